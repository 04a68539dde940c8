"""Policies: which type of node runs next.

Pass one of these as `policy=` to `jedbatch.batch` and `jedbatch.schedule`, or your own: any
callable from a `Frontier` to a type id.

- `depth`, `agenda`, `height`, `critical`, `sufficient`: heuristics.
- `FSM`: what `jedbatch.learn` returns; `FSM.load` reads one from a file.
- `beam`, `optimal`: searches, too slow for every minibatch, to tell how good the others are.
  `beam(width=64)` and `optimal(max_nodes=1000)` are the same with other options.
"""

from jedbatch._schedule.frontier import Frontier
from jedbatch._schedule.fsm import FSM
from jedbatch._schedule.heuristics import agenda, critical, depth, height, sufficient
from jedbatch._schedule.search import beam, optimal

__all__ = [
    "FSM",
    "Frontier",
    "agenda",
    "beam",
    "critical",
    "depth",
    "height",
    "optimal",
    "sufficient",
]
