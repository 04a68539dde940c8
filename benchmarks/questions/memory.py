"""What do orders inside of batches and shared rows save, and what do they cost?

Graphs of real or made-up instances, of up to seven kinds of models. Their cells are LSTMs over the
sum of their operands, whatever the model, with weights per node type and `--hidden` states, and
small outputs: memory is moved as the models would, arithmetic is about theirs. Inference.

order       of the nodes inside of batches, see `jedbatch.layout`.
slices      MB of operands read as slices, strided slices or broadcasts by the program.
gathered    MB read row by row.
run ms      median of interleaved runs of one plan; `×` is the ratio to `append`.
layout ms   planning of lanes and rows for instances that are known, median.

The second table is about rows: bytes for results if every lane had rows of its own, with rows used
again, and what is alive at most (padding included in all three); the ratio of the last two; and how
long the same plan runs with rows of its own and with shared rows, both in arenas that are there
from call to call, and with new arenas at each call (as under an outer `jax.jit`).

The third table is about training: bytes that the program for a loss and its gradients needs for
each node of 64 chains (of 200 words, hidden 128), beside parameters and tables, as XLA counts them.
*scan* is `jax.lax.scan` over the whole minibatch, differentiated by JAX; *least* is what any
reverse keeps without computing products again: states, and what comes back to each product.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks import common
from benchmarks.questions import topologies
from jedbatch._layout.allocator import live_bound
from jedbatch._layout.live_ranges import find_live_ranges
from jedbatch._program.plan import input_name

ORDERS = ["append", "longest", "reader", "pq", "auto"]
SKIPPED = {"code trees"}  # a hundred kinds of cells take minutes to compile
LABELS = 8


def make_cells(names: list[str], hidden: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(cell of each node type, parameters)."""
    cells, params = {}, {}
    for name, key in zip(names, jax.random.split(jax.random.key(0), len(names)), strict=True):
        size = LABELS if name == "output" else 4 * hidden
        params[name] = jax.random.normal(key, (hidden, size)) / np.sqrt(hidden)

        def compute(params, *states, name=name):
            if not states:
                states = ((jnp.tanh(params[name][0, :hidden]),) * 2,)
            gates = sum(h for h, _ in states) @ params[name]
            if name == "output":
                return jax.nn.log_softmax(gates)
            i, f, o, u = jnp.split(gates, 4)
            c = jax.nn.sigmoid(i) * jnp.tanh(u) + jax.nn.sigmoid(f) * sum(c for _, c in states)
            return jax.nn.sigmoid(o) * jnp.tanh(c), c

        cells[name] = jedbatch.cell(compute, name=name)
    return cells, params


def batched(cells: dict[str, Any], **options: Any) -> jedbatch.Batched:
    """Returns the results of all nodes that no other reads: the model of all workloads."""

    def fn(params, graph):
        results = jedbatch.evaluate(graph, cells, params)
        return [results[n] for n in graph.outputs.tolist()]

    return jedbatch.batch(fn, out_axes=None, **options)


def program(params: Any, plan: jedbatch.Plan) -> tuple[Any, tuple]:
    """(who runs a plan, what it is run on), without making a list of the results."""
    signature = plan.static.signature
    rows = tuple(plan.inputs[input_name(kind)] for kind in signature.arenas)
    given = jax.tree.leaves(params), rows, plan.table
    return plan.static.programs.executor(signature), given


def orders(table: common.Table, workload: str, size: int, graphs, hidden: int, budget: float):
    """Adds the orders to a table."""
    cells, params = make_cells([t.name for t in graphs[0].types], hidden)
    plans, runs = {}, {}
    policy = None
    for order in ORDERS:
        model = batched(cells, layout=order, policy=policy)
        model.plan(params, graphs, gradient=False)
        policy = policy or model.policy  # the same batches for all
        made = [model.plan(params, graphs, gradient=False) for _ in range(5)]
        layout = 1e3 * np.median([plan.host.seconds["layout"] for plan in made])
        plans[order] = made[-1], layout
        executor, given = program(params, made[-1])
        runs[order] = functools.partial(executor.infer, *given)
    times = common.interleaved(list(runs.values()), budget)
    for i, order in enumerate(ORDERS):
        plan, layout = plans[order]
        gathered, *sliced = plan.host.lowered.read_bytes / 1e6
        table.row(
            workload,
            size,
            order,
            f"{sum(sliced):.2f}",
            f"{gathered:.2f}",
            f"{1e3 * times.median(i):.2f}",
            times.ratio(i),
            f"{layout:.2f}",
        )
    return cells, params, policy


