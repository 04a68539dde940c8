"""Found cells: functions of the user that are cells, though nobody marked them.

A model without cells is recorded operation by operation, of which each passes through `jax.numpy`,
JAX and the recorder; a call of a cell is one step. Most models say themselves what a cell is: what
is done for one node is a function of its own, `compose(params, left, right)`, that others call. It
is taken for a cell where the calls met so far say so:

- its arguments are arrays, numbers and pytrees of them, and its results are arrays,
- it does not recur, and calls nothing that does,
- what it does depends on the types of its arguments alone (see `_record.granularity.calls_met`),
- there are many calls for each combination of types.

Functions that are passed to `batch` are pure, and so are those that they call. Where one fails as a
cell after all, it was none, and all is recorded as before. The outermost cells count; those that
they call are parts of them. Functions that are compiled by `jax.jit`, methods of pytrees, as those
of Equinox are, and methods of objects of libraries, as `apply` of modules of Flax, are functions,
too.

To have a say in what is called, functions are converted (see `_record.granularity.converted`). A
function of which no source is found runs as it is, and what it calls is recorded as it always was.
"""

import collections
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax

from jedbatch._record.asking import may_ask, may_change_things
from jedbatch._record.cell import Cell, cell, recording
from jedbatch._record.granularity.call_sites import is_library
from jedbatch._record.granularity.calls_met import CallsMet
from jedbatch._record.granularity.converted import convert, is_converted

MIN_INSTANCES = 8  # to be looked at before functions are taken for cells
MIN_OPERATIONS = 512
CALLS_PER_TYPE = 4  # of a cell, at least
MAX_TYPES = 12  # of a cell that is found, in the first instances
CALLS_PER_INSTANCE = 2  # of a cell with more than two combinations of types, in those it is in
MAX_TARGETS = 10_000  # functions that are known at a time
OF_JAX = frozenset({"jax", "jaxlib"})


