"""Policies for lanes: the same results, and steps as a simulator of recorded runs counts them."""

import collections
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import mostly_slow
from cases.loops import PROGRAMS, loop_in_loop, loop_in_scan, switch_in_loop_in_loop
from jax import lax

from jedbatch._jaxpr.lane_steps import counting
from jedbatch._jaxpr.program_counters import LaneRule, run_lanes
from jedbatch._schedule.lane_policies import (
    LARGEST_COST,
    LaneBlocks,
    LaneFrontier,
    checked_lane_policy,
    least_loss,
    most_lanes,
    next_step,
)
from jedbatch._schedule.lane_runs import LaneRun, LaneSimulator, simulate

# Programs of lanes are compiled as users do in `test_program_counters.py`.
pytestmark = pytest.mark.unoptimized

SIZE = 37
STEP_WORK = 300.0  # little, for blocks of these programs to have several widths


def last_first(frontier):
    """The last block in the program where somebody waits."""
    numbers = np.arange(len(frontier.blocks.work), dtype=np.int32)
    return frontier.step_of(frontier.xp.where(frontier.waiting > 0, numbers, -1).argmax())


def nonsense(frontier):
    """Block 0, whether or not somebody waits there."""
    return frontier.xp.int32(0) * frontier.waiting[0]


POLICIES = (least_loss, most_lanes, last_first, nonsense)


def instances(size=SIZE, most=7):
    rng = np.random.default_rng(0)
    numbers = jnp.asarray(rng.integers(0, most, size), jnp.int32)
    return numbers, jnp.asarray(np.random.default_rng(1).normal(size=(size, 4)), jnp.float32)


def run(fn, policy, n, x, records=True):
    """Returns (results of lanes, what was counted) under a policy."""
    program, shape = jax.make_jaxpr(fn, return_shape=True)(n[0], x[0])
    rule = LaneRule(policy, STEP_WORK)
    with counting(records) as counter:
        lanes = jax.jit(lambda *xs: run_lanes(program, xs, [True, True], len(n), rule=rule))
        outs = jax.block_until_ready(lanes(n, x))
        jax.effects_barrier()
    return jax.tree.unflatten(jax.tree.structure(shape), outs), counter


@functools.cache
def ran(fn, policy, size=SIZE, most=7):
    """The same for `instances`, compiled once for all tests."""
    return run(fn, policy, *instances(size, most))


def counted(counter, blocks):
    """Returns int64[K, 3], what was counted of the steps of some blocks."""
    counts = np.zeros((len(blocks.block), 3), np.int64)
    place = {(b + 1, w): k for k, (b, w) in enumerate(zip(blocks.block, blocks.width, strict=True))}
    for (_, what, number, work, width), row in counter.found.items():
        assert what == "block"
        assert work == blocks.work[number - 1]
        counts[place[number, width]] += row
    return counts


def run_by_all(fn, n, x):
    """Yields (results of lanes, what was counted) for each of `POLICIES`, by one program."""
    program, shape = jax.make_jaxpr(fn, return_shape=True)(n[0], x[0])

    def lanes(number, *xs):
        def chosen(frontier):
            steps = [jnp.asarray(policy(frontier), jnp.int32) for policy in POLICIES]
            return jnp.stack(steps)[number]

        return run_lanes(program, xs, [True, True], len(n), rule=LaneRule(chosen, STEP_WORK))

    with counting(True) as counter:
        compiled = jax.jit(lanes)
        for number in range(len(POLICIES)):
            outs = jax.block_until_ready(compiled(number, n, x))
            jax.effects_barrier()
            found = SimpleNamespace(found=counter.found, runs=counter.runs)
            counter.found, counter.runs = {}, []
            yield jax.tree.unflatten(jax.tree.structure(shape), outs), found


