"""Which policy for lanes needs the fewest steps and lanes, and how long does it take?

Loops in loops, as in `nested.py`: `hmc`, `nuts` and `oscillators`.

least_loss  the step that costs least above the shares of its lanes, the default.
most_lanes  the block at which most lanes wait.

`steps` and `lanes` are what ran on the device; `lanes / least` is how many times as many lanes ran
as had to, and `work` the same by operations, a step's start included. All run in turns in one
process, each warmed up; `ms` are medians and `least_loss /` how many times as long the default
takes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jedbatch
from benchmarks import common
from benchmarks.questions import nested
from jedbatch import policies


def work_of(counts: Any, step_work: float) -> float:
    """Operations of all steps over those that lanes need."""
    ran = sum(x.steps * step_work + x.lanes * x.work for x in counts)
    return ran / sum(x.needed * x.work for x in counts)


def measure(table: common.Table, name: str, case: nested.Case, seconds: float) -> None:
    """Prints a row for each policy."""
    rows = case.rows[1::2]  # the half that no policy was learned from when some were
    fns = {
        policy.__name__: jedbatch.batch(case.fn, in_axes=(None, 0), lane_policy=policy)
        for policy in (policies.least_loss, policies.most_lanes)
    }
    counts = {policy: fn.lane_steps(case.params, rows) for policy, fn in fns.items()}
    runs = [functools.partial(fn, case.params, rows) for fn in fns.values()]
    results = [np.asarray(run()[-1], float).sum() for run in runs]
    np.testing.assert_allclose(results, results[0], rtol=0.02)
    times = common.interleaved(runs, seconds, least=5)
    step_work = jedbatch.Target.named("cpu").step_work
    for i, (policy, found) in enumerate(counts.items()):
        table.row(
            name,
            len(rows),
            policy,
            found.steps,
            found.lanes,
            f"{found.lanes / found.needed:.3f}",
            f"{work_of(found, step_work):.3f}",
            f"{1e3 * times.median(i):.2f}",
            times.ratio(0, i),
        )
    jax.clear_caches()


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="per case (%(default)s)")
    parser.add_argument("--cases", default="hmc,nuts,oscillators", help="such as hmc,nuts")
    args = parser.parse_args()
    if args.data:
        parser.error("--data: instances are always synthetic here")
    sizes = {"hmc": 64, "nuts": 100, "oscillators": 128}
    if args.quick:
        args.seconds, sizes = 0.1, dict.fromkeys(sizes, 16)
    makers: dict[str, Callable[[int], nested.Case]] = {
        "hmc": nested.hmc,
        "nuts": nested.nuts,
        "oscillators": functools.partial(nested.ode, oscillators=64),
    }
    print(common.machine())
    columns = "instances", "policy", "steps", "lanes", "lanes / least", "work", "ms"
    table = common.Table("", *columns, "least_loss /")
    for name in args.cases.split(","):
        measure(table, name, makers[name](2 * sizes[name]), args.seconds)


if __name__ == "__main__":
    main()
