"""What type checkers see of cells and batched functions; mypy checks this file (`pyproject.toml`).

Lines with `type: ignore` must be errors, or the comment is one.
"""

from collections.abc import Callable
from typing import assert_type

import jax

import jedbatch

Tree = int | tuple["Tree", "Tree"]
Params = dict[str, jax.Array]


@jedbatch.cell
def word(params: Params, index: int) -> jax.Array:
    return params["embedding"][index]


@jedbatch.cell(name="join")
def phrase(params: Params, left: jax.Array, right: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return params["compose"] @ (left + scale * right)


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
    written: Callable[..., jax.Array] = jedbatch.cell(lambda p, x: p * x, name="written")
    assert_type(written(x, x), jax.Array)
    word(params)  # type: ignore[call-arg]
    word(params, "a")  # type: ignore[arg-type]
    phrase(params, x, x, factor=2.0)  # type: ignore[call-arg]
    jedbatch.cell(3)  # type: ignore[call-overload]


def check_batched(params: Params, trees: list[Tree]) -> None:
    encode_all = jedbatch.batch(encode)
    assert_type(encode_all(params, trees), jax.Array)
    assert_type(jedbatch.batch(encode, out_axes=None)(params, trees), list[jax.Array])
    assert_type(jedbatch.batch(encode, (None, 0), granularity="auto")(params, (1, 2)), jax.Array)
    assert_type(jedbatch.batch(len, in_axes=0)(["a", "b"]), int)
    assert_type(jedbatch.batch(lambda a, b, c: 1.0, (None, 0, 0))(1, [2], [3]), float)
    encode_all(params)  # type: ignore[call-arg]
    encode_all(trees, params)  # type: ignore[arg-type]
    jedbatch.batch(encode, granularity="cells")  # type: ignore[call-overload]
    jedbatch.batch(encode, executor="eager")  # type: ignore[call-overload]
    jedbatch.batch(encode, target="tpu")  # type: ignore[call-overload]
    jedbatch.Lazy(layout="shortest")  # type: ignore[arg-type]
