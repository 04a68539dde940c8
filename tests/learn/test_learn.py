"""Learning: the frontier it learns on, what it reaches, and how batched functions use it."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_no_recompile, check, random_dag

import jedbatch
from jedbatch import Graph, learn, lower_bound, policies, schedule
from jedbatch._learn.adaptive import Adaptive
from jedbatch._learn.candidates import by_type
from jedbatch._learn.q_learning import NAMES, Problem, codes, look, salts, slot
from jedbatch._schedule.encodings import ENCODINGS, encode

# Programs here have many types of few nodes, so that there is something to learn.
pytestmark = [
    pytest.mark.filterwarnings("ignore::jedbatch.errors.ManyTypesWarning"),
]

FIG1 = Graph.from_dag(
    [0] * 7 + [1] * 7 + [2],
    [[], [], [], [], [0, 1], [4, 2], [5, 3], *([n] for n in range(7)), list(range(7, 14))],
    names=["inner", "output", "sum"],
)


def twice(tree, outputs):
    """Two graphs in sequence, the roles of types 0 and 1 swapped in the second."""
    types, preds = [], []
    for inner, output in ((0, 1), (1, 0)):
        start = len(types)
        before = [start - 1] if start else []
        types += [inner] * len(tree)
        preds += [[start + p for p in reads] or before for reads in tree]
        types += [output] * len(outputs) + [2]
        preds += [[start + n] for n in outputs]
        preds.append(list(range(start + len(tree), start + len(tree) + len(outputs))))
    return Graph.from_dag(types, preds)


A4 = twice([[], [], [], [], [0, 1], [4, 2], [5, 3]], range(7))
A4_TIES = twice([[], [0], [1], [2]], range(4))


def alternating_chains(rng, count):
    """Chains of two types in turn, of different lengths, each beginning with either."""
    for _ in range(count):
        first, length = int(rng.integers(2)), int(rng.integers(1, 20))
        types = [(first + i) % 2 for i in range(length)]
        yield Graph.from_dag([*types, *[2] * length], chain(length) + [[i] for i in range(length)])


def chain(length):
    return [[i - 1] if i else [] for i in range(length)]


def random_trees(rng, count, kinds):
    """Binary trees whose inner nodes are of random types, with an output at every node."""
    names = [str(i) for i in range(kinds + 2)]
    for _ in range(count):
        types, preds = [], []
        grow(rng, int(rng.integers(2, 25)), kinds, types, preds)
        outputs = [[n] for n in range(len(types))]
        yield Graph.from_dag(types + [kinds + 1] * len(types), preds + outputs, names=names)


def grow(rng, size, kinds, types, preds):
    below = []
    if size > 1:
        left = int(rng.integers(1, size))
        below = [grow(rng, n, kinds, types, preds) for n in (left, size - left)]
    types.append(1 + int(rng.integers(kinds)) if below else 0)
    preds.append(below)
    return len(types) - 1


@pytest.mark.parametrize("seed", range(8))
def test_both_frontiers_step_alike(seed):
    """The frontier of execution and the one of learning, on a random part of the instances."""
    rng = np.random.default_rng(seed)
    num_types = int(rng.integers(2, 5))
    parts = [
        Graph.from_dag(
            *random_dag(rng, 20, num_types, most=2), names=[str(i) for i in range(num_types)]
        )
        for _ in range(4)
    ]
    whole = Graph.concatenate(parts)
    taken = np.array([1, 0, 1, 1])
    graph = Graph.concatenate([parts[i] for i in np.flatnonzero(taken)])
    instance = np.repeat(np.arange(4), 20)
    with jax.numpy_rank_promotion("allow"):
        problem = Problem.of(whole, instance, 4, np.ones(num_types))
        count = problem.count @ taken.astype(np.float32)
        done = np.append(count == 0, True)
        frontier = policies.Frontier(graph)
        numbers = list(range(num_types))
        while ready := frontier.ready_types:
            seen = look(problem, count, jnp.asarray(done))
            np.testing.assert_array_equal(seen.num_ready, frontier.num_ready)
            said = np.asarray(codes(seen))
            for t in ready:
                assert seen.num_next[t] == frontier.num_next(t)
                assert (seen.top[t], seen.many[t], seen.turning[t]) == frontier.tallest(t)
                assert seen.shortens[t] == frontier.shortens(t)
            for row, name in zip(said, NAMES, strict=True):
                code = encode(name, frontier, ready, numbers)
                np.testing.assert_array_equal(row, by_type(code, numbers))
                salt = salts(num_types)
                assert int(slot(row, salt)) == int(slot(jnp.asarray(row), jnp.asarray(salt)))
            t = int(rng.choice(ready))
            frontier.run(t)
            done[:-1] |= np.asarray(seen.ready) & (problem.node_type == t)
        assert done.all()


def test_the_example_of_figure_1():
    assert len(schedule(FIG1, policies.depth)) == 9
    assert len(schedule(FIG1, policies.agenda)) == 7
    fsm = learn(FIG1)
    assert len(schedule(FIG1, fsm)) == lower_bound(FIG1) == 6
    assert fsm.encoding == "base"


@pytest.mark.parametrize("teachers", [True, False])
@pytest.mark.parametrize(
    ("graph", "reached"),
    [
        (A4, {"base": 15, "max": 12, "sort": 12, "phase": 12}),
        (A4_TIES, {"base": 15, "max": 15, "sort": 15, "phase": 12}),
    ],
)
def test_the_counter_examples(graph, reached, teachers):
    """What base (and max and sort, if counts tie) cannot tell apart, phase can."""
    assert lower_bound(graph) == 12
    found = {
        e: len(schedule(graph, learn(graph, encoding=e, teachers=teachers))) for e in ENCODINGS
    }
    assert found == reached
    assert len(schedule(graph, learn(graph, teachers=teachers))) == 12


@pytest.mark.parametrize("kind", ["chains", "trees"])
def test_q_learning_alone_reaches_the_bound(kind):
    """Without a teacher, on chains of two types in turn and on trees of one type."""
    make = {
        "chains": alternating_chains,
        "trees": lambda rng, count: random_trees(rng, count, 1),
    }[kind]
    rng = np.random.default_rng(0)
    fsm = learn(list(make(rng, 32)), teachers=False)
    for size in (8, 32, 256):
        graph = Graph.concatenate(list(make(rng, size)))
        found = schedule(graph, fsm)
        found.check(graph)
        gap = 1 if kind == "chains" else 0  # chains that begin with the other type come last
        assert len(found) <= lower_bound(graph) + gap


def test_the_gap_stays_when_batches_grow():
    """Learned on 32 instances, used on 256 others."""
    rng = np.random.default_rng(1)
    fsm = learn(list(random_trees(rng, 32, 2)), encoding="phase")
    gaps = []
    for size in (32, 256):
        graph = Graph.concatenate(list(random_trees(rng, size, 2)))
        gaps.append(len(schedule(graph, fsm)) / lower_bound(graph))
        assert len(schedule(graph, fsm)) <= min(
            len(schedule(graph, p)) for p in (policies.depth, policies.agenda, policies.sufficient)
        )
    assert gaps[1] <= gaps[0] * 1.1


def test_a_report():
    fsm = learn(list(random_trees(np.random.default_rng(1), 24, 2)), episodes=64)
    text = str(fsm.report)
    names = [e.name for e in fsm.report.entries]
    for name in ("depth", "agenda", "height", "sufficient", "critical", "beam 16"):
        assert name in names
    for encoding in ENCODINGS:
        assert f"FSM {encoding} by Q-learning" in names
        assert "FSM " + encoding + " after beam 16" in names
        assert fsm.report.curves[f"FSM {encoding} by Q-learning"][0][0] == 0
    assert "certified lower bound" in text
    assert fsm.report.num_instances == (18, 6)
    assert all(e.training >= fsm.report.bound[0] for e in fsm.report.entries)
    by_name = {e.name: e for e in fsm.report.entries}
    assert by_name[names[0]].training <= by_name["critical"].training


def test_the_same_in_every_process():
    """Learned with an explicit key; hashing of strings differs from process to process."""
    code = (
        "import jedbatch, numpy as np\nfrom learn import test_learn as t\n"
        "g = list(t.random_trees(np.random.default_rng(3), 12, 2))\n"
        "print(jedbatch.learn(g, key=7, episodes=64).to_json())\n"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    env = {"PYTHONHASHSEED": seed, "PYTHONPATH": "tests", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    here = jedbatch.learn(list(random_trees(np.random.default_rng(3), 12, 2)), key=7, episodes=64)
    assert run.stdout == here.to_json() + "\n"
    assert "jedbatch policy" in run.stdout


def test_many_types():
    """More than a table with a row for every set of types could index."""
    rng = np.random.default_rng(4)
    names = [str(i) for i in range(70)]
    graphs = [Graph.from_dag(*random_dag(rng, 60, 70, most=2), names=names) for _ in range(2)]
    fsm = learn(graphs, teachers=False, episodes=16)
    whole = Graph.concatenate(graphs)
    found = schedule(whole, fsm)
    found.check(whole)
    assert len(found) <= len(schedule(whole, policies.agenda))


def test_another_objective():
    """Batches of one type cost a hundred times as much: none of them is wasted."""

    def objective(graph):
        return np.array([100.0 if label == "1" else 1.0 for label in graph.labels])

    graphs = list(random_trees(np.random.default_rng(5), 16, 2))
    fsm = learn(graphs, objective=objective, episodes=64)
    whole = Graph.concatenate(graphs)
    cost = lambda s: float(objective(whole)[s.batch_type].sum())  # noqa: E731
    assert cost(schedule(whole, fsm)) <= cost(schedule(whole, learn(graphs, episodes=0)))
    assert fsm.report.bound[0] >= 100


@pytest.mark.parametrize(
    ("graphs", "options", "error", "message"),
    [
        ([], {}, TypeError, "got nothing; expected graphs"),
        ([(1, 2)], {}, TypeError, r"`batched\.learn\(params, instances\)`"),
        (FIG1, {"encoding": "colour"}, ValueError, "'colour'; expected one of"),
        (FIG1, {"encoding": ["sort"]}, ValueError, "expected one of"),
        (None, {}, TypeError, "got NoneType; expected graphs"),
        (FIG1, {"episodes": -1}, ValueError, "episodes=-1"),
        (FIG1, {"episodes": 0, "teachers": False}, ValueError, "teachers=False"),
        (FIG1, {"objective": lambda g: [1.0]}, ValueError, "a positive number for each"),
        (
            [Graph.from_dag([0], [[]], names=["a"]), Graph.from_dag([0], [[]], names=["b"])],
            {},
            ValueError,
            "over different types",
        ),
    ],
)
def test_bad_input(graphs, options, error, message):
    with pytest.raises(error, match=message):
        learn(graphs, **options)


# --- batched functions ---


@jedbatch.cell
def plus(params, x, y):
    return jnp.tanh((x + y) @ params["plus"])


@jedbatch.cell
def times(params, x, y):
    return jnp.tanh((x * y) @ params["times"])


def evaluate(params, tree):
    if isinstance(tree, int):
        return params["leaf"] * tree
    kind, left, right = tree
    return (plus if kind else times)(params, evaluate(params, left), evaluate(params, right))


def formulas(seed, count):
    rng = np.random.default_rng(seed)

    def grow(size):
        if size == 1:
            return int(rng.integers(1, 5))
        left = int(rng.integers(1, size))
        return int(rng.integers(2)), grow(left), grow(size - left)

    return [grow(int(rng.integers(2, 14))) for _ in range(count)]


def parameters(size=3):
    key = jax.random.key(0)
    matrix = lambda i: 0.3 * jax.random.normal(jax.random.fold_in(key, i), (size, size))  # noqa: E731
    return {"leaf": jnp.ones(size) / 3, "plus": matrix(0), "times": matrix(1)}


def test_a_batched_function_learns_its_policy_once():
    params = parameters()
    batched = check(evaluate, params, formulas(0, 8), gradients=False)
    fsm = batched.policy
    assert fsm.encoding == "phase"
    assert {name.split("(")[0] for name in fsm.types} >= {"plus", "times"}
    with assert_no_recompile():
        for seed in range(1, 4):
            plan = batched.plan(params, formulas(seed, 8))
            assert plan.schedule.policy == "FSM phase"
    assert batched.policy is fsm


def test_planning_inside_of_jit():
    trees, params = formulas(1, 6), parameters()
    batched = jedbatch.batch(evaluate)
    inside = jax.jit(lambda p: batched(p, trees))(params)
    np.testing.assert_allclose(inside, jedbatch.batch(evaluate)(params, trees), rtol=1e-5)
    assert batched.policy is not None


def test_planning_where_jax_is_restricted():
    """Learning happens in JAX too, but not in the caller's."""
    trees, params = formulas(1, 6), parameters()
    expected = jedbatch.batch(evaluate)(params, trees)
    with jax.transfer_guard("disallow"):
        plan = jedbatch.batch(evaluate).plan(params, trees)
    with jax.disable_jit():
        again = jedbatch.batch(evaluate).plan(params, trees)
    assert plan.schedule.policy == again.schedule.policy == "FSM phase"
    mesh = jax.make_mesh((1,), ("x",))
    spec = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        lambda p: jedbatch.batch(evaluate)(p, trees), mesh=mesh, in_specs=spec, out_specs=spec
    )
    np.testing.assert_allclose(sharded(params), expected, rtol=1e-5)


