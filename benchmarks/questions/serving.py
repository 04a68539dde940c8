"""How much throughput and latency does serving cost, and is anything lost on the way?

A TreeLSTM classifies trees of about as many words as sentences of SICK have; none was met before.
All runs take turns, and are warmed up.

saturation  instances per second of requests that all come at once (`server`); of a stream; of plans
            made in a thread, two ahead, whose results are read (`ahead`); and of plans made
            before, which leaves out planning (`planned`). All in minibatches of `--batch`.
latency     milliseconds from when a request was due to its result, of requests that come at random
            (Poisson), at shares of the saturation of the server: by the server; one by one;
            and in fixed batches of 32 that wait for 50 ms at most. `longest gc` is the longest
            collection of garbage in a round, in milliseconds of the processor.
endurance   `--requests` requests, one in a hundred malformed and one in a hundred cancelled, and
            weights are swapped 20 times. Results are compared with those of either weights,
            computed before; the memory of the process is read along the way.

The load comes from the event loop of the server, in the same process. Python's collections of
garbage do not look at what was there before it (`gc.freeze`).
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import jax
import numpy as np

import jedbatch
from benchmarks import common
from jedbatch.data import synthetic_treebank
from jedbatch.models import tree
from jedbatch.serve import Server

MEAN_WORDS = 9.6
NUM_WORDS = 500
FIXED = {"max_batch": 32, "max_wait_ms": 50.0}
SHARES = (0.1, 0.5)
SWAPS = 20
NO_BOUND = 1 << 20


class Trees:
    """Trees that are all different; each is given once."""

    def __init__(self, count: int):
        found = synthetic_treebank(2 * count, num_words=NUM_WORDS, mean_length=MEAN_WORDS)
        self._trees = [t for t in dict.fromkeys(found) if len(t) > 2]
        self._words = np.random.default_rng(0)
        self._next = 0

    def take(self, count: int) -> list[Any]:
        """Trees that nobody had before: shapes come again, with other words."""
        taken = []
        for _ in range(count):
            taken.append(self._renamed(self._trees[self._next % len(self._trees)]))
            self._next += 1
        return taken

    def _renamed(self, root: Any) -> Any:
        label, *rest = root
        if len(rest) == 1:
            return label, int(self._words.integers(NUM_WORDS))
        return label, *map(self._renamed, rest)


class Model:
    """The function, its parameters, and trees."""

    def __init__(self, hidden: int, batch: int, count: int):
        cells = tree.plain_cells(NUM_WORDS, 5, hidden)
        self.params = cells.init(jax.random.key(0))
        self.batched = jedbatch.batch(tree.classifier(cells), cache_size=4096)
        self.batch = batch
        self.trees = Trees(count)
        self.sample = self.trees.take(10 * batch)

    @contextlib.asynccontextmanager
    async def server(self, **options: Any) -> AsyncIterator[Server]:
        """A server that is warmed up."""
        options = {"max_batch": self.batch, "max_queue": NO_BOUND} | options
        async with Server(self.batched, self.params, **options) as server:
            await server.warm(self.sample)
            yield server


# --- saturation ---


async def saturation(model: Model, size: int, rounds: int) -> tuple[list[Any], float]:
    """(the row of the table, requests per second of the server)."""
    batched, params = model.batched, model.params
    async with model.server() as server:

        async def served(trees: list[Any]) -> float:
            start = time.perf_counter()
            await asyncio.gather(*map(server, trees))
            return time.perf_counter() - start

        async def streamed(trees: list[Any]) -> float:
            return await asyncio.to_thread(of_stream, trees)

        def of_stream(trees: list[Any]) -> float:
            start = time.perf_counter()
            for _ in batched.stream(params, iter(trees), batch_size=model.batch):
                pass
            return time.perf_counter() - start

        async def ahead(trees: list[Any]) -> float:
            start = time.perf_counter()
            minibatches = common.chunks(trees, model.batch)
            before = None
            for plan in model.batched.plans(params, minibatches, gradient=False):
                found = batched.apply(params, plan)
                if before is not None:
                    np.asarray(before)
                before = found
            np.asarray(before)
            return time.perf_counter() - start

        async def planned(trees: list[Any]) -> float:
            minibatches = common.chunks(trees, model.batch)
            plans = [batched.plan(params, few, gradient=False) for few in minibatches]
            start = time.perf_counter()
            jax.block_until_ready([batched.apply(params, plan) for plan in plans])
            return time.perf_counter() - start

        ways = (served, streamed, ahead, planned)
        for way in ways:
            await way(model.trees.take(size))
        gc.collect()
        gc.freeze()  # as `python -m jedbatch serve` does
        times = []
        for number in range(rounds):
            found = [0.0] * len(ways)
            for k in range(len(ways)):
                k = (k + number) % len(ways)
                found[k] = await ways[k](model.trees.take(size))
            times.append(found)
    table = np.array(times).T
    rates = [f"{size / np.median(row):.0f}" for row in table]
    ratios = [common.spread(table[k] / table[0]) for k in (1, 2, 3)]
    return [*rates, *ratios], size / float(np.median(table[0]))


# --- latency ---


async def under_load(server: Server, trees: Sequence[Any], rate: float, seed: int) -> np.ndarray:
    """Seconds from when requests were due, at random, to their results."""
    due = np.random.default_rng(seed).exponential(1 / rate, len(trees)).cumsum()
    start = time.perf_counter()
    took = np.zeros(len(trees))

    async def ask(i: int) -> None:
        await server(trees[i])
        took[i] = time.perf_counter() - start - due[i]

    tasks: set[asyncio.Task] = set()  # that have not ended: others are garbage, as in a server
    for i, when in enumerate(due.tolist()):
        left = start + when - time.perf_counter()
        if left > 0:
            await asyncio.sleep(left)
        task = asyncio.ensure_future(ask(i))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return took


class Collections:
    """How long Python's collections of garbage take.

    Attributes:
      longest: milliseconds of the processor.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self._begun = 0.0

    def __call__(self, phase: str, _: dict[str, int]) -> None:
        """Is told when one begins and ends, by `gc.callbacks`."""
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self.longest = max(self.longest, 1e3 * (time.thread_time() - self._begun))


