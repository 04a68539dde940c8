"""Random programs against the loop: a program, its instances, and a way to run it."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from jedbatch.testing.judges import assert_close, check_plan, stacked, weighted_sum
from jedbatch.testing.programs import Instance, Program, make_params

GRANULARITIES = ("cell", "cell", "op", "auto")
LAYOUTS = ("auto", "append", "longest", "reader", "pq")
EXECUTORS = (None, None, "fused", "dispatch")
POLICIES = {
    "learned": None,
    "agenda": jedbatch.policies.agenda,
    "depth": jedbatch.policies.depth,
    "height": jedbatch.policies.height,
    "sufficient": jedbatch.policies.sufficient,
}
MOVED = 1e-6  # by how much parameters are moved to see whether a program is well conditioned


class UnclearError(Exception):
    """Rounding decides what a program computes, so that the loop is no judge of it."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How a program is run.

    Attributes:
      run: a name in `RUNS`.
      granularity, layout, reuse, executor: options of `jedbatch.batch`.
      policy: a name in `POLICIES`.
    """

    run: str = "grad(call)"
    granularity: str = "cell"
    layout: str = "auto"
    reuse: bool | None = None
    executor: str | None = None
    policy: str = "learned"

    @property
    def options(self) -> dict[str, Any]:
        """The options of `jedbatch.batch`."""
        return {
            "granularity": self.granularity,
            "layout": self.layout,
            "reuse": self.reuse,
            "executor": self.executor,
            "policy": POLICIES[self.policy],
        }

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
    """

    program: Program
    instances: tuple[Instance, ...]
    way: Way = Way()
    seed: int = 0

    def __str__(self) -> str:
        instances = "\n".join(f"  {i}" for i in self.instances)
        return f"{self.program.source}\n# {self.way}, parameters of seed {self.seed}\n{instances}"

    @functools.cached_property
    def params(self) -> dict[str, jax.Array]:
        """The parameters."""
        return make_params(self.seed)

    @functools.cached_property
    def columns(self) -> list[list[Any]]:
        """The mapped arguments: for each of them a value per instance."""
        rows = []
        for instance in self.instances:
            known = instance.arguments()
            mine = {name: known[name] for name in self.program.arguments}
            rows.append([mine] if self.program.together else list(mine.values()))
        return [list(column) for column in zip(*rows, strict=True)]

    @property
    def rtol(self) -> float:
        """The tolerance: bfloat16 has 8 bits, and is rounded in other places under `jax.jit`."""
        return 3e-2 if "bfloat16" in self.program.source or "brief" in self.program.uses else 1e-4

    def check(self) -> None:
        """Compares values and gradients with the loop.

        Raises:
          AssertionError: they differ, though the loop itself is well conditioned.
        """
        fn = self.program.function()
        expected = Expected.of(fn, self.params, self.columns)
        run = Run(self, fn, expected.stacks)
        try:
            run.compare(expected)
        except AssertionError as error:
            if not self._is_clear(fn, expected):
                raise UnclearError from error
            raise

    def check_plans(self) -> None:
        """Plans the program for training, for inference and in another order; computes nothing.

        Raises:
          AssertionError: the tables of a plan are wrong (see `check_plan`).
        """
        run = Run(self, self.program.function(), stacks=False)
        for gradient in (True, False):
            check_plan(run.plan(gradient=gradient))
        order = [*range(len(self.instances))[::-1], 0]
        run.columns = [[column[i] for i in order] for column in run.columns]
        check_plan(run.plan())

    def _is_clear(self, fn: Callable, expected: "Expected") -> bool:
        """Whether the loop gives nearly the same when parameters are moved a little."""
        for sign in (-1, 1):
            size = sign * MOVED * (self.rtol / 1e-4)
            moved = jax.tree.map(lambda x, size=size: x * (1 + size), self.params)
            other = Expected.of(fn, moved, self.columns)
            try:
                assert_close(other.results, expected.results, self.rtol)
                assert_close(other.gradient, expected.gradient, self.rtol)
            except AssertionError:
                return False
        return True


class Expected(NamedTuple):
    """The results and the gradient of the plain loop.

    Attributes:
      results: of every instance.
      gradient: of the weighted sum of all results, with respect to the parameters.
      stacks: whether results stack.
    """

    results: list[Any]
    gradient: Any
    stacks: bool

    @staticmethod
    def of(fn: Callable, params: Any, columns: Sequence[Sequence[Any]]) -> "Expected":
        """Runs the loop, on arrays of JAX."""
        columns = jax.tree.map(
            lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, columns
        )

        def total(params: Any) -> Any:
            results = [fn(params, *row) for row in zip(*columns, strict=True)]
            results = jax.tree.map(jnp.asarray, results)
            stacks = len({_form(r) for r in results}) == 1
            return weighted_sum(stacked(results) if stacks else results), results

        gradient, results = jax.grad(total, has_aux=True)(params)
        return Expected(results, gradient, len({_form(r) for r in results}) == 1)

    @property
    def joined(self) -> Any:
        """The results as a batched function returns them."""
        return stacked(self.results) if self.stacks else self.results


