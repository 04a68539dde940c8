"""Cells that take lists: one type serves lists of many lengths, with the loop's answers."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, compilations, mostly_slow

import jedbatch
from jedbatch._jaxpr.interpret import inlined
from jedbatch._jaxpr.list_arrays import numbers_of_length
from jedbatch._jaxpr.list_expressions import Expressions
from jedbatch._jaxpr.rolling import CannotRollError, Roller
from jedbatch._record.identity.primitives import Keys
from jedbatch._support import native
from jedbatch.testing import check_plan

W = jnp.array([[0.3, -0.7], [0.5, 0.2]])


def child_sum(w, x, *states):
    total = sum((h for h, _ in states[1:]), start=states[0][0])
    c = jnp.tanh(x + total @ w)
    for h, below in states:
        c = c + jax.nn.sigmoid(x + h @ w) * below
    return jnp.tanh(c), c


def attention(w, x, *states):
    h, c = (jnp.stack(parts) for parts in zip(*states, strict=True))
    weights = jax.nn.softmax(h @ w @ x)
    return weights @ c, jax.nn.relu(jnp.max(h @ w, axis=0))


def means(w, x, *states):
    rows = jnp.concatenate([h[None] for h, _ in states])
    columns = jnp.stack([c for _, c in states], axis=1)
    both = sum(h * c for h, c in states) / len(states)
    return jnp.mean(rows * x[None], axis=0) + both, jnp.sum(w @ columns, axis=1)


def in_order(w, x, *states):
    highest = product = states[0][0]
    for h, _ in states[1:]:
        highest = jnp.maximum(highest, h)
        product = product * h
    norms = jnp.array([jnp.sum(c * c) for _, c in states])
    return highest @ w + jax.nn.logsumexp(norms), product * x


def together(w, x, *states):
    rows = jnp.stack([h for h, _ in states])[:, None]
    scores = jnp.einsum("kij,kj->ki", rows, jnp.transpose(jnp.stack([c for _, c in states], 1)))
    return jnp.squeeze(jnp.tanh(rows), 1).T @ scores[:, 0], jnp.prod(rows.reshape(-1, 2), 0)


def looked_up(w, x, *states):
    return w[jnp.argmax(x)] * sum(h for h, _ in states) / len(states), x


def end_to_end(w, x, *states):
    """Arrays in which each element has several rows."""
    both = jnp.concatenate([h for h, _ in states]), jnp.concatenate([c for _, c in states])
    scores = jax.nn.softmax(both[0])
    columns = jnp.concatenate([h[None] * c[:, None] for h, c in states], axis=1)
    centered = (both[1] - both[1].mean()) ** 2
    total = scores @ both[1] + centered.mean() + both[0].max() * both[1].min()
    return total * x, jnp.tanh(w @ columns).sum(1) + columns.T.max(0)


def side_by_side(w, x, *states):
    return jnp.concatenate([h for h, _ in states]).reshape(2, -1).sum(1), x


def one_more(w, x, *states):
    rows = jnp.stack([x, *(h for h, _ in states)])
    return rows.sum(0) + jnp.concatenate([rows, rows[:1]]).prod(0), x


def self_attention(w, x, *states):
    """Two heads of one number each, among all elements and itself, of the causal kind."""
    h = jnp.stack([h for h, _ in states])
    n = h.shape[0]
    q, k, v = (jnp.tanh(h @ y).reshape(n, 2, 1) for y in (w, w.T, w @ w))
    scores = jnp.einsum("nhd,mhd->hnm", q, k) * 0.7
    scores = jnp.where(jnp.tri(n, dtype=bool), scores, -1e9)
    read = jnp.einsum("hnm,mhd->nhd", jax.nn.softmax(scores), v).reshape(n, 2)
    return read.mean(0) @ w, jax.lax.cumsum(h)[-1] * x


def neighbours(w, x, *states):
    """Differences, a recurrence along the list, and all pairs."""
    h, c = (jnp.stack(parts) for parts in zip(*states, strict=True))
    steps = jnp.tanh(h[1:] - h[:-1]).sum(0) + jnp.stack([h for h, _ in states[::-1]])[0]
    last, every = jax.lax.scan(lambda s, y: (jnp.tanh(s @ w + y), s), x, h[::-1])
    pairs = (h[:, None] * c[None]).reshape(-1, 2)
    return steps * every.sum(0), last + jnp.sort(pairs, axis=0)[-1] / pairs.shape[0]


def by_table(w, x, *states):
    """As many rows of a table as there are elements, and as many numbers."""
    h, c = (jnp.stack(parts) for parts in zip(*states, strict=True))
    n = len(states)
    table = jnp.outer(jnp.sin(jnp.arange(40.0)), w[0])
    near = h * table[:n] + table[-n:][::-1]
    far = jax.lax.dynamic_slice_in_dim(table, 2, n) * table[np.arange(n)]
    return (near + far).sum(0), x * (np.arange(n, 0, -1, dtype=np.float32) @ c)


def one_by_one(w, x, *states):
    """Rows of a stack, rows of what becomes of all of it, and its columns."""
    h = jnp.stack([h for h, _ in states])
    mixed = jax.nn.softmax(h @ h.T) @ h
    read = sum(jnp.tanh(row @ w) for row in jnp.unstack(mixed)) + sum(jnp.unstack(jnp.sin(h)))
    first, second = jnp.unstack(h, axis=1)
    return read, jnp.stack([first.sum(), second.max()]) * x


ALIKE = [
    by_table,
    one_by_one,
    child_sum,
    attention,
    means,
    in_order,
    together,
    looked_up,
    end_to_end,
    side_by_side,
    one_more,
    self_attention,
    neighbours,
]


def difference(w, x, *states):
    return states[0][0] - states[-1][0], x


def by_position(w, x, *states):
    return sum((k + 1.0) * h for k, (h, _) in enumerate(states)), x


def some(w, x, *states):
    return states[0][0] + states[1][0], x


def rows(w, x, *states):
    return jnp.stack([h for h, _ in states]), x


UNLIKE = [difference, by_position, some, rows]


def rolled(expressions, cell, length, numbers=None):
    """The ids of the results of a cell of so many states, of which `numbers` is told."""
    states = [(jnp.ones(2), jnp.ones(2))] * length
    program = jax.make_jaxpr(lambda w, x, states: cell(w, x, *states))(W, jnp.ones(2), states)
    program = inlined(program)
    elements = [("element", leaf, k) for k in range(length) for leaf in range(2)]
    roles = [("input", 0), ("input", 1), *elements]
    roller = Roller(expressions, program, roles, (length,))
    results = roller.results()
    if numbers is not None:
        numbers[length,] = roller.numbers
    return results


def parts(expressions):
    """The ids of the two leaves of a state."""
    return [expressions.given((2,), np.dtype(np.float32), "element", leaf) for leaf in range(2)]


NUMBERS_OF_LENGTH = {
    "the length": lambda n: n,
    "a constant": lambda n: 7,
    "one less": lambda n: n - 1,
    "pairs": lambda n: 2 * n * n + 3 * n,
    "a divisor": lambda n: np.float32(n + 1),
    "one by it": lambda n: np.float32(1 / (n * n)),
    "infinity": lambda n: np.float32(-np.inf),
    "not a number": lambda n: np.float32(np.nan),
    "half": lambda n: n // 2 + 1,
    "exactly half": lambda n: np.float32(n / 2),
}
OTHER_NUMBERS = {
    "a power": lambda n: 2**n,
    "a root": lambda n: np.float32(np.sqrt(n)),
    "by chance": lambda n: {3: 8}.get(n, n),
}


@pytest.mark.parametrize("name", NUMBERS_OF_LENGTH | OTHER_NUMBERS)
def test_numbers_that_follow_from_the_length(name):
    number = (NUMBERS_OF_LENGTH | OTHER_NUMBERS)[name]
    found = numbers_of_length({(n,): {0: (number(n),)} for n in (2, 3, 5, 9)})
    assert (found is not None) == (name in NUMBERS_OF_LENGTH)
    if found is not None:
        for n in (1, 4, 20, 1000):
            (known,) = found.of[0]
            np.testing.assert_allclose(float(known.at([n])), float(number(n)), rtol=1e-6)


@pytest.mark.parametrize("number", [lambda n, m: n + m - 1, lambda n, m: np.float32(n * m)])
def test_numbers_that_follow_from_two_lengths(number):
    pairs = [(2, 3), (4, 2), (2, 7), (5, 5), (3, 2)]
    found = numbers_of_length({pair: {0: (number(*pair),)} for pair in pairs})
    for pair in [(1, 1), (9, 30)]:
        np.testing.assert_equal(float(found.of[0][0].at(pair)), float(number(*pair)))


def test_numbers_in_cells_that_follow_from_the_length():
    """Divisors, the element in the middle, and rows of a table are of one type for all lengths."""

    @jedbatch.cell
    def node(w, states):
        n, rows = len(states), jnp.stack(states)
        scores = rows[: n // 2].max(0) + rows[n // 2] / (n + 1)
        return jnp.tanh(scores @ w) + sum(states) / n**2 - rows.sum(0) * (n / 2)

    fn = lambda w, count: node(w, [w[0] * (k + 1.0) for k in range(count)])  # noqa: E731
    batched, counts = jedbatch.batch(fn), [2, 3, 4, 5, 6, 7, 8, 9, 13]
    assert_close(batched(W, counts), jnp.stack([fn(W, n) for n in counts]), rtol=1e-5)
    graph = batched.plan(W, counts).graph
    assert sum(graph.types[t].name == "node" for t in graph.present_types) <= 4


@pytest.mark.parametrize("cell", mostly_slow(ALIKE, "child_sum", "end_to_end", "by_table"))
def test_programs_of_lists_are_rolled_up(cell):
    expressions = Expressions(Keys().params_key)
    numbers = {}
    results = {rolled(expressions, cell, length, numbers) for length in (3, 4, 5, 7)}
    assert len(results) == 1
    states = parts(expressions)
    program = expressions.program(
        *results,
        inputs=[0, 1],
        summed=[False] * 2,
        capacity=6,
        parts=states,
        numbers=numbers_of_length(numbers),
    )
    rng = np.random.default_rng(0)

    def value(run, w, *args):
        return sum(jnp.sin(y).sum() for y in run(w, *args))

    for length in (1, 2, 4, 6):
        x, *leaves = rng.normal(size=(1 + 2 * length, 2)).astype(np.float32)
        states = list(zip(leaves[:length], leaves[length:], strict=True))

        def padded(w, states, x=x, length=length):
            every = [*states, *[states[0]] * (6 - length)]
            elements = [part for parts in zip(*every, strict=True) for part in parts]
            return program([w, x], elements, [jnp.int32(length)])

        def plain(w, states, x=x):
            return cell(w, x, *states)

        ours, loops = (
            jax.value_and_grad(lambda w, s, run=run: value(run, w, s), argnums=(0, 1))(W, states)
            for run in (padded, plain)
        )
        assert_close(ours, loops, rtol=1e-4)


def test_lists_that_are_only_summed():
    """Of these the program takes the sum, but not where an element has another use."""
    expressions = Expressions(Keys().params_key)
    numbers = {}
    only = {cell: rolled(expressions, cell, 3, numbers) for cell in (child_sum, looked_up)}
    rolled(expressions, looked_up, 4, numbers)
    states = parts(expressions)
    leaves = {c: [expressions.is_only_summed(r, part) for part in states] for c, r in only.items()}
    assert leaves == {looked_up: [True, True], child_sum: [False, False]}  # the other is not read
    (results,) = {only[looked_up]}
    whole, of_sum = (
        expressions.program(results, [0, 1], [s, False], 4, states, numbers_of_length(numbers))
        for s in (False, True)
    )
    x, *h = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)), jnp.float32)
    length = [jnp.int32(3)]
    total = h[0] + h[1] + h[2]
    assert_close(of_sum([W, x], [total, *h], length), whole([W, x], [*h, *h], length), rtol=1e-6)


def test_operations_with_many_results_run_once():
    def in_parts(w, x, *states):
        first, second = jnp.split(sum(h for h, _ in states) @ w, 2)
        return first * second, sum(jnp.split(c, 2)[0] for _, c in states)

    expressions, numbers = Expressions(Keys().params_key), {}
    results = rolled(expressions, in_parts, 3, numbers)
    states = parts(expressions)
    known = numbers_of_length(numbers)
    program = expressions.program(results, [0, 1], [False] * 2, 4, states, known)
    args = [W, jnp.ones(2)], [jnp.ones(2)] * 8, [jnp.int32(3)]
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(program)(*args).jaxpr.eqns]
    assert names.count("split") == 2
    assert_close((*program(*args),), in_parts(W, None, *[(jnp.ones(2),) * 2] * 3), 1e-6)


@pytest.mark.parametrize("cell", [child_sum, attention, together, looked_up])
def test_programs_of_one_element_are_recognized(cell):
    """They have no reductions; what is said of longer lists is what they do, and of others not."""
    expressions = Expressions(Keys().params_key)
    of_several = {}
    several, _ = (rolled(expressions, cell, n, of_several) for n in (3, 4))
    numbers = numbers_of_length(of_several)

    def are_of_one(cell):
        own = {}
        one = rolled(expressions, cell, 1, own)
        return expressions.are_of_one(one, own[1,], several, numbers)

    assert are_of_one(cell)
    for other in ALIKE:
        if other is not cell:
            assert not are_of_one(other)


@pytest.mark.parametrize("cell", UNLIKE)
def test_what_differs_by_more_than_length_is_no_list(cell):
    expressions = Expressions(Keys().params_key)
    found = set()
    for length in (3, 4, 7):
        try:
            found.add(rolled(expressions, cell, length))
        except CannotRollError:
            found.add(length)
    assert len(found) == 3


@jedbatch.cell
def leaf(w, x):
    return jnp.tanh(x), x @ w


def encoder(cell, form):
    node = jedbatch.cell(cell)

    def encode(w, tree):
        x, *children = tree
        states = [encode(w, child) for child in children]
        return form(node, w, x, states) if states else leaf(w, x)

    return lambda w, tree: encode(w, tree)[0]


def spread(node, w, x, states):
    return node(w, x, *states)


def trees(seed, arities):
    """A tree for each number of children; the children have children, too."""
    rng = np.random.default_rng(seed)

    def tree(*numbers):
        x = rng.normal(size=2).astype(np.float32)
        return x, *(tree(*numbers[1:]) for _ in range(numbers[0] if numbers else 0))

    return [tree(n, 1 + n % 3) for n in arities]


def types_of(plan):
    return len({t for t, _ in plan.schedule.batches})


def test_many_lengths_are_few_types():
    encode = encoder(child_sum, spread)
    few, many = trees(0, [1, 2, 3]), trees(1, [0, 1, 2, 3, 4, 5, 6, 9, 12])
    batched = check(encode, W, many, inference=True)
    with compilations() as made:
        batched(W, trees(2, [0, 1, 2, 3, 4, 5, 6, 8, 11]))
    assert not made
    batched = jedbatch.batch(encode)
    assert types_of(batched.plan(W, few)) == 4  # one for each number of children
    # No children, up to four, up to eight, and up to 32.
    assert types_of(batched.plan(W, many)) == types_of(batched.plan(W, [*few, *many])) == 4


MIXING = mostly_slow(
    [self_attention, by_table, neighbours, one_more, side_by_side], "self_attention", "by_table"
)


@pytest.mark.parametrize("cell", MIXING)
def test_elements_that_meet_each_other_are_few_types(cell):
    encode = encoder(cell, spread)
    many = trees(1, [0, 1, 2, 3, 4, 5, 6, 9, 12])
    batched = check(encode, W, many, inference=True)
    unseen = trees(2, [0, 1, 2, 3, 4, 5, 6, 8, 11])
    with compilations() as made:
        found = batched(W, unseen)
    assert not made
    assert_close(found, jnp.stack([encode(W, tree) for tree in unseen]), rtol=1e-5)
    # No children, one if that is another program, up to four, up to eight, and up to 32.
    assert types_of(batched.plan(W, many)) <= 5


def test_long_lists_share_a_type_as_soon_as_they_are_met():
    """Numbers of one length are guessed: 70 of 70 elements may be all of them, or the first 70."""

    @jedbatch.cell
    def node(w, states):
        rows = jnp.stack(states)
        steps = jnp.sort(rows, axis=0)[1:] - rows[:-1]
        return (steps * steps.shape[0]).max(0) + rows[:70].sum(0) @ w

    fn = lambda w, count: node(w, [w[0] * jnp.sin(k + 1.0) for k in range(count)])  # noqa: E731
    batched = jedbatch.batch(fn)
    for counts, most in (([70, 70], 1), ([80], 1), ([85, 79], 1), ([70, 90, 75], 2)):
        assert_close(batched(W, counts), jnp.stack([fn(W, n) for n in counts]), rtol=1e-5)
        types = batched.plan(W, counts).graph
        assert sum(types.types[t].name == "node" for t in types.present_types) <= most


def test_what_is_another_program_for_some_lengths_is_no_list():
    """Numbers that do not follow from the length, and operations that only some lengths have."""

    @jedbatch.cell
    def node(w, states):
        rows = jnp.stack(states)
        scale = {3: 0.5, 5: 7.0}.get(len(states), 2.0)
        scores = jax.nn.softmax(rows @ rows.T * scale) @ rows
        return jnp.tanh(scores.mean(0) @ w if len(states) != 6 else jnp.sort(scores, 0)[2])

    fn = lambda w, count: node(w, [w[0] * (k + 1.0) for k in range(count)])  # noqa: E731
    batched = jedbatch.batch(fn)
    counts = [2, 3, 4, 5, 6, 7, 8, 9]
    assert_close(batched(W, counts), jnp.stack([fn(W, n) for n in counts]), rtol=1e-5)


def test_elements_of_weak_types_among_others():
    """Few lengths, but types for every pattern of leaves and nodes in them."""

    @jedbatch.cell
    def node(w, states):
        rows = jnp.stack(states)
        return jnp.tanh(jax.nn.softmax(rows @ w[0]) @ rows @ w + sum(states))

    def encode(w, tree):
        if isinstance(tree, float):
            return jnp.full(2, tree)  # of a Python number, so of a weak type
        return node(w, [encode(w, part) for part in tree])

    w, inner = jnp.asarray([[0.5, -1.0], [2.0, 0.25]], jnp.float32), (0.5, (1.0, -2.0))
    patterns = itertools.chain(*(itertools.product([0.25, inner], repeat=n) for n in (1, 2, 3)))
    many = list(patterns)
    batched = check(encode, w, many)
    assert types_of(batched.plan(w, many)) == 1
    few = jedbatch.batch(encode).plan(w, [(0.5, 1.0), (inner, inner), (0.5, inner)])
    assert types_of(few) == 3  # two leaves, a leaf and a node, and two nodes


def test_arguments_of_weak_types_that_are_no_elements():
    """Two lengths are few, whatever the types of the other arguments are."""

    @jedbatch.cell
    def node(w, x, y, *states):
        return jnp.tanh(x * y * sum(states) @ w)

    def fn(w, instance):
        x, y, count = instance
        return node(w, x or w[0, 0], y or w[0, 1], *[w[0] for _ in range(count)])

    instances = list(itertools.product([0, 0.5], [0, 2.0], [2, 3]))
    plan = jedbatch.batch(fn).plan(W, instances)
    names = [plan.graph.types[t].name for t, _ in plan.schedule.batches]
    assert names.count("node") == len(instances)


def test_patterns_of_weak_types_that_are_met_before_lengths():
    """Types of lists of one length do not vary; later they do."""

    @jedbatch.cell
    def node(w, states):
        return jnp.tanh(jnp.stack(states) @ w).sum(0)

    def fn(w, elements):  # of which Python numbers are of a weak type
        return node(w, [jnp.full(2, x) if isinstance(x, float) else w[x] for x in elements])

    patterns = list(itertools.product([0.25, 1], repeat=3))
    lengths = [(0.5,) * n for n in (1, 2, 4, 5)]
    for many in ([*patterns, *lengths], [*lengths, *patterns]):
        plan = jedbatch.batch(fn).plan(W, many)
        assert types_of(plan) == 3  # a row of `w`, nodes with room for 4, and with room for 8
        check_plan(plan)


def test_longer_lists_than_there_is_room_for():
    encode, many = encoder(child_sum, spread), trees(3, [1, 2, 3, 4, 5, 66])
    assert types_of(check(encode, W, many, gradients=False).plan(W, many)) == 4


def in_lists(node, w, x, states):
    return node(w, x, [h for h, _ in states], tuple(c for _, c in states))


def of_lists(w, x, hs, cs):
    return attention(w, x, *zip(hs, cs, strict=True))


@pytest.mark.slow
def test_lists_among_the_arguments():
    many = trees(4, [1, 2, 3, 4, 5, 6])
    assert types_of(check(encoder(of_lists, in_lists), W, many).plan(W, many)) == 3


def in_containers(w, node):
    x, (_, below) = node["x"], node["below"]
    return jnp.tanh(x + sum(h @ w for h in below["h"])), jnp.stack(below["c"]).max(0) * x


def test_lists_inside_of_other_arguments():
    def arranged(node, w, x, states):
        h, c = zip(*states, strict=True)
        return node(w, {"x": x, "below": (x, {"h": list(h), "c": c})})

    many = trees(7, [1, 2, 3, 4, 5, 6])
    batched = check(encoder(in_containers, arranged), W, many, gradients=False)
    assert types_of(batched.plan(W, many)) == 3


@pytest.mark.parametrize("cell", mostly_slow([means, by_position], "by_position"))
def test_lengths_that_python_reads(cell):
    many = trees(5, [1, 2, 3, 4, 5, 6])
    plan = check(encoder(cell, spread), W, many, gradients=False).plan(W, many)
    assert types_of(plan) == (4 if cell is means else 7)


def test_lists_in_a_lazy_scope():
    encode = encoder(child_sum, spread)
    many = trees(6, [1, 2, 3, 4, 5, 6])
    with jedbatch.lazy() as scope:
        futures = [encode(W, tree) for tree in many]
    assert len(scope.rounds) == 1
    np.testing.assert_allclose(
        np.stack([np.asarray(x) for x in futures]), [encode(W, t) for t in many], rtol=1e-5
    )


def test_lists_whose_elements_are_shared_arguments():
    node = jedbatch.cell(lambda x, rows: x + sum(jnp.tanh(r * x) for r in rows))
    params = [W[0] * k for k in range(7)]
    instances = [(np.ones(2, np.float32) * k, "a" * (1 + k % 7)) for k in range(7)]
    check(lambda params, x: node(x[0], params[: len(x[1])]), params, instances, gradients=False)


BAGS = [[[1, 2], [1]], [[3, 0, 3], [1, 4, 1, 0]], [[0, 2, 0, 2, 1], [1, 0, 6, 5, 4, 3]]]


def by_scores(xs):
    rows = jnp.stack(xs)
    return (jax.nn.softmax(rows @ rows.T / 5.5) @ rows).sum(axis=0)


def by_cosines(xs):
    rows = jnp.stack(xs)
    lengths = jnp.sqrt((rows**2).sum(axis=1))
    return jax.nn.softmax(rows @ rows.T / jnp.outer(lengths, lengths)) @ rows @ jnp.ones(2)


def by_distances(xs):
    rows = jnp.stack(xs)
    squares = ((rows[:, None] - rows[None]) ** 2).sum(axis=-1) + jnp.eye(rows.shape[0])
    return jnp.exp(-jnp.sqrt(squares)).sum(axis=0) @ rows


EDGES = {  # a function of a list, and of weights and a number to an element of it
    "flags": (lambda x: jnp.stack(x).max(0) * 1.0, lambda p, i: p < i),
    "small integers": (
        lambda x: jnp.stack(x).min(0) * 1.0,
        lambda p, i: jnp.uint32(i) + p.astype("u4"),
    ),
    "minus infinity": (
        lambda x: jnp.exp(jnp.stack(x).max(0)) + jnp.stack(x).max(0),
        lambda p, i: p * i - jnp.inf,
    ),
    "ties": (lambda x: jnp.stack(x).max(0), lambda p, i: p * (i % 2)),
    "infinite derivatives": (
        lambda x: sum(map(jnp.sqrt, x)),
        lambda p, i: (p - p[0]) * i + (p - p[0]),
    ),
    "large scores": (by_scores, lambda p, i: 9 * p * i),
    "cosines": (lambda xs: by_cosines(xs).sum(), lambda p, i: 9 * p * (i + 1)),
    "distances": (by_distances, lambda p, i: jnp.sin(p * (i + 1))),
}


@pytest.mark.parametrize("name", mostly_slow(EDGES, "small integers", "cosines"))
def test_what_does_not_exist_changes_nothing(name):
    """Neither results nor derivatives, though all elements may be equal to what nothing changes."""
    of_list, of_number = EDGES[name]
    join = jedbatch.cell(lambda p, xs: of_list(xs) * p.sum())
    element = jedbatch.cell(of_number)
    fn = lambda p, bag: join(p, [element(p, float(i)) for i in bag])  # noqa: E731
    batched, p = jedbatch.batch(fn), jnp.array([1.0, 2.0])
    for bags in BAGS:
        total = lambda p, run: run(p).sum()  # noqa: E731
        loop = lambda p, bags=bags: jnp.stack([fn(p, bag) for bag in bags])  # noqa: E731
        ours = lambda p, bags=bags: batched(p, bags)  # noqa: E731
        np.testing.assert_allclose(ours(p), loop(p), rtol=1e-5)
        np.testing.assert_allclose(jax.grad(total)(p, ours), jax.grad(total)(p, loop), rtol=1e-4)
    assert any("i32[])" in str(t) for t in batched.plan(p, BAGS[-1]).graph.types)  # a length


@jedbatch.cell
def bag_sum(p, scale, xs):
    return scale * jnp.tanh(sum(xs)) @ p


@jedbatch.cell
def item(p, i):
    return p[0] * i + jnp.log(i)


def bag(p, numbers):
    """The sum of a list; an item 0 makes it infinite, -1 no number."""
    return bag_sum(p, 1.0 + len(numbers), [item(p, float(i)) for i in numbers])


SUMS = [[1, 2], [2, 3, 2], [4], [3, 1, 2, 2], [2, 1, 1, 1, 5], [1, 2, 3, 4, 5, 6, 7], [2] * 9]


def summed(batched, *args):
    """For each kernel with a list the room in it, if it takes the sum."""
    kernels = batched.plan(*args).static.signature.kernels
    return [x.length for k in kernels for x in k.parameters if x.is_sum]


def test_sums_of_lists_are_read_as_sums():
    """Elements that are there twice count twice; those that do not exist have no cotangent.

    Of lists that are only summed there are no types for up to four elements.
    """
    batched = check(bag, W, SUMS, inference=True)
    assert sorted(summed(batched, W, SUMS)) == [8, 32]
    with compilations() as made:
        batched(W, [[5, 5, 5, 5], [1, 1, 2], [7], [2, 3], [2, 1], [1, 2, 3, 4, 5, 6], [3] * 11])
    assert not made
    plan = batched.plan(W, SUMS, gradient=True)
    check_plan(plan)
    signature = plan.static.signature
    k, x = next((k, x) for k, n in enumerate(signature.kernels) for x in n.parameters if x.is_sum)
    for there, value in ((True, -1), (False, 0)):  # one less is added up, or one more
        table = np.array(plan.table)
        listed = signature.form.view(table, "operands", k)[x.first : x.first + x.length]
        listed[tuple(np.argwhere((listed[:, :1] >= 0) == there)[0])] = value
        with pytest.raises(AssertionError, match="other elements than exist"):
            check_plan(dataclasses.replace(plan, table=table))


def test_no_element_that_does_not_exist_is_a_part_of_a_sum():
    batched = jedbatch.batch(bag)
    batched(W, SUMS)
    for wrong in (0, -1):  # infinity, and NaN, in one list of which some elements do not exist
        lists = [[wrong], [1, wrong, 2], *SUMS]
        ours, loop = batched(W, lists), jnp.stack([bag(W, x) for x in lists])
        np.testing.assert_allclose(ours, loop, rtol=1e-5)
        ours, loop = (
            jax.grad(lambda p, run=run: run(p)[2:].sum())(W)
            for run in (
                lambda p, lists=lists: batched(p, lists),
                lambda p, lists=lists: jnp.stack([bag(p, x) for x in lists]),
            )
        )
        np.testing.assert_allclose(ours, loop, rtol=1e-5)


@pytest.mark.parametrize("way", mostly_slow(["operations of XLA", "switch"], "operations of XLA"))
def test_sums_without_calls(way, monkeypatch):
    if way == "operations of XLA":
        monkeypatch.setattr(native, "core", lambda: None)
    options = {"target": "gpu"} if way == "switch" else {}
    check(bag, W, SUMS, **options)


@pytest.mark.slow
def test_derivatives_of_sums():
    batched = jedbatch.batch(bag)
    value = lambda run: lambda p: jnp.sin(run(p)).sum()  # noqa: E731
    ours, loop = (
        value(lambda p: batched(p, SUMS)),
        value(lambda p: jnp.stack([bag(p, x) for x in SUMS])),
    )
    for of in (
        lambda f: jax.jvp(f, (W,), (W,)),
        lambda f: jax.jvp(jax.grad(f), (W,), (W,)),
        lambda f: jax.vmap(jax.grad(f))(jnp.stack([W, 2 * W])),
    ):
        for a, b in zip(jax.tree.leaves(of(ours)), jax.tree.leaves(of(loop)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [70, pytest.param(300, marks=pytest.mark.slow)])
def test_long_chains(length):
    """Elements one after the other; those that are equal share the cotangent as in the loop."""
    values = jnp.array([[0.9, 1.1], [1.02, 0.97], [1.02, 1.1]])
    cell = jedbatch.cell(lambda *xs: functools.reduce(jnp.maximum, xs) * math.prod(xs))
    rng = np.random.default_rng(0)
    lists = [tuple(rng.integers(0, 3, n).tolist()) for n in (length, length + 3)]

    def fn(values, chosen):
        rows = [jnp.tanh(values[k]) for k in range(3)]
        return cell(*(rows[k] + 0.2 for k in chosen))

    check(fn, values, lists, rtol=1e-4)


def test_equal_elements_share_the_gradient_of_an_extreme():
    """All entries that are equal, whatever element they are of."""
    draws = np.random.default_rng(3)
    sizes = (3, 1, 5, 7, 2, 6)
    lists = [list(draws.choice([-2.0, 1.0, 2.0], (n, 4)).astype(np.float32)) for n in sizes]
    for join in (jnp.concatenate, jnp.stack):

        @jedbatch.cell
        def extremes(xs, join=join):
            return join(xs).max() - 3 * join(xs).min()

        def fn(p, xs, extremes=extremes):
            return extremes([p * x for x in xs])

        batched = check(fn, jnp.ones(4), lists)
        assert types_of(batched.plan(jnp.ones(4), lists)) <= 5
