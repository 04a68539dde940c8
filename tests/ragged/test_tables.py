"""Loops that fill tables over pairs of rows: dynamic programs of sentences of any length.

The judges are the function itself, run on padded arrays equation by equation and on arrays of the
right size; the loop over instances; and, for grammars, all trees of a sentence written out.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, number
from jax import export, lax

import jedbatch
from benchmarks.rivals import inside
from jedbatch._jaxpr.interpret import value_of
from jedbatch._jaxpr.padding.padded_loops import find_chain, find_count
from jedbatch._jaxpr.padding.padded_rules import Padded
from jedbatch._jaxpr.symbolic_dims import extent_at, make_symbol
from jedbatch._kernel.target import CPU
from jedbatch._ragged.phases import find_phases, flattened

SCOPE = export.SymbolicScope()
N, M = make_symbol("n", SCOPE), make_symbol("m", SCOPE)
EXIST, ROOM = {"n": 3, "m": 4}, {"n": 5, "m": 6}


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, Y = map(jnp.asarray, (random(ROOM["n"], 2), random(ROOM["m"], 2, seed=1)))

# --- what a user writes, of x [n, 2] and y [m, 2] ---


def scores(x, y):
    return x @ y.T


def by_widths(x, y):
    """The best split of every span, by width; one loop in another, table in place."""
    n = x.shape[0]

    def width(w, table):
        def start(i, table):
            split = lambda m, best: jnp.maximum(best, table[i, m] + table[m, i + w])  # noqa: E731
            return table.at[i, i + w].set(1 + lax.fori_loop(i, i + w, split, -9.0))

        return lax.fori_loop(0, n - w, start, table)

    return lax.fori_loop(1, n, width, scores(x, x))


def diagonals(x, y):
    n, i = x.shape[0], jnp.arange(x.shape[0])

    def width(table, w):
        moved = jnp.take(table, i + w, axis=1, mode="clip")
        found = jnp.where(i + w < n, (jnp.tanh(table) * moved).sum(1), 0)
        return table.at[i, i + w].add(found, mode="drop"), found.max()

    return lax.scan(width, scores(x, x), jnp.arange(n))


def alignment(x, y):
    """Edit distance and its like: rows of the table one by one, and entries of each."""
    first = jnp.cumsum(jnp.ones(y.shape[0] + 1))

    def row(above, costs):
        def entry(left, others):
            up, corner, cost = others
            value = jnp.minimum(jnp.minimum(up, left) + 1, corner + cost)
            return value, value

        _, rest = lax.scan(entry, above[0] + 1, (above[1:], above[:-1], costs))
        return jnp.concatenate([above[:1] + 1, rest]), rest.sum()

    return lax.scan(row, first, jnp.square(scores(x, y)))


def from_the_end(x, y):
    def row(below, costs):
        return jnp.tanh(costs + below), below.max()

    return lax.scan(row, jnp.zeros(y.shape[0]), scores(x, y), reverse=True)


def shortest_paths(x, y):
    def through(k, d):
        return jnp.minimum(d, d[:, k][:, None] + d[k][None])

    return lax.fori_loop(0, x.shape[0], through, jnp.square(x[:, None] - x[None]).sum(-1))


def pasted(x, y):
    def paste(k, table):
        table = lax.dynamic_update_slice(table, y[None, :, 0] * k, (k, 1))
        return lax.dynamic_update_slice(table, jnp.ones((1, 1)), (k, 0))

    return lax.fori_loop(0, x.shape[0], paste, jnp.zeros((x.shape[0], y.shape[0] + 1)))


def settled(x, y):
    """Steps until values are small, and a branch."""

    def step(state):
        k, d = state
        return k + 1, lax.cond(k % 2 == 0, lambda d: 0.5 * d, lambda d: d - 0.1 * d.T, d)

    return lax.while_loop(lambda state: jnp.abs(state[1]).max() > 0.3, step, (0, scores(x, x)))


def cells(x, y):
    """All entries in one loop of n·m steps, and the table as one row."""
    n, m = x.shape[0], y.shape[0]

    def entry(k, table):
        i, j = k // m, k % m
        before = jnp.where(j > 0, table[i, j - 1], table[i - 1, m - 1] * (i > 0))
        return table.at[i, j].set(jnp.tanh(before + x[i, 0] * y[j, 0]))

    return lax.fori_loop(0, n * m, entry, jnp.zeros((n, m))).reshape(-1)


TABLES = {
    f.__name__: f
    for f in (by_widths, diagonals, alignment, from_the_end, shortest_paths, pasted, settled, cells)
}
NO_GRADIENT = {"by_widths", "settled"}  # of loops that are a `while` for numbers too


def traced(fn):
    shapes = [jax.ShapeDtypeStruct((n, 2), jnp.float32) for n in (N, M)]
    return flattened(jax.make_jaxpr(fn)(*shapes))


def on_padded(fn, differentiable, x, y):
    """Returns the results for the first rows of arrays, by the rules of padding."""
    closed = traced(fn)
    lengths = {s: jnp.int32(n) for s, n in EXIST.items()}
    rules = Padded(ROOM, lengths, True, differentiable=differentiable)
    env = dict(zip(closed.jaxpr.invars, (x, y), strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for eqn in closed.jaxpr.eqns:
        values = [value_of(v, env) for v in eqn.invars]
        env.update(zip(eqn.outvars, rules.run(eqn, values), strict=True))
    results = []
    for v in closed.jaxpr.outvars:
        part = value_of(v, env)
        for axis, extent in enumerate(v.aval.shape):
            size = extent if type(extent) is int else extent_at(extent, EXIST)
            part = lax.slice_in_dim(part, 0, size, axis=axis)
        results.append(part)
    return results


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("differentiable", [False, True])
def test_padding_changes_nothing(name, differentiable):
    fn = TABLES[name]
    found = jax.jit(lambda x, y: on_padded(fn, differentiable, x, y))(X, Y)
    expected = jax.jit(fn)(X[: EXIST["n"]], Y[: EXIST["m"]])
    assert_close(found, jax.tree.leaves(expected), 1e-5)


@pytest.mark.parametrize("name", sorted(TABLES.keys() - NO_GRADIENT))
def test_gradients_of_what_exists(name):
    """No gradient comes from padding, and none reaches it."""
    fn, n, m = TABLES[name], EXIST["n"], EXIST["m"]

    def total(results):
        return sum(jnp.sin(r).sum() for r in jax.tree.leaves(results) if r.dtype == np.float32)

    found = jax.jit(jax.grad(lambda x, y: total(on_padded(fn, True, x, y)), (0, 1)))(X, Y)
    expected = jax.jit(jax.grad(lambda x, y: total(fn(x, y)), (0, 1)))(X[:n], Y[:m])
    assert_close([found[0][:n], found[1][:m]], list(expected), 1e-4)
    assert not any(x.any() for x in (found[0][n:], found[1][m:]))


def test_counted_loops_and_tables_in_place():
    """A table that is written at indices is neither copied nor selected in a loop."""
    loops = [e for e in traced(by_widths).jaxpr.eqns if e.primitive.name == "while"]
    (outer,) = loops
    assert find_count(outer) is not None
    body = outer.params["body_jaxpr"]
    body = getattr(body, "jaxpr", body)
    carried = body.invars[outer.params["body_nconsts"] :]
    chains = find_chain(body, carried, body.outvars)
    assert [bool(chain) for chain in chains] == [False, False, True]
    (settling,) = [e for e in traced(settled).jaxpr.eqns if e.primitive.name == "while"]
    assert find_count(settling) is None


def test_what_reads_a_table_is_computed_with_it():
    """A loop that fills a table runs once, whatever reads the table."""

    def fn(x, y):
        table = by_widths(x, y)
        hidden = jnp.tanh(x @ jnp.eye(2) * table[0, -1])
        return (table @ hidden).sum()

    program = find_phases(traced(fn), 0)
    loops = [e for phase in program.phases for e in phase.equations if e.primitive.name == "while"]
    assert len(loops) == 1
    assert not find_phases(traced(lambda x, y: jnp.tanh(scores(x, y)).sum()), 0).has_table_loops


def test_sizes_of_tables():
    """Steps that compute a table count all of it, those that write a number of one do not."""

    def size(fn):
        return find_phases(traced(lambda x, y: sum(r.sum() for r in fn(x, y))), 0).table_size(8)

    assert size(diagonals) >= 8 * 8
    assert size(lambda x, y: [by_widths(x, y)]) < 8


# --- whole minibatches ---

K, VOCABULARY = 2, 5


def sentences(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]


@functools.cache
def grammar():
    return inside.parameters(VOCABULARY, K)


def all_trees(params, words):
    """The logarithm of the sum over all trees of a sentence, each with its probability."""
    p = {k: np.asarray(v, np.float64) for k, v in params.items()}
    rules = np.exp(p["rules"]) / np.exp(p["rules"]).sum((1, 2), keepdims=True)
    emissions = VOCABULARY * np.exp(p["words"]) / np.exp(p["words"]).sum(1, keepdims=True)
    root = np.exp(p["root"]) / np.exp(p["root"]).sum()

    def derivations(a, span):
        if len(span) == 1:
            yield emissions[a, span[0]]
            return
        for cut in range(1, len(span)):
            for b, c in itertools.product(range(K), repeat=2):
                left = list(derivations(b, span[:cut]))
                right = list(derivations(c, span[cut:]))
                yield from (rules[a, b, c] * x * y for x in left for y in right)

    return np.log(sum(root[a] * x for a in range(K) for x in derivations(a, list(words))))


def test_the_inside_algorithm():
    """All trees of every sentence, gradients of the loop, and nothing compiled for new lengths."""
    batched = jedbatch.batch(inside.log_likelihood)
    few = sentences([3, 1, 3, 2])
    plan = batched.plan(grammar(), few)
    assert plan.ragged_rows is not None
    assert plan.host.apart is None
    slope = jax.jit(jax.value_and_grad(lambda p, plan: (batched.apply(p, plan) ** 2).sum()))
    (stage,) = plan.host.ragged_calls.stages
    sizes = map(stage.region.packed.phased.table_size, stage.capacity.lengths)
    assert stage.capacity.few == tuple(CPU.table_size // size for size in sizes)
    value, found = slope(grammar(), plan)
    expected = np.array([all_trees(grammar(), words) for words in few])
    np.testing.assert_allclose(value, (expected**2).sum(), 1e-5)
    alone = jax.jit(jax.grad(lambda p: sum(inside.log_likelihood(p, w) ** 2 for w in few)))
    assert_close(found, alone(grammar()), 1e-4)
    before = batched.compilations
    unseen = sentences([6, 5, 3, 1], seed=1)
    slope(grammar(), batched.plan(grammar(), unseen))
    assert batched.compilations == before
    assert slope._cache_size() == 1


def test_two_lengths():
    """Edit distance, as everyone knows it."""

    def distance(pair):
        a, b = pair

        def row(above, x):
            def entry(left, others):
                up, corner, y = others
                value = jnp.minimum(jnp.minimum(up, left) + 1, corner + (x != y))
                return value, value

            _, rest = lax.scan(entry, above[0] + 1, (above[1:], above[:-1], b))
            return jnp.concatenate([above[:1] + 1, rest]), None

        return lax.scan(row, jnp.arange(b.shape[0] + 1), a)[0][-1]

    @functools.cache
    def recursive(a, b):
        if not (a and b):
            return len(a) + len(b)
        replaced = recursive(a[1:], b[1:]) + (a[0] != b[0])
        return min(recursive(a[1:], b) + 1, recursive(a, b[1:]) + 1, replaced)

    batched = jedbatch.batch(distance, in_axes=0)
    for seed, lengths in enumerate(
        [[(5, 3), (2, 6), (7, 7), (0, 2)], [(6, 1), (4, 4), (3, 8), (0, 0)]]
    ):
        pairs = [tuple(sentences(pair, seed + k)) for k, pair in enumerate(lengths)]
        before = batched.compilations
        expected = [recursive(tuple(a.tolist()), tuple(b.tolist())) for a, b in pairs]
        assert batched(pairs).tolist() == expected
        assert batched.plan(pairs).host.apart is None
    assert batched.compilations == before


def gaussian_process(params, given):
    """Log-likelihood of values at points [n, 2], of two right-hand sides at once."""
    points, values = given
    apart = jnp.square(points[:, None] - points[None]).sum(-1)
    kernel = jnp.exp(-params * apart) + 0.1 * jnp.eye(points.shape[0])
    factor = jnp.linalg.cholesky(kernel)
    white = jax.scipy.linalg.solve_triangular(factor, values, lower=True)
    return -jnp.square(white).sum() / 2 - jnp.log(jnp.diagonal(factor)).sum()


def from_the_right(params, given):
    """Transposed systems, with the rows of the instance as equations of which there are n."""
    points, values = given
    upper = jnp.triu(params * points @ points.T) + 3 * jnp.eye(points.shape[0])
    solve = functools.partial(lax.linalg.triangular_solve, upper, lower=False)
    found = solve(values.T, left_side=False, transpose_a=True) @ values
    return found.sum() + jax.scipy.linalg.cho_solve((upper.T, True), values).max()


def spectrum(params, given):
    """Functions of eigenvalues, the largest of them, and a filter by eigenvectors."""
    points, values = given
    apart = jnp.square(points[:, None] - points[None]).sum(-1)
    graph = jnp.exp(-params * apart)
    found, vectors = jnp.linalg.eigh(jnp.diag(graph.sum(0)) - graph + jnp.eye(points.shape[0]))
    filtered = vectors @ (jnp.exp(-found)[:, None] * (vectors.T @ values))
    return jnp.log(found).sum() + jnp.linalg.eigvalsh(graph)[-1] + filtered.sum()


@pytest.mark.parametrize("fn", [gaussian_process, from_the_right, spectrum])
def test_factors_and_triangular_systems(fn):
    one = jax.jit(fn)
    batched = jedbatch.batch(fn)
    for lengths in [(4, 7, 1, 3), (7, 2, 2, 6)]:
        given = [(random(n, 2, seed=n), random(n, 2, seed=n + 50)) for n in lengths]
        before = batched.compilations
        expected = jnp.stack([one(0.5, x) for x in given])
        np.testing.assert_allclose(batched(0.5, given), expected, 1e-4)
        assert batched.plan(0.5, given).host.apart is None
    assert batched.compilations == before
    ours = lambda p, x: batched(p, x).sum()  # noqa: E731
    theirs = lambda p, x: sum(one(p, y) for y in x)  # noqa: E731
    given = jax.tree.map(jnp.asarray, given)
    for p in (0.5, 1.0):
        found, alone = (jax.grad(f, argnums=(0, 1))(p, given) for f in (ours, theirs))
        assert_close(found, alone, 1e-3)
    twice = [jax.jvp(lambda p, f=f: jax.grad(f)(p, given), (0.5,), (1.0,)) for f in (ours, theirs)]
    np.testing.assert_allclose(*twice, 1e-3)


def test_neighbours_and_returned_tables():
    """Nearest rows, tables of pairs as results, and rows that are too few."""

    def fn(params, x):
        apart = jnp.square(x[:, None] - x[None]).sum(-1) @ jnp.tril(jnp.ones((x.shape[0],) * 2))
        nearest = lax.top_k(-apart, 2)[1]
        return apart * params, x[nearest].sum(1), apart[0, x.shape[0] - 1]

    batched, one = jedbatch.batch(fn, out_axes=None), jax.jit(fn)
    points = [random(n, 2, seed=n) for n in (3, 5, 2)]
    expected = [one(2.0, x) for x in points]
    assert_close(batched(2.0, points), expected, 1e-5)
    assert batched.plan(2.0, points).host.apart is None

    def total(run):
        return lambda p: sum(jnp.sin(table).sum() for table, *_ in run(p))

    found = jax.grad(total(lambda p: batched(p, points)))(2.0)
    alone = jax.grad(total(lambda p: [one(p, x) for x in points]))(2.0)
    np.testing.assert_allclose(found, alone, 1e-4)
    with pytest.raises(ValueError, match=r"k=2 with shape=\[1, 1\](?s:.)*instance 1 was recorded"):
        batched.plan(2.0, [points[0], random(1, 2)])


def test_the_largest_of_no_rows():
    batched = jedbatch.batch(lambda x: lax.top_k(x.sum(1), 1)[0], in_axes=0)
    points = [random(n, 2, seed=n) for n in (3, 5)]
    assert_close(batched(points), jnp.stack([x.sum(1).max(keepdims=True) for x in points]), 1e-6)
    with pytest.raises(ValueError, match=r"`top_k` takes the largest 1 of 0 rows in instance 1"):
        batched.plan([points[0], random(0, 2)])


def test_tables_may_hold_nothing():
    def last(x):
        table = jnp.outer(x, x)[:, :, None][:, :, :0]
        table, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), table, x[:, None][:, :0])
        return x[-1] + table.sum()

    xs = [np.arange(1, n, dtype=np.float32) for n in (4, 6, 3)]
    np.testing.assert_array_equal(jedbatch.batch(last, in_axes=0)(xs), [x[-1] for x in xs])


# --- padding of pairs, where the last row meets its copy ---


def lennard_jones(w, x):
    i = jnp.arange(x.shape[0])
    apart = ((x[:, None] - x[None]) ** 2).sum(-1)
    attraction = (w[0, 0] / jnp.where(i[:, None] == i[None], 1.0, apart)) ** 3
    return jnp.where(i[:, None] < i[None], attraction**2 - attraction, 0.0).sum()


def distances(w, x):
    h = x @ w
    return jnp.sqrt(((h[:, None] - h[None]) ** 2).sum(-1) + jnp.eye(x.shape[0]))


def near(x, scores):
    i = jnp.arange(x.shape[0])
    return jnp.where(jnp.abs(i[:, None] - i[None]) < 2, scores, -jnp.inf)


BESIDE_COPIES = {
    "distances": lambda w, x: distances(w, x).sum(),
    "forces": lambda w, x: jax.grad(lambda x: jnp.exp(-distances(w, x)).sum())(x),
    "potential": lennard_jones,
    "from the last": lambda w, x: jnp.sqrt(
        ((x @ w - (x @ w)[-1][None]) ** 2).sum(1) + (jnp.arange(x.shape[0]) == x.shape[0] - 1)
    ).sum(),
    "scaled": lambda w, x: (w[0, 1] * jnp.arctanh(0.5 * jnp.eye(x.shape[0]) + x[0, 0] / 9)).sum(),
    "window": lambda w, x: jax.nn.softmax(near(x, x @ w @ x.T), -1) @ x,
    "neighbours": lambda w, x: lax.top_k(-distances(w, x) - 9.0 * jnp.eye(x.shape[0]), 1)[0].sum(),
}


@pytest.mark.parametrize("name", BESIDE_COPIES)
def test_gradients_where_padding_repeats_a_row(name):
    """In padding the distance is 0, and its slope infinite; and no weight is left."""
    fn = BESIDE_COPIES[name]
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(3, 3)), jnp.float32)
    points = [rng.normal(size=(n, 3)).astype(np.float32) for n in (3, 5, 2)]

    def slopes(run):
        def loss(weight, points):
            return number(run(weight, points))

        return jax.grad(loss, argnums=(0, 1))(weight, points)

    batched = jedbatch.batch(fn, out_axes=None)
    want = slopes(lambda w, xs: [jax.jit(fn)(w, x) for x in xs])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(want))
    assert_close(slopes(batched), want, 1e-3)
    assert batched.plan(weight, points).host.apart is None


@pytest.mark.parametrize("stops", ["before", "behind", "compared"])
def test_gradients_beside_a_loop_through_which_nothing_comes_back(stops):
    """A `while_loop` has no gradient in reverse mode, and needs none here."""

    def fn(weight, x):
        still, rows = lax.stop_gradient((weight, x)) if stops == "before" else (weight, x)

        def going(state):
            return (state[0] < x.shape[0]) & (state[1].sum() < 1.5)

        def step(state):
            return state[0] + 1, jnp.tanh(still @ state[1]) + rows[state[0]]

        end = lax.while_loop(going, step, (0, jnp.ones(3)))[1]
        if stops == "compared":
            return jnp.where(end > 0.3, weight @ x.sum(0), x.sum(0))
        if stops == "behind":
            end = lax.stop_gradient(2 * jnp.sin(end))
        return weight @ x.sum(0) * end

    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(3, 3)), jnp.float32)
    points = [jnp.asarray(rng.normal(size=(n, 3)), jnp.float32) for n in (3, 5, 2)]
    batched = jedbatch.batch(fn)

    def slopes(run):
        return jax.grad(lambda w, xs: number(run(w, xs)), argnums=(0, 1))(weight, points)

    assert_close(slopes(batched), slopes(lambda w, xs: jnp.stack([fn(w, x) for x in xs])), 1e-4)
    assert batched.plan(weight, points).host.apart is None


@jedbatch.cell
def joined(params, left, right):
    return jnp.tanh(params * left + right)


def leaves_joined(params, tree):
    if isinstance(tree, int):
        return params * tree
    return joined(params, *(leaves_joined(params, child) for child in tree))


@pytest.mark.parametrize("begins", ["alike", "in jit", "at a tree"])
def test_gradients_of_loops_that_read_nothing_of_an_array_but_its_length(begins):
    """Beside trees also where other ragged values have become nodes on tiles."""

    def fn(params, given):
        x, tree = given

        def stepped(h):
            return lax.fori_loop(0, 2 * x.shape[0], lambda k, h: jnp.sin(h) * params + k, h)

        if begins == "in jit":
            return jax.jit(stepped)(params)
        return stepped(leaves_joined(params, tree) if begins == "at a tree" else params)

    trees = [1, (1, 2), ((1, 2), 3), (1, (2, 3)), ((1, 1), (2, 2)), (((1, 2), 3), 4)]
    lengths = (3, 1, 4, 2, 3, 1)
    given = [(random(n, 2), tree) for n, tree in zip(lengths, trees, strict=True)]
    weight = jnp.asarray([0.5, -0.9])
    batched = jedbatch.batch(fn)
    for instances in (given[:3], given):
        slopes, expected = (
            jax.grad(lambda w, run=run, xs=instances: number(run(w, xs)))(weight)
            for run in (batched, lambda w, xs: jnp.stack([fn(w, x) for x in xs]))
        )
        assert_close(slopes, expected, 1e-4)
    assert batched.plan(weight, given).host.apart is None


def stepped_from(begin, limit, x):
    """Steps that read an array, as many as there are from one whole number to another."""
    goes_on, more = lambda c: c[0] < c[1], lambda c: (c[0] + c[0].dtype.type(1), c[1])
    step = lambda c: (*more(c), jnp.sin(c[2]) + 0.1 * x[0])  # noqa: E731
    return lax.while_loop(goes_on, step, (begin, limit, jnp.tanh(x).sum(0)))[2]


def test_loops_whose_numbers_wrap_around_take_the_steps_of_each_instance():
    """Differences of numbers, and lengths, may be out of the range of the dtype that counts."""

    def fn(params, given):
        x, k = given
        n, x = x.shape[0], x * params
        signed, unsigned = k.astype(jnp.int8), k.astype(jnp.uint8)
        steps = [
            (unsigned, jnp.uint8(3)),
            (jnp.uint32(5), k.astype(jnp.uint32)),
            (jnp.int8(-100), signed * jnp.int8(10)),
            (jnp.uint8(0), jnp.asarray(n - 5).astype(jnp.uint8)),
            (jnp.asarray(n + 100).astype(jnp.int8), jnp.int8(100)),
        ]
        return jnp.stack([stepped_from(*pair, x) for pair in steps])

    given = [(random(n, 2), np.int32(n)) for n in (2, 3, 4, 7, 9, 12)]
    batched = jedbatch.batch(fn)
    found = batched(jnp.float32(0.7), given)
    assert_close(found, jnp.stack([fn(jnp.float32(0.7), x) for x in given]), 1e-5)
    assert batched.plan(jnp.float32(0.7), given).host.apart is None


def test_gradients_of_loops_to_lengths_in_few_bits():
    def fn(params, x):
        n, x = jnp.asarray(x.shape[0]), x * params
        step = lambda k, h: jnp.sin(h) + x[k] * k  # noqa: E731
        return lax.fori_loop(jnp.uint8(0), n.astype(jnp.uint8), step, jnp.tanh(x).sum(0)).sum()

    xs = [random(n, 2) for n in (2, 3, 4, 7, 9, 12)]
    batched = jedbatch.batch(fn)
    slope = jax.grad(lambda w: batched(w, xs).sum())(jnp.float32(0.7))
    expected = jax.grad(lambda w: sum(fn(w, x) for x in xs))(jnp.float32(0.7))
    assert_close(slope, expected, 1e-4)
