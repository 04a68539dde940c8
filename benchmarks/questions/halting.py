"""How much is saved when every instance stops by itself?

Two functions of one instance that repeat a step until a computed value says stop:

depth       layers of adaptive depth (Graves, 2016): h ← tanh(W₂ relu(W₁ h + b₁) + b₂) + x, and
            halting probability is added up until it reaches 1.
newton      a damped Newton iteration for y + tanh(W y) / 2 = x, whose step solves a linear system
            of `size` unknowns, until the largest residual is below 1e-4.

How often an instance repeats its step follows from a number that comes with it (the probability
added in a step; the damping), chosen so that the depths are distributed as wanted:

equal       all the same: no instance waits for another.
uniform     all from 2 to 60.
geometric   8 on average, 2 at least, 60 at most: most are shallow, few are deep.
straggler   4, and 60 for one instance in 32.

vmap        `jax.vmap` of the function with a `lax.while_loop`, jit-compiled: what it repeats, it
            repeats for all instances until all have stopped.
loop        Python, instance by instance: a jit-compiled step, and `bool()` of its result to see
            whether it is done.
compiled    instance by instance: a jit-compiled `lax.while_loop` for each.
jedbatch    `jedbatch.batch` of the same function of one instance, with a Python `while`.
with lax    `jedbatch.batch` of the function with a `lax.while_loop`, without lock step.

Rows are steps of single instances: those needed, and those that `vmap` makes. Results of all sides
are compared with the loop's before anything is timed. All run in turns in one process, each warmed
up; the table has milliseconds per minibatch, medians, and in brackets the quartiles of the ratios
of neighbouring runs. The loops are timed on a few instances, and scaled up by numbers of steps.
With `--minibatches N` the three sides that take minibatches get N in turn, of other arrays each, so
that nobody knows when an instance will stop; without, the same again and again.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks import common

MAX_STEPS = 100  # steps, if something does not stop
MAX_DEPTH = 60
DISTRIBUTIONS = ("equal", "uniform", "geometric", "straggler")


class Workload(NamedTuple):
    """A function that repeats a step.

    Attributes:
      init: maps an instance's x to what the step carries at first.
      step: maps (params, x, pace, carry) to (carry, whether it is done).
      pace: maps a depth to the number that makes an instance stop after so many steps.
    """

    init: Callable[[Any], Any]
    step: Callable[..., tuple]
    pace: Callable[[int], float]


# --- layers of adaptive depth ---


def layer(params: Any, x: jax.Array, pace: Any, carry: tuple) -> tuple:
    h, halt = carry
    inner = jax.nn.relu(h @ params["w1"] + params["b1"])
    h = jnp.tanh(inner @ params["w2"] + params["b2"]) + x
    halt = halt + pace * (1 + 1e-3 * jnp.tanh(h @ params["halt"]))
    return (h, halt), halt >= 1.0


def pace_of_layers(depth: int) -> float:
    return 1 / (depth - 0.5)


# --- Newton iteration ---


def iterate(params: Any, x: jax.Array, pace: Any, carry: tuple) -> tuple:
    y, _ = carry
    act = jnp.tanh(params["w"] @ y)
    slope = jnp.eye(len(y)) + 0.5 * (1 - act**2)[:, None] * params["w"]
    y = y - pace * jnp.linalg.solve(slope, y + 0.5 * act - x)
    error = jnp.abs(y + 0.5 * jnp.tanh(params["w"] @ y) - x).max()
    return (y, error), error < 1e-4


def pace_of_newton(depth: int) -> float:
    """The residual shrinks by 1 - pace in a step: from about 1 to 1e-4 in so many."""
    return 1 - 10.0 ** (-4.3 / depth) if depth > 3 else 1.0


def workloads() -> dict[str, Workload]:
    return {
        "depth": Workload(lambda x: (x, 0.0), layer, pace_of_layers),
        "newton": Workload(lambda x: (x, 1.0), iterate, pace_of_newton),
    }


def parameters(size: int) -> dict[str, jax.Array]:
    """Of both workloads."""
    keys = jax.random.split(jax.random.key(0), 4)
    scaled = lambda key, *shape: jax.random.normal(key, shape) / np.sqrt(shape[0])  # noqa: E731
    return {
        "w1": scaled(keys[0], size, 2 * size),
        "w2": scaled(keys[1], 2 * size, size),
        "halt": scaled(keys[2], size),
        "w": scaled(keys[3], size, size),
        "b1": jnp.zeros(2 * size),
        "b2": jnp.zeros(size),
    }


def depths(distribution: str, count: int) -> list[int]:
    """As many depths as instances."""
    rng = np.random.default_rng(0)
    match distribution:
        case "equal":
            found = np.full(count, 16)
        case "uniform":
            found = rng.integers(2, MAX_DEPTH + 1, count)
        case "geometric":
            found = np.clip(1 + rng.geometric(1 / 7, count), 2, MAX_DEPTH)
        case "straggler":
            found = np.where(np.arange(count) % 32 == 7, MAX_DEPTH, 4)
    return found.tolist()


Instance = tuple[np.ndarray, float]


def instances_of(
    work: Workload, distribution: str, count: int, size: int, number: int = 0
) -> list[Instance]:
    """Minibatch `number`: of the first, paces are numbers of Python, of others arrays."""
    rng = np.random.default_rng(1 + number)
    xs = rng.normal(size=(count, size)).astype(np.float32)
    paces: list[Any] = list(map(work.pace, depths(distribution, count)))
    if number:
        paces = list(rng.permutation(np.array(paces, np.float32)))
    return [(x, np.asarray(pace) if number else pace) for x, pace in zip(xs, paces, strict=True)]


# --- the sides ---


def by_python(work: Workload, step: Callable) -> Callable[[Any, Instance], tuple]:
    """A function of (params, instance): (first of what is carried, number of steps)."""

    def fn(params: Any, instance: Instance) -> tuple:
        x, pace = instance
        carry, done, steps = work.init(x), False, 0
        while not done and steps < MAX_STEPS:
            carry, done = step(params, x, pace, carry)
            steps += 1
        return carry[0], steps

    return fn


def by_lax(work: Workload) -> Callable[..., tuple]:
    """The same in `lax`, a function of (params, x, pace)."""

    def fn(params: Any, x: jax.Array, pace: jax.Array) -> tuple:
        def body(state: tuple) -> tuple:
            carry, _, steps = state
            return *work.step(params, x, pace, carry), steps + 1

        first, second = work.init(x)
        start = ((first, jnp.float32(second)), jnp.bool_(False), jnp.int32(0))
        goes_on = lambda state: ~state[1] & (state[2] < MAX_STEPS)  # noqa: E731
        carry, _, steps = jax.lax.while_loop(goes_on, body, start)
        return carry[0], steps

    return fn


def check(expected: list, results: list, name: str) -> None:
    """Raises unless the results are the loop's."""
    for (value, steps), (other, more) in zip(expected, results, strict=True):
        if int(steps) != int(more):
            raise SystemExit(f"{name} makes {int(more)} steps where the loop makes {steps}")
        np.testing.assert_allclose(other, value, rtol=1e-3, atol=1e-4, err_msg=name)


