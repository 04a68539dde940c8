"""Bugs that earlier systems had, one test for each.

Others of their bugs are tested where they belong: a state that a learned policy has not seen
(`test_fsm.py`, `test_unknown_states_are_left_to_the_fallback_and_counted`), layouts that changed
values (`test_layout.py`, `test_every_order_gives_the_values_and_gradients_of_the_loop`), schedules
that differed from run to run (`test_schedule.py`, `test_valid_and_not_below_the_bound`), a missing
weight (`test_dependency.py`, `test_every_weight_matters`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import programs, values
from cases.helpers import assert_close, check, loop

import jedbatch

cell = jedbatch.cell
P = programs.weights(0, W=(4, 4), V=(4, 4), b=(4,), E=(9, 4))
XS = list(np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32))


def each_way(**functions):
    """The functions as cells and as they are: two tests each."""
    ways = {"cell": lambda f: cell(f), "operations": lambda f: f}
    cases = [
        pytest.param(make, f, marks=[] if (k, way) == (0, "cell") else pytest.mark.slow)
        for k, f in enumerate(functions.values())
        for way, make in ways.items()
    ]
    names = [f"{name}-{way}" for name in functions for way in ways]
    return pytest.mark.parametrize(("way", "f"), cases, ids=names)


# --- wrong values ---


@each_way(matrix=lambda m, x: m @ x, vector=lambda m, x: x @ m.T)
def test_a_matrix_computed_in_the_middle_of_a_batch(way, f):
    """DyNet #1258: what is not batched itself, but was computed as a later part of a batch."""
    make = way(lambda w, s: jnp.tanh(w * s))
    apply = way(f)

    def fn(params, x):
        first, second = make(params["W"], x[0]), make(params["W"], x[1])
        return sum(apply(second, x + i) for i in range(3)) + apply(first, x)

    check(fn, P, XS)


@pytest.mark.slow
def test_a_float_is_part_of_what_is_computed():
    """DyNet #555: constants 1.1, 1.2, 1.3 that were added became one of them."""
    add = cell(lambda x, c: x + c)
    static = cell(lambda x, *, c: x + c)

    def fn(params, x):
        closed = [cell(lambda x, c=c: x + c, name="closed") for c in (1.1, 1.2, 1.3)]
        total = x * 0
        for i, c in enumerate((1.1, 1.2, 1.3)):
            total = total * 2 + jnp.stack(
                [x[0] + c, add(x[1], c), static(x[2], c=c), closed[i](x[3])]
            )
        return total * params["b"]

    check(fn, P, XS)


def test_floats_of_instances():
    """The same with constants that differ between instances, also by one bit."""
    fn = lambda params, c: (params["b"] + c) * c  # noqa: E731
    check(fn, P, [1.1, 1.2, 1.3, float(np.nextafter(np.float32(1.3), np.float32(2))), -1.1])


# --- wrong gradients ---


@pytest.mark.slow
@each_way(score=lambda w, h, i: -jax.nn.log_softmax(w @ h)[i])
def test_cross_entropies_of_different_sizes(way, f):
    """DyNet #584, #622: scores are single numbers, and were put together by that."""
    score = way(f)

    def fn(params, instance):
        x, candidates = instance
        few = score(params["E"][: len(candidates)], x, 0)
        rows = jnp.stack([params["E"][c] for c in candidates])
        return few + score(rows, jnp.tanh(x), len(candidates) - 1)

    check(fn, P, [(x, tuple(range(i + 1))) for i, x in enumerate(XS)])


@each_way(times=lambda u, v: (u + v) * u, plus=lambda u, v: u * v + u)
def test_a_sum_as_the_first_factor(way, f):
    """DyNet #1666: the reverse of a product got the whole batch of sums for one of them."""
    f = way(f)

    def fn(params, x):
        return f(f(x, params["b"]), f(params["b"], x)) * f(f(x, x), params["W"] @ x)

    check(fn, P, XS)


