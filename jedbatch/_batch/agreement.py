"""Agreement of processes on one program, before devices of several processes compute together.

Devices of several processes run one program together only if all processes compile the same: the
same kernels in the same order, the same sizes, the same number of instances. A process knows its
own minibatch alone. So before a plan is handed out, processes tell each other what they would run.
If that is the same, which it is once programs have room for everybody, one all-gather of digests is
all. If not, one more brings all programs as JSON, and each process makes the same one of them: that
of the largest sizes.

A process that cannot plan its minibatch says so, and all end with an error. So plans are handed out
to all processes in the same order, in the thread that also runs them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jedbatch import checks
from jedbatch._export.encoding import from_json, to_json
from jedbatch._kernel.kernel import Kernel
from jedbatch._program.alive import merged_refused
from jedbatch._program.fit import lowered_for, reverse_tables, with_instructions_for
from jedbatch._program.lower import Lowered
from jedbatch._program.lower_vjp import (
    ReverseSignature,
    find_readers,
    make_reverse_signature,
    reverse_fits,
    reverse_need,
    with_all_refused,
)
from jedbatch._program.placement import Placement
from jedbatch._program.signature import Signature
from jedbatch._session.programs.program_cache import ProgramCache, Together

MAX_ROUNDS = 16  # in which programs grow until all processes have room
READY, FAILED, ENDED = range(3)
WORD = 8  # bytes of a digest that are compared


def gathered(own: np.ndarray) -> np.ndarray:
    """Returns the arrays of all processes, of one shape, along a new first axis.

    Raises:
      RuntimeError: a process has ended.
    """
    try:
        return np.asarray(multihost_utils.process_allgather(own))
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"process {jax.process_index()} waited for the {jax.process_count()} processes to "
            "agree on a program, and one of them has ended or cannot be reached: "
            f"{checks.cut(error)}. Look for the error of the process that ended first, and start "
            "all again from a checkpoint."
        ) from error


def exchanged(own: Any) -> list[Any]:
    """Returns what each process has to say as JSON; one all-gather does if that is the same."""
    text = json.dumps(own).encode()
    digest = hashlib.blake2b(text, digest_size=WORD).digest()
    heads = gathered(np.frombuffer(digest + len(text).to_bytes(4, "big"), np.uint8))
    if (heads == heads[0]).all():
        return [json.loads(text)] * len(heads)
    lengths = [int.from_bytes(head[WORD:].tobytes(), "big") for head in heads]
    padded = np.zeros(max(lengths), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    rows = gathered(padded)
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, lengths, strict=True)]


def agree_to_begin(name: str, state: int, facts: Mapping[str, Any], error: str = "") -> bool:
    """Tells other processes how far this one has come; returns False if all have ended.

    Args:
      name: of the function, for messages.
      state: whether there is a minibatch, none could be planned, or there are no more.
      facts: numbers and names that must be the same in all processes.
      error: why none could be planned.

    Raises:
      RuntimeError: another process could not plan its minibatch, or has ended.
      ValueError: processes disagree in some fact, or have different numbers of minibatches.
    """
    states, every, errors = zip(*exchanged([state, dict(facts), error]), strict=True)
    if FAILED in states:
        if state != FAILED:
            process = states.index(FAILED)
            raise RuntimeError(
                f"process {process} could not plan its minibatch of the batched `{name}`: "
                f"{errors[process]}"
            )
        return True
    if ENDED in states:
        if set(states) == {ENDED}:
            return False
        ended = [i for i, x in enumerate(states) if x == ENDED]
        raise ValueError(
            f"the processes {ended} have no more minibatches of the batched `{name}`, and others "
            "have; expected equally many in each. Drop what is left over in loaders of data."
        )
    for fact in facts:
        values = [x[fact] for x in every]
        if any(x != values[0] for x in values):
            other = next(i for i, x in enumerate(values) if x != values[0])
            raise ValueError(
                f"processes disagree in {fact} of the batched `{name}`: process 0 has "
                f"{checks.cut(values[0], 200)}, and process {other} has "
                f"{checks.cut(values[other], 200)}; expected the same in all."
            )
    return True


class Agreement:
    """Lowers the shards of this process for a program that all processes run.

    Args:
      programs: of this process.
      name: of the function, for messages.
    """

    def __init__(self, programs: ProgramCache, name: str):
        self._programs, self._name = programs, name

    def lower(self, shards: Sequence[Placement], leaves: Sequence[Any] | None) -> Together:
        """Returns minibatches for one program, its reverse, and the tables for that.

        All processes get the same program; see `ProgramCache.lower`.
        """
        found = self._programs.lower(shards, leaves)
        for _ in range(MAX_ROUNDS):
            every = exchanged(to_json(self._named(found)))
            if all(x == every[0] for x in every):
                break
            found = self._fitted(shards, leaves, found[0], from_json(every))
        else:
            raise AssertionError("processes find no program for all")
        self._programs.adopt(found[0][0].signature, found[1])
        return found

    def _named(self, found: Together) -> tuple[Signature, ReverseSignature | None]:
        """Returns programs for other processes: with names in place of kernels, each by itself.

        A name is a label, and what tells the kernel apart in all processes, if anything does.
        """
        (minibatch, *_), reverse, _ = found
        signature, identity = minibatch.signature, self._programs.identity
        nothing: Any = None
        names: Any = tuple((k.node_type.label, identity(k)) for k in signature.kernels)
        return replace(signature, kernels=names), reverse and replace(reverse, forward=nothing)

    def _fitted(
        self,
        shards: Sequence[Placement],
        leaves: Sequence[Any] | None,
        found: list[Lowered],
        every: Sequence[tuple[Signature, Any]],
    ) -> Together:
        """Returns minibatches for the program that has room for those of all processes.

        As long as these differ, so does what their reverses are made for.
        """
        forward, reverses = zip(*every, strict=True)
        if any(x != forward[0] for x in forward):
            program = merged(forward)
            program = replace(program, kernels=self._own(program.kernels))
            found = lowered_for(shards, program)
            found = found or lowered_for(shards, with_instructions_for(shards, program))
            assert found, "a program made of all has no room for one"
            if leaves is None:
                return found, None, []
            placed = [x.placed for x in found]
            return found, *self._programs.reverses(placed, found[0].signature, leaves)
        assert leaves is not None
        reverse = replace(merged_reverse(reverses), forward=found[0].signature)
        return found, *fitted_reverse(found, leaves, reverse)

    def _own(self, names: Sequence[Any]) -> tuple[Kernel, ...]:
        """Returns the kernels of this process that have some names.

        Raises:
          ValueError: a process has not met one of the types; the same error in all processes.
        """
        labels = {label for label, _ in names}
        known: dict[Any, Kernel] = {}
        for t, node_type in enumerate(self._programs.registry.node_types):
            if node_type.label in labels:
                kernel = self._programs.kernel(t)
                known.setdefault((node_type.label, self._programs.identity(kernel)), kernel)
        missing = sorted(label for label, identity in names if (label, identity) not in known)
        for process, of_process in enumerate(exchanged(missing)):
            for label in of_process:
                raise ValueError(
                    f"process {process} has no node type `{label}` of the batched `{self._name}` "
                    "that computes the same as in another process; expected the same function, "
                    "with the same constants, in all processes, and all types to be known there. "
                    "Call `warm` with the same sample of instances in each before the first "
                    "minibatch."
                )
        return tuple(known[name] for name in names)


def merged(several: Sequence[Signature]) -> Signature:
    """Returns the program that has room for all of several, the same in each process."""
    order = [max(several, key=lambda s: sum(s.lanes)), *several]
    readings: dict[Kernel, Any] = {}
    for signature in order:
        for kernel, reading in zip(signature.kernels, signature.readings, strict=True):
            readings.setdefault(kernel, reading)
    capacity, as_needed = order[0].capacity, dict.fromkeys(order[0].capacity.sizes, int)
    for signature in several:
        capacity = capacity.grown(signature.capacity, as_needed)
    reuse = any(s.shared_rows is not None for s in several)
    made = Signature.of(capacity, order[0].target, readings, reuse)
    return replace(made, branches=order[0].branches)


def merged_reverse(several: Sequence[ReverseSignature]) -> ReverseSignature:
    """Returns the reverse that has room for those of all processes, the same in each."""
    largest = max(several, key=lambda r: r.num_instructions)
    sent = [r.sent for r in several if r.sent is not None]
    return replace(
        largest,
        readers=tuple(
            tuple(map(max, *columns)) for columns in zip(*(r.readers for r in several), strict=True)
        ),
        input_readers=tuple(map(max, *(r.input_readers for r in several))),
        sums=tuple(map(max, *(r.sums for r in several))),
        sent=tuple(map(max, *sent)) if len(sent) > 1 else sent[0] if sent else None,
        tells=any(r.tells for r in several),
        refused=merged_refused(x for r in several for x in r.refused),
    )


def fitted_reverse(
    found: Sequence[Lowered], leaves: Sequence[Any], reverse: ReverseSignature
) -> tuple[ReverseSignature, list[Any]]:
    """Returns a reverse program, larger if need be, and the tables of minibatches for it."""
    forward, shares = reverse.forward, reverse.sent is not None
    own = [
        find_readers(x.placed, forward, numbers, None, shares)
        for x, numbers in zip(found, leaves, strict=True)
    ]
    readers = [replace(x, refused=reverse.refused) for x in with_all_refused(own)]
    for lowered, its in zip(found, readers, strict=True):
        need = reverse_need(lowered.placed, its, forward)
        if not reverse_fits(need, its, reverse):
            made = make_reverse_signature(lowered.placed, its, forward, reverse)
            reverse = replace(made, branches=reverse.branches)
    return reverse, reverse_tables(found, readers, reverse)
