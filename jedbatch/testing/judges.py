"""The judges of `jedbatch.testing`."""

import contextlib
import dataclasses
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import monitoring

from jedbatch import checks
from jedbatch._batch.batch import batch
from jedbatch._batch.batched import Batched
from jedbatch._graph.graph import CARRIED, Graph
from jedbatch._jaxpr.storage import is_key
from jedbatch._program.plan import Plan
from jedbatch._session.plans.verify import verify
from jedbatch._support.types import Leaf, PyTree

COMPILED = "/jax/core/compile/backend_compile_duration"


# --- values ---


def loop(fn: Callable[..., Any], params: PyTree, instances: Sequence[PyTree]) -> PyTree:
    """`fn` of every instance, one by one, stacked.

    Args:
      fn: a function of parameters and one instance.
      params: a pytree of arrays.
      instances: a sequence of instances.

    Returns:
      A pytree of arrays [instances, ...].
    """
    return stacked([fn(params, instance) for instance in instances])


def stacked(results: Sequence[PyTree]) -> PyTree:
    """Results of instances along a new first axis."""
    return jax.tree.map(lambda *rows: jnp.stack([jnp.asarray(r) for r in rows]), *results)


def has_gradient(x: Leaf) -> bool:
    """True of arrays of real and complex numbers."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def weighted_sum(result: object, instance: int | None = None) -> PyTree:
    """A sum of the real parts of a result under fixed random weights: all of it counts.

    Args:
      result: any pytree of arrays.
      instance: what the sum is limited to, a position along the first axis of each.

    Returns:
      A real number, a scalar array.
    """
    total: Any = 0.0
    for path, x in jax.tree.leaves_with_path(result):
        x = jnp.asarray(x)
        if has_gradient(x):
            weight = _weight(path, x)
            wide = jnp.promote_types(x.dtype, "float32")
            terms = jnp.real((x * weight).astype(wide))
            total = total + (terms if instance is None else terms[instance]).sum()
    return total


def weights_for(result: object) -> PyTree:
    """Cotangents for `jax.vjp` of a result: the weights of `weighted_sum`, made without JAX."""

    def weights(path: Any, x: Leaf) -> np.ndarray:
        return _weight(path, x) if has_gradient(x) else np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree_util.tree_map_with_path(weights, result)


def _weight(path: Any, x: Leaf) -> np.ndarray:
    seed = zlib.crc32(jax.tree_util.keystr(path).encode())
    return np.random.default_rng(seed).normal(size=x.shape).astype(x.dtype)


def assert_close(
    got: object, expected: object, rtol: float, *, what: str = "", by_instance: bool = False
) -> None:
    """Raises `AssertionError` unless pytrees agree in structure, shapes, dtypes and values.

    The tolerance is relative to the largest element of a leaf, since sums are taken in another
    order. Integers and truth values must be equal.

    Args:
      got: a pytree of arrays or numbers.
      expected: another.
      rtol: the tolerance.
      what: what is compared, for the message.
      by_instance: whether the first axis of the leaves counts instances, for the message.
    """
    what = f"{what}: " if what else ""
    mine: Any = jax.tree.structure(got)
    its: Any = jax.tree.structure(expected)
    if mine != its:
        raise AssertionError(f"{what}the result is a {mine}; expected {its}.")
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        where = f"leaf {jax.tree_util.keystr(path) or 'of the result'}"
        a, b = _as_data(a), _as_data(b)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise AssertionError(
                f"{what}{where} is {a.dtype}{list(a.shape)}; expected {b.dtype}{list(b.shape)}."
            )
        if a.dtype != jax.dtypes.float0:
            _assert_leaf(a, b, rtol, f"{what}{where}", by_instance)


def _as_data(x: Leaf) -> np.ndarray:
    x = x if getattr(x, "dtype", None) == jax.dtypes.float0 else jnp.asarray(x)
    return np.asarray(jax.random.key_data(x) if is_key(x.dtype) else x)


def _assert_leaf(a: np.ndarray, b: np.ndarray, rtol: float, where: str, by_instance: bool) -> None:
    allowed = 0.0
    if has_gradient(a):
        wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
        a, b = a.astype(wide), b.astype(wide)
        allowed = float(rtol * np.abs(b[np.isfinite(b)]).max(initial=1e-3))
        same = np.isclose(a, b, rtol=rtol, atol=allowed, equal_nan=True)
    else:
        same = a == b
    if same.all():
        return
    with np.errstate(invalid="ignore", over="ignore"):
        exact = complex if a.dtype.kind == "c" else float
        distance = np.abs(np.asarray(a, exact) - np.asarray(b, exact))
    distance = np.where(same, -1.0, np.where(np.isnan(distance), np.inf, distance))
    worst = np.unravel_index(int(distance.argmax()), distance.shape)
    place = list(map(int, worst))
    if by_instance and place:
        where = f"{where} of instance {place.pop(0)}"
    element = f" at {place}" if place else ""
    largest = float(distance[worst])
    raise AssertionError(
        f"{where}: largest difference {largest:.3g}{element}, {a[worst]} instead of {b[worst]}, "
        f"where {allowed:.3g} is allowed; {int((~same).sum())} of {a.size} elements differ."
    )


def check_against_loop(
    fn: Callable[..., Any],
    params: PyTree,
    instances: Sequence[PyTree],
    gradients: bool = True,
    *,
    rtol: float = 1e-5,
    thorough: bool = False,
    plans: bool = True,
    inference: bool = True,
    alone: Callable[..., Any] | None = None,
    **options: Any,
) -> Batched[*tuple[Any, ...], Any]:
    """Values and gradients of a batched function are those of the loop over single instances.

    Args:
      fn: a function of parameters and one instance, as for `jedbatch.batch`.
      params: a pytree of arrays.
      instances: a sequence of instances.
      gradients: whether gradients with respect to the parameters are compared too, those of a
        weighted sum of all results.
      rtol: the tolerance, relative to the largest element of each array: sums are taken in
        another order.
      thorough: whether to compare `plan` and `apply` too, also under `jax.jit`.
      plans: whether the function can be planned; False for one that decides on computed values.
      inference: whether to compare values of a call that is not differentiated, too, for which
        another program is compiled. Without gradients it is always made.
      alone: what the loop calls, such as `jax.jit(fn)` where operations one by one take long.
      **options: of `jedbatch.batch`.

    Returns:
      The batched function.

    Raises:
      AssertionError: something differs. The message says how the function was run, and the
        instance, the leaf and the largest difference.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jedbatch import testing
      >>> def encode(params, tree):
      ...     if isinstance(tree, tuple):
      ...         return jnp.tanh(params * encode(params, tree[0]) + encode(params, tree[1]))
      ...     return params * tree
      >>> encode_all = testing.check_against_loop(encode, jnp.ones(3), [((1, 2), 3), 4])
    """
    flags = {"gradients": gradients, "thorough": thorough, "plans": plans, "inference": inference}
    for name, value in flags.items():
        checks.flag("check_against_loop", name, value)
    rtol = checks.number("check_against_loop", "rtol", rtol, least=0.0)
    instances = checks.items("check_against_loop", "instances", instances, "a list of instances")
    alone = fn if alone is None else alone
    checks.function("check_against_loop", "alone", alone, "a function of one instance, or None")
    in_list = options.get("out_axes", 0) is None
    together = list if in_list else stacked
    loop = _Loop(alone, params, instances, together, gradients, rtol, inference or not gradients)

    batched = batch(fn, **options)
    loop.check(lambda p: batched(p, instances), "a call")
    if not plans:
        return batched
    plan = batched.plan(params, instances)
    check_plan(plan)
    if thorough:
        loop.check(lambda p: batched.apply(p, plan), "`plan` and `apply`")
        loop.check(lambda p: jax.jit(batched.apply)(p, plan), "`apply` under `jax.jit`")
    return batched


class _Loop:
    """The loop over single instances, and what it gives."""

    def __init__(
        self,
        alone: Callable,
        params: PyTree,
        instances: Sequence[PyTree],
        together: Callable,
        gradients: bool,
        rtol: float,
        inference: bool,
    ):
        """Runs the loop.

        Args:
          alone: a function of parameters and one instance.
          params: its parameters.
          instances: all instances.
          together: makes one result of a list of results: `list`, or `stacked`.
          gradients: whether to compute gradients of a weighted sum of all results.
          rtol: see `check_against_loop`.
          inference: whether calls that are not differentiated are compared.
        """
        self.inference = inference
        self.alone, self.params, self.instances = alone, params, instances
        self.together, self.rtol = together, rtol
        self.gradient, self.has_gradient = None, gradients
        if gradients:
            run = jax.grad(self._weighted, has_aux=True, allow_int=True)
            self.gradient, self.results = run(params)
        else:
            self.results = self._run(params)

    def _run(self, params: PyTree) -> PyTree:
        return self.together([self.alone(params, instance) for instance in self.instances])

    def _weighted(self, params: PyTree) -> tuple[PyTree, PyTree]:
        results = self._run(params)
        return weighted_sum(results), results

    def check(self, run: Callable, how: str) -> None:
        """Raises an `AssertionError` if a function of parameters gives something else."""
        if self.inference:
            self._check_results(run(self.params), how)
        if self.has_gradient:

            def weighted(params: PyTree) -> tuple[PyTree, PyTree]:
                results = run(params)
                return weighted_sum(results), results

            differentiate = jax.grad(weighted, has_aux=True, allow_int=True)
            gradient, results = differentiate(self.params)
            self._check_results(results, f"{how} that is differentiated")
            try:
                assert_close(gradient, self.gradient, self.rtol, what=f"gradient of {how}")
            except AssertionError as error:
                error.add_note(
                    _blame(run, self.alone, self.params, self.instances, self.rtol, self.together)
                )
                raise

    def _check_results(self, results: PyTree, how: str) -> None:
        """Raises an `AssertionError` if results are not those of the loop."""
        if self.together is list:
            for i, (got, expected) in enumerate(zip(results, self.results, strict=True)):
                assert_close(got, expected, self.rtol, what=f"{how}, instance {i}")
        else:
            assert_close(results, self.results, self.rtol, what=how, by_instance=True)


def _blame(run, alone, params, instances, rtol, together) -> str:
    """The instances whose share of the gradient differs, for a message."""
    if together is list:
        return "The gradient of all instances together."
    found = []
    for i in range(len(instances)):

        def share(p: object, i: int = i) -> PyTree:
            return weighted_sum(run(p), i)

        def share_of_loop(p: object, i: int = i) -> PyTree:
            return weighted_sum(stacked([alone(p, instance) for instance in instances]), i)

        try:
            mine, its = (jax.grad(f, allow_int=True)(params) for f in (share, share_of_loop))
            assert_close(mine, its, rtol)
        except AssertionError as error:
            found.append(f"instance {i}: {error}")
    if not found:
        return "The share of every single instance agrees; their sum does not."
    return "What single instances contribute to the gradient differs:\n  " + "\n  ".join(found)


# --- compilations ---


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Yields a list that grows by one name for everything XLA compiles inside, in any thread."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **facts: str | int) -> None:
        if event == COMPILED:
            compiled.append(str(facts.get("fun_name", "a program")))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def assert_no_recompile() -> Iterator[None]:
    """Inside of this block nothing may be compiled: not by jedbatch, nor by JAX for anything else.

    Raises:
      AssertionError: at the end, with the names of what XLA compiled, in any thread.

    Examples:
      >>> import jax.numpy as jnp, jedbatch
      >>> from jedbatch import testing
      >>> double = jedbatch.batch(lambda x: 2 * x, 0)
      >>> first = double([jnp.ones(3)] * 2)
      >>> with testing.assert_no_recompile():
      ...     second = double([jnp.ones(3)] * 2)
    """
    with compilations() as compiled:
        yield
    if compiled:
        shown = ", ".join(sorted(set(compiled)))
        raise AssertionError(
            f"XLA compiled {len(compiled)} programs where none was expected: {shown}. "
            "`jax.config.update('jax_log_compiles', True)` says where and for which shapes."
        )


# --- plans ---


NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d.e+-]*|inf|nan)(?=:\w+\[\])")  # a literal in a jaxpr


def assert_merged(plan: Plan) -> None:
    """Raises unless everything that could share a batch does, whatever instance it is of.

    Arrays of different lengths are not grouped by their shapes, nor compiled for each kind of
    instance; no two types of nodes differ in nothing but numbers that JAX took for constants of a
    program, each of which is compiled by itself; and the policy knew all states it met, so that
    none was left to its fallback.

    Args:
      plan: made by `Batched.plan`.

    Raises:
      AssertionError: something keeps nodes apart; the message says what to write instead.

    Examples:
      >>> import jax.numpy as jnp, jedbatch
      >>> from jedbatch import testing
      >>> double = jedbatch.batch(lambda x: 2 * x, 0)
      >>> testing.assert_merged(double.plan([jnp.ones(3)] * 2))
    """
    host = _checked(plan, "assert_merged").host
    for shard in plan.shards:
        assert_merged(shard)
    if plan.shards:
        return
    if host is None:
        raise ValueError(
            "`assert_merged` got a plan that was flattened, which has lost its graph; call it "
            "with what `Batched.plan` returned."
        )
    if host.apart is not None:
        raise AssertionError(
            f"arrays of different lengths are grouped by equal shapes, since {host.apart}."
        )
    if host.unpadded is not None:
        raise AssertionError(
            "arrays of different lengths run in a program of their own for each kind of instance, "
            f"since {host.unpadded}."
        )
    graph, schedule = host.placed.graph, host.placed.schedule
    alike: dict[Any, dict[str, None]] = {}
    for t in graph.present_types:
        kind: Any = graph.types[t]
        text = str(kind.operation.jaxpr)
        key = kind.label, kind.operands, kind.shared, kind.results, NUMBER.sub("#", text)
        alike.setdefault(key, {})[", ".join(NUMBER.findall(text))] = None
    for (label, *_), found in alike.items():
        numbers = list(found)
        if len(numbers) > 1:
            shown = "; ".join(numbers[:4]) + ("; ..." if len(numbers) > 4 else "")
            raise AssertionError(
                f"{len(numbers)} types of `{label}` differ only in numbers, which are constants of "
                f"each: {shown}. Pass such numbers as arrays, `np.asarray(x, np.float32)`, or as "
                "positional arguments of a cell."
            )
    if schedule.unseen:
        raise AssertionError(
            f"the policy left {schedule.unseen} of {len(schedule)} decisions to its fallback, "
            "since it has not met such a minibatch; learn one with `Batched.learn`."
        )


def _checked(plan: Any, name: str) -> Plan:
    if not isinstance(plan, Plan):
        expected = "a plan, as `Batched.plan` makes it"
        raise TypeError(checks.wrong(name, checks.shown(plan), expected))
    return plan


def check_plan(plan: Plan) -> None:
    """The tables of a plan compute its graph, and its gradients, whatever made them.

    The tables are run on symbols in place of values. Every operand must have been written before it
    is read, and still be there where rows are used again; every lane computes a node or, for
    padding, repeats another; what is returned is what the graph returns; in reverse every value
    gets the cotangents of its readers, each once; and every row of an array of any length belongs
    to one instance. Of a plan that was flattened, whose graph is gone, only that is checked for
    which the tables are enough.

    With `JEDBATCH_CHECK=1` in the environment this is done for every plan that is made, those that
    calls and rounds make for themselves too. It takes Python for every lane: for tests.

    Args:
      plan: made by `Batched.plan`.

    Raises:
      AssertionError: the plan is wrong, which is an error of jedbatch: please report it.
      ValueError: it is one of shards that was flattened.

    Examples:
      >>> import jax.numpy as jnp, jedbatch
      >>> from jedbatch import testing
      >>> double = jedbatch.batch(lambda x: 2 * x, 0)
      >>> testing.check_plan(double.plan([jnp.ones(3)] * 2))
    """
    plan = _checked(plan, "check_plan")
    for shard in plan.shards:
        check_plan(shard)
    if plan.shards:
        return
    if plan.static.devices is not None:
        raise ValueError(
            "`check_plan` got a plan of shards that was flattened; call it with what "
            "`Batched.plan` returned."
        )
    if plan.graph is not None:
        assert plan.schedule is not None
        assert plan.layout is not None
        plan.graph.check()
        _check_carried(plan.graph)
        plan.schedule.check(plan.graph)
        plan.layout.check(plan.graph)
    verify(plan)


def _check_carried(graph: Graph) -> None:
    """Compares what a graph has taken over from those of its instances with what it would find."""
    alone = dataclasses.replace(graph)
    for name in CARRIED:
        if name in vars(graph):
            same = np.array_equal(getattr(graph, name), getattr(alone, name))
            assert same, f"not a valid plan: `{name}` of nodes is that of another graph"