def rows(table: common.Table, workload: str, size: int, graphs, cells, params, policy, budget):
    """Adds the memory to a table."""
    plans, runs = {}, []
    for reuse in (False, True):
        model = batched(cells, policy=policy, reuse=reuse)
        plans[reuse] = plan = model.plan(params, graphs, gradient=False)
        executor, given = program(params, plan)
        runs.append(functools.partial(executor.infer, *given))
    weights, *rest = given
    runs.append(functools.partial(executor.once, {"shared": weights}, *rest))
    times = common.interleaved(runs, budget)
    placed = plan.host.placed
    kinds = [np.dtype(dtype).itemsize * int(np.prod(shape)) for shape, dtype in placed.arenas]
    blocks = find_live_ranges(placed.graph, placed.schedule, placed.layout.padded)
    arena = placed.layout.space[placed.schedule.batch_type[blocks.batch], blocks.slot]
    alive = live_bound(blocks.size * np.array(kinds)[arena], blocks.batch, blocks.last)
    once = int((blocks.size * np.array(kinds)[arena]).sum())
    used = int((placed.layout.rows * kinds).sum())
    table.row(
        workload,
        size,
        f"{once / 1e6:.2f}",
        f"{used / 1e6:.2f}",
        f"{alive / 1e6:.2f}",
        f"{used / alive:.3f}",
        *(f"{1e3 * times.median(i):.2f}" for i in range(3)),
    )


@jedbatch.cell
def recurrent(params, state, x):
    """A step of a recurrent network."""
    return (jnp.tanh(x + state[0] @ params["w"][:, : x.shape[-1]]),)


@jedbatch.cell
def gated(params, state, x):
    """A step of an LSTM."""
    h, c = state
    i, f, o, u = jnp.split(h @ params["w"] + x @ params["u"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def training(table: common.Table, hidden: int, count: int, length: int) -> None:
    """Adds the memory of training on chains to a table."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "table": jax.random.normal(keys[0], (1000, hidden)),
        "w": jax.random.normal(keys[1], (hidden, 4 * hidden)) / np.sqrt(hidden),
        "u": jax.random.normal(keys[2], (hidden, 4 * hidden)) / np.sqrt(hidden),
    }
    words = np.array(jax.random.randint(keys[3], (count, length), 0, 1000))
    for name, cell, states, kept in (("RNN", recurrent, 1, 2), ("LSTM", gated, 2, 6)):

        def fn(params, words, cell=cell, states=states):
            state = (np.zeros(hidden, np.float32),) * states
            for word in words:
                state = cell(params, state, params["table"][word])
            return state[0].sum()

        model = jedbatch.batch(fn)

        def loss(params, plan, model=model):
            return model.apply(params, plan).sum()

        def scanned(params, words, cell=cell, states=states):
            def step(state, now):
                return cell(params, state, params["table"][now]), None

            start = (jnp.zeros((count, hidden)),) * states
            return jax.lax.scan(step, start, words)[0][0].sum()

        plan = model.plan(params, [tuple(some) for some in words.tolist()])
        found = [
            jax.jit(jax.value_and_grad(run)).lower(params, x).compile().memory_analysis()
            for run, x in ((loss, plan), (scanned, words.T))
        ]
        sizes = [x.temp_size_in_bytes / words.size for x in found]
        table.row(name, *(f"{x:,.0f}" for x in sizes), f"{4 * hidden * kept:,}")


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--hidden", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--batch", type=common.numbers, default=[8, 64], help="such as 8,64")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds for each set of runs")
    parser.add_argument("--workloads", default="", help="names, separated by semicolons")
    args = parser.parse_args()
    if args.quick:
        args.batch, args.hidden = [4], 16
    directory = Path(args.data) if args.data else None
    print(common.machine())
    print(f"{args.data or 'made-up'} graphs, hidden {args.hidden}")
    header = ["batch", "order", "slices MB", "gathered MB", "run ms", "× append", "layout ms"]
    first = common.Table("workload", *header)
    found = []
    chosen = [w for w in args.workloads.split(";") if w] or [
        w for w in topologies.WORKLOADS if w not in SKIPPED
    ]
    for workload in chosen:
        graphs = topologies.instances(workload, directory, max(args.batch))
        for size in args.batch:
            part = graphs[:size]
            made = orders(first, workload, size, part, args.hidden, args.budget)
            found.append((workload, size, part, *made))
    names = ["own rows MB", "shared MB", "alive MB", "shared / alive"]
    second = common.Table("workload", "batch", *names, "own ms", "shared ms", "new arenas ms")
    for entry in found:
        rows(second, *entry, args.budget)
    third = common.Table("training", "jedbatch", "scan", "least")
    training(third, args.hidden, *((4, 10) if args.quick else (64, 200)))


if __name__ == "__main__":
    main()
