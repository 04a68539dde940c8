"""Agreement of processes on one program, before devices of several processes compute together.

Devices of several processes run one program together only if all processes compile the same: the
same kernels in the same order, the same sizes, the same number of instances. A process knows its
own minibatch alone. So before a plan is handed out, processes tell each other what they would run,
as a digest. If all are equal, which they are once programs have room for everybody, that is all. If
not, they exchange programs as JSON, and each makes the same one of them, which has room for all.

A process that cannot plan its minibatch says so, and all end with an error. So plans are handed out
to all processes in the same order, in the thread that also runs them.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jedbatch import checks
from jedbatch._export.programs import (
    reverse_of,
    reverse_to_json,
    signature_of,
    signature_to_json,
)
from jedbatch._kernel.kernel import Kernel
from jedbatch._program.alive import Refused
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
from jedbatch._session.portable import identity_of
from jedbatch._session.program_cache import ProgramCache

MAX_ROUNDS = 8  # in which programs grow until all processes have room
STATES = READY, FAILED, ENDED = range(3)
WORD = 8  # bytes of a digest that are compared
LARGER = ("lanes", "widest", "inputs", "outputs")
Exchange = Callable[[bytes], list[bytes]]


def digest(*parts: Any) -> bytes:
    """Returns a digest of what is written as JSON."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=WORD).digest()


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


