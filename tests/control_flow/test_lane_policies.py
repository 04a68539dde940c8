"""Policies for lanes: the same results, and steps as a simulator of queues counts them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import mostly_slow
from cases.loops import PROGRAMS, loop_in_loop
from jax import lax

import jedbatch
from jedbatch import policies
from jedbatch._jaxpr.lane_policies import (
    LARGEST_COST,
    LaneBlocks,
    LaneFrontier,
    checked_lane_policy,
    least_loss,
    most_lanes,
    next_step,
)
from jedbatch._jaxpr.lane_steps import counting
from jedbatch._jaxpr.program_counters import LaneRule, _cut_for, lane_blocks, run_lanes

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
    return jnp.int32(0) * frontier.waiting[0]


POLICIES = (least_loss, most_lanes, last_first, nonsense)


def instances(size=SIZE, most=7):
    rng = np.random.default_rng(0)
    numbers = jnp.asarray(rng.integers(0, most, size), jnp.int32)
    return numbers, jnp.asarray(np.random.default_rng(1).normal(size=(size, 4)), jnp.float32)


def run_by_all(fn, n, x):
    """Yields (results of lanes, counts by block and width) of `POLICIES`, by one program."""
    program, shape = jax.make_jaxpr(fn, return_shape=True)(n[0], x[0])

    def lanes(number, *xs):
        def chosen(frontier):
            steps = [jnp.asarray(policy(frontier), jnp.int32) for policy in POLICIES]
            return jnp.stack(steps)[number]

        return run_lanes(program, xs, [True, True], len(n), rule=LaneRule(chosen, STEP_WORK))

    with counting() as counter:
        compiled = jax.jit(lanes)
        for number in range(len(POLICIES)):
            counter.begin()
            outs = jax.block_until_ready(compiled(number, n, x))
            jax.effects_barrier()
            found = {(b - 1, width): row for (_, _, b, _, width), row in counter.found.items()}
            yield jax.tree.unflatten(jax.tree.structure(shape), outs), found


def blocks_in(fn, n, x):
    """Returns (the blocks of a function and their steps, which of them come after themselves)."""
    program, found = jax.make_jaxpr(fn)(n[0], x[0]), []
    jax.eval_shape(lambda *xs: found.append(_cut_for(program, xs, [True, True])), n, x)
    repeats = [block.repeats for block in found[0].blocks[1:-1]]
    return lane_blocks(found[0], len(n), STEP_WORK), repeats


def visits_of(often):
    """Returns the blocks of `loop_in_loop` that a lane visits, and its trips in each in a row."""
    visits = []
    for i in range(often):
        inner = (i * often) % 5
        visits += [[0, 1], *([[1, inner]] if inner else []), [2, 1]]
    return visits


def simulated(blocks, repeats, lanes, policy):
    """Returns int64[K, 3], the counts of each step, where lanes make some visits in queues."""
    choose = jax.jit(lambda waiting: next_step(policy, LaneFrontier(blocks, waiting)))
    counts = np.zeros((len(blocks.block), 3), np.int64)
    left = [list(map(list, visits)) for visits in lanes]
    queues = [[] for _ in blocks.work]

    def arrive(lane):
        if left[lane]:
            queues[left[lane][0][0]].append(lane)

    for lane in range(len(lanes)):
        arrive(lane)
    while any(queues):
        waiting = np.array(list(map(len, queues)), np.int32)
        step = int(choose(waiting))
        block, width = blocks.block[step], blocks.width[step]
        taken, queues[block] = queues[block][:width], queues[block][width:]
        assert taken, "nobody waits there"
        full, wasted = min(width, int(waiting.sum())), 0
        stay, trips = list(taken), 0
        while stay and (not trips or (repeats[block] and wasted * blocks.work[block] < STEP_WORK)):
            counts[step] += 1, width, len(stay)
            for lane in stay:
                left[lane][0][1] -= 1
            trips, stay = trips + 1, [lane for lane in stay if left[lane][0][1]]
            wasted += full - len(stay)
        for lane in taken:
            if not left[lane][0][1]:
                left[lane].pop(0)
            arrive(lane)
    return counts


@pytest.mark.parametrize("fn", mostly_slow(PROGRAMS, "loop_in_loop"))
def test_policies_change_no_result_and_no_work_that_lanes_need(fn):
    n, x = instances()
    theirs = [jax.jit(fn)(a, b) for a, b in zip(n, x, strict=True)]
    theirs = jax.tree.map(lambda *xs: np.stack(xs), *theirs)
    known = None
    for ours, found in run_by_all(fn, n, x):
        for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        needed = {}
        for (block, _), (_, lanes, own) in found.items():
            assert own <= lanes
            needed[block] = needed.get(block, 0) + own
        known = known or needed
        assert known == needed


def test_steps_are_those_of_queues():
    """What each lane does is known from the function in Python."""
    n, x = instances(70, 9)
    blocks, repeats = blocks_in(loop_in_loop, n, x)
    assert len(blocks.block) > len(blocks.work) == 3
    lanes = [visits_of(often) for often in n.tolist()]
    totals = []
    for policy, (_, found) in zip(POLICIES, run_by_all(loop_in_loop, n, x), strict=True):
        expected = simulated(blocks, repeats, lanes, policy)
        ours = [found[step] for step in zip(blocks.block, blocks.width, strict=True)]
        np.testing.assert_array_equal(ours, expected)
        assert expected[:, 2].sum() == sum(trips for visits in lanes for _, trips in visits)
        totals.append(expected[:, 0].sum())
    assert len(set(totals)) > 1  # some take more steps than others


# --- what policies choose ---


def blocks_of(work, start=100.0, widths=(4, 16, 64)):
    steps = [(b, w) for b in range(len(work)) for w in widths]
    return LaneBlocks(work, *zip(*steps, strict=True), start)


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
        frontier = LaneFrontier(blocks, waiting)
        assert int(least_loss(frontier)) == by_hand(blocks, waiting.tolist())


def test_steps_that_nobody_waits_for_are_left_to_the_default():
    rng = np.random.default_rng(1)
    blocks = blocks_of((3.0, 7e5, 12345.0))
    choose = jax.jit(lambda waiting: next_step(nonsense, LaneFrontier(blocks, waiting)))
    seen = set()
    for _ in range(50):
        waiting = rng.multinomial(rng.integers(1, 9), rng.dirichlet([0.5] * 3)).astype(np.int32)
        expected = 0 if waiting[0] else by_hand(blocks, waiting.tolist())
        assert int(choose(waiting)) == expected
        assert waiting[blocks.block[expected]] > 0
        seen.add(bool(waiting[0]))
    assert seen == {True, False}


def test_most_lanes_takes_the_block_with_most():
    blocks = blocks_of((1.0, 1e4))
    for waiting, block in (([3, 2], 0), ([2, 3], 1), ([2, 2], 0), ([0, 1], 1)):
        step = int(most_lanes(LaneFrontier(blocks, np.array(waiting, np.int32))))
        assert blocks.block[step] == block
    step = int(most_lanes(LaneFrontier(blocks, np.array([0, 17], np.int32))))
    assert blocks.width[step] == 16  # 64 lanes of so much work cost more than 16


def test_costs_are_whole_numbers_that_products_of_lanes_do_not_exceed():
    blocks = blocks_of((1e7, 3.0), widths=(8, 8192))
    assert blocks.costs.dtype == np.int32
    assert blocks.costs.max() == LARGEST_COST
    assert blocks.filling.tolist() == [8, 8]
    waiting = np.array([8000, 192], np.int32)
    assert (LaneFrontier(blocks, waiting).lost >= 0).all()


def test_policies_are_callables():
    assert checked_lane_policy(most_lanes) is most_lanes
    with pytest.raises(TypeError, match=r"got lane_policy='most'; expected a callable from a"):
        checked_lane_policy("most")


@pytest.mark.parametrize("step", ["x", None, 1.0, (0, 1), np.zeros(1, np.int32)])
def test_policies_return_numbers_of_steps(step):
    frontier = LaneFrontier(blocks_of((30.0,)), np.array([3], np.int32))
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
    blocks, repeats = blocks_in(spin, n, x)
    lanes = [[[0, often]] if often else [] for often in n.tolist()]
    expected = simulated(blocks, repeats, lanes, least_loss)
    for ours, found in run_by_all(spin, n, x):
        np.testing.assert_allclose(ours, [spin(a, b) for a, b in zip(n, x, strict=True)], rtol=1e-5)
        np.testing.assert_array_equal([found[0, w] for w in blocks.width], expected)
        assert expected[:, 2].sum() == n.sum()


# --- in batched functions ---

rng = np.random.default_rng(0)
W = jnp.asarray(rng.normal(size=(8, 8)) / 4, jnp.float32)
TARGET = jedbatch.Target("small", step_work=500.0)


@jedbatch.cell
def spin_in_spin(w, n, x):
    def body(carry):
        i, x = carry
        x = lax.fori_loop(0, i, lambda _, x: jnp.tanh(x @ w), x)
        return i + 1, jnp.sin(x @ w)

    return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]


def by_rows(**options):
    fn = lambda w, n, x: spin_in_spin(w, n, x)  # noqa: E731
    return jedbatch.batch(fn, (None, 0, 0), control_flow="lanes", target=TARGET, **options)


def rows(count=64):
    draws = np.random.default_rng(1)
    return jnp.asarray(draws.integers(0, 7, count)), jnp.asarray(draws.normal(size=(count, 8)), "f")


def test_policies_for_lanes_are_given_by_value():
    given = rows()
    alone = jax.jit(spin_in_spin)  # else its loops are compiled for each instance
    theirs = [alone(W, *x) for x in zip(*given, strict=True)]
    fn, steps = by_rows(lane_policy=most_lanes), {}
    for policy in (most_lanes, policies.least_loss):  # assigned later, too
        fn.lane_policy = policy
        assert fn.lane_policy is policy
        np.testing.assert_allclose(fn(W, *given), theirs, rtol=1e-5, atol=1e-6)
        steps[policy] = fn.lane_steps(W, *given)
    assert steps[most_lanes].needed == steps[least_loss].needed
    assert steps[most_lanes].steps != steps[least_loss].steps
    with pytest.raises(TypeError, match="got lane_policy='most_lanes'; expected a callable"):
        by_rows(lane_policy="most_lanes")
    with pytest.raises(TypeError, match="got lane_policy=None"):
        fn.lane_policy = None


@pytest.mark.parametrize("lanes", [True, False])
def test_no_policy_for_lanes_is_learned(lanes):
    with pytest.raises(TypeError, match=r"`learn` got lanes=.*give `lane_policy=` of `jedbatch"):
        by_rows().learn(W, *rows(4), lanes=lanes)
    with pytest.raises(AttributeError, match=r"policies for lanes are not learned. Give `lane_pol"):
        _ = policies.LaneFSM


@pytest.mark.slow
def test_derivatives_under_a_policy():
    given = rows(20)
    fn = by_rows(lane_policy=most_lanes)
    pushed = jax.jvp(lambda w: fn(w, *given), (W,), (W,))[1]
    by_loop = lambda w: jnp.stack([spin_in_spin(w, *x) for x in zip(*given, strict=True)])  # noqa: E731
    np.testing.assert_allclose(pushed, jax.jvp(by_loop, (W,), (W,))[1], rtol=1e-3, atol=1e-5)


def test_lanes_or_lock_step_by_what_a_step_costs():
    """`auto` runs by lanes where a step costs little, and in lock step where it costs much."""
    given, counts = rows(), {}
    for step_work in (100.0, 1e9):
        target = jedbatch.Target("some", step_work=step_work)
        fn = jedbatch.batch(lambda w, n, x: spin_in_spin(w, n, x), (None, 0, 0), target=target)
        counts[step_work] = fn.lane_steps(W, *given)
    assert {x.what for x in counts[100.0]} == {"block"}
    assert not counts[1e9]