class FoundCells:
    """Finds cells among the functions that a batched function calls.

    Attributes:
      revision: changes whenever what was recorded first would now be recorded otherwise.
      is_learning: whether calls are looked at.
      has_failed: whether a function was taken for a cell that is none.
    """

    def __init__(self) -> None:
        self.revision = 0
        self.is_learning = True
        self.has_failed = False
        self._targets: dict[int, tuple[Any, Callable]] = {}  # what is called in place of what
        self._made: list[int] = []  # of those, functions that may have been made by the user's
        self._converted: dict[int, tuple[Any, Callable]] = {}
        self._calls: dict[Any, CallsMet] = {}
        self._cells: dict[Any, tuple[Any, Callable]] = {}
        self._refused: dict[Any, Any] = {}
        self._active: collections.Counter[CallsMet] = collections.Counter()
        self._num_operations = self._num_instances = 0
        targets = self._targets

        def hook(fn: Any) -> Any:
            known = targets.get(id(fn))
            return self._look(fn) if known is None else known[1]

        self._hook = hook

    # --- what is called ---

    def converted(self, fn: Callable) -> Callable:
        """Returns a function of one instance as it is to be recorded; itself without its source."""
        self._active.clear()
        if len(self._targets) > MAX_TARGETS:
            self._forget_targets()
        for key in self._made:  # with the values of instances that they hold
            self._targets.pop(key, None)
        self._made.clear()
        return self._as_called(fn)

    def _forget_targets(self) -> None:
        self._targets.clear()
        self._made.clear()

    def _look(self, fn: Any) -> Any:
        """Returns what is called in place of a function met for the first time."""
        if isinstance(fn, types.FunctionType):
            return self._function(fn)
        if isinstance(fn, types.MethodType):
            return self._method(fn, fn.__func__, fn.__self__)
        if isinstance(fn, functools.partial):
            target = self._hook(fn.func)
            return fn if target is fn.func else functools.partial(target, *fn.args, **fn.keywords)
        if fn is map or fn is functools.reduce:
            return self._keep(fn, lambda f, *xs, **options: fn(self._hook(f), *xs, **options))
        if isinstance(fn, jax.stages.Wrapped):
            if _root(fn) not in OF_JAX:
                return self._keep(fn, self._in_place(id(fn), fn, fn))
        elif isinstance(fn, types.BuiltinFunctionType):
            if not isinstance(fn.__self__, types.ModuleType | None):
                return fn  # a method, made for this call
        elif not isinstance(fn, type):
            called = vars(type(fn)).get("__call__")
            if isinstance(called, types.FunctionType):
                return self._method(fn, called, fn)
            return self._keep(fn, fn) if isinstance(getattr(fn, "cell", None), Cell) else fn
        return self._keep(fn, fn)

    def _function(self, fn: types.FunctionType) -> Callable:
        if is_library(fn.__module__ or ""):
            return self._keep(fn, fn)
        if is_converted(fn.__code__):  # made by a function that is converted
            return self._in_place(id(fn), fn, fn, may_be_cell=False)
        return self._keep(fn, self._in_place(id(fn), fn, self._as_called(fn)))

    def _method(self, method: Any, fn: Any, owner: Any) -> Callable:
        """Returns what is called in place of a method: a function of its owner, if that is data."""
        if not isinstance(fn, types.FunctionType) or _root(fn) in OF_JAX:
            return method
        key = id(fn), id(owner)
        if key in self._cells:
            return self._cells[key][1]
        if id(fn) in self._cells:
            return functools.partial(self._cells[id(fn)][1], owner)
        if jax.tree_util.all_leaves([owner]):
            return self._in_place(key, method, self._as_called(method))
        target = self._in_place(id(fn), fn, self._as_called(fn))
        return method if target is fn else functools.partial(target, owner)

    def _keep(self, fn: Any, target: Callable) -> Callable:
        self._targets[id(fn)] = fn, target
        if "<locals>" in getattr(fn, "__qualname__", "<locals>"):
            self._made.append(id(fn))
        return target

    def _as_called(self, fn: Any) -> Callable:
        """Returns a function converted, if its source is found."""
        if isinstance(fn, types.MethodType):
            target = self._as_called(fn.__func__)
            return fn if target is fn.__func__ else types.MethodType(target, fn.__self__)
        called = vars(type(fn)).get("__call__")
        if isinstance(called, types.FunctionType):
            return self._as_called(types.MethodType(called, fn))
        if not isinstance(fn, types.FunctionType) or is_library(fn.__module__ or ""):
            return fn
        known = self._converted.get(id(fn))
        if known is None:
            known = fn, convert(fn, self._hook) or fn
            if not fn.__closure__:
                self._converted[id(fn)] = known
        return known[1]

    def _in_place(
        self, key: Any, fn: Callable, target: Callable, *, may_be_cell: bool = True
    ) -> Callable:
        """Returns the cell that a function is; else a target, watched while there is to learn."""
        if key in self._cells:
            return self._cells[key][1]
        if not self.is_learning or key in self._refused:
            return target

        def call(*args: Any, **static: Any) -> Any:
            recorder = recording.recorder
            if recorder is None or not self.is_learning:
                return target(*args, **static)
            calls = self._calls.get(key)
            if calls is None:
                calls = self._calls[key] = _unmet(fn, may_be_cell)
            recurs = self._active[calls] > 0
            self._active[calls] += 1
            for met in self._active:  # all that are being called
                met.asks |= calls.asks
                met.is_cell &= not (recurs or calls.changes)
            try:
                return calls.record(recorder, target, args, static)
            finally:
                self._active[calls] -= 1
                if self._active[calls] <= 0:
                    del self._active[calls]

        return call

    # --- learning ---

    def note(self, num_instances: int, num_operations: int) -> None:
        """Notes that instances were recorded; decides once there are enough."""
        self._num_instances += num_instances
        self._num_operations += num_operations
        if self._num_instances < MIN_INSTANCES or self._num_operations < MIN_OPERATIONS:
            return
        self.decide()

    def decide(self, least: int = 1) -> None:
        """Takes functions for cells by the calls that were met.

        Args:
          least: operations that they do, if JAX has not compiled them into one.
        """
        self.is_learning = False
        for key, calls in self._calls.items():
            is_large = calls.num_operations >= least or isinstance(calls.fn, jax.stages.Wrapped)
            if is_large and self._is_cell(calls):
                self._cells[key] = calls.fn, self._guarded(key, calls.fn)
        self.revision += bool(self._cells)
        self._calls.clear()
        self._forget_targets()

    def _is_cell(self, calls: CallsMet) -> bool:
        num_types = len(calls.done)
        if not calls.is_cell or not 0 < num_types <= MAX_TYPES or not calls.num_operations:
            return False
        num_instances = len(calls.instances)
        if num_types > 2 and calls.num < CALLS_PER_INSTANCE * num_instances:
            return False
        return calls.num >= CALLS_PER_TYPE * num_types and num_instances > 1

    @property
    def are_found(self) -> bool:
        """Returns whether there are cells."""
        return bool(self._cells)

    def give_up(self) -> None:
        """Takes no function for a cell: most is done outside of those that could be."""
        self._cells.clear()
        self._forget_targets()
        self.revision += 1

    def _guarded(self, key: Any, fn: Callable) -> Callable:
        """Returns a function as a cell, until it turns out to be none."""
        called = cell(fn)

        def call(*args: Any, **static: Any) -> Any:
            try:
                return called(*args, **static)
            except RecursionError:
                raise
            except Exception:
                self._refuse(key)
            return fn(*args, **static)  # whose errors are the user's

        return call

    def _refuse(self, key: Any) -> None:
        """Takes a function for none from now on."""
        if key in self._cells:
            self._refused[key] = self._cells.pop(key)
            self._forget_targets()
            self.has_failed = True
            self.revision += 1


def _unmet(fn: Any, may_be_cell: bool) -> CallsMet:
    """Returns what is known of a function before it is called."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None:
        return CallsMet(fn, may_be_cell, asks=True, changes=False)
    changes = may_change_things(code) and not is_library(fn.__module__ or "")
    return CallsMet(fn, may_be_cell, may_ask(code), changes)


def _root(fn: Any) -> str:
    """Returns the package that a function is from."""
    return (getattr(fn, "__module__", None) or "").partition(".")[0]
