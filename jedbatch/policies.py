"""Policies: which type of node runs next, and on the device which block of a loop.

Pass one of these as `policy=` to `jedbatch.batch` and `jedbatch.schedule`, or your own: any
callable from a `Frontier` to a type id.

- `depth`, `agenda`, `height`, `critical`, `sufficient`: heuristics.
- `FSM`: what `jedbatch.learn` returns; `FSM.load` reads one from a file.
- `beam`, `optimal`: searches, too slow for every minibatch, to tell how good the others are.
  `beam(width=64)` and `optimal(max_nodes=1000)` are the same with other options.

Policies for lanes say which block of nested loops runs next on the device. Pass one as
`lane_policy=` to `jedbatch.batch`, or your own: any callable from a `LaneFrontier` to the number
of a step.

- `least_loss`, the default, and `most_lanes`.
"""

from typing import Any

from jedbatch._jaxpr.lane_policies import LaneFrontier, least_loss, most_lanes
from jedbatch._schedule.frontier import Frontier
from jedbatch._schedule.fsm import FSM
from jedbatch._schedule.heuristics import agenda, critical, depth, height, sufficient
from jedbatch._schedule.search import beam, optimal

__all__ = [
    "FSM",
    "Frontier",
    "LaneFrontier",
    "agenda",
    "beam",
    "critical",
    "depth",
    "height",
    "least_loss",
    "most_lanes",
    "optimal",
    "sufficient",
]


def __getattr__(name: str) -> Any:
    if name == "LaneFSM":
        raise AttributeError(
            "there is no `jedbatch.policies.LaneFSM`: policies for lanes are not learned. Give "
            "`lane_policy=` of `jedbatch.batch` `least_loss`, the default, `most_lanes`, or any "
            "callable from a `LaneFrontier` to the number of a step."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