@pytest.mark.parametrize("fn", mostly_slow(PROGRAMS, "loop_in_loop"))
def test_policies_change_no_result_and_take_the_steps_that_are_simulated(fn):
    n, x = instances()
    theirs = [jax.jit(fn)(a, b) for a, b in zip(n, x, strict=True)]
    theirs = jax.tree.map(lambda *xs: np.stack(xs), *theirs)
    known = None
    for policy, (ours, counter) in zip(POLICIES, run_by_all(fn, n, x), strict=True):
        for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        (again,) = counter.runs
        known = known or again
        assert known.blocks == again.blocks
        for name in ("ptr", "block", "trips"):  # whoever runs with a lane, it goes the same way
            np.testing.assert_array_equal(getattr(known, name), getattr(again, name))
        found = simulate(known, policy)
        np.testing.assert_array_equal(found.counts, counted(counter, known.blocks))
        assert found.counts[:, 2].sum() == known.needed
        assert found.started <= found.counts[:, 0].sum()


def test_what_is_recorded_is_what_instances_do():
    n, _ = instances()
    _, counter = ran(loop_in_loop, most_lanes)
    (known,) = counter.runs
    for lane, often in enumerate(n.tolist()):
        visits = slice(known.ptr[lane], known.ptr[lane + 1])
        trips = collections.Counter()
        for block, times in zip(known.block[visits], known.trips[visits], strict=True):
            trips[int(block)] += int(times)
        inner = sum((i * often) % 5 for i in range(often))
        assert sorted(trips.values()) == sorted(t for t in (often, inner, often) if t)
    assert known.useful == sum(
        known.blocks.work[b] * t for b, t in zip(known.block, known.trips, strict=True)
    )


def test_a_part_of_a_run_is_that_of_its_lanes():
    (whole,) = ran(loop_in_scan, least_loss)[1].runs
    lanes = np.arange(0, SIZE, 3)
    part = whole.part(lanes)
    part.check()
    for i, lane in enumerate(lanes):
        ours = part.block[part.ptr[i] : part.ptr[i + 1]]
        np.testing.assert_array_equal(ours, whole.block[whole.ptr[lane] : whole.ptr[lane + 1]])
    assert simulate(part, most_lanes).counts[:, 2].sum() == part.needed < whole.needed


def test_counting_alone_records_nothing():
    counter = run(loop_in_loop, least_loss, *instances(4), records=False)[1]
    assert counter.found
    assert not counter.runs


def test_runs_of_many_widths():
    """More lanes than a step takes, in programs of several blocks with much work."""
    many = functools.partial(ran, switch_in_loop_in_loop, size=150, most=9)
    (known,) = many(policy=least_loss)[1].runs
    assert len(known.blocks.block) > len(known.blocks.work)
    for policy in (least_loss, most_lanes):
        counter = many(policy=policy)[1]
        found = simulate(known, policy)
        np.testing.assert_array_equal(found.counts, counted(counter, known.blocks))


# --- what policies choose ---


def blocks_of(work, size=64, repeats=None, start=100.0, widths=(4, 16, 64)):
    steps = [(b, w) for b in range(len(work)) for w in widths]
    return LaneBlocks(
        "blocks", size, work, repeats or (False,) * len(work), *zip(*steps, strict=True), start
    )


def by_hand(blocks, waiting):
    """The step that loses least, by the definition, in exact fractions of the unit of costs."""
    left, lost = sum(waiting), []
    for k, (b, w) in enumerate(zip(blocks.block, blocks.width, strict=True)):
        taken = min(waiting[b], w)
        shares = [
            int(blocks.costs[j]) // min(blocks.width[j], left)
            for j in range(len(blocks.block))
            if blocks.block[j] == b
        ]
        lost.append(int(blocks.costs[k]) - taken * min(shares) if taken else float("inf"))
    return lost.index(min(lost))


def test_least_loss_is_what_its_definition_says():
    rng = np.random.default_rng(0)
    for _ in range(200):
        blocks = blocks_of(tuple(rng.integers(1, 1000, 3).astype(float)))
        waiting = rng.multinomial(rng.integers(1, 65), rng.dirichlet([0.5] * 3)).astype(np.int32)
        frontier = LaneFrontier(blocks, waiting, np)
        assert int(least_loss(frontier)) == by_hand(blocks, waiting.tolist())


