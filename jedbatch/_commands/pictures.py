"""Draws a plan and saves the pictures."""

from pathlib import Path
from typing import Any

import jedbatch
from jedbatch import viz
from jedbatch.policies import FSM


def save_pictures(plan: jedbatch.Plan, policy: Any, folder: Path) -> None:
    """Saves pictures of a plan, and of the policy if it is a state machine; prints their names."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "instance": viz.graph(plan, instance=0),
        "graph": viz.graph(plan),
        "batches": viz.batches(plan),
        "timeline": viz.timeline(plan),
        "memory": viz.memory(plan),
        "time": viz.time_split(plan),
    }
    if isinstance(policy, FSM) and len(policy):
        pictures["policy"] = viz.state_machine(policy)
    for name, picture in pictures.items():
        picture.save(folder / f"{name}.svg")
    print(f"\ndrawn: {', '.join(str(folder / f'{name}.svg') for name in pictures)}")
