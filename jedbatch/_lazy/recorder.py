"""Records what happens inside of a lazy scope, and computes it when it has to.

What `batch` is told by its arguments has to be guessed here:

    weights    arrays of JAX with real or complex numbers that come from outside, traced or not.
               All nodes share them, and gradients flow to them.
    values     everything else: arrays of NumPy, numbers, integers, random keys, arrays made inside
               from these, and futures computed earlier, whatever their scope.

Node types name the weights they read. Weights are new objects after every step of training, so
they cannot be told apart by identity from one scope to the next: each is named by the operation
that reads it first and by how many of its type that had read before. The same code names the same
weights in the same way; code that meets them in another order gets new types, which are compiled
again, and right.
"""

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jedbatch._graph.prune import cut_apart, without_unread
from jedbatch._jaxpr.identity import tree_key
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.storage import is_key, stored_kind
from jedbatch._lazy.futures import Awaited, Future, Outcome, Returned, SharedFuture
from jedbatch._record.calls.fast_path import Description
from jedbatch._record.cell import Cell, pause, recording
from jedbatch._record.identity.mutation import Watched, holders_in
from jedbatch._record.instances.arrays import array_type, is_array
from jedbatch._record.operations.symbols import Shared, Symbol, Value
from jedbatch._record.run.recorder import Recorder
from jedbatch._record.run.trace import finish
from jedbatch._record.types.registry import Registry
from jedbatch._session.plans.round import Round
from jedbatch._support.types import Leaf
from jedbatch.errors import RecompilationWarning, SymbolicValueError

MANY_WEIGHTS = 64  # of one type, read first by one operation, before we warn
FEW_FUTURES = 64  # that wait: not worth a look whether they are garbage
NODES_PER_FUTURE = 16  # nodes per future that waits, in a scope that lets go of most


@dataclass(eq=False)
class Scope:
    """The scope that `with jedbatch.lazy() as scope` binds.

    Attributes:
      rounds: what was computed together, in order.
    """

    rounds: list[Round] = field(default_factory=list)

    def __str__(self) -> str:
        noun = "round" if len(self.rounds) == 1 else "rounds"
        lines = [f"Lazy scope of {len(self.rounds)} {noun}", "  nodes  batches  futures  host ms"]
        lines += [
            f"  {r.nodes:5}  {r.batches:7}  {r.futures:7}  {1e3 * r.seconds:7.1f}"
            for r in self.rounds
        ]
        return "\n".join(lines)


