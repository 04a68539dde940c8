"""How much do loops and branches gain that do not run in lock step?

loop        1024 instances, each with a number of steps n: x ← x + tanh(x W₁) W₂ / 100, n times, in
            a `lax.while_loop` in a cell. How n is distributed: `geometric` with a mean of 20,
            `lognormal` with a longer tail, or `equal`.
switch      256 instances, each with one of 8 experts: tanh(x W₁ᵉ) W₂ᵉ by `lax.switch` in a cell.

vmap        `jax.vmap` of the same function, jit-compiled.
lockstep    `jedbatch.batch(..., control_flow="lockstep")`.
lanes       `jedbatch.batch(..., control_flow="lanes")`, if asked for by `--ways`.
auto        `jedbatch.batch` as it is.

Plans are made before. All run in turns in one process, each warmed up; results are compared with
those of `vmap` before anything is timed.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks import common

EXPERTS = 8
Rows = tuple[np.ndarray, np.ndarray]


def steps(params: Any, count: Any, x: jax.Array) -> jax.Array:
    first, second = params

    def body(state: tuple) -> tuple:
        left, x = state
        return left - 1, x + 0.01 * (jnp.tanh(x @ first) @ second)

    return jax.lax.while_loop(lambda state: state[0] > 0, body, (count, x))[1]


def experts(params: Any, expert: Any, x: jax.Array) -> jax.Array:
    pairs = zip(*params, strict=True)
    branches = [lambda x, a=a, b=b: jnp.tanh(x @ a) @ b for a, b in pairs]
    return jax.lax.switch(expert, branches, x)


def loops(distribution: str, count: int, hidden: int) -> tuple[Any, Rows]:
    """(parameters, rows)."""
    rng = np.random.default_rng(0)
    match distribution:
        case "geometric":
            found = rng.geometric(1 / 20, count)
        case "lognormal":
            found = np.maximum(1, rng.lognormal(2.5, 1, count).astype(int))
        case _:
            found = np.full(count, 20)
    weights = rng.normal(size=(2, hidden, hidden)).astype(np.float32) / np.sqrt(hidden)
    x = rng.normal(size=(count, hidden)).astype(np.float32)
    return tuple(map(jnp.asarray, weights)), (found.astype(np.int32), x)


def choices(count: int, hidden: int) -> tuple[Any, Rows]:
    """(parameters, rows)."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(2, EXPERTS, hidden, hidden)).astype(np.float32) / np.sqrt(hidden)
    x = rng.normal(size=(count, hidden)).astype(np.float32)
    params = tuple([jnp.asarray(w) for w in of_layer] for of_layer in weights)
    return params, (rng.integers(EXPERTS, size=count).astype(np.int32), x)


def measure(
    table: common.Table,
    name: list[Any],
    fn: Callable,
    params: Any,
    rows: Rows,
    args: Any,
    train: bool,
) -> None:
    """Prints a row."""

    def finished(run: Callable) -> Callable:
        if not train:
            return common.jit(run)
        return common.jit(jax.grad(lambda params, given: jnp.square(run(params, given)).sum()))

    every = jax.vmap(fn, (None, 0, 0))
    sides = [(finished(lambda params, rows: every(params, *rows)), tuple(map(jnp.asarray, rows)))]
    instances = [(int(n), x) for n, x in zip(*rows, strict=True)]
    for control_flow in args.ways:
        cell = jedbatch.cell(fn)
        batched = jedbatch.batch(
            lambda params, instance, cell=cell: cell(params, *instance), control_flow=control_flow
        )
        plan = batched.plan(params, instances, gradient=train)
        sides.append((finished(batched.apply), jax.device_put(plan)))
    results = [run(params, given) for run, given in sides]
    for result in results[1:]:
        for ours, theirs in zip(*map(jax.tree.leaves, (result, results[0])), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    runs = [lambda run=run, given=given: run(params, given) for run, given in sides]
    times = common.interleaved(runs, args.seconds, least=5)
    milliseconds = [f"{1e3 * times.median(i):.2f}" for i in range(len(runs))]
    table.row(*name, *milliseconds, times.ratio(0, len(runs) - 1))
    jax.clear_caches()


def measure_all(args: argparse.Namespace, count: int, of_experts: int) -> None:
    """Prints the table of minibatches."""
    columns = [f"{way} ms" for way in ("vmap", *args.ways)]
    table = common.Table("", "", "hidden", *columns, f"vmap / {args.ways[-1]}")
    for hidden in args.hidden:
        for distribution in ("geometric", "lognormal", "equal"):
            given = loops(distribution, count, hidden)
            measure(table, ["loop", distribution, hidden], steps, *given, args, False)
        for train in (False, True):
            name = ["switch", "training" if train else "inference", hidden]
            measure(table, name, experts, *choices(of_experts, hidden), args, train)


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=common.numbers, default=[64, 128], help="such as 64,128")
    parser.add_argument("--instances", type=int, default=1024, help="of `loop` (%(default)s)")
    parser.add_argument("--ways", nargs="+", default=["lockstep", "auto"], help="of jedbatch")
    parser.add_argument("--seconds", type=float, default=4, help="per row (%(default)s)")
    args = parser.parse_args()
    if args.data:
        parser.error("--data: instances are always synthetic here")
    count, of_experts = args.instances, args.instances // 4
    if args.quick:
        args.hidden, args.seconds, count, of_experts = [8], 0.2, 64, 64
    print(common.machine())
    measure_all(args, count, of_experts)


if __name__ == "__main__":
    main()
