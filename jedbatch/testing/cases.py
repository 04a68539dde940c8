"""Random programs against the loop: a program, its instances, and a way to run it."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from jedbatch._layout.bucketing import Buckets
from jedbatch._program.executors import Executor
from jedbatch._support.types import Leaf, PyTree
from jedbatch.testing.judges import (
    assert_close,
    check_plan,
    has_gradient,
    stacked,
    weights_for,
)
from jedbatch.testing.programs import Instance, Program, make_params

GRANULARITIES = ("cell", "cell", "auto")
LAYOUTS = ("auto", "append", "longest", "reader", "pq")
POLICIES = {
    "learned": None,
    "agenda": jedbatch.policies.agenda,
    "depth": jedbatch.policies.depth,
    "height": jedbatch.policies.height,
    "sufficient": jedbatch.policies.sufficient,
    "machine": jedbatch.policies.FSM("phase", (), ()),  # knows no state
}
# Most programs are small, and compiled in few widths: what a program costs is compiling it.
ONE_WIDTH = Buckets((4,), 4)
NARROW = jedbatch.Target(
    "narrow",
    heavy=ONE_WIDTH.widths,
    light=ONE_WIDTH.widths,
    sums=ONE_WIDTH,
    blocks=ONE_WIDTH,
    rows_together=8,
    together=2,
    shortest=2,
)
SWITCH = dataclasses.replace(NARROW, name="switch", control="switch", superinstruction=3)
TARGETS = {"narrow": NARROW, "switch": SWITCH, "cpu": "cpu", "gpu": "gpu"}
READ = ("all", "first leaf", "last instance")  # what a loss reads of the results
MOVED = 1e-6  # by how much parameters are moved to see whether a program is well conditioned


class UnclearError(Exception):
    """Rounding decides what a program computes, so that the loop is no judge of it."""


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run a program.

    Attributes:
      run: a name in `RUNS`.
      granularity, layout, reuse: options of `jedbatch.batch`.
      policy: a name in `POLICIES`.
      target: a name in `TARGETS`.
      read: an element of `READ`: what is differentiated.
      copies: how often all instances are given.
      whole: whether arrays of equal shapes are given as one array, not as a list.
      listed: whether results come as a list, even if they would stack.
      hands_over: whether all arenas are handed from call to call, not only large ones.
    """

    run: str = "grad(call)"
    granularity: str = "cell"
    layout: str = "auto"
    reuse: bool | None = None
    policy: str = "learned"
    target: str = "narrow"
    read: str = "all"
    copies: int = 1
    whole: bool = False
    listed: bool = False
    hands_over: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of `jedbatch.batch`."""
        return {
            "granularity": self.granularity,
            "layout": self.layout,
            "reuse": self.reuse,
            "policy": POLICIES[self.policy],
            "target": TARGETS[self.target],
        }

    def hand_over(self) -> PyTree:
        """A context in which small arenas are handed from call to call too, if that is wanted."""
        if not self.hands_over:
            return contextlib.nullcontext()
        return mock.patch.object(Executor, "worth_keeping", 0)

    def __str__(self) -> str:
        usual = Way()
        given = dataclasses.asdict(self).items()
        shown = [f"{k}={x!r}" for k, x in given if k == "run" or x != getattr(usual, k)]
        return f"Way({', '.join(shown)})"


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, its instances, and a way to run it; `check` compares it with the loop.

    Attributes:
      program: what is run.
      instances: what for.
      way: how.
      seed: of the parameters.
      unseen: instances that only later minibatches have.
      minibatches: later ones, of numbers of instances; those of unseen instances come last.
    """

    program: Program
    instances: tuple[Instance, ...]
    way: Way = Way()
    seed: int = 0
    unseen: tuple[Instance, ...] = ()
    minibatches: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        lines = [self.program.source, f"# {self.way}, parameters of seed {self.seed}"]
        lines += [f"  {i}" for i in self.instances]
        if self.minibatches:
            later = ", then ".join(str(list(picks)) for picks in self.minibatches)
            lines += [f"# later: minibatches {later}, with", *(f"  {i}" for i in self.unseen)]
        return "\n".join(lines)

    @functools.cached_property
    def params(self) -> dict[str, jax.Array]:
        """The parameters."""
        return make_params(self.seed)

    @functools.cached_property
    def columns(self) -> list[list[Any]]:
        """The mapped arguments: for each of them a value per instance, once, unseen ones last."""
        rows = []
        for instance in (*self.instances, *self.unseen):
            known = instance.arguments()
            mine = {name: known[name] for name in self.program.arguments}
            rows.append([mine] if self.program.together else list(mine.values()))
        return [list(column) for column in zip(*rows, strict=True)]

    @property
    def picks(self) -> list[int]:
        """The instances that are given at first, by number."""
        return [*range(len(self.instances))] * self.way.copies

    @property
    def rtol(self) -> float:
        """The tolerance: bfloat16 has 8 bits, and is rounded in other places under `jax.jit`."""
        return 3e-2 if "bfloat16" in self.program.source or "brief" in self.program.uses else 1e-4

    def check(self) -> None:
        """Compares values and gradients with the loop.

        Raises:
          AssertionError: they differ, though the loop itself is well conditioned, or a plan of a
            later minibatch is wrong.
        """
        fn = self.program.function()
        loop = Loop.of(fn, self.params, self.columns, self.way)
        run = Run(self, fn, loop.stacks)
        try:
            with self.way.hand_over():
                run.compare(loop)
        except AssertionError as error:
            if not self._is_clear(fn, loop):
                raise UnclearError from error
            raise

    def check_plans(self) -> None:
        """Plans the program for training, for inference and later minibatches; computes nothing.

        Raises:
          AssertionError: the tables of a plan are wrong (see `check_plan`).
        """
        run = Run(self, self.program.function(), stacks=False)
        for gradient in (True, False):
            check_plan(run.plan(gradient=gradient))
        for picks in ([*self.picks[::-1], 0], *self.minibatches):
            with run.picked(picks):
                check_plan(run.plan())

    def _is_clear(self, fn: Callable, loop: "Loop") -> bool:
        """Returns whether the loop gives nearly the same when parameters are moved a little."""
        expected = loop.expected(self.picks)
        for sign in (-1, 1):
            size = sign * MOVED * (self.rtol / 1e-4)
            moved = jax.tree.map(lambda x, size=size: x * (1 + size), self.params)
            other = Loop.of(fn, moved, self.columns, self.way).expected(self.picks)
            try:
                assert_close(other.results, expected.results, self.rtol)
                assert_close(other.gradient, expected.gradient, self.rtol)
            except AssertionError:
                return False
        return True