def sparsemax(x):
    """(The projection onto the simplex, its threshold) (Martins and Astudillo, 2016)."""
    z = jnp.sort(x)[::-1]
    sums = jnp.cumsum(z)
    support = (1 + jnp.arange(1, len(x) + 1) * z > sums).sum()
    threshold = (sums[support - 1] - 1) / support
    return jnp.maximum(x - threshold, 0), threshold


@jax.custom_vjp
def project(x):
    return sparsemax(x)[0]


def _project_forward(x):
    y, threshold = sparsemax(x)
    return y, (x, threshold)


def _project_reverse(kept, g):
    x, threshold = kept
    inside = x > threshold
    return (jnp.where(inside, g - (g * inside).sum() / inside.sum(), 0),)


project.defvjp(_project_forward, _project_reverse)


@each_way(rule=project, plain=lambda x: sparsemax(x)[0])
def test_what_the_forward_pass_keeps_for_the_reverse(way, f):
    """DyNet #1490: what one lane had kept for its reverse was overwritten by the next."""
    choose = way(f)
    check(lambda params, x: choose(params["W"] @ x) @ choose(x * params["b"]), P, XS)


@pytest.mark.parametrize(
    "n", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(7, marks=pytest.mark.slow)]
)
def test_the_first_and_the_last_of_a_batch_get_their_gradients(n):
    """DyNet #604, #1210: one lane too many or too few in the reverse."""

    def fn(params, i):
        h = params["E"][i] * (i == n - 1) + params["b"]
        return jnp.tanh(params["W"] @ h) if i else h

    check(fn, P, list(range(n)))


# --- too many batches ---