class LazyRecorder(Recorder):
    """Records what happens inside of a scope, and computes it when it has to.

    Attributes:
      futures: weak references to those recorded since the last round.
      scope: what the user sees.
    """

    result = Future

    def __init__(self, registry: Registry, caller: Any, compute: Callable, scope: Scope):
        super().__init__(registry, caller)
        registry.shared_operands.is_one_by_one = False
        self.futures: list[weakref.ref] = []
        self.scope = scope
        self._compute = compute
        self.computed: Any = weakref.WeakValueDictionary()  # a scope may last for long
        self._weights: dict[int, tuple[weakref.ref, int]] = {}  # shared ids by id of the array
        self._names: dict[Hashable, list[weakref.ref]] = {}
        self._held: dict[Hashable, Any] = {}  # weights read since the last round, by name
        self._traced: list[Any] = []  # values of outer transformations since the last round
        self._places: dict[int, int] = {}  # of these, by id
        self._reader = ""

    def forget(self) -> None:
        """Lets go of everything; what still waits is lost."""
        for future in self._waiting():
            future.lose()
        self._start_again()
        self._weights.clear()
        self._names.clear()
        self.registry.constants.clear()
        super().forget()
        if hasattr(self, "call_cell"):  # a circle, which would keep traces alive
            del self.call_cell
        for name in ("caller", "_compute"):
            vars(self).pop(name, None)

    # --- what things count as ---

    def symbol(self, x: Leaf) -> Leaf:
        """Any array or number as a symbol: a weight as a shared value, all else as a value."""
        if isinstance(x, Symbol) and x._trace is self:
            return x
        if isinstance(x, Tracer):
            x._trace.is_valid()
        elif not isinstance(x, jax.Array):
            return self.input(x)
        token, position = self.known.get(id(x), (None, None))
        if position is not None:
            assert isinstance(token, int)
            return Value(self, position, token)
        if (index := self._weight(x)) is not None:
            return Shared(self, index)
        if isinstance(x, Awaited) and x.outcome is not None and x.outcome.is_traced:
            value = self._row(x.outcome)
        elif isinstance(x, Tracer) and not isinstance(x, Awaited):
            value = self.leaf_value(self._kind(x), self._leaf(x), ())
        else:
            value = Value(
                self, self.new_input(self.registry.group("value", self._kind(x)), x), self._kind(x)
            )
        self.known[id(x)] = value.type, value.index
        self.kept.append(x)
        return value

    def input(self, x: Leaf) -> Value:
        """A number or an array of NumPy as an input."""
        kind = self._kind(x)
        x = np.array(x) if np.ndim(x) else x  # it may change before it is read
        return Value(self, self.new_input(self.registry.group("value", kind), x), kind)

    def _kind(self, x: Leaf) -> int:
        return self.registry.value_type(*array_type(x))

    def _leaf(self, x: Leaf) -> int:
        if id(x) not in self._places:
            self._places[id(x)] = len(self._traced)
            self._traced.append(x)
        return self._places[id(x)]

    def _row(self, outcome: Outcome) -> Value:
        """A value of an earlier round, under a transformation."""
        kind = self.registry.value_type(outcome.aval.shape, outcome.aval.dtype, False)
        if is_key(outcome.aval.dtype):
            return self.leaf_value(kind, self._leaf(outcome.value), ())
        return self.leaf_value(kind, self._leaf(outcome.returned.rows), (outcome.row,))

    def _weight(self, x: Leaf) -> int | None:
        """The id of an array among the shared values if it is a weight."""
        ref, index = self._weights.get(id(x), (None, -1))
        if ref is None or ref() is not x:
            if not self._is_weight(x):
                return None
            index = self._named(x)
        self._held[self.registry.shared[index].tracer] = x
        if id(x) not in self.known:
            self.known[id(x)] = self.registry.token("weight", index), None
            self.kept.append(x)
        return index

    def _is_weight(self, x: Leaf) -> bool:
        if isinstance(x, Awaited):  # values stay values; but of a scope around they are weights
            return has_gradient(x.dtype) and (isinstance(x, SharedFuture) or x.outcome is None)
        return (
            isinstance(x, jax.Array)
            and has_gradient(x.dtype)
            and (isinstance(x, Tracer) or x.ndim > 0)
            and id(x) not in self.computed
        )

    is_weight_reached = _is_weight

    def _named(self, x: Leaf) -> int:
        """The id of a new weight, named by who reads it first."""
        aval = jax.typeof(x)
        first = self._reader, aval.shape, aval.dtype, aval.weak_type
        names = self._names.setdefault(first, [])
        number = next((k for k, ref in enumerate(names) if ref() is None), len(names))
        ref = weakref.ref(x)
        names[number : number + 1] = [ref]
        if len(names) == MANY_WEIGHTS == number + 1:
            warnings.warn(
                f"`{self._reader}` has read {MANY_WEIGHTS} arrays {aval.str_short()} in a lazy "
                "scope. An array of JAX that comes from outside counts as a weight, and what "
                "reads different weights cannot run together. If they are data, pass them as "
                "arrays of NumPy: `numpy.asarray(x)`. "
                "`help(jedbatch.errors.RecompilationWarning)` says more.",
                RecompilationWarning,
                stacklevel=2,
            )
        index = self.registry.outer((*first, number), aval)
        self._weights[id(x)] = ref, index
        return index

    # --- operations ---

    def cell_call_spec(self, cell: Cell, args: tuple, static: dict) -> Any:
        """Returns how to record a call of a cell."""
        self._reader = cell.name
        return super().cell_call_spec(cell, args, static)

    def description(self, cell: Cell, args: tuple, static: dict) -> Description:
        for x in (*args, *static.values()):
            self._describe(x)
        return super().description(cell, args, static)

    def _describe(self, x: Leaf) -> None:
        """Files a container of weights, so that the next call need not look into it."""
        if id(x) in self.known or is_array(x) or isinstance(x, int | float):
            return
        leaves, structure = jax.tree.flatten(x)
        tokens = [self.known.get(id(leaf), (None, 0)) for leaf in leaves]
        if not leaves or not all(index is None for _, index in tokens):
            return
        token = self.registry.token("weights", tree_key(structure), *(name for name, _ in tokens))
        holders = holders_in(x)
        if holders is not None:
            self.watched[id(x)] = Watched(x, token, holders)

    def process_primitive(self, primitive, tracers, params, /):
        self._reader = primitive.name
        return super().process_primitive(primitive, tracers, params)

    def _operation(
        self, name: str, key: Hashable, call: Callable, args: Sequence[Leaf], is_ragged=False
    ) -> list:
        self._reader = name
        if any(isinstance(x, Tracer) or self._is_weight(x) for x in args):
            args = [self.symbol(x) if isinstance(x, Tracer) or np.ndim(x) else x for x in args]
        return super()._operation(name, key, call, args, is_ragged)

    def _constant(self, key: Hashable, call: Callable, args: Sequence[Leaf]) -> list[Leaf]:
        if not any(map(np.ndim, args)):
            return super()._constant(key, call, args)
        with pause(), jax.ensure_compile_time_eval():  # not kept: data need not come again
            out = list(call(*args))
        self.computed.update((id(x), x) for x in out)
        return out

    def _shared_operation(self, key, call, args, tracers) -> list[Leaf]:
        outs = super()._shared_operation(key, call, args, tracers)
        return [SharedFuture(self, shared.index) for shared in outs]

    # --- rounds ---

    def value_of(self, symbol: Symbol) -> Any:
        """Returns the value of a future; computes it, and everything else."""
        if not isinstance(symbol, Awaited):
            return super().value_of(symbol)
        if recording.recorder is not self:
            raise SymbolicValueError(
                f"the value of a future of type {symbol.aval.str_short()} is wanted inside of a "
                "cell or another function that is being recorded, or in another thread than "
                "that of its lazy scope; expected it to be wanted in the scope itself. Pass it "
                "to the cell as an argument, or ask for the value before."
            )
        self.compute()
        assert symbol.outcome is not None
        return symbol.outcome.value

    def compute(self) -> None:
        """Computes what waits, and starts to record again."""
        self.known.clear()  # tuples that nobody else holds, and the futures in them
        self.kept.clear()
        futures = self._waiting()
        if len(futures) > FEW_FUTURES and NODES_PER_FUTURE * len(futures) > len(self.call_specs):
            del futures  # some may be garbage: a function that calls itself is a circle
            gc.collect(1)
            futures = self._waiting()
        try:
            if futures:
                with pause():
                    self._round(futures)
        except BaseException:
            for future in futures:
                future.lose()
            raise
        finally:
            self._start_again()

    def _waiting(self) -> list[Any]:
        return [future for ref in self.futures if (future := ref()) is not None]

    def _start_again(self) -> None:
        for memory in (self.known, self.kept, self.watched, self.leaves, self._places):
            memory.clear()
        for recorded in (self.call_specs, self.references, self.input_group, self.input_value):
            recorded.clear()
        self._traced = []
        self.num_values = 0
        self.futures.clear()
        self._held.clear()
        self._weights = {k: v for k, v in self._weights.items() if v[0]() is not None}

    def _round(self, futures: list[Any]) -> None:
        start = time.perf_counter()
        outputs = [self._output(future) for future in futures]
        counts = self.call_specs, self.references, self.input_group, outputs
        ends = np.array([(0, len(x)) for x in counts])
        recorded = finish(self.registry, self.written, outputs, ends)
        graph = self.registry.pad(without_unread(recorded))
        avals = [future.aval for future in futures]
        kinds = [(aval.shape, aval.dtype) for aval in avals]
        rows: dict[Any, list[int]] = {}
        places = []
        for kind, output in zip(kinds, graph.outputs.tolist(), strict=True):
            rows_of_kind = rows.setdefault(stored_kind(kind), [])
            places.append(len(rows_of_kind))
            rows_of_kind.append(output)
        held = {name: _lowered(x) for name, x in self._held.items()}
        layout, arenas = self._compute(cut_apart(graph), rows, held, self._traced)
        returned = {kind: Returned(arena) for kind, arena in arenas.items()}
        for future, aval, kind, row in zip(futures, avals, kinds, places, strict=True):
            future.settle(Outcome(aval, returned[stored_kind(kind)], row))
        seconds = time.perf_counter() - start
        self.scope.rounds.append(Round.of(layout, 0, seconds, len(futures)))

    def _output(self, future: Any) -> int:
        if isinstance(future, Future):
            return future.index
        shared = (future.index,)
        return self.node("shared", "identity", lambda shared, _: shared[0], shared, []).index


def _lowered(x: Leaf) -> Any:
    return x.full_lower() if isinstance(x, Awaited) else x
