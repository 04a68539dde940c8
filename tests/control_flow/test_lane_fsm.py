"""Policies for lanes that are learned: tables on hosts and devices, files, batched functions."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import mostly_slow
from jax import lax

import jedbatch
from jedbatch import policies
from jedbatch._learn.lane_learning import learn_lanes
from jedbatch._schedule.lane_fsm import (
    MAX_ENTRIES,
    TABLE_SIZE,
    LaneDecision,
    LaneFSM,
    lane_code,
    look_up,
)
from jedbatch._schedule.lane_policies import (
    LaneBlocks,
    LaneFrontier,
    least_loss,
    most_lanes,
    next_step,
)
from jedbatch._schedule.lane_runs import LaneRun, simulate

# Programs of lanes are compiled as users do in `test_program_counters.py`.
pytestmark = pytest.mark.unoptimized

LABELS = ("a to 1", "b to 0")


def blocks_of(label, size=64, num_blocks=3):
    steps = [(b, w) for b in range(num_blocks) for w in (4, 16, size)]
    work = tuple(100.0 * (b + 1) for b in range(num_blocks))
    return LaneBlocks(label, size, work, (False,) * num_blocks, *zip(*steps, strict=True), 500.0)


def random_tables(rng, count, num_blocks=3):
    """For each label decisions on random codes, and the same as the steps of `blocks_of`."""
    tables = {}
    for label in LABELS:
        codes = {tuple(rng.integers(0, 4, num_blocks).tolist()) for _ in range(count)}
        tables[label] = {
            code: (int(rng.choice(np.flatnonzero(code))), int(rng.integers(3)))
            for code in codes
            if any(code)
        }
    return tables


def test_tables_say_what_was_put_in_on_hosts_and_devices():
    rng = np.random.default_rng(0)
    tables = random_tables(rng, 40)
    machine = LaneFSM.of(tables)
    assert len(machine) == sum(map(len, tables.values()))
    assert machine.table.shape == (TABLE_SIZE,)
    for label in LABELS:
        blocks = blocks_of(label)
        on_device = jax.jit(
            lambda table, waiting, blocks=blocks: look_up(table, LaneFrontier(blocks, waiting, jnp))
        )
        for _ in range(60):
            waiting = rng.multinomial(rng.integers(1, 65), rng.dirichlet([0.4] * 3))
            frontier = LaneFrontier(blocks, waiting.astype(np.int32), np)
            code = tuple(lane_code(frontier).tolist())
            expected = -1
            if code in tables[label]:
                block, width = tables[label][code]
                expected = 3 * block + width
            assert int(machine(frontier)) == expected
            assert int(on_device(machine.table, frontier.waiting)) == expected
            step = int(next_step(machine, frontier))
            assert step == (int(least_loss(frontier)) if expected < 0 else expected)


def test_codes_say_how_many_wait():
    blocks = blocks_of("a")
    assert blocks.filling.tolist() == [16, 16, 16]
    frontier = LaneFrontier(blocks, np.array([0, 3, 4], np.int32), np)
    assert lane_code(frontier).tolist() == [0, 1, 2]
    assert lane_code(frontier._replace(waiting=np.array([15, 16, 1], np.int32))).tolist() == [
        2,
        3,
        1,
    ]


def test_too_many_entries_are_left_to_the_default():
    rng = np.random.default_rng(1)
    machine = LaneFSM.of(random_tables(rng, 2 * MAX_ENTRIES, num_blocks=8))
    assert len(machine) > MAX_ENTRIES
    kept = (machine.table[-(TABLE_SIZE // 2) :] >= 0).sum()
    assert kept == MAX_ENTRIES


def test_machines_can_be_saved_and_printed(tmp_path):
    machine = LaneFSM.of({"a to 1": {(1, 0): (0, 1), (2, 1): (0, 1), (0, 3): (1, 0)}})
    machine.save(tmp_path / "lanes.json")
    assert LaneFSM.load(tmp_path / "lanes.json") == machine
    assert policies.LaneFSM is LaneFSM
    text = str(machine)
    assert "LaneFSM of 1 programs, 3 codes, otherwise least_loss" in text
    assert "run 0 in width 1 when 0 few" in text
    assert "or 0 many, 1 few" in text
    assert "run 1 in width 0 when 1 full" in text
    with pytest.raises(ValueError, match=r"`LaneFSM.load` cannot read the text: its format is"):
        LaneFSM.from_json("{}")
    broken = machine.to_json().replace('"run": 0', '"run": 7')
    with pytest.raises(ValueError, match="runs block 7, where nobody waits"):
        LaneFSM.from_json(broken)


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (LaneDecision(1, 0, 0, ((1, 0),)), "of no program"),
        (LaneDecision(0, 0, 0, ()), "has no codes"),
        (LaneDecision(0, 0, 9, ((1, 0),)), "no width 9"),
        (LaneDecision(0, 0, 0, ((1, 0), (1, 0, 0))), "differ in their blocks"),
        (LaneDecision(0, 0, 0, ((4, 0),)), "is no code"),
        (LaneDecision(0, 1, 0, ((1, 0),)), "where nobody waits"),
    ],
)
def test_machines_that_cannot_run_are_refused(decision, message):
    with pytest.raises(ValueError, match=message):
        LaneFSM(("a",), (decision,))


def synthetic_run(seed, size=64):
    """Lanes that alternate between two blocks with much work, over one with little."""
    rng = np.random.default_rng(seed)
    lanes = []
    for _ in range(size):
        visits = []
        for _ in range(rng.integers(1, 12)):
            visits += [(int(rng.integers(2)), 1), (2, 1)]
        lanes.append(visits)
    return LaneRun.of(blocks_of("synthetic", size), lanes)


def test_learning_is_never_worse_than_the_default_on_what_it_learned_from():
    runs = [synthetic_run(seed) for seed in range(3)]
    machine = learn_lanes(runs, episodes=24)
    ours, default, most = (
        sum(simulate(run, policy).cost for run in runs)
        for policy in (machine, least_loss, most_lanes)
    )
    assert ours <= default
    report = machine.report
    by_name = {e.policy.partition(" ")[0]: e for e in report.entries}
    useful = sum(run.useful for run in runs)
    assert by_name["least_loss"].cost == pytest.approx(default / useful)
    assert by_name["most_lanes"].cost == pytest.approx(most / useful)
    assert by_name["LaneFSM"].cost == pytest.approx(ours / useful)
    assert report.entries[0].cost == min(e.cost for e in report.entries)
    (needed,) = report.needed.values()
    assert needed == sum(run.needed for run in runs) <= min(e.lanes for e in report.entries)
    assert "certified least" in str(report)
    costs = [cost for _, cost in report.curves["synthetic"]]
    assert costs == sorted(costs, reverse=True)  # the best so far
    assert learn_lanes(runs, episodes=24) == machine  # the same runs give the same policy


def test_runs_of_several_sizes_are_learned_from_together():
    runs = [synthetic_run(0), synthetic_run(1, 32)]
    machine = learn_lanes(runs, episodes=4)
    ours = sum(simulate(run, machine).cost for run in runs)
    assert ours <= sum(simulate(run, least_loss).cost for run in runs)


def test_nothing_to_learn_from():
    machine = learn_lanes([], episodes=4)
    assert len(machine) == 0
    frontier = LaneFrontier(blocks_of("a"), np.array([3, 9, 0], np.int32), np)
    assert int(next_step(machine, frontier)) == int(least_loss(frontier))
    with pytest.raises(ValueError, match=r"`learn` got episodes=-1"):
        learn_lanes([], episodes=-1)


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


def instances(count=64, seed=1):
    draws = np.random.default_rng(seed)
    return [(int(n), draws.normal(size=8).astype(np.float32)) for n in draws.integers(0, 7, count)]


def whole(w, instance):
    return spin_in_spin(w, *instance)


alone = jax.jit(whole)  # else its loops are compiled for each instance


def batched(**options):
    return jedbatch.batch(whole, control_flow="lanes", target=TARGET, **options)


def by_rows(**options):
    """The same for the rows of arrays, which compile once."""
    fn = lambda w, n, x: spin_in_spin(w, n, x)  # noqa: E731
    return jedbatch.batch(fn, (None, 0, 0), control_flow="lanes", target=TARGET, **options)


def rows_of(given):
    return jnp.asarray([n for n, _ in given]), jnp.stack([x for _, x in given])


@pytest.fixture(params=mostly_slow([by_rows, batched], "by_rows"), scope="module")
def learned(request):
    """A function, its arguments and results, its machine, and what was counted by each policy."""
    given = instances()
    theirs = [alone(W, x) for x in given]
    fn, args = request.param(), rows_of(given) if request.param is by_rows else [given]
    counts = {"least_loss": fn.lane_steps(W, *args)}
    machine = fn.learn(W, *args, lanes=True, episodes=8)
    assert fn.lane_policy is machine
    counts["LaneFSM"] = fn.lane_steps(W, *args)
    return SimpleNamespace(fn=fn, args=args, theirs=theirs, machine=machine, counts=counts)


def test_a_machine_is_data_of_compiled_programs(learned):
    fn, args, theirs, counts = learned.fn, learned.args, learned.theirs, learned.counts
    fn.lane_policy = learned.machine
    np.testing.assert_allclose(fn(W, *args), theirs, rtol=1e-5, atol=1e-6)
    assert counts["LaneFSM"].needed == counts["least_loss"].needed
    compiled = fn.compilations
    program = learned.machine.report.entries[0].program
    codes = [(a, b, c) for a in range(4) for b in range(4) for c in range(4) if a or b or c]
    others = [
        LaneFSM.of({program: {c: (int(np.flatnonzero(c)[k]), w) for c in codes}})
        for k, w in ((0, 0), (-1, 2))
    ]
    for other in others:
        fn.lane_policy = other
        np.testing.assert_allclose(fn(W, *args), theirs, rtol=1e-5, atol=1e-6)
        assert fn.compilations == compiled
    last = fn.lane_steps(W, *args)
    assert last.needed == counts["LaneFSM"].needed
    assert last.steps != counts["LaneFSM"].steps  # it does something else


def test_the_report_is_what_the_device_counts(learned):
    """Steps and lanes of every policy in the report, against those that ran."""
    fn, counts = learned.fn, learned.counts
    fn.lane_policy = policies.most_lanes
    counts["most_lanes"] = fn.lane_steps(W, *learned.args)
    entries = learned.machine.report.entries
    assert {entry.policy.partition(" ")[0] for entry in entries} == counts.keys()
    for entry in entries:
        name = entry.policy.partition(" ")[0]
        assert (counts[name].steps, counts[name].lanes) == (entry.steps, entry.lanes), name
        assert counts[name].needed == learned.machine.report.needed[entry.program]


def test_plans_keep_the_table_they_were_made_with():
    """A plan is data of a compiled program, so is its table, under `jit` too."""
    given = instances(12)
    theirs = [alone(W, x) for x in given]
    fn = batched(lane_policy=LaneFSM.of({"nothing to 1": {(1, 0): (0, 0)}}))
    traced = []

    @jax.jit
    def apply(w, plan):
        traced.append(1)
        return fn.apply(w, plan)

    first = fn.plan(W, given, gradient=False)
    other = LaneFSM.of({"nothing to 1": {(1, 1): (0, 0)}})
    fn.lane_policy = other
    second = fn.plan(W, given, gradient=False)
    assert (np.asarray(first.lane_table) != np.asarray(second.lane_table)).any()
    np.testing.assert_array_equal(second.lane_table, other.table)
    for plan in (first, second):
        np.testing.assert_allclose(apply(W, plan), theirs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(fn.apply(W, plan), theirs, rtol=1e-5, atol=1e-6)
    assert len(traced) == 1
    fn.lane_policy = policies.most_lanes  # of another kind: compiled by itself
    np.testing.assert_allclose(fn(W, given), theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fn.apply(W, first), theirs, rtol=1e-5, atol=1e-6)
    assert fn.plan(W, given).lane_table is None


@pytest.mark.slow
def test_derivatives_under_a_machine():
    given = instances(20)
    fn = batched()
    fn.learn(W, given, lanes=True, episodes=2)

    def theirs(w):
        return jnp.stack([whole(w, x) for x in given])

    pushed = jax.jvp(lambda w: fn(w, given), (W,), (W,))[1]
    np.testing.assert_allclose(pushed, jax.jvp(theirs, (W,), (W,))[1], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_gradients_around_loops_under_a_machine():
    @jedbatch.cell
    def around(w, n, x):
        return jnp.tanh(x @ w) * lax.stop_gradient(spin_in_spin(w, n, x))

    given = instances(20)
    fn = jedbatch.batch(lambda w, x: around(w, *x), control_flow="lanes", target=TARGET)
    fn.learn(W, given, lanes=True, episodes=2)

    def loss(run, w):
        return jnp.square(run(w)).sum()

    ours = jax.grad(lambda w: loss(lambda w: fn(w, given), w))(W)
    theirs = jax.grad(lambda w: loss(lambda w: jnp.stack([around(w, *x) for x in given]), w))(W)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_policies_for_lanes_are_given_by_name_or_value():
    given = instances()
    theirs = [alone(W, x) for x in given]
    for policy in (policies.least_loss, policies.most_lanes):
        fn = by_rows(lane_policy=policy)
        np.testing.assert_allclose(fn(W, *rows_of(given)), theirs, rtol=1e-5, atol=1e-6)
        assert fn.lane_policy is policy
    with pytest.raises(TypeError, match="got lane_policy='most_lanes'; expected a callable"):
        batched(lane_policy="most_lanes")
    fn = batched()
    with pytest.raises(TypeError, match="got lane_policy=None"):
        fn.lane_policy = None
    with pytest.raises(TypeError, match="`learn` got values that JAX traces"):
        jax.jit(lambda w: fn.learn(w, given, lanes=True) and w)(W)
    with pytest.raises(TypeError, match="lanes=1; expected True or False"):
        fn.learn(W, given, lanes=1)


@pytest.mark.slow
def test_functions_that_decide_on_values_run_under_a_machine():
    """In rounds."""

    def decides(w, instance):
        n, x = instance
        return spin_in_spin(w, n if x.sum() > 1e9 else n + 1, x) + 0 * x

    given = instances(20)
    fn = jedbatch.batch(decides, control_flow="lanes", target=TARGET)
    machine = fn.learn(W, given, lanes=True, episodes=2)
    assert machine.report.num_runs >= 1
    theirs = [spin_in_spin(W, n + 1, x) for n, x in given]
    np.testing.assert_allclose(fn(W, given), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_exported_functions_keep_their_machine():
    given = instances(20)
    theirs = [alone(W, x) for x in given]
    fn = batched()
    fn.learn(W, given, lanes=True, episodes=2)
    exported = fn.export(W, given, gradient=False)
    np.testing.assert_allclose(exported(W, fn.graph(W, given)), theirs, rtol=1e-5, atol=1e-6)


def test_lanes_or_lock_step_by_what_a_step_costs():
    """`auto` runs by lanes where a step costs little, and in lock step where it costs much."""
    rows = rows_of(instances())
    counts = {}
    for step_work in (100.0, 1e9):
        target = jedbatch.Target("some", step_work=step_work)
        fn = jedbatch.batch(lambda w, n, x: spin_in_spin(w, n, x), (None, 0, 0), target=target)
        counts[step_work] = fn.lane_steps(W, *rows)
    assert {x.what for x in counts[100.0]} == {"block"}
    assert not counts[1e9]
