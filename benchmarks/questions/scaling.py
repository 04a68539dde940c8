"""How evenly do minibatches fall on many devices, and how many processes must plan for them?

Nothing runs: minibatches of synthetic instances are cut as over so many devices, 64 instances each,
every shard is planned, and what it costs is what the planner takes it to cost.

balance    cost of the slowest shard over that of the mean, cut by cost.
by count   the same where each shard gets the next 64 instances, whatever they cost.
cut ms     to cut the minibatch, once its graph is there.
plan µs    to plan a node of a shard, of instances never seen before: CPU time of one process.
"""

import time

import jax
import numpy as np

import jedbatch
from benchmarks import common
from jedbatch._session.plans.shards import Costs, cut_by_cost
from jedbatch.models import WORKLOADS

MODELS = ["treelstm", "lattice_lstm", "tagger"]
EACH = 64  # instances of a shard


def model(name: str, shards: int, hidden: int) -> list:
    """A row of the table."""
    workload = WORKLOADS[name]
    instances, sizes = workload.load(limit=EACH * shards, seed=1)
    cells = workload.cells(hidden=hidden, **sizes)
    params = cells.init(jax.random.key(0))
    batched = jedbatch.batch(workload.scorer(cells))
    for few in common.chunks(instances[: 2 * EACH], EACH):
        batched.plan(params, few)
    cost: dict[str, np.ndarray] = {}
    seconds: list[float] = []
    nodes: list[int] = []

    def planned(few: list) -> float:
        start = time.process_time()
        plan = batched.plan(params, few)
        seconds.append(time.process_time() - start)
        nodes.append(len(plan.graph.node_type))
        return plan.host.placed.cost

    cost["by count"] = np.array(list(map(planned, common.chunks(instances, EACH))))
    per_node = 1e6 * np.median(np.array(seconds) / np.array(nodes))
    whole = batched.plan(params, instances)
    costs = Costs.of(whole.static.programs, whole.graph)
    start = time.perf_counter()
    cut = cut_by_cost(costs, shards)
    milliseconds = 1e3 * (time.perf_counter() - start)
    cost["balance"] = np.array([planned([instances[i] for i in own.tolist()]) for own in cut])
    balance = [f"{cost[how].max() / cost[how].mean():.3f}" for how in ("balance", "by count")]
    size = round(float(np.mean(nodes)))
    return [workload.title, shards, size, *balance, f"{milliseconds:.1f}", f"{per_node:.2f}"]


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="(default %(default)s)")
    parser.add_argument("--shards", default="8,64,512", help="(default %(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="(default %(default)s)")
    args = parser.parse_args()
    if args.quick:
        args.models, args.shards, args.hidden = "treelstm", "2", 8
    print(common.machine())
    header = ["shards", "nodes of a shard", "balance", "by count", "cut ms", "plan µs"]
    table = common.Table("model", *header)
    for name in args.models.split(","):
        for shards in map(int, args.shards.split(",")):
            table.row(*model(name, shards, args.hidden))


if __name__ == "__main__":
    main()