def test_learning_from_instances():
    params, trees = parameters(), formulas(2, 16)
    batched = jedbatch.batch(evaluate)
    assert batched.policy is None
    shapes = jax.eval_shape(lambda: params)
    fsm = batched.learn(shapes, trees, encoding="sort", episodes=0)
    assert batched.policy is fsm
    plan = batched.plan(params, formulas(3, 16))
    assert plan.schedule.policy == "FSM sort"
    assert "batches FSM sort" in str(plan)
    batched.policy = None
    assert batched.plan(params, trees).schedule.policy == "FSM phase"
    with pytest.raises(TypeError, match="policy='agenda'"):
        batched.policy = "agenda"


def test_what_is_left_to_the_fallback_is_printed():
    params, trees = parameters(), formulas(4, 16)
    empty = policies.FSM("phase", (), ())
    plan = jedbatch.batch(evaluate, policy=empty).plan(params, trees)
    assert plan.schedule.unseen > 0
    assert f"FSM phase, {plan.schedule.unseen} left to its fallback" in str(plan)


def test_a_policy_serves_other_sizes_and_other_processes(tmp_path):
    """Saved, loaded, and used with more hidden units: no state is unknown."""
    trees = formulas(5, 24)
    first = jedbatch.batch(evaluate)
    first.learn(parameters(3), trees).save(tmp_path / "policy.json")
    fsm = policies.FSM.load(tmp_path / "policy.json")
    other = jedbatch.batch(evaluate, policy=fsm)
    plans = [first.plan(parameters(3), trees), other.plan(parameters(7), trees)]
    assert plans[0].schedule.unseen == plans[1].schedule.unseen
    np.testing.assert_array_equal(plans[0].schedule.node, plans[1].schedule.node)


