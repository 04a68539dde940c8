"""`Batched.learn`: a policy learned from the graph of some instances; nothing is computed."""

from typing import Any

from jedbatch import checks
from jedbatch._learn.candidates import learn as learn_from_graphs
from jedbatch._schedule.fsm import FSM
from jedbatch._session.minibatch import graph_of
from jedbatch._support.types import PyTree


def learn(batched: Any, *args: PyTree, **options: Any) -> FSM:
    """Learns a policy from instances and uses it for the plans made from then on.

    Args:
      batched: the batched function.
      *args: as for a call; shared arguments may be `jax.ShapeDtypeStruct`s. 32 instances are
        plenty.
      **options: see `jedbatch.learn`.

    Returns:
      The policy: print it, print its `report`, `save` it.

    Raises:
      TypeError, ValueError: as a call does, or an option makes no sense.
    """
    if "lanes" in options:
        raise TypeError(
            f"`learn` got lanes={checks.brief(options['lanes'])}; expected options of "
            "`jedbatch.learn`. Policies for lanes are not learned: leave the option out, and give "
            "`lane_policy=` of `jedbatch.batch` one of `jedbatch.policies`, such as `least_loss`, "
            "the default, or a function of your own."
        )
    shared, instances = batched._arguments.split(args)
    session, _ = batched._session(shared)
    with batched._planning:
        graph = graph_of(batched._record(session, instances).records)
    batched.policy = policy = learn_from_graphs(graph, **options)
    return policy