def _form(result: Any) -> Any:
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
      batched: the batched function.
    """

    def __init__(self, case: Case, fn: Callable, stacks: bool):
        self.case, self.fn, self.stacks = case, fn, stacks
        self.params, self.columns = case.params, case.columns
        axes = case.program.in_axes
        self.batched = jedbatch.batch(fn, axes, 0 if stacks else None, **case.way.options)

    def compare(self, expected: Expected) -> None:
        """Runs all instances, and once more in another order, and compares with the loop."""
        manner = RUNS[self.case.way.run]
        self._compare(manner, expected, self.case.way.run)
        if manner.again:
            order = [*range(len(self.columns[0]))[::-1], 0]
            self.columns = [[column[i] for i in order] for column in self.columns]
            expected = Expected.of(self.fn, self.params, self.columns)
            self._compare(manner, expected, "the same in another order")

    def _compare(self, manner: "Manner", expected: Expected, what: str) -> None:
        results, gradient = manner.run(self)
        rtol = self.case.rtol
        assert_close(results, expected.joined, rtol, what=what, by_instance=self.stacks)
        if gradient is not None:
            assert_close(gradient, expected.gradient, rtol, what=f"the gradient of {what}")

    def plan(self, **options: Any) -> Any:
        """A plan of all instances."""
        return self.batched.plan(self.params, *self.columns, **options)

    def loop(self, params: Any, columns: Sequence[Sequence[Any]]) -> Any:
        """The results of the loop."""
        found = [self.fn(params, *row) for row in zip(*columns, strict=True)]
        found = jax.tree.map(jnp.asarray, found)
        return stacked(found) if self.stacks else found


class Manner(NamedTuple):
    """How something is computed.

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

    def run(r: Run) -> tuple[Any, Any]:
        inner = apply(r)

        def total(params: Any) -> Any:
            found = inner(params)
            return weighted_sum(found), found

        (_, found), gradient = wrap(jax.value_and_grad(total, has_aux=True))(r.params)
        return found, gradient

    return run


def _call(r: Run) -> Any:
    return r.batched(r.params, *r.columns)


def _apply(r: Run) -> Any:
    return r.batched.apply(r.params, r.plan(gradient=False))


def _jit(r: Run) -> Any:
    return jax.jit(r.batched.apply)(r.params, r.plan())


def _donated(r: Run) -> Any:
    """Twice: the buffers of a plan that is given away must not be those of the next one."""
    run = jax.jit(r.batched.apply, donate_argnums=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        for _ in range(2):
            found = run(r.params, jax.tree.map(jnp.array, r.plan(gradient=False)))
    return found


def _with_half(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.stack([x, x / 2]), params)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _vmap(r: Run) -> Any:
    """Over parameters, of which the first are these."""
    plan = r.plan()
    return _first(jax.vmap(lambda p: r.batched.apply(p, plan))(_with_half(r.params)))


def _vmap_of_gradient(grad: Callable) -> Callable:
    return lambda params: _first(jax.vmap(grad)(_with_half(params)))


def _lazy(r: Run) -> Any:
    with jedbatch.lazy():
        found = [r.fn(r.params, *row) for row in zip(*r.columns, strict=True)]
    found = jax.tree.map(jnp.asarray, found)
    return stacked(found) if r.stacks else found


def _lazy_gradient(r: Run) -> Callable:
    def inner(params: Any) -> Any:
        with jedbatch.lazy():
            found = [r.fn(params, *row) for row in zip(*r.columns, strict=True)]
            found = jax.tree.map(jnp.asarray, found)
            return stacked(found) if r.stacks else found

    return inner


def _calling(r: Run) -> Callable:
    return lambda params: r.batched(params, *r.columns)


def _applying(r: Run) -> Callable:
    plan = r.plan()
    return lambda params: r.batched.apply(params, plan)


def _checkpoint(r: Run) -> Callable:
    return jax.checkpoint(_applying(r))


def _jitted_step(r: Run) -> tuple[Any, Any]:
    """As in training: the plan is an argument."""

    def total(params: Any, plan: Any) -> Any:
        found = r.batched.apply(params, plan)
        return weighted_sum(found), found

    step = jax.jit(jax.value_and_grad(total, has_aux=True))
    (_, found), gradient = step(r.params, r.plan())
    return found, gradient


def _of_arrays(r: Run) -> tuple[Any, Any]:
    """With respect to parameters and arrays of instances together."""
    moving = [
        [x if isinstance(x, np.ndarray) and x.dtype == np.float32 else None for x in column]
        for column in r.columns
    ]

    def total_of(run: Callable) -> Callable:
        def total(params: Any, moving: Any) -> Any:
            columns = [
                [x if m is None else jnp.asarray(m) for x, m in zip(column, mine, strict=True)]
                for column, mine in zip(r.columns, moving, strict=True)
            ]
            found = run(params, columns)
            return weighted_sum(found), found

        return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)

    (_, found), (gradient, mine) = total_of(lambda p, c: r.batched(p, *c))(r.params, moving)
    _, (_, its) = total_of(r.loop)(r.params, moving)
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