class Loop(NamedTuple):
    """The plain loop over all instances.

    Attributes:
      found: the results of every instance.
      pulls: of every instance, gives the gradient with respect to the parameters of a cotangent.
      way: says what is read of the results.
    """

    found: list[PyTree]
    pulls: list[Callable[[PyTree], tuple[PyTree]]]
    way: Way

    @staticmethod
    def of(fn: Callable, params: PyTree, columns: Sequence[Sequence[PyTree]], way: Way) -> "Loop":
        """Runs the loop, on arrays of JAX, once for each instance.

        Args:
          fn: the function.
          params: its parameters.
          columns: the mapped arguments of different instances.
          way: says what is read of the results.
        """

        def run(row: Sequence[PyTree], params: PyTree) -> PyTree:
            return jax.tree.map(jnp.asarray, fn(params, *row))

        pairs = [jax.vjp(functools.partial(run, row), params) for row in _rows(columns)]
        return Loop([found for found, _ in pairs], [pull for _, pull in pairs], way)

    @property
    def stacks(self) -> bool:
        """Whether results stack."""
        return not self.way.listed and len({_form(r) for r in self.found}) == 1

    def expected(self, picks: Sequence[int]) -> "Expected":
        """The results and the gradient of a minibatch.

        Args:
          picks: its instances, by number.
        """
        results = [self.found[i] for i in picks]
        cotangents = _cotangents(results, self.stacks, self.way.read)
        total: dict[int, Any] = {}
        for i, cotangent in zip(picks, cotangents, strict=True):
            total[i] = jax.tree.map(_sum, total[i], cotangent) if i in total else cotangent
        gradients = [part for i, cotangent in total.items() for part in self.pulls[i](cotangent)]
        gradient = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *gradients)
        return Expected(results, gradient, self.stacks)


