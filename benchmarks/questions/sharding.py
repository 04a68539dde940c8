"""How evenly are minibatches cut over devices, and what does it cost to cut them?

Eight devices, which this script asks XLA for on one CPU (they share its cores, so that nothing runs
faster for it). Minibatches never seen before of a model of this package; inference and training.

balance    planned cost of the slowest shard over that of the mean, the median of minibatches and
           the largest.
plan       milliseconds to plan a minibatch that is cut, over those for one device.
programs   XLA programs built after the first two minibatches, by steps inside of `jax.jit` and
           outside; 0 is what we aim for.
talk       collective operations in a compiled step.
one shard  the time of a step on one device under `jax.shard_map`, over that of a step with a plan
           that is not cut.
"""

import re
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jedbatch
from benchmarks import common
from jedbatch.models import WORKLOADS

NUM_DEVICES = 8
MODELS = ["treelstm", "lattice_lstm", "tagger"]
COLLECTIVE = re.compile(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(")


def mesh_of(count: int) -> Mesh:
    """The first devices as a mesh."""
    return Mesh(np.array(jax.devices()[:count]), ("data",))


class Step:
    """A step of training, jit-compiled, that counts how often it is traced."""

    def __init__(self, batched: jedbatch.Batched):
        self.batched = batched
        self.traced = 0
        self.run = jax.jit(self._step)

    def _step(self, params: Any, plan: jedbatch.Plan) -> Any:
        self.traced += 1
        return jax.value_and_grad(lambda p: self.batched.apply(p, plan)[:, 0].sum())(params)


def planned(batched: jedbatch.Batched, params: Any, few: Any, mesh: Any) -> tuple[float, Any]:
    """(seconds, plan)."""
    start = time.perf_counter()
    plan = batched.plan(params, few, mesh=mesh)
    return time.perf_counter() - start, plan


def model(name: str, size: int, count: int, hidden: int, budget: float) -> list[Any]:
    """The row of a model."""
    workload = WORKLOADS[name]
    instances, sizes = workload.load(limit=size * count, seed=1)
    minibatches = common.chunks(instances, size)
    cells = workload.cells(hidden=hidden, **sizes)
    params = cells.init(jax.random.key(0))
    mesh = mesh_of(NUM_DEVICES)
    everywhere = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    several, one = (jedbatch.batch(workload.scorer(cells)) for _ in range(2))
    step, late, inside = Step(several), 0, 0
    balance, ratios = [], []
    for number, few in enumerate(minibatches):
        cut, plan = planned(several, everywhere, few, mesh)
        alone, _ = planned(one, params, few, None)
        costs = np.array([shard.host.placed.cost for shard in plan.shards])
        balance.append(costs.max() / costs.mean())
        if number > 1:
            ratios.append(cut / alone)
        step.run.lower(everywhere, plan)  # traces it if it is another program
        jax.block_until_ready(several.apply(everywhere, plan))
        if number == 1:
            inside, late = step.traced, several.compilations
    inside, late = step.traced - inside, several.compilations - late
    text = step.run.lower(everywhere, plan).compile().as_text()
    talk = ", ".join(sorted(COLLECTIVE.findall(text)))
    row = [workload.title, hidden, f"{np.median(balance):.3f}", f"{max(balance):.3f}"]
    row += [common.spread(ratios), inside, late, talk]
    few = minibatches[0][: max(1, size // NUM_DEVICES)]
    shard = one.plan(params, few, mesh=mesh_of(1))
    whole = one.plan(params, few)
    alone = Step(one)
    runs = [lambda: alone.run(params, whole), lambda: alone.run(params, shard)]
    calls = [lambda: one.apply(params, whole), lambda: one.apply(params, shard)]
    row += [common.interleaved(runs, budget).ratio(1), common.interleaved(calls, budget).ratio(1)]
    return row


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="(default %(default)s)")
    parser.add_argument("--size", type=int, default=512, help="instances (default %(default)s)")
    parser.add_argument("--count", type=int, default=10, help="minibatches (default %(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="(default %(default)s)")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)  # before any is used
    budget = args.seconds
    if args.quick:
        args.size, args.count, args.hidden, args.models, budget = 16, 3, 8, "treelstm", 0.1
    print(common.machine())
    print(f"synthetic instances, {args.count} minibatches of {args.size}")
    header = ["hidden", "balance", "worst", "plan", "programs inside", "programs outside", "talk"]
    table = common.Table("model", *header, "one shard, training", "one shard, inference")
    for name in args.models.split(","):
        table.row(*model(name, args.size, args.count, args.hidden, budget))


if __name__ == "__main__":
    main()