def unstack(results: tuple) -> list:
    return list(zip(*map(np.asarray, results), strict=True))


def measure(
    table: common.Table, name: str, distribution: str, args: Any, size: int, count: int
) -> None:
    """Prints a row."""
    work = workloads()[name]
    params = parameters(size)
    minibatch = instances_of(work, distribution, count, size)
    few = minibatch[: args.few]
    loop = by_python(work, common.jit(work.step))
    one = common.jit(by_lax(work))
    every = common.jit(jax.vmap(by_lax(work), (None, 0, 0)))
    numbers = range(1, 1 + args.minibatches) if args.minibatches > 1 else range(1)
    minibatches = [instances_of(work, distribution, count, size, n) for n in numbers]

    def in_turn(run: Callable[[list[Instance]], Any]) -> Callable[[], Any]:
        """Returns a function that runs the next minibatch."""
        following = itertools.cycle(minibatches)
        return lambda: run(next(following))

    def run_vmap(minibatch: list[Instance] = minibatch) -> tuple:
        xs = np.stack([x for x, _ in minibatch])
        return every(params, xs, np.array([pace for _, pace in minibatch], np.float32))

    runs = [
        lambda: [loop(params, i) for i in few],
        lambda: [one(params, *i) for i in few],
        in_turn(run_vmap),
    ]
    expected = [loop(params, i) for i in minibatch]
    check(expected[: len(few)], runs[1](), "compiled")
    check(expected, unstack(run_vmap()), "vmap")
    if not args.baselines:
        batched = jedbatch.batch(by_python(work, jedbatch.cell(work.step, name=name)))
        runs.append(in_turn(functools.partial(batched, params)))
        check(expected, unstack(batched(params, minibatch)), "jedbatch")
        with_lax = jedbatch.batch(lambda params, instance: by_lax(work)(params, *instance))
        runs.append(in_turn(functools.partial(with_lax, params)))
        check(expected, unstack(with_lax(params, minibatch)), "with lax")
    times = common.interleaved(runs, args.seconds, least=5)
    steps = [n for _, n in expected]
    times.seconds[:2] *= sum(steps) / sum(steps[: len(few)])
    padded = count * max(steps)
    row = [name, size, count, distribution, f"{min(steps)}–{max(steps)}", sum(steps)]
    row += [f"{padded} ({padded / sum(steps):.2f})"]
    row += [f"{1e3 * times.median(i):.1f}" for i in range(len(runs))]
    if not args.baselines:
        rounds = batched.last_rounds
        lanes = sum(r.lanes for r in rounds)
        row += [times.ratio(3, 2), times.ratio(3, 0), f"{lanes} ({lanes / sum(steps):.2f})"]
        row.append(times.ratio(2, 4))
    table.row(*row)


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=common.numbers, default=[128, 256], help="of `depth`")
    parser.add_argument("--size", type=common.numbers, default=[64], help="unknowns of `newton`")
    parser.add_argument("--batch", type=common.numbers, default=[8, 64], help="such as 8,64")
    parser.add_argument("--few", type=int, default=16, help="instances the loops run (%(default)s)")
    parser.add_argument("--seconds", type=float, default=6, help="per row (%(default)s)")
    parser.add_argument(
        "--minibatches", type=int, default=1, help="of other arrays each, in turn (%(default)s)"
    )
    parser.add_argument("--baselines", action="store_true", help="time the other sides only")
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.size, args.batch, args.few, args.seconds = [16], [8], [4], 2, 0.2
    if args.data:
        parser.error("--data: instances are always synthetic here")
    print(common.machine())
    header = ["", "size", "batch", "depths", "steps", "rows", "rows vmap", "loop ms", "compiled ms"]
    header.append("vmap ms")
    if not args.baselines:
        header += ["jedbatch ms", "with lax ms", "jedbatch / vmap", "jedbatch / loop", "lanes"]
        header.append("vmap / with lax")
    table = common.Table(*header)
    for name, sizes in (("depth", args.hidden), ("newton", args.size)):
        for size, count in common.by(sizes, args.batch):
            for distribution in DISTRIBUTIONS:
                measure(table, name, distribution, args, size, count)
            jax.clear_caches()


if __name__ == "__main__":
    main()
