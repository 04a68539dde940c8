"""`Batched.learn`: a policy learned from the graph of some instances; nothing is computed."""

from typing import Any

from jedbatch import checks
from jedbatch._learn.candidates import learn as learn_from_graphs
from jedbatch._schedule.fsm import FSM
from jedbatch._session.core import Core
from jedbatch._session.session import graph_of


def learn(core: Core, args: tuple, options: dict[str, Any]) -> FSM:
    """Learns a policy and uses it from then on; see `Batched.learn`."""
    if "lanes" in options:
        raise TypeError(
            f"`learn` got lanes={checks.brief(options['lanes'])}; expected options of "
            "`jedbatch.learn`. Which block of nested loops runs next is not learned: leave the "
            "option out."
        )
    shared, instances = core.arguments.split(args)
    session, _ = core.session(shared)
    with core.planning:
        graph = graph_of(core.record(session, instances).records)
    core.policy = policy = learn_from_graphs(graph, **options)
    return policy