class Expected(NamedTuple):
    """The results of a minibatch, and its gradient.

    Attributes:
      results: of every instance.
      gradient: of the weighted sum of all results that are read, with respect to the parameters.
      stacks: whether results stack.
    """

    results: list[PyTree]
    gradient: Any
    stacks: bool

    @property
    def joined(self) -> PyTree:
        """The results as a batched function returns them."""
        return stacked(self.results) if self.stacks else self.results


def _cotangents(results: list[PyTree], stacks: bool, read: str) -> list[PyTree]:
    """Cotangents of the loop's results: those of joined results, cut; zero where not read."""
    blank = jax.tree.map(_blank, results)
    count = len(results)
    cut = weights_for(blank)
    if stacks:
        weights = weights_for(jax.tree.map(lambda *rows: np.stack(rows), *blank))
        cut = [jax.tree.map(lambda x, i=i: _row(x, i), weights) for i in range(count)]
    if read == "last instance":
        cut[:-1] = [jax.tree.map(_nothing, c) for c in cut[:-1]]
    if read == "first leaf":
        leaves, structure = jax.tree.flatten(cut)
        each = len(leaves) // count if stacks else len(leaves)
        cut = jax.tree.unflatten(
            structure, [_nothing(x) if i % each else x for i, x in enumerate(leaves)]
        )
    return cut


def _blank(x: Leaf) -> np.ndarray:
    """An array of the shape of a result, and of its dtype if it has cotangents."""
    return np.zeros(x.shape, x.dtype if has_gradient(x) else np.int32)


def _row(x: np.ndarray, i: int) -> np.ndarray:
    return x[i : i + 1].reshape(x.shape[1:])  # `x[i]` of float0 is no array


def _nothing(x: np.ndarray) -> np.ndarray:
    return np.zeros(x.shape, x.dtype)


def _reader(read: str, stacks: bool) -> Callable[[Any], Any]:
    """Gives the part of joined results that is differentiated, and the same part of weights."""
    if read == "first leaf":
        return lambda joined: jax.tree.leaves(joined)[0]
    if read == "last instance":
        return lambda joined: jax.tree.map(_last, joined) if stacks else joined[-1]
    return lambda joined: joined


def _sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a if a.dtype == jax.dtypes.float0 else a + b


def _last(x: Leaf) -> PyTree:
    return _row(x, len(x) - 1) if isinstance(x, np.ndarray) else x[-1]


def _pulled(run: Callable, read: Callable[[Any], Any], *args: Any) -> tuple[PyTree, PyTree]:
    """Results of a function of some arguments, and the gradients of the part that is read."""

    def reading(*args: Any) -> PyTree:
        found = run(*args)
        return read(found), found

    _, pull, found = jax.vjp(reading, *args, has_aux=True)
    return found, pull(read(weights_for(found)))


def _form(result: object) -> Any:
    leaves, structure = jax.tree.flatten(result)
    return structure, tuple((x.shape, x.dtype) for x in leaves)


