"""Cells and batched functions as type checkers see them.

mypy checks this file (`pyproject.toml`), and pyright does (`session/test_signatures.py`). Lines
with `type: ignore` must be errors, or the comment is one.
"""

from collections.abc import Callable
from typing import assert_type

import jax

import jedbatch
from jedbatch.testing import check_against_loop

Tree = int | tuple["Tree", "Tree"]
Params = dict[str, jax.Array]


@jedbatch.cell
def word(params: Params, index: int) -> jax.Array:
    return params["embedding"][index]


@jedbatch.cell(name="join")
def phrase(params: Params, left: jax.Array, right: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return params["compose"] @ (left + scale * right)


def scaled(p: jax.Array, x: jax.Array) -> jax.Array:
    return p * x


class Model:
    @jedbatch.cell
    def step(self, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        return state, state


def encode(params: Params, tree: Tree) -> jax.Array:
    if isinstance(tree, int):
        return word(params, tree)
    return phrase(params, encode(params, tree[0]), encode(params, tree[1]), scale=2.0)


def check_cells(params: Params, x: jax.Array) -> None:
    assert_type(word(params, 1), jax.Array)
    assert_type(phrase(params, left=x, right=x), jax.Array)
    assert_type(Model().step(x), tuple[jax.Array, jax.Array])
    written: Callable[..., jax.Array] = jedbatch.cell(scaled, name="written")
    assert_type(written(x, x), jax.Array)
    word(params)  # type: ignore[call-arg]
    word(params, "a")  # type: ignore[arg-type]
    phrase(params, x, x, factor=2.0)  # type: ignore[call-arg]
    jedbatch.cell(3)  # type: ignore[call-overload]


def added(a: float, b: float, c: float) -> float:
    return a + b + c


def check_batched(params: Params, trees: list[Tree]) -> None:
    encode_all = jedbatch.batch(encode)
    assert_type(encode_all(params, trees), jax.Array)
    assert_type(jedbatch.batch(encode, out_axes=None)(params, trees), list[jax.Array])
    assert_type(jedbatch.batch(encode, (None, 0), granularity="auto")(params, (1, 2)), jax.Array)
    assert_type(jedbatch.batch(len, in_axes=0)(["a", "b"]), int)
    assert_type(jedbatch.batch(added, (None, 0, 0))(1, [2], [3]), float)
    encode_all(params)  # type: ignore[call-arg]
    encode_all(trees, params)  # type: ignore[arg-type]
    jedbatch.batch(encode, granularity="cells")  # type: ignore[call-overload]
    jedbatch.batch(encode, executor="fused")  # type: ignore[call-overload]
    jedbatch.batch(encode, target="tpu")  # type: ignore[call-overload]
    jedbatch.Lazy(layout="shortest")  # type: ignore[arg-type]


def check_plans(params: Params, trees: list[Tree]) -> None:
    encode_all, listed = jedbatch.batch(encode), jedbatch.batch(encode, out_axes=None)
    plan = encode_all.plan(params, trees, gradient=False)
    assert_type(plan, jedbatch.Plan)
    assert_type(encode_all.apply(params, plan), jax.Array)
    assert_type(listed.apply(params, listed.plan(params, trees)), list[jax.Array])
    assert_type(encode_all.warm(params, trees, batch_size=2), jedbatch.Plan | None)
    assert_type(encode_all.graph(params, trees), jedbatch.Graph)
    assert_type(encode_all.export(params, trees), jedbatch.Exported)
    assert_type(encode_all.export(params, trees).platforms, tuple[str, ...])
    assert_type(jedbatch.calibrate(encode_all, params, trees), jedbatch.Calibration)
    for later in encode_all.plans(params, [trees], workers=1):
        assert_type(later, jedbatch.Plan)
    planner = encode_all.planner(params, trees)
    assert_type(planner.attach(planner(trees)), jedbatch.Plan)
    for _ in encode_all.stream(params, iter(trees), batch_size=2):
        assert_type(encode_all.compilations, int)
    encode_all.plan(params, trees, gradients=False)  # type: ignore[call-arg]
    encode_all.plan(params, trees).graph.check()  # type: ignore[union-attr]


def check_scopes(params: Params, trees: list[Tree]) -> None:
    with jedbatch.lazy():
        assert_type([encode(params, tree) for tree in trees], list[jax.Array])
    with jedbatch.Lazy(reuse=True)():
        assert_type(word(params, 1), jax.Array)
    check_against_loop(encode, params, trees)
    check_against_loop(3, params, trees)  # type: ignore[arg-type]


def check_schedules(graph: jedbatch.Graph) -> None:
    assert_type(jedbatch.schedule(graph), jedbatch.Schedule)
    assert_type(jedbatch.schedule(graph, jedbatch.policies.depth), jedbatch.Schedule)
    assert_type(jedbatch.lower_bound(graph), float)
    assert_type(jedbatch.layout(graph, jedbatch.schedule(graph), order="pq"), jedbatch.Layout)
    assert_type(
        jedbatch.schedule(graph, jedbatch.learn([graph], encoding="sort")), jedbatch.Schedule
    )
    jedbatch.learn(graph, encoding="sorted")  # type: ignore[arg-type]
    jedbatch.layout(graph, jedbatch.schedule(graph), order="shortest")  # type: ignore[arg-type]