def test_hosts_and_devices_choose_alike():
    rng = np.random.default_rng(1)
    for blocks in (blocks_of((3.0, 7e5, 12345.0)), blocks_of((8192.0,) * 4, start=5e4)):
        for policy in POLICIES:
            choose = jax.jit(
                lambda waiting, blocks=blocks, policy=policy: next_step(
                    policy, LaneFrontier(blocks, waiting, jnp)
                )
            )
            for _ in range(50):
                shares = rng.dirichlet([0.5] * len(blocks.work))
                waiting = rng.multinomial(rng.integers(1, 65), shares).astype(np.int32)
                ours = int(next_step(policy, LaneFrontier(blocks, waiting, np)))
                assert int(choose(waiting)) == ours
                assert waiting[blocks.block[ours]] > 0


def test_most_lanes_takes_the_block_with_most():
    blocks = blocks_of((1.0, 1e4))
    for waiting, block in (([3, 2], 0), ([2, 3], 1), ([2, 2], 0), ([0, 1], 1)):
        step = int(most_lanes(LaneFrontier(blocks, np.array(waiting, np.int32), np)))
        assert blocks.block[step] == block
    step = int(most_lanes(LaneFrontier(blocks, np.array([0, 17], np.int32), np)))
    assert blocks.width[step] == 16  # 64 lanes of so much work cost more than 16


def test_costs_are_whole_numbers_that_products_of_lanes_do_not_exceed():
    blocks = blocks_of((1e7, 3.0), size=8192, widths=(8, 8192))
    assert blocks.costs.dtype == np.int32
    assert blocks.costs.max() == LARGEST_COST
    assert blocks.filling.tolist() == [8, 8]
    waiting = np.array([8000, 192], np.int32)
    assert (LaneFrontier(blocks, waiting, np).lost >= 0).all()


def test_a_block_runs_again_until_much_is_lost():
    """Of 4 lanes one stays for long: 3 lanes of work 30 are lost in a trip, 100 cost a step."""
    blocks = blocks_of((30.0,), size=4, repeats=(True,), widths=(4,))
    known = LaneRun.of(blocks, [[(0, 1)], [(0, 1)], [(0, 1)], [(0, 9)]])
    simulator = LaneSimulator(known)
    first = simulator.advance(0)
    assert (first.trips, first.needed, first.cost) == (2, 5, 100 + 2 * 4 * 30)
    assert simulator.waiting.tolist() == [1]
    assert simulate(known, least_loss).counts[:, 2].sum() == 12


def test_policies_are_callables():
    assert checked_lane_policy(most_lanes) is most_lanes
    with pytest.raises(TypeError, match=r"got lane_policy='most'; expected a callable from a"):
        checked_lane_policy("most")


@pytest.mark.parametrize("step", ["x", None, 1.0, (0, 1), np.zeros(1, np.int32)])
def test_policies_return_numbers_of_steps(step):
    frontier = LaneFrontier(blocks_of((30.0,)), np.array([3], np.int32), np)
    with pytest.raises(
        TypeError, match=r"the lane policy .* returned .*; expected the number of a"
    ):
        next_step(lambda _: step, frontier)
    for known in (0, np.int32(0), jnp.int32(0), -1, 7):
        assert next_step(lambda _, known=known: known, frontier) == 0


def test_nested_maps_of_lanes_run_under_a_policy():
    """An outer `vmap` over lanes with program counters."""
    n, x = instances(8, 4)
    program = jax.make_jaxpr(loop_in_loop)(n[0], x[0])
    rule = LaneRule(most_lanes, STEP_WORK)
    lanes = functools.partial(run_lanes, program, in_batched=[True, True], size=8, rule=rule)
    both = jax.jit(jax.vmap(lambda x: lanes(args=[n, x])[1]))(jnp.stack([x, 2 * x]))
    for ours, given in zip(both, (x, 2 * x), strict=True):
        theirs = np.stack([loop_in_loop(a, b)[1] for a, b in zip(n, given, strict=True)])
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_single_block_needs_no_policy():
    def spin(n, x):
        return lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, jnp.sin(c[1])), (n, x))[1]

    n, x = instances()
    ours, counter = run(spin, most_lanes, n, x)
    np.testing.assert_allclose(ours, [spin(a, b) for a, b in zip(n, x, strict=True)], rtol=1e-5)
    (known,) = counter.runs
    assert known.needed == int(n.sum())
    np.testing.assert_array_equal(
        simulate(known, least_loss).counts, counted(counter, known.blocks)
    )
