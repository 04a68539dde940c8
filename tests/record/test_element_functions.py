"""Functions of elements of lists are computed where elements are made, with the loop's answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import check, compilations

import jedbatch
from jedbatch._graph.types import operation_of
from jedbatch.testing import check_plan

SIZE = 8
KEYS = jax.random.split(jax.random.key(0), 4)
P = {
    "leaf": jax.random.normal(KEYS[0], (SIZE,)),
    "gates": jax.random.normal(KEYS[1], (SIZE, SIZE)) / 3,
    "forget": jax.random.normal(KEYS[2], (SIZE, SIZE)) / 3,
    "values": jax.random.normal(KEYS[3], (SIZE, SIZE)) / 3,
}


def assert_close(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), got, expected)


def child_sum(p, x, states):
    x = x * p["leaf"]
    total = sum(h for h, _ in states) @ p["gates"]
    c = jnp.tanh(x + total)
    for h, below in states:
        c = c + jax.nn.sigmoid(x + p["forget"] @ h) * below
    return jnp.tanh(c), c


def attention(p, x, states):
    """Nothing is read of the first part of a state but its products with two matrices."""
    x = x * p["leaf"]
    keys = jnp.tanh(jnp.stack([h for h, _ in states]) @ p["forget"])
    values = jnp.stack([h for h, _ in states]) @ p["values"]
    weights = jax.nn.softmax(keys @ x)
    return weights @ values, x * len(states)


def encoder(form, repeated=False):
    """The model of a tree of (number, *children) whose cells get lists of states."""
    node = jedbatch.cell(form)
    leaf = jedbatch.cell(lambda p, x: (jnp.tanh(p["leaf"] * x), p["leaf"] + x))

    def encode(p, tree):
        x, *children = tree
        if not children:
            return leaf(p, x)
        states = [encode(p, child) for child in children]
        return node(p, x, [*states, states[0]] if repeated else states)

    return lambda p, tree: encode(p, tree)[0]


def trees(seed, lengths):
    """A tree for each number of children, of which some have children themselves."""
    rng = np.random.default_rng(seed)

    def tree(*numbers):
        children = [tree(*numbers[k + 1 :]) for k in range(numbers[0] if numbers else 0)]
        return float(rng.normal()), *children

    return [tree(n, 1 + n % 3, 2) for n in lengths]


def products(node_type):
    """The shapes of the results of the matrix products of a type."""
    eqns = operation_of(node_type).jaxpr.jaxpr.eqns
    return sorted(e.outvars[0].aval.shape for e in eqns if e.primitive.name == "dot_general")


def types_of(plan):
    return [plan.graph.types[t] for t in sorted({t for t, _ in plan.schedule.batches})]


MANY = [0, 1, 2, 3, 4, 5, 6, 9]


@pytest.mark.parametrize("repeated", [False, True])
def test_products_of_elements_are_of_the_values(repeated):
    """No product has a row for each place of a list; nodes have one more for what they make.

    Those with more than four children too, which are elements of nothing here.
    """
    fn = encoder(child_sum, repeated)
    batched = check(fn, P, trees(0, MANY))
    types = types_of(batched.plan(P, trees(0, MANY)))
    most = [operation_of(t).lists.capacity if operation_of(t).lists else 0 for t in types]
    assert sorted(most) == [0, 4, 8, 32]
    assert [len(t.results) for t in types] == [3] * 4
    assert all(shape == (SIZE,) for t in types for shape in products(t))
    lists = [operation_of(t).lists for t in types]
    assert {x.summed for x in lists if x is not None} == {(True, False, False)}


def test_nodes_with_many_children_become_elements_later():
    """Nodes that read them are of the types of those that read nodes with few children."""
    batched = jedbatch.batch(encoder(child_sum))
    before = types_of(batched.plan(P, trees(0, MANY)))
    later = [(0.5, tree, (1.5,)) for tree in trees(2, MANY)]
    assert set(types_of(batched.plan(P, later))) == set(before)
    check(encoder(child_sum), P, later)


def test_leaves_that_are_read_by_functions_alone_are_not_read():
    batched = check(encoder(attention), P, trees(1, MANY))
    types = types_of(batched.plan(P, trees(1, MANY)))
    for t in types:
        lists = operation_of(t).lists
        assert len(t.results) == 4
        if lists is not None:  # keys and values; no state is read
            assert len(t.operands) == lists.first + 2 * lists.capacity + 1


def test_unseen_lengths_compile_nothing():
    batched = jedbatch.batch(encoder(child_sum))
    slope = jax.grad(lambda p, xs: batched(p, xs).sum())
    for seed in range(2):
        slope(P, trees(seed, MANY))
    with compilations() as made:
        slope(P, trees(2, [0, 1, 2, 3, 4, 5, 7, 8]))
    assert not made


def test_known_instances_take_part_when_types_change():
    """Instances that were recorded before there were many lengths are recorded again."""
    fn = encoder(child_sum)
    batched = jedbatch.batch(fn)
    few, many = trees(3, [0, 1, 2]), trees(4, MANY)
    before = types_of(batched.plan(P, few))
    assert max(len(t.results) for t in before) == 2
    together = [*few, *many]
    assert_close(batched(P, together), jnp.stack([fn(P, t) for t in together]))
    assert {len(t.results) for t in types_of(batched.plan(P, few))} == {3}


def test_elements_that_no_node_makes():
    """Lists of inputs, or of inputs and results, are multiplied by the nodes that read them."""
    node = jedbatch.cell(lambda p, x, rows: sum(jnp.tanh(p["forget"] @ r) for r in rows) * x)
    make = jedbatch.cell(lambda p, x: jnp.tanh(p["leaf"] * x))

    def fn(p, instance):
        rows, numbers = instance
        made = [make(p, x) for x in numbers]
        own = [node(p, 1.0, made)] if made else []
        return node(p, 2.0, [*rows, *made]) + sum(own, start=jnp.zeros(SIZE))

    rng = np.random.default_rng(0)
    instances = [
        (
            [rng.normal(size=SIZE).astype(np.float32) for _ in range(k % 3)],
            [float(rng.normal()) for _ in range(k % 7 if k % 3 else 1 + k % 7)],
        )
        for k in range(14)
    ]
    batched = check(fn, P, instances)

    def kinds(plan):
        types = types_of(plan)
        return {operation_of(t).key[0] for t in types if operation_of(t).lists is not None}

    assert kinds(batched.plan(P, instances)) == {"list"}
    batched = jedbatch.batch(fn)  # inputs come later
    assert kinds(batched.plan(P, [([], x[1] or [1.0]) for x in instances])) == {"list of functions"}
    assert kinds(batched.plan(P, instances)) == {"list", "list of functions"}
    assert_close(batched(P, instances), jnp.stack([fn(P, x) for x in instances]))


def test_values_that_are_seldom_elements_are_left_alone():
    make = jedbatch.cell(lambda p, x: jnp.tanh(p["leaf"] * x))
    node = jedbatch.cell(lambda p, rows: sum(jnp.tanh(p["forget"] @ r) for r in rows))

    def fn(p, n):
        rows = [make(p, float(k)) for k in range(10 * n)]
        return node(p, rows[:n]) + rows[-1]

    numbers = [1, 2, 3, 4, 5, 6]
    types = types_of(check(fn, P, numbers).plan(P, numbers))
    assert {len(t.results) for t in types} == {1}

    def often(p, n):
        return node(p, [make(p, float(k)) for k in range(n)])

    types = types_of(check(often, P, numbers).plan(P, numbers))
    assert {len(t.results) for t in types if operation_of(t).lists is None} == {2}


def test_calls_of_python_are_left_to_the_readers():
    """Values that are elements of nothing are not given to functions of elements."""
    given = []

    def look(x):
        given.append(np.array(x))
        return np.asarray(x)

    def called(p, x, states):
        def product(h):
            y = p["forget"] @ h
            return jax.pure_callback(
                look, jax.ShapeDtypeStruct(y.shape, y.dtype), y, vmap_method="sequential"
            )

        return jnp.tanh(x + sum(product(h) for h, _ in states)), x * p["leaf"]

    fn, instances = encoder(called), trees(9, MANY)
    batched = jedbatch.batch(fn)
    batched(P, instances)
    jax.effects_barrier()
    given.clear()
    expected = jnp.stack([fn(P, t) for t in instances])
    seen = np.stack(given)
    given.clear()
    assert_close(batched(P, instances), expected)
    jax.effects_barrier()
    nearest = [np.abs(seen - x).max(axis=1).min() for x in given]
    assert given
    assert max(nearest) < 1e-4


def test_derivatives_of_all_kinds():
    fn, instances = encoder(child_sum), trees(5, MANY)
    batched = jedbatch.batch(fn)
    moved = jax.tree.map(jnp.ones_like, P)

    def total(run):
        return lambda p: jnp.sin(run(p)).sum()

    loop = total(lambda p: jnp.stack([fn(p, t) for t in instances]))
    ours = total(lambda p: batched(p, instances))
    for of in (
        lambda f: jax.jvp(f, (P,), (moved,)),
        lambda f: jax.jvp(jax.grad(f), (P,), (moved,)),
        lambda f: jax.vmap(f)(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), P)),
    ):
        assert_close(of(ours), of(loop))
    plan = batched.plan(P, instances, gradient=True)
    slope = jax.jit(jax.grad(lambda p: jnp.sin(batched.apply(p, plan)).sum()))
    assert_close(slope(P), jax.grad(loop)(P))


def test_a_lazy_scope():
    fn, instances = encoder(child_sum), trees(6, MANY)
    with jedbatch.lazy():
        futures = [fn(P, tree) for tree in instances]
    got = np.stack([np.asarray(x) for x in futures])
    assert_close(got, np.stack([np.asarray(fn(P, t)) for t in instances]))


def test_single_instances():
    fn, instances = encoder(child_sum), trees(7, MANY)
    batched = jedbatch.batch(fn)
    batched(P, instances)
    for tree in instances:
        assert_close(batched(P, [tree])[0], fn(P, tree))


def test_plans_are_right_and_can_be_exported():
    fn, instances = encoder(child_sum), trees(8, MANY)
    batched = jedbatch.batch(fn)
    exported = batched.export(P, instances, gradient=True)
    for seed in range(3):
        more = trees(seed, np.random.default_rng(seed).integers(0, 10, 5))
        check_plan(batched.plan(P, more, gradient=True))
        plan = exported.plan(batched.graph(P, more).split(), gradient=True)
        assert_close(exported.apply(P, plan), jnp.stack([fn(P, t) for t in more]))
