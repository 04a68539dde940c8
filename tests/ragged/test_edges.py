"""Rows read and written by index, between arrays of two ragged lengths, against the loop.

Letters: `n` nodes and `e` edges of a graph.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, by_themselves, mostly_slow, number

import jedbatch
from jedbatch import testing

SIZES = [(3, 5), (1, 1), (6, 2), (2, 9), (4, 0)]  # (n, e) of each graph
OTHER_SIZES = [(5, 0), (2, 7), (7, 3)]
WEIGHT = np.array([[0.5, -1.0], [2.0, 0.25]], np.float32)


def graphs(sizes, seed=0, reach=lambda n: (0, n)):
    """Graphs (x [n, 2], m [e, 2], source [e], target [e]); `reach(n)` bounds the indices."""
    rng = np.random.default_rng(seed)

    def ends(n, e):
        return rng.integers(*reach(n), size=e).astype(np.int32)

    def rows(n):
        return rng.normal(size=(n, 2)).astype(np.float32)

    return [(rows(n), rows(e), ends(n, e), ends(n, e)) for n, e in sizes]


def far(n):
    """Indices of which some are negative, and some out of bounds on both sides."""
    return -2 * n - 1, 2 * n + 1


def split(fn):
    """`fn` of (weight, x, m, source, target)."""
    return lambda weight, graph: fn(weight, *graph)


def agree(fn, instances, gradient=True, batched=None):
    """Values, and gradients of the weight and the floats of graphs, are those of the loop."""
    batched = batched or jedbatch.batch(fn, out_axes=None)
    # Compiled, as `jax.numpy` gives integers that overflow other values where it is not; and as a
    # whole, which takes less time than each instance by itself.
    alone = jax.jit(lambda weight, graphs: [fn(weight, graph) for graph in graphs])
    assert_close(batched(WEIGHT, instances), alone(WEIGHT, instances), 2e-5)
    if not gradient:
        return batched
    floats = [graph[:2] for graph in instances]

    def slopes(run):
        def loss(weight, floats):
            whole = [(*pair, *graph[2:]) for pair, graph in zip(floats, instances, strict=True)]
            return number(run(weight, whole))

        return jax.grad(loss, argnums=(0, 1))

    given = jnp.asarray(WEIGHT), floats
    assert_close(slopes(batched)(*given), jax.jit(slopes(alone))(*given), 2e-4)
    return batched


def merged(batched, sizes=SIZES, programs=1):
    """All graphs are calls of one program, or a few, which serve graphs never seen."""
    plan = batched.plan(WEIGHT, graphs(sizes))
    assert plan.host.apart is None, plan.host.apart
    assert len(plan.host.ragged_calls.stages) == programs
    before = batched.compilations
    batched(WEIGHT, graphs(OTHER_SIZES, seed=1))
    assert batched.compilations == before
    return plan


def merged_each(fn, instances):
    """Agrees with the loop; all graphs are calls of one program for each result."""
    results = jax.tree.leaves(jax.eval_shape(split(fn), WEIGHT, instances[0]))
    return merged(agree(split(fn), instances), programs=len(results))


# --- one operation after the other ---

GATHERS = {
    "rows": lambda w, x, m, s, t: x[s],
    "taken": lambda w, x, m, s, t: jnp.take(x, s, axis=0),
    "clipped": lambda w, x, m, s, t: jnp.take(x, s, axis=0, mode="clip"),
    "filled": lambda w, x, m, s, t: x.at[s].get(mode="fill", fill_value=7.0),
    "numbers": lambda w, x, m, s, t: x[:, 1][s],
    "columns": lambda w, x, m, s, t: x.T[:, s],
    "entries": lambda w, x, m, s, t: x[s, t % 2],
    "by entry": lambda w, x, m, s, t: jnp.take_along_axis(x, jnp.stack([s, t], 1), axis=0),
    "pairs": lambda w, x, m, s, t: x[jnp.stack([s, t], 1)],
    "integers": lambda w, x, m, s, t: jnp.take(jnp.arange(x.shape[0]), s, axis=0),
    "flags": lambda w, x, m, s, t: jnp.take(x[:, 0] > 0, s, axis=0),
    "same axis": lambda w, x, m, s, t: x[jnp.arange(x.shape[0]) // 2],
    "computed": lambda w, x, m, s, t: x[(s * 3 + 1) % x.shape[0]],
    "looked up": lambda w, x, m, s, t: x[jnp.argsort(x[:, 0])],
    "twice": lambda w, x, m, s, t: x[t][jnp.arange(s.shape[0])[::-1]],
    "of few": lambda w, x, m, s, t: (w * x.sum())[s % 2],
}

SUMS = {
    "sum": lambda w, x, m, s, t: jax.ops.segment_sum(m, t, x.shape[0]),
    "sum of few": lambda w, x, m, s, t: jax.ops.segment_sum(m, t, 3),
    "sum of numbers": lambda w, x, m, s, t: jax.ops.segment_sum(m[:, 0], t, x.shape[0]),
    "sum of integers": lambda w, x, m, s, t: jax.ops.segment_sum(s, t, x.shape[0]),
    "added": lambda w, x, m, s, t: x.at[t].add(m @ w),
    "added where it can": lambda w, x, m, s, t: x.at[t].add(m, mode="drop"),
    "added to the nearest": lambda w, x, m, s, t: x.at[t].add(m, mode="clip"),
    "added to what is shared": lambda w, x, m, s, t: w.at[t].add(m),
    "added entries": lambda w, x, m, s, t: x.at[t, s % 2].add(m[:, 0]),
    "added columns": lambda w, x, m, s, t: x.T.at[:, t].add(m.T),
    "subtracted": lambda w, x, m, s, t: x.at[t].subtract(m),
    "degrees": lambda w, x, m, s, t: jnp.zeros(x.shape[0]).at[t].add(1.0),
    "same axis": lambda w, x, m, s, t: m.at[jnp.arange(m.shape[0]) // 2].add(m),
    "there and back": lambda w, x, m, s, t: jax.ops.segment_sum(x[s], t, x.shape[0])[s],
}

EXTREMES = {
    "max": lambda w, x, m, s, t: jax.ops.segment_max(m, t, x.shape[0]),
    "min": lambda w, x, m, s, t: jax.ops.segment_min(m, t, x.shape[0]),
    "max into rows": lambda w, x, m, s, t: x.at[t].max(m),
    "min into rows": lambda w, x, m, s, t: x.at[t].min(m),
    "max of ties": lambda w, x, m, s, t: x.at[t].max(jnp.round(m)),
    "max of few": lambda w, x, m, s, t: jnp.zeros((3, 2)).at[t].max(m),
}


@pytest.mark.parametrize("fn", by_themselves(GATHERS, "rows", "taken", "entries"))
def test_rows_are_read_by_index(fn):
    merged_each(fn, graphs(SIZES))


@pytest.mark.parametrize("fn", by_themselves(SUMS, "sum", "added", "sum of few", "there and back"))
def test_rows_are_added_by_index(fn):
    """In phases that read or write by index, and in none over instances."""
    for stage in merged_each(fn, graphs(SIZES)).host.ragged_calls.stages:
        phases = stage.region.packed.phased.phases
        assert any(p.indexed for p in phases)
        assert not any(p.extent is None and not p.indexed for p in phases)


@pytest.mark.parametrize("fn", by_themselves(EXTREMES, "max", "min into rows"))
def test_extremes_by_index(fn):
    merged_each(fn, graphs(SIZES))


WRITES = {
    "set to a number": lambda w, x, m, s, t: x.at[t].set(0.5),
    "set rows": lambda w, x, m, s, t: m.at[jnp.arange(m.shape[0])[::-1]].set(jnp.tanh(m)),
}


@pytest.mark.parametrize("name", mostly_slow(WRITES, "set to a number"))
def test_rows_are_set_by_index(name):
    merged(agree(split(WRITES[name]), graphs(SIZES)))


PRODUCTS = {
    "product": lambda w, x, m, s, t: jax.ops.segment_prod(m @ w, t, x.shape[0]),
    "product of few": lambda w, x, m, s, t: jax.ops.segment_prod(m @ w, t, 3),
    "multiplied": lambda w, x, m, s, t: x.at[t].multiply(m @ w),
}


@pytest.mark.parametrize("name", mostly_slow(PRODUCTS, "product"))
def test_products_by_index(name):
    """JAX has no gradient of them where an index may come twice, in the loop either."""
    batched = agree(split(PRODUCTS[name]), graphs(SIZES), gradient=False)
    merged(batched)
    with pytest.raises(NotImplementedError, match="unique_indices"):
        jax.grad(lambda w: number(batched(w, graphs(SIZES))))(jnp.asarray(WEIGHT))


# Factors that are data, in a phase by index and in one over instances.
MULTIPLIED = {
    "rows": lambda w, x, m, s, t: (x @ w).at[t].multiply(jnp.tanh(m)),
    "entries": lambda w, x, m, s, t: (x @ w @ x.T).at[s, t].multiply(m[:, 0]) @ x,
}


@pytest.mark.parametrize("rows_together", mostly_slow([4096, 8], 4096))
@pytest.mark.parametrize("fn", by_themselves(MULTIPLIED, "rows"))
def test_what_is_multiplied_has_a_gradient_if_its_factors_need_none(fn, rows_together):
    fn, instances = split(fn), graphs(SIZES)
    target = dataclasses.replace(
        jedbatch.Target.named("cpu"), name="small", microbatch_rows=rows_together
    )
    batched = jedbatch.batch(fn, out_axes=None, target=target)
    alone = jax.jit(jax.grad(lambda w: number([fn(w, graph) for graph in instances])))
    slope = jax.grad(lambda w: number(batched(w, instances)))(jnp.asarray(WEIGHT))
    assert_close(slope, alone(jnp.asarray(WEIGHT)), 2e-4)


# --- indices that are out of bounds ---

OUT_OF_BOUNDS = {
    name: some[name]
    for some, names in (
        (GATHERS, "rows taken clipped filled numbers columns integers flags pairs"),
        (SUMS, "sum added"),
        (EXTREMES, "max min"),
    )
    for name in names.split()
} | {
    "sum of few": SUMS["sum of few"],
    "added to the nearest": SUMS["added to the nearest"],
    "max into rows": EXTREMES["max into rows"],
    "set to a number": WRITES["set to a number"],
    "small integers": lambda w, x, m, s, t: x[s.astype(jnp.int8)],
    "fill of small integers": lambda w, x, m, s, t: jnp.take((9 * x).astype(jnp.uint8), s, axis=0),
}


@pytest.mark.parametrize(
    "fn", by_themselves(OUT_OF_BOUNDS, "rows", "filled", "sum", "max into rows")
)
def test_indices_out_of_bounds_reach_no_other_instance(fn):
    instances = graphs(SIZES, reach=far)
    assert any((s >= len(x)).any() and (s < -len(x)).any() for x, _, s, _ in instances)
    merged_each(fn, instances)


def test_nan_stays_in_its_instance():
    fn = split(lambda w, x, m, s, t: jax.ops.segment_sum(x[s] @ w, t, x.shape[0]).sum(0))
    instances = graphs(SIZES, reach=far)
    instances[1][0][:] = np.nan
    instances[1][1][:] = np.nan
    results = jedbatch.batch(fn)(WEIGHT, instances)
    expected = jnp.stack([jax.jit(fn)(WEIGHT, graph) for graph in instances])
    others = jnp.array([0, 2, 3, 4])
    assert jnp.isfinite(results[others]).all()
    assert_close(results[others], expected[others], 2e-5)


# --- lengths of 0 ---


def test_graphs_without_edges():
    fn = split(lambda w, x, m, s, t: x + jax.ops.segment_sum(x[s] @ w, t, x.shape[0]))
    none = [(n, 0) for n, _ in SIZES]
    batched = agree(fn, graphs(SIZES))
    agree(fn, graphs(none), batched=batched)
    agree(fn, graphs([*none, (0, 0)]))


def test_rows_of_an_array_without_rows():
    fn = split(lambda w, x, m, s, t: x[s])
    batched = agree(fn, graphs(SIZES))
    instances = graphs([*SIZES, (0, 0)])
    instances.append((instances[-1][0], *instances[0][1:]))
    with pytest.raises(ValueError, match=r"instance 6 .* rows by index"):
        batched(WEIGHT, instances)
    into_none = split(lambda w, x, m, s, t: jax.ops.segment_sum(m, t, x.shape[0]).sum(0))
    agree(into_none, instances, gradient=False)


# --- in phases over instances, where arrays are padded ---


def adjacency(w, x, m, s, t):
    n = x.shape[0]
    edges = jnp.zeros((n, n)).at[s, t].add(m[:, 0])
    return {
        "steps": (edges @ edges @ x) @ w,
        "entries": edges[t, s],
        "rows": (edges[s] * m[:, 1:]).sum(0).sum(),
    }


@pytest.mark.parametrize("reach", [lambda n: (0, n), far], ids=["inside", "out of bounds"])
def test_edges_as_a_matrix(reach):
    batched = agree(split(adjacency), graphs(SIZES, reach=reach))
    merged(batched)


PLACES = {
    "one": lambda w, x, m, s, t: x.at[0].set(w[0]),
    "last": lambda w, x, m, s, t: x.at[-1].add(w[0]),
    "several": lambda w, x, m, s, t: x.at[jnp.array([0, 7, 1, 0])].add(x[:1] * 2),
    "nearest": lambda w, x, m, s, t: x.at[jnp.array([0, 7, 1])].add(w[:1], mode="clip"),
    "max": lambda w, x, m, s, t: x.at[jnp.array([0, 7, 1])].max(x[:1] * 2),
    "column": lambda w, x, m, s, t: x.at[:, 1].add(m.sum() * x[:, 0]),
    "all but the first": lambda w, x, m, s, t: x.at[1:].add(jnp.tanh(x[:-1]) @ w),
    "all but the last, in a column": lambda w, x, m, s, t: x.at[:-1, 0].set(x[1:, 1]),
    "in the order of features": lambda w, x, m, s, t: x.T.at[:, 1:].max(2 * x.T[:, :-1]),
    "from a place on": lambda w, x, m, s, t: jnp.concatenate([x, x]).at[x.shape[0] :].multiply(x),
}


@pytest.mark.parametrize("fn", by_themselves(PLACES, "one", "several", "all but the first"))
def test_places_that_do_not_depend_on_the_instance(fn):
    merged_each(fn, graphs(SIZES))


def test_what_is_not_covered_is_grouped_by_shapes():
    for fn, reason in (
        (lambda w, x, m, s, t: jnp.take(x, s, axis=0, mode="wrap"), "know the lengths"),
        (lambda w, x, m, s, t: x.at[t].max(m, mode="clip"), "`scatter-max` to the nearest"),
    ):
        batched = agree(split(fn), graphs(SIZES[:3]))
        assert reason in batched.plan(WEIGHT, graphs(SIZES[:3])).host.apart


# --- several lengths ---


def with_loops(w, x, m, s, t):
    """An edge from every node to itself, and one back for each; divided by how many there are."""
    n = x.shape[0]
    own = jnp.arange(n)
    source, target = jnp.concatenate([s, t, own]), jnp.concatenate([t, s, own])
    degrees = jax.ops.segment_sum(jnp.ones(source.shape), target, n)
    scale = jax.lax.rsqrt(degrees)
    sent = (x @ w * scale[:, None])[source]
    return jax.ops.segment_sum(sent, target, n) * scale[:, None]


def sorted_edges(w, x, m, s, t):
    order = jnp.argsort(t)
    sums = jax.ops.segment_sum(m[order], t[order], x.shape[0], indices_are_sorted=True)
    ranks = jnp.argsort(order)
    places = jnp.zeros(m.shape).at[ranks].set(m[order], unique_indices=True)
    by_keys = m[jnp.lexsort((s, t))].cumsum(0)  # JAX does not say which lengths it compares
    products = jax.ops.segment_prod(jnp.tanh(sums), jnp.arange(x.shape[0]) // 2, 4)
    return sums, places, by_keys, products


def edges_of_edges(w, x, m, s, t):
    """Messages between edges, and from edges to nodes to a few kinds of them."""
    twice = m[jnp.arange(m.shape[0])[::-1]] + m
    nodes = x.at[t].add(twice @ w)[1:]
    return jnp.zeros((3, 2)).at[jnp.arange(nodes.shape[0]) % 3].max(nodes), nodes


def read_back(w, x, m, s, t):
    kinds = jax.ops.segment_sum(x, jnp.arange(x.shape[0]) % 3, 3)
    return x - kinds[jnp.arange(x.shape[0]) % 3], kinds[s % 3] * m


@pytest.mark.parametrize("fn", [with_loops, edges_of_edges, read_back])
def test_several_lengths(fn):
    merged(agree(split(fn), graphs(SIZES)))


def messages(w, x, m, s, t):
    h = jnp.tanh(x + jax.ops.segment_sum(x[s] @ w + m, t, x.shape[0]))
    return h.at[t].max(m), h[s].sum(0)


@pytest.mark.parametrize("sizes", [[(4, 3), (4, 5), (4, 0)], [(2, 5), (7, 5), (4, 5)]])
def test_one_length_is_the_same_everywhere(sizes):
    """As many nodes in each graph, or as many edges."""
    batched = agree(split(messages), graphs(sizes))
    plan = batched.plan(WEIGHT, graphs(sizes))
    assert plan.host.apart is None
    before = batched.compilations
    batched(WEIGHT, graphs([sizes[1], sizes[1], sizes[0]], seed=1))
    assert batched.compilations == before


@jedbatch.cell
def passed(w, x, source, target):
    return jnp.tanh(x @ w + jax.ops.segment_sum(x[source], target, x.shape[0]))


@jedbatch.cell
def joined(w, left, right):
    return jnp.tanh(left @ w - right)


def test_graphs_at_the_leaves_of_a_tree():
    def encode(w, tree):
        if isinstance(tree, dict):
            return passed(w, tree["x"], tree["source"], tree["target"]).sum(0)
        return joined(w, *(encode(w, part) for part in tree))

    def leaf(size, seed):
        ((x, _, source, target),) = graphs([size], seed)
        return {"x": x, "source": source, "target": target}

    def trees(seed):
        a, b, c, d = (leaf(size, seed + k) for k, size in enumerate(SIZES[:4]))
        return [(a, b), ((c, d), a), d]

    batched = jedbatch.batch(encode)
    plan = batched.plan(WEIGHT, trees(0))
    assert len(plan.host.ragged_calls.stages) == 1

    def call(w, trees):
        return batched(w, trees)

    def loop(w, trees):
        return jnp.stack([encode(w, tree) for tree in trees])

    def slopes(run):
        return jax.grad(lambda w: number(run(w)))(jnp.asarray(WEIGHT))

    for instances in (trees(0), trees(5)):
        found = slopes(functools.partial(call, trees=instances))
        assert_close(found, slopes(functools.partial(loop, trees=instances)), 2e-4)


def test_sorted_indices():
    merged(agree(split(sorted_edges), graphs(SIZES), gradient=False), programs=2)
    # Where what is equally long in the first graph is so by chance, too.
    plan = jedbatch.batch(split(sorted_edges), out_axes=None).plan(WEIGHT, graphs([(2, 2), (3, 5)]))
    assert plan.host.apart is None
    testing.assert_merged(plan)


# --- models ---


def propagate(params, graph):
    """Returns the sum over the nodes of a graph after three rounds of messages along its edges."""
    x, source, target = graph
    h = x
    for _ in range(3):
        messages = jax.ops.segment_sum(h[source] @ params["u"], target, x.shape[0])
        h = jnp.tanh(h @ params["w"] + messages)
    return h.sum(0)


def attend(params, graph):
    """Returns the maximum over nodes after attention of each to those before it along edges."""
    x, source, target = graph
    n = x.shape[0]
    scores = (x[source] @ params["w"] * x[target]).sum(-1)
    most = jax.ops.segment_max(scores, target, n)
    weights = jnp.exp(scores - jax.lax.stop_gradient(most)[target])
    total = jax.ops.segment_sum(weights, target, n)
    mixed = jax.ops.segment_sum((weights / total[target])[:, None] * x[source], target, n)
    return jnp.tanh(mixed @ params["u"]).sum(0)


def molecules(count, seed):
    """Graphs of 5 to 40 atoms, one of which is as large as any."""
    rng = np.random.default_rng(seed)
    sizes = [(n, int(rng.integers(0, 4 * n))) for n in rng.integers(5, 41, count - 1)]
    made = graphs([(40, 160), *sizes], seed=seed)
    return [(x, source, target) for x, _, source, target in made]


GPU = jedbatch.Target.named("gpu")
BLOCKS = dataclasses.replace(jedbatch.Target.named("cpu"), name="blocks", straight_indexed_rows=0)
FEW_BYTES = dataclasses.replace(GPU, name="few bytes", straight_bytes=1 << 10)
PARAMS = {"w": jnp.asarray(WEIGHT) / 2, "u": jnp.asarray(WEIGHT[::-1].copy()) / 3}


@pytest.mark.parametrize(
    ("model", "target"),
    [
        pytest.param(propagate, BLOCKS, id="blocks"),
        pytest.param(propagate, None, id="straight"),
        pytest.param(propagate, GPU, id="gpu"),
        pytest.param(propagate, FEW_BYTES, id="few-bytes"),
        pytest.param(attend, BLOCKS, id="attention-blocks", marks=pytest.mark.slow),
        pytest.param(attend, GPU, id="attention-gpu", marks=pytest.mark.slow),
    ],
)
def test_networks_of_graphs(model, target, monkeypatch):
    """In blocks of rows, and as they run on a CPU or a GPU, without loops."""
    monkeypatch.setenv("JEDBATCH_CHECK", "1")
    batched = jedbatch.batch(model, target=target)
    seen = molecules(6, seed=0)
    plan = batched.plan(PARAMS, seen)
    assert plan.host.apart is None
    (stage,) = plan.host.ragged_calls.stages
    assert bool(stage.capacity.slots) == (target in (None, GPU))
    testing.assert_merged(plan)

    @jax.jit
    def step(params, plan):
        return jax.value_and_grad(lambda p: (batched.apply(p, plan) ** 2).sum())(params)

    @jax.jit
    @jax.value_and_grad
    def loop(params, instances):
        return (jnp.stack([model(params, graph) for graph in instances]) ** 2).sum()

    assert_close(step(PARAMS, plan), loop(PARAMS, seen), 2e-4)
    step(PARAMS, batched.plan(PARAMS, [seen[0]] * 6))  # the most that there can be
    unseen = [molecules(6, seed) for seed in range(1, 3)]
    plans = [batched.plan(PARAMS, instances) for instances in unseen]
    before = batched.compilations
    with testing.assert_no_recompile():
        found = [step(PARAMS, plan) for plan in plans]
    assert batched.compilations == before
    expected = [loop(PARAMS, instances) for instances in unseen]
    assert_close(found, expected, 2e-4)


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_rows_without_elements(target):
    def fn(w, graph):
        x, source, _ = graph
        mixed = x @ w
        none = mixed[:, :0]
        return jnp.cumsum(none, axis=0), none[source], none.T @ mixed, jnp.cumsum(mixed, axis=0)

    made = molecules(4, seed=0)
    batched = jedbatch.batch(fn, target=target, out_axes=None)
    for found, graph in zip(batched(PARAMS["w"], made), made, strict=True):
        for one, expected in zip(found, fn(PARAMS["w"], graph), strict=True):
            assert one.shape == expected.shape
            assert_close(one, expected, 1e-4)


@pytest.mark.parametrize("twice", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_of_rows_read_by_index_on_a_gpu(twice):
    def energy(w, graph):
        x, source, target = graph
        mixed = x @ w
        nearest = mixed.at[target + 1].get(mode="clip")
        received = jax.ops.segment_sum(jnp.tanh(mixed)[source] * nearest, target, x.shape[0])
        return jnp.square(received).sum()

    made = molecules(4, seed=0)
    batched = jedbatch.batch(energy, target="gpu")
    plan = batched.plan(PARAMS["w"], made)
    found = twice(jax.grad(lambda w: batched.apply(w, plan).sum()))(PARAMS["w"])
    expected = twice(jax.grad(lambda w: sum(energy(w, graph) for graph in made)))(PARAMS["w"])
    assert_close(found, expected, 2e-4)


def test_as_many_edges_as_fit_run_without_loops_on_a_gpu():
    batched = jedbatch.batch(propagate, target="gpu")
    chain = np.arange(20, dtype=np.int32)
    edges = np.tile(chain, 100), np.tile(np.roll(chain, 1), 100)
    nodes = np.ones((20, PARAMS["w"].shape[0]), np.float32)
    plan = batched.plan(PARAMS, [(nodes, *edges)] * 100 + molecules(3, seed=0))
    (stage,) = plan.host.ragged_calls.stages
    assert max(stage.capacity.rows) >= 200_000
    assert stage.capacity.slots
    packed = stage.region.packed
    assert packed.kept_bytes(stage.capacity) < GPU.straight_bytes


def test_forces_inside():
    """A gradient by the instance, and that of a loss of it."""

    def loss(w, graph):
        x, source, target = graph

        def energy(x):
            messages = jax.ops.segment_sum(
                jnp.tanh((x[source] - x[target]) @ w), target, x.shape[0]
            )
            return (messages * x).sum()

        return jnp.square(jax.grad(energy)(x)).sum() / x.shape[0]

    batched = jedbatch.batch(loss)
    instances = molecules(3, seed=0)
    assert batched.plan(WEIGHT, instances).host.apart is None

    def alone(w):
        return jnp.stack([loss(w, graph) for graph in instances])

    def mine(w):
        return batched(w, instances)

    assert_close(mine(WEIGHT), jax.jit(alone)(WEIGHT), 2e-4)
    found, expected = (jax.grad(lambda w, f=f: f(w).sum()) for f in (mine, alone))
    assert_close(found(jnp.asarray(WEIGHT)), jax.jit(expected)(jnp.asarray(WEIGHT)), 2e-4)


@pytest.mark.slow
def test_derivatives_of_second_order():
    batched = jedbatch.batch(propagate)
    instances = molecules(3, seed=3)

    def loss(run):
        return lambda p: (run(p) ** 2).sum()

    mine = loss(lambda p: batched(p, instances))
    loop = loss(lambda p: jnp.stack([propagate(p, graph) for graph in instances]))
    assert_close(jax.hessian(mine)(PARAMS), jax.jit(jax.hessian(loop))(PARAMS), 1e-3)

    def twice(f):
        return jax.grad(lambda p: sum(jnp.vdot(g, g) for g in jax.tree.leaves(jax.grad(f)(p))))

    assert_close(twice(mine)(PARAMS), jax.jit(twice(loop))(PARAMS), 1e-3)
    tangents = jax.tree.map(jnp.ones_like, PARAMS)
    assert_close(jax.jvp(mine, (PARAMS,), (tangents,)), jax.jvp(loop, (PARAMS,), (tangents,)), 2e-4)