class Run:
    """A case while it runs.

    Attributes:
      case: what is run.
      fn: its function.
      params: its parameters.
      columns: the mapped arguments; each a value per instance.
      stacks: whether results stack.
      read: gives the part of the results that is differentiated.
      batched: the batched function.
    """

    def __init__(self, case: Case, fn: Callable, stacks: bool):
        self.case, self.fn, self.stacks = case, fn, stacks
        self.params = case.params
        self.columns = self._picked(case.picks)
        self.read = _reader(case.way.read, stacks)
        axes = case.program.in_axes
        self.batched = jedbatch.batch(fn, axes, 0 if stacks else None, **case.way.options)

    @contextlib.contextmanager
    def picked(self, picks: Sequence[int]) -> Iterator[None]:
        """Chooses the instances that are given; errors say which they are."""
        self.columns = self._picked(picks)
        try:
            yield
        except Exception as error:
            error.add_note(f"in minibatch {list(picks)}")
            raise

    def _picked(self, picks: Sequence[int]) -> list[list[Any]]:
        """The mapped arguments of some instances."""
        return [[column[i] for i in picks] for column in self.case.columns]

    def compare(self, loop: Loop) -> None:
        """Runs all instances, and later minibatches with other parameters; compares them all."""
        case, manner = self.case, RUNS[self.case.way.run]
        self._compare(manner, loop.expected(case.picks), case.way.run)
        if manner.again:
            self.params = make_params(case.seed + 1)
            loop = Loop.of(self.fn, self.params, case.columns, case.way)
            picks = [*case.picks[::-1], 0]
            with self.picked(picks):
                what = "the same in another order, with other parameters"
                self._compare(manner, loop.expected(picks), what)
        for later in case.minibatches:
            with self.picked(later):
                if not case.program.decides:
                    check_plan(self.plan())
                if manner.again:
                    self._compare(manner, loop.expected(later), "a later minibatch")

    def _compare(self, manner: "Manner", expected: Expected, what: str) -> None:
        results, gradient = manner.run(self)
        rtol = self.case.rtol
        assert_close(results, expected.joined, rtol, what=what, by_instance=self.stacks)
        if gradient is not None:
            assert_close(gradient, expected.gradient, rtol, what=f"the gradient of {what}")

    def plan(self, **options: Any) -> Any:
        """A plan of all instances."""
        return self.batched.plan(self.params, *self.given(self.columns), **options)

    def given(self, columns: Sequence[Any]) -> list[PyTree]:
        """The mapped arguments as they are given to the batched function."""
        return list(map(_whole, columns)) if self.case.way.whole else list(columns)

    def loop(self, params: PyTree, columns: Sequence[Sequence[PyTree]]) -> PyTree:
        """The results of the loop."""
        found = [self.fn(params, *row) for row in zip(*columns, strict=True)]
        found = jax.tree.map(jnp.asarray, found)
        return stacked(found) if self.stacks else found


def _whole(column: Sequence[PyTree]) -> PyTree:
    """One array in place of a list of arrays, if they are of one shape."""
    if all(isinstance(x, np.ndarray) for x in column) and len({x.shape for x in column}) == 1:
        return np.stack(column)
    return column


class Manner(NamedTuple):
    """A way to compute something.

    Attributes:
      run: gives (results, gradient with respect to the parameters or None).
      eager: whether the function may decide on values.
      again: whether what is compiled is used again by the next run.
    """

    run: Callable[[Run], tuple[Any, Any]]
    eager: bool = False
    again: bool = True


def _values(run: Callable[[Run], Any]) -> Callable[[Run], tuple[Any, Any]]:
    return lambda r: (run(r), None)


def _gradient(apply: Callable[[Run], Callable], wrap: Callable = lambda f: f) -> Callable:
    """Results and gradient of what `apply` gives, a function of parameters."""

    def run(r: Run) -> tuple[PyTree, PyTree]:
        inner = apply(r)
        found, (gradient,) = wrap(lambda params: _pulled(inner, r.read, params))(r.params)
        return found, gradient

    return run


def _call(r: Run) -> PyTree:
    return r.batched(r.params, *r.given(r.columns))


def _apply(r: Run) -> PyTree:
    return r.batched.apply(r.params, r.plan(gradient=False))


def _jit(r: Run) -> PyTree:
    return jax.jit(r.batched.apply)(r.params, r.plan())


def _donated(r: Run) -> PyTree:
    """Twice: the buffers of a plan that is given away must not be those of the next one."""
    run = jax.jit(r.batched.apply, donate_argnums=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        for _ in range(2):
            found = run(r.params, jax.tree.map(jnp.array, r.plan(gradient=False)))
    return found


def _with_half(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.stack([x, x / 2]), params)


def _first(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], tree)


