"""`Executor`: each half of a program as one XLA program.

A program for inference keeps no history. Arenas that are not small are handed from call to call,
by donation, so that a steady stream of minibatches allocates nothing. Calls at the same time take
different ones. What the prologues of kernels make of the shared values (packed weights) is kept
too, for as long as calls bring the very same arrays.
"""

import collections
import functools
import itertools
import operator
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jedbatch._jaxpr.configuration import devices_of, finds_faults, is_staging
from jedbatch._jaxpr.faults import located, made_in
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.storage import row_bytes
from jedbatch._jaxpr.zeros import guarded, keeps_zeros, sources_of, where_alive
from jedbatch._kernel.target import Target
from jedbatch._program.arenas import take, zeros
from jedbatch._program.execute import Backward, Forward, advance, fused_forward, fused_reverse
from jedbatch._program.signature import Signature
from jedbatch._support.announce import announce, announced
from jedbatch._support.types import Array, PyTree


class Packed(NamedTuple):
    """Consts of every kernel, and the shared values they were made of, as long as these live."""

    shared: tuple[weakref.ref, ...]
    consts: list[list[Any]]

    def is_of(self, shared: Sequence[Array]) -> bool:
        """Returns whether these are the very same arrays."""
        return all(ref() is x for ref, x in zip(self.shared, shared, strict=True))


