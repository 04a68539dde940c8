"""Instances whose arrays differ in length, against the loop over instances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, mostly_slow, number
from jax import lax

import jedbatch
from jedbatch import ragged

SHORT = [3, 1, 2, 5, 1]
EMPTY = [0, 3, 1, 0, 2]
MIXED = [2, 300, 0, 1, 37]


def random(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def weights():
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 4), "b": (4,), "table": (9, 4), "positions": (310, 4), "k": (3, 4, 4)}
    return {name: jnp.asarray(random(rng, *shape)) / 2 for name, shape in shapes.items()}


def made(lengths, seed=0):
    """Instances (x [n, 4], y [m, 4], words [n]) whose n are `lengths`; m is another one of them."""
    rng = np.random.default_rng(seed)
    others = [*lengths[1:], lengths[0]]
    return [
        (random(rng, n, 4), random(rng, m, 4), rng.integers(0, 9, n).astype(np.int32))
        for n, m in zip(lengths, others, strict=True)
    ]


def split(fn):
    """`fn` of (params, x, y, words)."""
    return lambda params, instance: fn(params, *instance)


def agree(fn, instances, rtol=2e-5, batched=None):
    """Lists of results, and gradients of parameters and arrays, are those of the loop."""
    params = weights()
    batched = batched or jedbatch.batch(fn, out_axes=None)
    alone = jax.jit(fn)
    floats = [tuple(x for x in mine if x.dtype == np.float32) for mine in instances]

    def filled(arrays):
        found = []
        for mine, some in zip(instances, arrays, strict=True):
            some = iter(some)
            found.append(tuple(next(some) if x.dtype == np.float32 else x for x in mine))
        return found

    def slopes(run):
        def loss(params, arrays):
            results = run(params, filled(arrays))
            return number(results), results

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, floats)

    found, while_found = slopes(batched)
    expected, results = slopes(lambda p, xs: [alone(p, x) for x in xs])
    assert_close(batched(params, instances), results, rtol)
    assert_close(while_found, results, rtol)
    assert_close(found, expected, 10 * rtol)
    return batched


def compiled_once(batched, instances):
    """Nothing is kept apart by its length, and other lengths compile nothing."""
    plan = batched.plan(weights(), instances)
    assert plan.ragged_rows is not None
    assert plan.host.apart is None, plan.host.apart
    before = batched.compilations
    batched(weights(), instances[::-1])
    batched(weights(), [tuple(x[: len(x) // 2 + 1] for x in mine) for mine in instances])
    assert batched.compilations == before


# --- one operation after the other -------------------------------------------------------------


def row_by_row(p, x, y, words):
    norm = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return {
        "product": x @ p["w"],
        "bias": x @ p["w"] + p["b"][None],
        "gelu": jax.nn.gelu(x),
        "relu": jax.nn.relu(x),
        "layer norm": norm * p["b"][None],
        "look-up": p["table"][words],
        "positions": x + p["positions"][: x.shape[0]],
        "index": x * jnp.arange(x.shape[0])[:, None],
        "features": jax.nn.softmax(x),
        "frequencies": jnp.abs(jnp.fft.rfft(x)),
        "bins": jnp.searchsorted(jnp.array([-0.5, 0.0, 0.5]), x),
        "incomplete beta": jax.scipy.special.betainc(2.0, 3.0, jax.nn.sigmoid(x)),
        "column": x[:, 1],
        "transposed": 2 * x.T,
        "heads": (x @ p["w"]).reshape(-1, 2, 2).sum(1),
        "length": x / (1 + x.shape[0]),
        "residual": x + jnp.tanh(x @ p["w"]) @ p["w"].T,
    }


def rows_together(p, x, y, words):
    return {
        "sum": x.sum(0),
        "total": (x @ p["w"]).sum(),
        "product": jnp.prod(x, 0),
        "any": (x > 1).any(0),
        "all": (x > -1).all(0),
        "softmax": jax.nn.softmax(x, 0),
        "counts": jax.nn.one_hot(words, 9).sum(0),
        "score": jnp.take_along_axis(jax.nn.log_softmax(x @ p["w"]), words[:, None] % 4, 1).sum(),
        "centred": x - x.sum(0, keepdims=True) / (1 + x.shape[0]),
        "pooled": jax.nn.softmax(x @ p["b"]) @ x,
    }


def some_rows(p, x, y, words):
    """What needs a row at least."""
    return {
        "mean": x.mean(0),
        "max": x.max(0),
        "min": x.min(0),
        "variance": x.var(0),
        "argmax": x.argmax(0),
        "log sum": jax.nn.logsumexp(x, 0),
        "median": jnp.median(x, 0),
        "first": x[0],
        "last": x[-1],
        "differences": x[1:] - x[:-1],
        "rolled": jnp.roll(x, 1, 0),
        "reversed": x[::-1],
        "taken": jnp.take(x, jnp.array([0, -1, 7]), 0),
    }


def rows_moved(p, x, y, words):
    def step(h, row):
        h = jnp.tanh(h @ p["w"] + row)
        return h, h

    kernel = {"window_strides": (1,), "padding": "SAME"}
    numbers = {"dimension_numbers": ("NWC", "WIO", "NWC")}
    return {
        "sorted": jnp.sort(x, 0),
        "by first": x[jnp.argsort(x[:, 0])],
        "sums": jnp.cumsum(x, 0),
        "sums from the end": lax.cumsum(x, 0, reverse=True),
        "products": jnp.cumprod(x, 0),
        "maxima": lax.cummax(x, 0),
        "flipped": jnp.flip(x, 0),
        "joined": jnp.concatenate([x, y]),
        "between": jnp.concatenate([p["b"][None], x, p["b"][None]]) @ p["w"],
        "padded": jnp.pad(x, ((1, 2), (0, 0)), constant_values=3.0),
        "flat": 2 * x.reshape(-1),
        "scan": lax.scan(step, jnp.zeros(4), x),
        "convolution": lax.conv_general_dilated(x[None], p["k"], **kernel, **numbers)[0],
    }


def pairs(p, x, y, words):
    causal = jnp.tril(jnp.ones((x.shape[0], x.shape[0]))) > 0
    q, k = (x @ p["w"]).reshape(-1, 2, 2), y.reshape(-1, 2, 2)
    by_head = jax.nn.softmax(jnp.einsum("ihd,jhd->hij", q, k))
    return {
        "A^T B": (x @ p["w"]).T @ jnp.tanh(x),
        "A B": (x @ y.T) @ y,
        "attention": jax.nn.softmax(x @ p["w"] @ x.T) @ x,
        "causal": jax.nn.softmax(jnp.where(causal, x @ x.T, -jnp.inf)) @ x,
        "cross": jax.nn.softmax(x @ y.T) @ y,
        "heads": jnp.einsum("hij,jhd->ihd", by_head, k).reshape(-1, 4),
        "named": ragged.attention(q, k, k),
        "named, causal": ragged.attention(q, q, q, causal=True),
    }


OPERATIONS = {
    row_by_row: MIXED,
    rows_together: [2, 40, 0, 1, 17],  # what takes 300 rows to compile is not the point
    rows_moved: [2, 17, 0, 1, 5],
    pairs: [2, 40, 0, 1, 17],
    some_rows: [3, 1, 2, 9, 1],
}


@pytest.mark.slow
@pytest.mark.parametrize("fn", OPERATIONS)
def test_operations(fn):
    instances = made(OPERATIONS[fn])
    compiled_once(agree(split(fn), instances), instances)


def test_some_operations():
    """Some of the tables, and instances of two lengths: the loop compiles for each of them."""

    def some(p, x, y, words):
        spread = jax.scipy.special.betainc(2.0, 3.0, jax.nn.sigmoid(x))
        return jax.nn.softmax(x @ p["b"]) @ x, jnp.concatenate([x, y]), spread

    instances = made([1, 30, 1, 30])
    compiled_once(agree(split(some), instances), instances)


@pytest.mark.parametrize("lengths", [[3, 1, 3], pytest.param(MIXED, marks=pytest.mark.slow)])
def test_dropout(lengths):
    def fn(params, instance):
        key, x = instance
        first, second = jax.random.split(key)
        x = jnp.where(jax.random.bernoulli(first, 0.7, x.shape), x / 0.7, 0)
        return ((x + jax.random.normal(second, x.shape)) @ params["w"]).sum(0)

    keys = jax.random.split(jax.random.key(0), len(lengths))
    instances = [(key, x) for key, (x, *_) in zip(keys, made(lengths), strict=True)]
    batched = check(fn, weights(), instances, rtol=2e-5, alone=jax.jit(fn))
    assert batched.plan(weights(), instances).host.apart is None


@pytest.mark.parametrize("lengths", [[3, 1, 3], pytest.param(SHORT, marks=pytest.mark.slow)])
def test_a_key_for_each_row(lengths):
    def fn(params, instance):
        key, x = instance
        first, second, third = jax.random.split(key, 3)
        keys = jax.random.split(first, x.shape[0])
        places = jnp.arange(x.shape[0])
        drawn = jax.vmap(lambda k, i: jax.random.normal(jax.random.fold_in(k, i), (4,)))
        scores = (jnp.tanh(x @ params["w"] + drawn(keys, places)) * x).sum()

        def step(h, rows):
            key, raw, row = rows
            noise = jax.random.uniform(key, (4,)) * jax.random.normal(jax.random.wrap_key_data(raw))
            h = jnp.tanh(h @ params["w"] + row * noise)
            return h, None

        raw = jax.random.key_data(jax.random.split(third, x.shape[0]))
        keys = jax.random.split(second, x.shape[0])[::-1]
        return scores + lax.scan(step, params["b"], (keys, raw, x))[0]

    keys = jax.random.split(jax.random.key(1), len(lengths))
    instances = [(key, x) for key, (x, *_) in zip(keys, made(lengths), strict=True)]
    batched = check(fn, weights(), instances, rtol=2e-5, alone=jax.jit(fn))
    assert batched.plan(weights(), instances).host.apart is None


def test_derivatives_in_all_directions():
    """They cut into one piece, and those of what is stacked take it apart."""

    def fn(params, x):
        y, _ = jax.device_put((x @ params["b"], params["b"]))
        stacked = jax.grad(lambda z: jnp.square(jnp.stack([z, jnp.sin(z)], 1)[:, 1]).sum())(y)
        return (jax.jacfwd(jnp.sin)(y) @ jax.jacrev(jnp.cumsum)(stacked)).sum()

    instances = [x for x, *_ in made([3, 1, 3])]
    batched = check(fn, weights(), instances, alone=jax.jit(fn))
    assert batched.plan(weights(), instances).host.apart is None


# --- parts of larger functions --------------------------------------------------------------------


@jedbatch.cell
def sentence(params, x):
    return (jax.nn.softmax(x @ params["w"] @ x.T) @ x).sum(0)


@jedbatch.cell
def join(params, left, right):
    return jnp.tanh(params["w"] @ (left - right))


def encode(leaf):
    def encode(params, tree):
        if isinstance(tree, tuple):
            return join(params, encode(params, tree[0]), encode(params, tree[1]))
        return leaf(params, tree)

    return encode


def trees(seed=0):
    rng = np.random.default_rng(seed)
    a, b, c, d, e, f, g = (random(rng, n, 4) for n in rng.integers(1, 9, 7))
    return [((a, b), c), (d, (e, (f, g))), a, (b, b)]


@pytest.mark.parametrize("plain", mostly_slow([False, True], True))
def test_trees_of_sentences(plain):
    def leaf(params, x):
        return jnp.tanh(x @ params["w"]).sum(0) if plain else sentence(params, x)

    batched = check(encode(leaf), weights(), trees(), rtol=3e-5, thorough=not plain)
    plan = batched.plan(weights(), trees(1))
    batched(weights(), trees(2))
    before = batched.compilations
    batched(weights(), trees(3))
    assert batched.compilations == before
    exist = plan.ragged_rows[1]
    assert exist == sum(len(x) for tree in trees(1) for x in jax.tree.leaves(tree))
    assert plan.host.ragged_calls.stages[0].region.id == 0
    assert len(plan.host.ragged_calls.stages) == 1  # all sentences of all trees together


def test_two_lengths_that_are_the_same_sometimes():
    def fn(params, pair):
        return (jax.nn.softmax(pair[0] @ pair[1].T) @ pair[1]).sum(0) @ params["w"]

    rng = np.random.default_rng(0)
    batched = jedbatch.batch(fn)
    for lengths in ([(2, 2), (3, 3)], [(2, 3), (4, 1)], [(5, 5), (1, 2)]):
        pairs = [(random(rng, n, 4), random(rng, m, 4)) for n, m in lengths]
        expected = jnp.stack([fn(weights(), pair) for pair in pairs])
        assert_close(batched(weights(), pairs), expected, 1e-5)
    assert batched.plan(weights(), pairs).host.apart is None


def test_arrays_of_one_length_are_not_ragged():
    def fn(params, pair):
        x, fixed = pair
        return x @ fixed, sum(row.sum() for row in fixed)

    rng = np.random.default_rng(0)
    instances = [(random(rng, n, 3), random(rng, 3, 2)) for n in (4, 1, 6)]
    batched = jedbatch.batch(fn, out_axes=None)
    expected = [fn({}, instance) for instance in instances]
    assert_close(batched({}, instances), expected, 1e-5)
    plan = batched.plan({}, instances)
    assert plan.host.apart is None
    assert plan.ragged_rows[1] == 11


def test_results_of_one_length_stack():
    batched = jedbatch.batch(lambda params, x: jnp.tanh(x @ params["w"]))
    instances = [x for x, *_ in made([3, 5])]
    with pytest.raises(ValueError, match="do not stack"):
        batched(weights(), instances)
    got = batched(weights(), [instances[0], instances[0] + 1])
    expected = jnp.stack([jnp.tanh(x @ weights()["w"]) for x in (instances[0], instances[0] + 1)])
    assert_close(got, expected, 1e-5)


def test_under_jit_and_with_inputs():
    def fn(params, x):
        return jnp.tanh(x @ params["w"]).sum(0) @ params["w"]

    batched = jedbatch.batch(fn)
    traced = []

    @jax.jit
    def step(params, plan):
        traced.append(plan)
        return jax.value_and_grad(lambda p: number(batched.apply(p, plan)))(params)

    for seed, lengths in enumerate([SHORT, [4, 4, 2, 1, 1], [1, 2, 3, 5, 1]]):
        xs = [x for x, *_ in made(lengths, seed)]
        got = step(weights(), batched.plan(weights(), xs))
        want = jax.value_and_grad(lambda p, xs=xs: number(jnp.stack([fn(p, x) for x in xs])))(
            weights()
        )
        assert_close(got, want, 3e-5)
    assert len(traced) == 1
    plan = batched.plan(weights(), xs)
    name = next(name for name in plan.inputs if "region" in name)
    slope = jax.grad(
        lambda x: number(batched.apply(weights(), plan, inputs=plan.inputs | {name: x}))
    )(plan.inputs[name])
    rows = sum(map(len, xs))
    expected = jax.grad(lambda xs: number(jnp.stack([fn(weights(), x) for x in xs])))(xs)
    assert_close(slope[:rows], jnp.concatenate(expected), 3e-5)


def test_functions_of_a_length_alone():
    fn = lambda params, x: x.sum(0) / x.shape[0] + params["b"] * x.shape[0]  # noqa: E731
    batched = check(fn, weights(), [x for x, *_ in made(SHORT)])
    assert batched.plan(weights(), [x for x, *_ in made(SHORT)]).host.apart is None


@pytest.mark.slow
def test_tiles_of_more_rows_than_the_instance_has():
    def fn(params, x):
        rows = jnp.concatenate([params["b"][None], x])
        out = ragged.attention(rows @ params["w"], rows, rows)
        return jnp.cumsum(out, 0)[-1] + out.sum(0)

    instances = [x for x, *_ in made([255, 256, 3, 257, 512])]
    check(fn, weights(), instances, rtol=2e-4, alone=jax.jit(fn))


@pytest.mark.slow
def test_rows_that_are_none_do_not_spoil_gradients():
    def fn(params, x):
        grown = jnp.exp(jnp.cumsum(15 + 0 * x * params["b"][None], 0)).sum(0) / 1e20
        kernel = {"window_strides": (1,), "padding": "SAME"}
        numbers = {"dimension_numbers": ("NWC", "WIO", "NWC")}
        (rows,) = lax.conv_general_dilated(x[None], params["k"], **kernel, **numbers)
        normal = rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)
        start = jnp.asarray(1.0 * x.shape[0])
        _, roots = lax.scan(lambda c, row: (c - 1, jnp.sqrt(c) * row), start, x @ params["w"])
        return grown + normal.sum(0) + roots.sum(0)

    check(fn, weights(), [x for x, *_ in made([3, 2, 5])], rtol=1e-4, alone=jax.jit(fn))


@pytest.mark.parametrize("reverse", [False, True])
def test_products_in_padding_do_not_spoil_gradients(reverse):
    """Those of a row that stands in for others would be infinite, and their slopes not numbers."""
    fn = lambda params, x: lax.cumprod(x * params["b"], reverse=reverse).sum()  # noqa: E731
    instances = [np.full(n, 1e20 if n == 1 else 2.0, np.float32) for n in (1, 3, 5)]
    check(fn, {"b": jnp.float32(1.0)}, instances, alone=jax.jit(fn))


# --- what cannot run together ---------------------------------------------------------------------


def test_loops_over_rows():
    def fn(params, x):
        h = jnp.zeros(4)
        for row in x:
            h = jnp.tanh(params["w"] @ h + row)
        return h

    batched = check(fn, weights(), [x for x, *_ in made(SHORT)])
    plan = batched.plan(weights(), [x for x, *_ in made(SHORT)])
    assert plan.ragged_rows is None
    assert "Python is told how long arrays are" in str(plan)


@jax.custom_jvp
def straight_through(x):
    return jax.nn.one_hot(x.argmax(-1), 4)


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), *tangents))

APART = {  # what comes, and a word of the reason
    "the rest": (lambda p, x: x[x.shape[0] // 4 * 4 :].sum(0), "rows are not the more"),
    "up to a maximum": (
        lambda p, x: jnp.concatenate([x, jnp.zeros((9 - x.shape[0], 4))]) * p["table"],
        "rows are not the more",
    ),
    "own derivative": (lambda p, x: straight_through(x @ p["w"]).sum(0), "derivative of its own"),
    "padding": (lambda p, x: jnp.pad(x, ((x.shape[0], 0), (0, 0))).sum(0), "`pad`"),
    "spectrum": (lambda p, x: jnp.abs(jnp.fft.fft(x, axis=0)).sum(0) * p["b"], "`fft`"),
}


@pytest.mark.parametrize("what", mostly_slow(APART, "up to a maximum", "spectrum"))
def test_what_is_kept_apart(what):
    fn, reason = APART[what]
    instances = [x for x, *_ in made([3, 2, 5])]
    batched = check(fn, weights(), instances)
    assert reason in batched.plan(weights(), instances).host.apart


def test_rows_read_by_several_numbers_are_packed():
    def fn(params, x):
        y = jnp.tanh(x @ params["w"])
        return y[0] + 2 * y[1] - y[-1] + params["b"]

    instances = [x for x, *_ in made([3, 2, 7])]
    plan = check(fn, weights(), instances, gradients=False).plan(weights(), instances)
    assert plan.ragged_rows is not None
    assert "grouped" not in str(plan)


def test_unknown_operations_are_grouped_by_shape():
    def fn(params, x):
        return jnp.linalg.svd(x @ params["w"], compute_uv=False).sum()

    instances = [x for x, *_ in made([5, 6, 5])]
    batched = jedbatch.batch(fn)
    expected = jnp.stack([fn(weights(), x) for x in instances])
    assert_close(batched(weights(), instances), expected, 1e-5)
    assert "grouped by equal shapes, since" in str(batched.plan(weights(), instances))


DECISIONS = {
    "equal": lambda x: x.shape[0] == 2,
    "unequal": lambda x: x.shape[0] != 2,
    "shapes": lambda x: x.shape == (2, 4),
    "any row": lambda x: x.shape[0] > 0,
    "no row": lambda x: x.shape[0] < 1,
    "truth": lambda x: bool(x.shape[0]),
    "sum": lambda x: x.shape[0] + 1 == 3,
    "result": lambda x: jnp.tanh(x).shape[0] >= 1,
    "length": lambda x: len(x) == 2,
    "larger": lambda x: max(x.shape[0], 2) == 2,
}


@pytest.mark.parametrize("name", mostly_slow(DECISIONS, "shapes", "truth", "larger"))
def test_decisions_on_lengths(name):
    decide = DECISIONS[name]

    def fn(params, x):
        return x.sum(0) if decide(x) else -x.sum(0)

    instances = [x for x, *_ in made([0, 1, 2, 3])]
    batched = jedbatch.batch(fn)
    assert_close(batched({}, instances), jnp.stack([fn({}, x) for x in instances]), 1e-5)
    assert "Python is told how long arrays are" in str(batched.plan({}, instances))


def test_errors_of_the_function_are_its_own():
    def fn(params, x):
        return x @ params["w"][:3]

    batched = jedbatch.batch(fn, out_axes=None)
    with pytest.raises(TypeError, match="dot_general"):
        batched(weights(), [x for x, *_ in made(SHORT)])
    assert next(iter(batched._core.sessions.values())).records.lengths.off is None


# --- how much is computed -------------------------------------------------------------------------


def test_rows_computed():
    batched = jedbatch.batch(lambda params, x: jnp.tanh(x @ params["w"]).sum(0))
    rng = np.random.default_rng(0)
    for size in (8, 64):
        xs = [random(rng, n, 4) for n in rng.integers(3, 50, size)]
        computed, exist = batched.plan(weights(), xs).ragged_rows
        assert exist == sum(map(len, xs))
        assert exist <= computed < exist + 96  # half of a wide block


@pytest.mark.slow
def test_nothing_is_quadratic_in_a_length():
    def fn(params, x):
        q, k, v = x @ params["w"], x @ params["k"][0], x @ params["k"][1]
        return (jax.nn.softmax(q @ k.T) @ v).sum(0)

    xs = [random(np.random.default_rng(0), n, 4) for n in (4096, 30)]
    batched = jedbatch.batch(fn)
    plan = batched.plan(weights(), xs)

    def slope(params, plan):
        return jax.grad(lambda p: number(batched.apply(p, plan)))(params)

    room = 2 * 4096  # for longer instances than there are
    compiled = jax.jit(slope).lower(weights(), plan).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < room**2 * 4 / 4


def test_the_plan_says_what_is_ragged():
    batched = jedbatch.batch(
        split(lambda p, x, y, words: pairs(p, x, y, words)["attention"].sum(0))
    )
    batched(weights(), made(SHORT))
    text = str(batched.plan(weights(), made(SHORT)))
    assert "ragged    5 calls with 12 rows: 1 phases over rows, 2 over instances" in text