async def latencies(model: Model, rate: float, seconds: float, rounds: int) -> list[list[Any]]:
    """The rows of a rate: p50, p99 and longest collection by way, and ratios of p99 in rounds."""
    ways: dict[str, dict[str, Any]] = {
        "server": {},
        "one by one": {"max_batch": 1},
        "fixed batches": FIXED,
    }
    found: dict[str, list[np.ndarray]] = {name: [] for name in ways}
    sizes = dict.fromkeys(ways, 0.0)
    async with contextlib.AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(model.server(**options))
            for name, options in ways.items()
        }
        count = max(20, int(rate * seconds))
        for number in range(rounds + 1):  # the first warms up
            for name, server in servers.items():
                trees = model.trees.take(count)
                gc.collect()
                gc.freeze()
                collections = Collections()
                gc.callbacks.append(collections)
                took = await under_load(server, trees, rate, number)
                gc.callbacks.remove(collections)
                if number:
                    percentiles = 1e3 * np.percentile(took, (50, 99))
                    found[name].append(np.array([*percentiles, collections.longest]))
                sizes[name] = server.metrics.mean_batch_size
    rows = []
    tables = {name: np.array(x) for name, x in found.items()}
    for name, table in tables.items():
        p50, p99, longest = (f"{x:.1f}" for x in np.median(table, axis=0))
        times = common.spread(table[:, 1] / tables["server"][:, 1])
        rows.append([f"{rate:.0f}", name, f"{sizes[name]:.1f}", p50, p99, longest, times])
    return rows


