"""`Batched.learn`: policies learned from instances, for nodes and for lanes.

A policy for nodes is learned from the graph of some instances, and nothing is computed. Where lanes
go depends on values: so the function is run once, compiled to tell it, and a policy for lanes is
learned from what was recorded (see `_learn.lane_learning`).
"""

from typing import Any, Literal, overload

import jax
from jax.core import Tracer

from jedbatch import checks
from jedbatch._graph.graph import Graph
from jedbatch._jaxpr.lane_steps import counting
from jedbatch._learn.candidates import learn as learn_from_graphs
from jedbatch._learn.lane_learning import learn_lanes
from jedbatch._schedule.fsm import FSM
from jedbatch._schedule.lane_fsm import LaneFSM
from jedbatch._support.types import PyTree


@overload
def learn(batched: Any, *args: PyTree, lanes: Literal[False] = False, **options: Any) -> FSM: ...
@overload
def learn(batched: Any, *args: PyTree, lanes: Literal[True], **options: Any) -> LaneFSM: ...
def learn(batched: Any, *args: PyTree, lanes: bool = False, **options: Any) -> FSM | LaneFSM:
    """Learns a policy from instances and uses it for the plans made from then on.

    Args:
      batched: the batched function.
      *args: as for a call; shared arguments may be `jax.ShapeDtypeStruct`s, but not for `lanes`. 32
        instances are plenty for nodes; for lanes as many as minibatches have.
      lanes: False for the policy that chooses the type of node that runs next; True for the one
        that chooses the block of nested loops that runs next on the device. For this the function
        is compiled anew and run once, which records where each node goes.
      **options: see `jedbatch.learn`; for `lanes`: `episodes`, the budget of Q-learning for each
        program of blocks (64), `key`, a whole number (0), and `progress`, whether to show a
        progress bar.

    Returns:
      The policy: print it, print its `report`, `save` it. One for lanes costs at most as much as
      `least_loss` on the recorded runs, in steps and lanes as a simulator counts them.

    Raises:
      TypeError, ValueError: as a call does, or an option makes no sense.
    """
    if checks.flag("learn", "lanes", lanes):
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
            raise TypeError(
                "`learn` got values that JAX traces; expected arrays. It learns from what has run: "
                "call it outside of `jax.jit` and of derivatives."
            )
        twin = batched._counting_twin()
        with counting(records=True) as counter:
            jax.block_until_ready(twin(*args))
            counter.result()
        batched.lane_policy = machine = learn_lanes(counter.runs, **options)
        return machine
    shared, instances = batched._arguments.split(args)
    session, _ = batched._session(shared)
    with batched._planning:
        records, *_ = batched._record(session, instances)
        graph = Graph.select([(r.whole, r.index) for r in records])
    batched.policy = policy = learn_from_graphs(graph, **options)
    return policy
