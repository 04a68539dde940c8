"""What a step of lanes costs by itself on this machine (see `_schedule.lane_policies`).

A step of W lanes takes the time S + W c, in floating-point operations. Two programs of lanes that
take turns with two branches are timed, one with little work and one with much. How many steps they
start and how many operations these do is known without measuring: the ways of their lanes are
recorded and run again by the simulator. That leaves two equations for the time of a start and the
time of an operation; S is the first over the second.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jedbatch._jaxpr.lane_steps import counting
from jedbatch._jaxpr.program_counters import LaneRule, run_lanes
from jedbatch._program.executors import median_seconds
from jedbatch._schedule.lane_policies import least_loss
from jedbatch._schedule.lane_runs import simulate

LANES, TRIPS, WIDTHS = 64, 16, (48, 192)  # of rows of the programs that are timed
LEAST, MOST = 1e3, 1e10  # operations that a start may be taken to cost


def measure_step_work(repeat: int) -> float:
    """Returns floating-point operations that take as long as to start a step of lanes.

    Args:
      repeat: how often each program is timed; medians count.
    """
    made = [_program(width) for width in WIDTHS]
    counts = np.array([count for _, count in made], float)
    seconds = median_seconds([run for run, _ in made], repeat)
    a_start, an_operation = np.linalg.lstsq(counts, seconds, rcond=None)[0].tolist()
    if an_operation <= 0:  # too noisy to tell
        return LEAST
    return float(np.clip(a_start / an_operation, LEAST, MOST))


def _program(width: int) -> tuple[Callable, tuple[int, float]]:
    """Returns a program of lanes, and the steps it starts and the operations they do."""
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(2, width, width)) / np.sqrt(width), jnp.float32)
    first = jnp.asarray(rng.integers(0, 2, LANES), jnp.int32)
    rows = jnp.asarray(rng.normal(size=(LANES, width)), jnp.float32)

    def lane(first: jax.Array, x: jax.Array, weights: jax.Array) -> jax.Array:
        branches = [lambda x, w=w: jnp.tanh(x @ w) for w in weights]

        def trip(state: tuple) -> tuple:
            i, x = state
            return i + 1, lax.switch((i + first) % 2, branches, x)

        return lax.while_loop(lambda state: state[0] < TRIPS + first, trip, (jnp.int32(0), x))[1]

    program = jax.make_jaxpr(lane)(first[0], rows[0], weights)
    flags = [True, True, False]

    def lanes(*given: jax.Array) -> list[jax.Array]:
        return run_lanes(program, given, flags, LANES, rule=LaneRule())

    with counting(records=True) as counter:
        jax.block_until_ready(jax.jit(lambda *given: lanes(*given))(first, rows, weights))
        counter.result()
    (run,) = counter.runs
    found = simulate(run, least_loss)
    work = found.cost - found.started * run.blocks.start
    return functools.partial(jax.jit(lanes), first, rows, weights), (found.started, work)