# --- endurance ---


def resident() -> float:
    """MB of memory that the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


async def endurance(model: Model, requests: int, rate: float) -> list[list[Any]]:
    """Rows of memory and of what became of requests, at each tenth of them."""
    rng = np.random.default_rng(1)
    both = [model.params, jax.tree.map(lambda x: 0.5 * x, model.params)]
    pool = model.trees.take(min(requests, 20_000))
    references = [
        np.stack(list(model.batched.stream(params, pool, batch_size=model.batch)))
        for params in both
    ]
    counts = dict.fromkeys(("right", "wrong", "malformed", "cancelled", "lost"), 0)

    async def ask(server: Server, number: int, is_bad: bool) -> None:
        try:
            answer = await server("malformed" if is_bad else pool[number])
        except asyncio.CancelledError:
            counts["cancelled"] += 1
        except ValueError:
            counts["malformed" if is_bad else "wrong"] += 1
        else:
            near = [np.allclose(answer, x[number], rtol=1e-3, atol=1e-5) for x in references]
            counts["right" if any(near) and not is_bad else "wrong"] += 1

    rows, tasks = [], set()
    async with model.server() as server:
        before, start = model.batched.compilations, time.perf_counter()
        for i in range(requests):
            task = asyncio.ensure_future(ask(server, i % len(pool), rng.random() < 0.01))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if rng.random() < 0.01:
                loop = asyncio.get_running_loop()
                loop.call_later(rng.random() / 50, task.cancel)
            if i % 32 == 31:
                while len(tasks) > 1000:
                    await asyncio.sleep(0.002)
                await asyncio.sleep(max(0.0, start + i / rate - time.perf_counter()))
            if (i + 1) % (requests // SWAPS) == 0:
                swap = (i + 1) // (requests // SWAPS)
                await server.swap(both[swap % 2])
            if (i + 1) % (requests // 10) == 0:
                seconds = time.perf_counter() - start
                rows.append([i + 1, f"{seconds:.0f}", f"{resident():.0f}", *counts.values()])
        await asyncio.gather(*tasks, return_exceptions=True)
        counts["lost"] = requests - sum(counts.values())
        seconds = time.perf_counter() - start
        rows.append(["end", f"{seconds:.0f}", f"{resident():.0f}", *counts.values()])
        print(f"\n{server.metrics}\ncompiled meanwhile: {model.batched.compilations - before}")
    return rows


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="of load in a round")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--parts", default="saturation,latency,endurance")
    options = parser.parse_args()
    if options.quick:
        options.hidden, options.batch, options.rounds = 4, 4, 2
        options.seconds, options.requests = 0.1, 400
    parts = options.parts.split(",")
    print(common.machine())
    model = Model(options.hidden, options.batch, 40 if options.quick else 4000)
    size = options.batch * (2 if options.quick else 20)
    run: Callable[[Any], Any] = asyncio.run
    row, rate = run(saturation(model, size, options.rounds))
    if "saturation" in parts:
        head = ["server/s", "stream/s", "ahead/s", "planned/s"]
        table = common.Table(*head, "stream/server", "ahead/server", "planned/server")
        table.row(*row)
    if "latency" in parts:
        head = ["requests/s", "way", "batch", "p50 ms", "p99 ms", "longest gc ms"]
        table = common.Table(*head, "p99 / server's")
        for share in SHARES[:1] if options.quick else SHARES:
            rounds = min(options.rounds, 5)
            for row in run(latencies(model, share * rate, options.seconds, rounds)):
                table.row(*row)
    if "endurance" in parts:
        rows = run(endurance(model, options.requests, 0.8 * rate))
        names = ("right", "wrong", "malformed", "cancelled", "lost")
        table = common.Table("requests", "seconds", "MB", *names)
        for row in rows:
            table.row(*row)


if __name__ == "__main__":
    main()