def test_one_batch_for_every_layer():
    """DyNet #1038: a perceptron on a minibatch was ten times as slow as batched by hand."""
    layer = cell(lambda w, b, h: jnp.tanh(w @ h + b))

    def fn(params, x):
        return layer(params["V"], params["b"], layer(params["W"], params["b"], x))

    for num in (1, 6, 48):
        plan = jedbatch.batch(fn).plan(P, XS * (num // 6) if num > 1 else XS[:1])
        assert len(plan.schedule) == 2
        assert len(plan.graph.node_type) == 2 * num


@pytest.mark.slow
def test_both_directions_share_their_batches():
    """DyNet #1222: tagging by two LSTMs, batches of 50. As many batches as the longest is long."""

    @cell
    def step(w, h, x):
        return jnp.tanh(w @ (h + x))

    @cell
    def tag(params, forth, back):
        return (forth * back).sum() * params["b"][0]

    def fn(params, words):
        vectors = [params["E"][w] for w in words]
        forth, back = [params["b"]], [params["b"]]
        for x, y in zip(vectors, reversed(vectors), strict=True):
            forth.append(step(params["W"], forth[-1], x))
            back.append(step(params["V"], back[-1], y))
        losses = [tag(params, f, b) for f, b in zip(forth[1:], reversed(back[1:]), strict=True)]
        return functools.reduce(jnp.add, losses)

    rng = np.random.default_rng(1)
    instances = [tuple(rng.integers(9, size=n).tolist()) for n in rng.integers(1, 20, 50)]
    longest = max(map(len, instances))
    plan = check(fn, P, instances).plan(P, instances)
    names = [plan.graph.types[t].name for t, _ in plan.schedule.batches]
    assert names.count("tag") == 1
    assert names.count("step") == 2 * longest  # the weights differ
    assert len(plan.schedule) == jedbatch.lower_bound(plan.graph)


def test_lookups_are_one_batch():
    """DyNet #1038: each look-up was a node alone."""

    def fn(params, words):
        return functools.reduce(lambda h, w: h + params["E"][w], words, params["b"])

    instances = [tuple(range(i + 1)) for i in range(9)]
    plan = check(fn, P, instances).plan(P, instances)
    lookups = [t for t, _ in plan.schedule.batches if "add" not in plan.graph.types[t].name]
    assert len(lookups) == len(set(lookups))


@pytest.mark.slow
@each_way(drop=lambda key, h: jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0))
def test_dropout_is_batched(way, f):
    """DyNet #1330: a node with random numbers of its own could not be batched."""
    drop = way(f)

    def fn(params, instance):
        key, x = instance
        return drop(key, jnp.tanh(params["W"] @ x))

    keys = list(jax.random.split(jax.random.key(3), len(XS)))
    counts = []
    for num in (1, len(XS)):
        instances = list(zip(keys, XS, strict=True))[:num]
        batched = check(fn, P, instances)
        counts.append(len(batched.plan(P, instances).schedule))
    assert counts[0] == counts[1]


# --- reading values ---


@pytest.mark.slow
def test_reading_a_value_does_not_end_batching():
    """DyNet #1407 and #719: a parser that looks at its values ran node by node."""
    fn, params, instances = values.shift_reduce(40, seed=2)
    batched = check(fn, params, instances, rtol=3e-5, plans=False)
    rounds = batched.last_rounds
    assert len(rounds) <= 2 * max(map(len, instances))  # a shift or a reduction in each
    assert sum(r.batches for r in rounds) < sum(r.nodes for r in rounds) / 4


# --- policies ---


def test_every_model_has_its_own_policy():
    """ED-Batch's code had one table of states per process, whatever the model."""

    def model(kinds):
        cells = [
            cell(lambda p, x, y, i=i: p["b"] * i + x * y, name=f"kind_{i}") for i in range(kinds)
        ]

        def fn(params, graph):
            made = [params["b"]]
            for kind, a, b in graph:
                made.append(cells[kind % kinds](params, made[a % len(made)], made[b % len(made)]))
            return made[-1]

        return fn

    rng = np.random.default_rng(5)
    graphs = [tuple(map(tuple, rng.integers(0, 60, (14, 3)).tolist())) for _ in range(8)]

    def learned(kinds):
        batched = jedbatch.batch(model(kinds))
        lengths = [len(batched.plan(P, graphs).schedule), len(batched.plan(P, graphs[:3]).schedule)]
        return str(batched.policy), lengths

    alone = learned(3)
    assert alone[0].startswith("FSM")
    learned(2)
    assert learned(3) == alone


def test_a_tie_between_all():
    """Types that nothing tells apart run in the order of their numbers."""
    cells = [cell(lambda p, x, i=i: x * i + p["b"], name=f"same_{i}") for i in range(4)]
    fn = lambda params, x: sum(c(params, x) for c in cells)  # noqa: E731
    orders = set()
    for _ in range(3):
        plan = jedbatch.batch(fn).plan(P, XS)
        orders.add(tuple(plan.graph.types[t].name for t, _ in plan.schedule.batches))
    assert len(orders) == 1
    check(fn, P, XS)


def test_values_do_not_depend_on_the_policy():
    """ED-Batch's layouts and schedules changed what was computed: here they change order only."""
    fn, params, instances = programs.dag(9, seed=3)
    expected = loop(fn, params, instances)
    for policy in (jedbatch.policies.agenda, jedbatch.policies.depth, jedbatch.policies.critical):
        got = jedbatch.batch(fn, policy=policy)(params, instances)
        assert_close(got, expected, 1e-5)


def test_rows_that_nodes_compute_are_not_looked_at():
    """Operations merged into one type read inputs in some nodes, and computed rows in others."""

    def fn(params, instance):
        number, word, key = instance
        row = jax.random.randint(key, (), 0, 6)
        if number % 2 == 0:
            return params["E"][row], params["E"][word], row
        return params["b"], jnp.ones(4) * number / 2, row

    params = {"E": jnp.ones((6, 4)), "b": jnp.ones(4)}
    instances = [(3, 5, jax.random.key(87)), (2, 2, jax.random.key(52))]
    results = jedbatch.batch(fn, granularity="auto", out_axes=None)(params, instances)
    for result, instance in zip(results, instances, strict=True):
        assert_close(result, fn(params, instance), 1e-6)