def all_bytes(own: bytes) -> list[bytes]:
    """Returns the bytes of all processes, of any length."""
    lengths = gathered(np.array([len(own)], np.int32))[:, 0].tolist()
    padded = np.zeros(max(*lengths, 1), np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    rows = gathered(padded)
    return [row[:n].tobytes() for row, n in zip(rows, lengths, strict=True)]


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
    own = np.frombuffer(digest(dict(facts)), np.uint8).astype(np.int32)
    found = gathered(np.append(np.int32(state), own).astype(np.int32))
    states = found[:, 0].tolist()
    if FAILED in states:
        errors = [x.decode() for x in all_bytes(error.encode())]
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
    if (found[:, 1:] != found[0, 1:]).any():
        every = [json.loads(x) for x in all_bytes(json.dumps(dict(facts)).encode())]
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
        self._identities: dict[Kernel, str] = {}

    def lower(
        self, shards: Sequence[Placement], leaves: Sequence[Any] | None
    ) -> tuple[list[Lowered], ReverseSignature | None, list[Any]]:
        """Returns minibatches for one program, its reverse, and the tables for that.

        All processes get the same program; see `ProgramCache.lower_together`.
        """
        found, reverse, tables = self._programs.lower_together(shards, leaves)
        found = self._agreed(shards, found)
        signature = found[0].signature
        if leaves is None:
            self._programs.adopt(signature)
            return found, None, []
        if reverse is None or reverse.forward != signature:
            reverse, tables = self._programs.reverse_together(found, leaves)
        reverse, tables = self._agreed_reverse(found, leaves, reverse, tables)
        self._programs.adopt(signature, reverse)
        return found, reverse, tables

    def _agreed(self, shards: Sequence[Placement], found: list[Lowered]) -> list[Lowered]:
        """Returns minibatches for a program that all processes have."""
        for _ in range(MAX_ROUNDS):
            signature = found[0].signature
            every = self._exchanged(self._written(signature))
            if every is None:
                return found
            merged = self._merged(every)
            again = lowered_for(shards, merged)
            found = again or lowered_for(shards, with_instructions_for(shards, merged))
            assert found, "a program made of all has no room for one"
        raise AssertionError("processes find no program for all")

    def _agreed_reverse(
        self, found: list[Lowered], leaves: Sequence[Any], reverse: ReverseSignature, tables: Any
    ) -> tuple[ReverseSignature, list[Any]]:
        """Returns a reverse program that all processes have, and the tables for it."""
        for _ in range(MAX_ROUNDS):
            every = self._exchanged(reverse_to_json(reverse))
            if every is None:
                return reverse, tables
            merged = merged_reverse([reverse_of(x, reverse.forward) for x in every])
            reverse, tables = fitted_reverse(found, leaves, merged)
        raise AssertionError("processes find no reverse program for all")

    def _exchanged(self, written: Mapping[str, Any]) -> list[Any] | None:
        """Returns what all processes wrote; None if it is the same."""
        text = json.dumps(written, default=int)
        own = np.frombuffer(digest(text), np.uint8).astype(np.int32)
        found = gathered(own)
        if (found == found[0]).all():
            return None
        return [json.loads(x) for x in all_bytes(text.encode())]

    def _written(self, signature: Signature) -> dict[str, Any]:
        kernels = [[str(k.node_type.label), self._identity(k)] for k in signature.kernels]
        return {**signature_to_json(signature), "kernels": kernels}

    def _identity(self, kernel: Kernel) -> str:
        """Returns what tells a kernel apart in all processes; its label if nothing else does."""
        if kernel not in self._identities:
            found = identity_of(kernel, self._programs.registry)
            self._identities[kernel] = "" if found is None else found.hex()
        return self._identities[kernel]

    def _merged(self, every: Sequence[Mapping[str, Any]]) -> Signature:
        """Returns the program that has room for those of all processes, the same in each."""
        sizes = [sum(x["lanes"]) for x in every]
        largest = sizes.index(max(sizes))
        order = [every[largest], *every]
        kinds = list(dict.fromkeys(tuple(k) for x in order for k in x["kernels"]))
        self._check_kernels(every)
        kernels = [self._own(*kind) for kind in kinds]
        made = [signature_of(x, [self._own(*k) for k in x["kernels"]]) for x in order]
        capacity = made[0].capacity
        for other in made[1:]:
            capacity = _largest(capacity, other.capacity)
        readings: dict[Kernel, Any] = {}
        for signature in made:
            for kernel, reading in zip(signature.kernels, signature.readings, strict=True):
                readings.setdefault(kernel, reading)
        base = made[0]
        reuse = any(x.shared_rows is not None for x in made)
        merged = Signature.of(capacity, base.target, readings, reuse)
        assert list(merged.kernels) == kernels
        return replace(merged, branches=base.branches)

    def _own(self, label: str, identity: str) -> Kernel:
        """Returns the kernel of this process that is the same as one elsewhere."""
        programs = self._programs
        for t, node_type in enumerate(programs.registry.node_types):
            if node_type.label == label and self._identity(programs.kernel(t)) == identity:
                return programs.kernel(t)
        raise self._unlike(label)

    def _check_kernels(self, every: Sequence[Mapping[str, Any]]) -> None:
        """Raises the same error in all processes if one has not met a type of another."""
        labels = {label for x in every for label, _ in x["kernels"]}
        missing = []
        for x in every:
            for label, identity in x["kernels"]:
                try:
                    self._own(label, identity)
                except ValueError:
                    missing.append(label)
        found = all_bytes(json.dumps(sorted(set(missing))).encode())
        for process, text in enumerate(found):
            for label in json.loads(text):
                if label in labels:
                    raise self._unlike(label, process)

    def _unlike(self, label: str, process: int | None = None) -> ValueError:
        where = "a process" if process is None else f"process {process}"
        return ValueError(
            f"{where} has no node type `{label}` of the batched `{self._name}` that computes the "
            "same as in another process; expected the same function, with the same constants, in "
            "all processes, and all types to be known there. Call `warm` with the same sample of "
            "instances in each before the first minibatch."
        )


def _largest(mine: Any, its: Any) -> Any:
    """Returns the larger of each size of two capacities; what only the other has comes last."""
    sizes = {}
    for name, own in mine.sizes.items():
        other = its.sizes.get(name, {})
        keys = dict.fromkeys([*own, *other])
        sizes[name] = {key: max(own.get(key, 0), other.get(key, 0)) for key in keys}
    return type(mine)(sizes)


def merged_reverse(several: Sequence[ReverseSignature]) -> ReverseSignature:
    """Returns the reverse that has room for those of all processes, the same in each."""
    largest = max(several, key=lambda r: r.num_instructions)
    refused: dict[tuple[int, int], Refused] = {}
    for x in (x for r in several for x in r.refused):
        other = refused.get((x.kernel, x.result), x)
        refused[x.kernel, x.result] = replace(
            x, leads_to=x.leads_to | other.leads_to, origins=x.origins | other.origins
        )
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
        refused=tuple(refused[key] for key in sorted(refused)),
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