def test_optimal_without_learning_where_rank_says_so():
    """Trees of one type: by rank, and the machine that does the same if one asks for it."""
    params = parameters()
    trees = [(1, left, 2) for left in (1, (1, 2, 3), (1, (1, 1, 2), 1))]
    batched = jedbatch.batch(evaluate)
    plan = batched.plan(params, trees)
    assert plan.schedule.policy == "by rank"
    assert len(schedule(plan.graph, batched.policy)) == lower_bound(plan.graph)
    mixed = batched.plan(params, formulas(6, 8))
    assert mixed.schedule.policy == "FSM phase"


def test_settings_do_not_matter():
    """64 bits, strict promotion of dtypes: learning is the same."""
    graphs = list(random_trees(np.random.default_rng(6), 8, 2))
    plain = learn(graphs, episodes=64)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
        assert learn(graphs, episodes=64) == plain
    assert learn(graphs, episodes=64, key=jax.random.key(0)) == plain


def test_new_types_are_learned_when_there_are_more_than_known():
    """Not for every type that appears, or a stream of new ones would learn for ever."""
    adaptive = Adaptive()
    rng = np.random.default_rng(7)

    def mixed(num_types):
        names = [str(i) for i in range(num_types)]
        return Graph.from_dag(*random_dag(rng, 40, num_types, most=2), names=names)

    machines = []
    for num_types in (2, 3, 4, 5, 6):
        graph = mixed(num_types)
        for _ in range(2):
            found = adaptive.schedule(graph)
            found.check(graph)
            machines.append(adaptive.machine)
    assert len({id(m) for m in machines}) == 2
    assert len(machines[-1].types) == 5


def test_what_was_learned_from_little_is_learned_again():
    """From one instance, then from four times as many, up to what learning can use."""
    adaptive = Adaptive()
    adaptive._by_rank = False  # one tree may be one that needs no policy
    rng = np.random.default_rng(8)
    machines = []  # all of them stay alive, or two could have one id
    for size in (1, 2, 3, 4, 8, 16, 64, 256, 512):
        graph = Graph.concatenate(list(random_trees(rng, size, 2)))
        adaptive.schedule(graph).check(graph)
        machines.append(adaptive.machine)
    which = list(map(id, machines))
    assert which[0] == which[2] != which[3] == which[4] != which[5]
    assert len(set(which)) == 4


def test_large_graphs_are_not_learned_from():
    """Where learning would take much longer than planning."""
    rng = np.random.default_rng(9)
    graph = Graph.from_dag(*random_dag(rng, 20_000, 40, most=2))
    adaptive = Adaptive()
    found = adaptive.schedule(graph)
    found.check(graph)
    assert len(adaptive.machine) == 0
    assert found.unseen > 0


def test_a_progress_bar(capsys):
    learn(A4, encoding="base", episodes=32, progress=True)
    assert "Q-learning base: " in capsys.readouterr().err