def _rows(columns: Sequence[Sequence[PyTree]]) -> list[tuple[Any, ...]]:
    """Returns the arguments of each instance for a plain function, with arrays of JAX.

    `batch` hands arrays over as symbols that have `x.at`; arrays of NumPy have not.
    """
    columns = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, columns)
    return list(zip(*columns, strict=True))


def _vmap(r: Run) -> PyTree:
    """Over parameters, of which the first are these."""
    plan = r.plan()
    return _first(jax.vmap(lambda p: r.batched.apply(p, plan))(_with_half(r.params)))


def _vmap_of_gradient(grad: Callable) -> Callable:
    return lambda params: _first(jax.vmap(grad)(_with_half(params)))


def _lazy(r: Run) -> PyTree:
    rows = _rows(r.columns)
    with jedbatch.lazy():
        found = [r.fn(r.params, *row) for row in rows]
    found = jax.tree.map(jnp.asarray, found)
    return stacked(found) if r.stacks else found


def _lazy_gradient(r: Run) -> Callable:
    rows = _rows(r.columns)

    def inner(params: PyTree) -> PyTree:
        with jedbatch.lazy():
            found = [r.fn(params, *row) for row in rows]
            found = jax.tree.map(jnp.asarray, found)
            return stacked(found) if r.stacks else found

    return inner


def _calling(r: Run) -> Callable:
    return lambda params: r.batched(params, *r.given(r.columns))


def _applying(r: Run) -> Callable:
    plan = r.plan()
    return lambda params: r.batched.apply(params, plan)


def _checkpoint(r: Run) -> Callable:
    return jax.checkpoint(_applying(r))


def _jitted_step(r: Run) -> tuple[PyTree, PyTree]:
    """As in training: the plan is an argument."""

    def step(params: PyTree, plan: Any) -> PyTree:
        return _pulled(lambda params: r.batched.apply(params, plan), r.read, params)

    found, (gradient,) = jax.jit(step)(r.params, r.plan())
    return found, gradient


def _of_arrays(r: Run) -> tuple[PyTree, PyTree]:
    """With respect to parameters and arrays of instances together."""
    leaves, structure = jax.tree.flatten(r.columns)
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, np.ndarray)}
    moving = {i: x for i, x in arrays.items() if x.dtype == np.float32}

    def filled(moving: PyTree) -> PyTree:
        given = {i: jnp.asarray(x) for i, x in (arrays | moving).items()}
        return jax.tree.unflatten(structure, [given.get(i, x) for i, x in enumerate(leaves)])

    found, (gradient, mine) = _pulled(
        lambda p, m: r.batched(p, *filled(m)), r.read, r.params, moving
    )
    _, (_, its) = _pulled(lambda p, m: r.loop(p, filled(m)), r.read, r.params, moving)
    assert_close(mine, its, r.case.rtol, what="gradient of the arrays of instances")
    return found, gradient


RUNS = {
    "call": Manner(_values(_call), eager=True),
    "grad(call)": Manner(_gradient(_calling), eager=True),
    "apply": Manner(_values(_apply)),
    "jit(apply)": Manner(_values(_jit), again=False),
    "jit(apply, donate_argnums=1)": Manner(_values(_donated), again=False),
    "jit(call)": Manner(_values(lambda r: jax.jit(_calling(r))(r.params)), again=False),
    "vmap(apply)": Manner(_values(_vmap), again=False),
    "lazy": Manner(_values(_lazy), eager=True),
    "grad(apply)": Manner(_gradient(_applying)),
    "jit(grad(apply))": Manner(_jitted_step, again=False),
    "jit(grad(call))": Manner(_gradient(_calling, jax.jit), again=False),
    "grad(checkpoint(apply))": Manner(_gradient(_checkpoint), again=False),
    "vmap(grad(apply))": Manner(_gradient(_applying, _vmap_of_gradient), again=False),
    "grad(lazy)": Manner(_gradient(_lazy_gradient), eager=True),
    "grad(call) with respect to arrays": Manner(_of_arrays, eager=True),
}