def is_lasting(x: Array) -> bool:
    """True of arrays that will hold the same values as long as they exist."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_deleted()


def jit_for(target: Target, function: Callable, **options: Any) -> Callable:
    """`jax.jit` with the compiler options of a target, where there is a program to compile.

    Inside of another `jax.jit` they are its own to give (see `compiler_options`).
    """
    plain = jax.jit(function, **options)
    compiler_options = target.compiler_options()
    tuned = plain
    if compiler_options:
        tuned = jax.jit(function, compiler_options=compiler_options, **options)
    compiled = announced(lambda *args: (plain if is_staging() else tuned)(*args))
    return located(compiled, announced(function))


class Executor:
    """Each half of a program as one XLA program.

    Attributes:
      arenas: of calls that are done, for later ones to use: a list of arenas for each set of
        devices.
      states: the same for calls that run in rounds.
      worth_keeping: bytes of arenas; new ones of fewer bytes cost less than handing them on.
    """

    worth_keeping = 1 << 20

    def __init__(self, prepare: Callable, signature: Signature, compiled: Callable[[str], None]):
        self.prepare = prepare
        self.signature = signature
        self.compiled = compiled
        self.arenas: dict[Any, list[Any]] = collections.defaultdict(list)
        self.states: dict[Any, list[Any]] = collections.defaultdict(list)
        size = sum(map(operator.mul, signature.rows, map(row_bytes, signature.arenas)))
        self.is_large = size > self.worth_keeping
        self._packed: Packed | None = None
        self._prologue: bool | None = None  # whether there is one, once it is known
        compiled_for = functools.partial(jit_for, signature.target)
        self.pack: Callable = jax.jit(self._pack)
        self.once = compiled_for(self._once)
        self.watched = compiled_for(self._watched)
        self.again = compiled_for(self._again, donate_argnums=3)
        self.save = compiled_for(self._save)
        self.reverse = compiled_for(self._reverse, static_argnums=0)
        self.fresh = jax.jit(self._fresh, static_argnums=0)
        self.move = jax.jit(self._move, static_argnums=(0, 1))
        donated = () if finds_faults() else 4  # to find who made them, a round runs again
        self.round = compiled_for(self._round, static_argnums=0, donate_argnums=donated)
        self.pick = jax.jit(pick)

    def infer(self, shared, inputs, table):
        """The rows returned from each arena."""
        if is_staging():
            return self.once({"shared": shared}, inputs, table)
        given = self._weights(shared), inputs, table
        devices = devices_of(given) if self.is_large and not finds_faults() else None
        if devices is None:
            return self.once(*given)
        config: Any = jax.config
        free = self.arenas[devices or config.jax_default_device]  # where `jax.export` binds them
        try:
            arenas = free.pop()
        except IndexError:  # the first call, or others at the same time have them all
            arenas = tuple(map(zeros, self.signature.rows, self.signature.arenas))
            arenas = jax.device_put(arenas, devices[0]) if devices else arenas
        outputs, arenas = self.again(*given, arenas)
        free.append(arenas)
        return outputs

    def watch(self, shared, inputs, table):
        """The rows returned from each arena, and where loops were stopped (see `Forward`)."""
        return self.watched(self._weights(shared), inputs, table)

    def blank(self, saving, shared):
        """The state before the first round; rows that inference has not written hold anything."""
        free = self.states[devices_of(shared)]
        return free.pop() if free and not saving else self.fresh(saving)

    def give_back(self, shared, state):
        """Keeps the state of a call for inference that is done for a later one."""
        if self.is_large and not finds_faults():
            self.states[devices_of(shared)].append(state)

    def advance(self, saving, shared, inputs, table, state):
        """Runs one round: (rows returned from each arena, state); see `_control_flow.workspace`."""
        return self.round(saving, self._weights(shared), inputs, table, state)

    def release(self) -> None:
        """Forgets the arenas that wait for a call."""
        self.arenas.clear()
        self.states.clear()

    def _weights(self, shared: Sequence[Array]) -> dict[str, Any]:
        """Shared values, or what the prologues make of them, if these are arrays to stay."""
        if finds_faults() or self._prologue is False or not all(map(is_lasting, shared)):
            return {"shared": shared}
        if not self._has_prologue(shared):
            return {"shared": shared}
        packed = self._packed
        if packed is None or not packed.is_of(shared):
            refs = tuple(weakref.ref(x, self._forget) for x in shared)
            packed = self._packed = Packed(refs, self.pack(shared))
        return {"consts": packed.consts}

    def _announce(self, kind: str) -> None:
        """Counts a program that is about to be compiled, and says so if that takes long."""
        self.compiled(kind)
        types, widths = len(self.signature.kernels), sum(self.signature.widest)
        announce(f"compiling a program for {kind}: {types} node types in {widths} widths")

    def _forget(self, _: Any) -> None:
        self._packed = None

    def _has_prologue(self, shared: Sequence[Array]) -> bool:
        if self._prologue is None:
            self._prologue = bool(jax.make_jaxpr(self.prepare)(shared).eqns)
        return self._prologue

    def _pack(self, shared):
        self.compiled("prologue")
        return self.prepare(shared)

    def _once(self, weights, inputs, table):
        return self._again(weights, inputs, table, None)[0]

    def _again(self, weights, inputs, table, arenas):
        self._announce("inference")
        forward = Forward(self.signature, saving=False)
        consts = weights["consts"] if "consts" in weights else self.prepare(weights["shared"])
        outputs, state = fused_forward(forward, consts, inputs, table, arenas)
        return outputs, state[0]

    def _watched(self, weights, inputs, table):
        self._announce("inference")
        forward = Forward(self.signature, saving=False)
        consts = weights["consts"] if "consts" in weights else self.prepare(weights["shared"])
        outputs, state = fused_forward(forward, consts, inputs, table)
        return outputs, state[1]

    def _save(self, shared, inputs, table):
        self._announce("training")
        forward = Forward(self.signature, saving=True)
        return fused_forward(forward, self.prepare(shared), inputs, table)

    def _fresh(self, saving):
        return Forward(self.signature, saving).start(no_inputs(self.signature))

    def _move(self, saving, before, state):
        self.compiled("move")
        return Forward(self.signature, saving).moved(before, state)

    def _round(self, saving, weights, inputs, table, state):
        self._announce("round")
        forward = Forward(self.signature, saving)
        consts = weights["consts"] if "consts" in weights else self.prepare(weights["shared"])
        return advance(forward, consts, table, forward.resume(inputs, state))

    def _reverse(self, signature, shared, tables, values, outputs):
        self._announce("reverse")
        consts = self.prepare(shared)
        reverse = Backward(signature)
        gradients, alive, inputs = fused_reverse(reverse, consts, tables, values, outputs)
        with made_in("the derivative of what all instances share"):
            return pulled_back(self.prepare, shared, gradients, alive), inputs


def no_inputs(signature: Signature) -> list[Array]:
    """No input rows for any arena."""
    return [zeros(0, kind) for kind in signature.arenas]


def pick(state: PyTree, rows: Sequence[Array], given: Sequence[Array | None]) -> tuple[Any, ...]:
    """Rows of each arena of a state, or those that are given in place of any of them."""
    arenas = zip(state[0], rows, given, strict=True)
    return tuple(take(arena, row_ids) if own is None else own for arena, row_ids, own in arenas)


def pulled_back(
    prepare: Callable, shared: Sequence[Array], gradients: Sequence[Any], alive: Sequence[Array]
) -> list[Array]:
    """Cotangents of the shared values from those of what `prepare` makes of them.

    `gradients` has None for what gets nothing, and `alive` says, at run time, if the others do;
    they are zeros if not. Again None for what gets nothing.
    """
    moving = [i for i, x in enumerate(shared) if has_gradient(x.dtype)]

    def prepared(values):
        full = list(shared)
        for i, x in zip(moving, values, strict=True):
            full[i] = x
        outs = itertools.chain(*prepare(full))
        return [x for x, g in zip(outs, every, strict=True) if g is not None]

    every = list(itertools.chain(*gradients))
    flags = [x for x in itertools.chain(*alive) if x is not None]
    present = [x for x in every if x is not None]
    _, pull_back = jax.vjp(prepared, [shared[i] for i in moving])
    back = jax.make_jaxpr(lambda present: pull_back(present)[0])(present)
    sources = sources_of(back.jaxpr, back.jaxpr.invars)
    closed = guarded(back.jaxpr, back.consts, back.jaxpr.invars)
    outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *present, *flags)
    sums = jax.core.eval_jaxpr(back.jaxpr, back.consts, *present)
    are_sums = keeps_zeros(back.jaxpr, back.jaxpr.invars)
    of_shared: list[Any] = [None] * len(shared)
    for i, x, total, is_sum, source_ids in zip(moving, outs, sums, are_sums, sources, strict=True):
        if is_sum:
            of_shared[i] = total
        elif source_ids:
            of_shared[i] = where_alive(jnp.stack([flags[s] for s in sorted(source_ids)]).any(), x)
    return of_shared


def median_seconds(functions: Sequence[Any], repeat: int) -> np.ndarray:
    """float[F], the median time of each function, run in turns and warmed up."""
    times = np.zeros((repeat, len(functions)))
    for row in [np.zeros(len(functions)), *times]:
        for i, run in enumerate(functions):
            start = time.perf_counter()
            jax.block_until_ready(run())
            row[i] = time.perf_counter() - start
    return np.median(times, axis=0)
