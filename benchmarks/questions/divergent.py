"""How much do loops and branches gain that do not run in lock step?

loop        1024 instances, each with a number of steps n: x ← x + tanh(x W₁) W₂ / 100, n times, in
            a `lax.while_loop` in a cell. How n is distributed: `geometric` with a mean of 20,
            `lognormal` with a longer tail, or `equal`.
switch      256 instances, each with one of 8 experts: tanh(x W₁ᵉ) W₂ᵉ by `lax.switch` in a cell.

vmap        `jax.vmap` of the same function, jit-compiled.
lockstep    `jedbatch.batch(..., control_flow="lockstep")`.
lanes       `jedbatch.batch(..., control_flow="lanes")`, if asked for by `--ways`.
auto        `jedbatch.batch` as it is.

stream      4096 instances of `loop` in minibatches of 64, from an iterator to results on the host:
            `vmap` on minibatches that are stacked, two ahead; `jedbatch.Batched.stream` with
            `refill=False`, where each minibatch ends with its slowest instance; and as it is.
            The lanes that steps run, as multiples of those that are needed, are counted.

But for streams, plans are made before. All run in turns in one process, each warmed up; results are
compared with those of `vmap` before anything is timed. Milliseconds of streams are of processor
time too, which other processes of the machine disturb less.
"""

import argparse
import collections
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks import common

EXPERTS = 8
PARTS = ("minibatches", "streams")
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


def measure_stream(
    table: common.Table, name: list[Any], params: Any, rows: Rows, size: int, seconds: float
) -> None:
    """Prints a row of a stream in minibatches of some size."""
    instances = list(zip(*rows, strict=True))
    cell = jedbatch.cell(steps)
    batched = jedbatch.batch(lambda params, instance: cell(params, *instance))
    every = common.jit(jax.vmap(steps, (None, 0, 0)))

    def by_vmap() -> list[np.ndarray]:
        running: collections.deque[jax.Array] = collections.deque()
        found = []
        for first in range(0, len(instances), size):
            stacked = map(np.stack, zip(*instances[first : first + size], strict=True))
            running.append(every(params, *stacked))
            if len(running) > 2:
                found.append(np.asarray(running.popleft()))
        return [*found, *map(np.asarray, running)]

    def streamed(refill: bool) -> list[np.ndarray]:
        return list(batched.stream(params, iter(instances), batch_size=size, refill=refill))

    runs = [by_vmap, lambda: streamed(False), lambda: streamed(True)]
    expected, *others = [
        np.concatenate([x.reshape(-1, x.shape[-1]) for x in run()]) for run in runs
    ]
    for found in others:
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    before = batched.compilations
    walls: list[list[float]] = []
    processor: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(walls) < 5 or time.perf_counter() < end:
        wall, used = [0.0] * 3, [0.0] * 3
        for i in ((k + len(walls)) % 3 for k in range(3)):
            start = time.perf_counter(), time.process_time()
            runs[i]()
            wall[i], used[i] = time.perf_counter() - start[0], time.process_time() - start[1]
        walls.append(wall)
        processor.append(used)
    assert batched.compilations == before
    times, cpu = common.Times(np.array(walls).T), common.Times(np.array(processor).T)
    numbers = rows[0].astype(int)
    longest = [size * numbers[k : k + size].max() for k in range(0, len(numbers), size)]
    counts = batched.lane_steps(params, instances, batch_size=size)
    ratios = [sum(longest) / numbers.sum(), counts.lanes / counts.needed]
    table.row(
        *name,
        *(f"{1e3 * times.median(i):.0f}" for i in range(3)),
        *(f"{1e3 * cpu.median(i):.0f}" for i in range(3)),
        *(f"{x:.2f}" for x in ratios),
        times.ratio(0, 2),
        times.ratio(1, 2),
    )
    jax.clear_caches()


def measure_streams(args: argparse.Namespace, count: int, size: int) -> None:
    """Prints the table of streams."""
    ways = ("vmap", "apart", "stream")
    columns = [f"{way} {what}" for what in ("ms", "cpu ms") for way in ways]
    columns += ["vmap lanes", "stream lanes"]
    table = common.Table("", "hidden", *columns, "vmap / stream", "apart / stream")
    for hidden in args.hidden:
        for distribution in ("geometric", "lognormal", "equal"):
            params, rows = loops(distribution, count, hidden)
            name = [f"stream {distribution}", hidden]
            measure_stream(table, name, params, rows, size, args.seconds)


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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=4, help="per row (%(default)s)")
    args = parser.parse_args()
    if args.data:
        parser.error("--data: instances are always synthetic here")
    count, of_experts, of_stream = args.instances, args.instances // 4, 4096
    if args.quick:
        args.hidden, args.seconds, count, of_experts, of_stream = [8], 0.2, 64, 64, 128
    print(common.machine())
    if "minibatches" in args.parts:
        measure_all(args, count, of_experts)
    if "streams" in args.parts:
        measure_streams(args, of_stream, 16 if args.quick else 64)


if __name__ == "__main__":
    main()
