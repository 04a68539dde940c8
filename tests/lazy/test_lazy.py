"""Inside of a lazy scope a loop over instances is batched as it runs, and gives what it gave."""

import asyncio
import collections
import copy
import gc
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import programs
from cases.helpers import assert_close, assert_no_recompile, compilations, loop, number
from cases.scopes import PARAMS, TREES, H, encode, leaf, loop_in_scope, node, total, total_by_loop

import jedbatch
from jedbatch._program.returned import some_rows
from jedbatch.data import synthetic_treebank
from jedbatch.errors import EscapedValueError, RecompilationWarning, SymbolicValueError
from jedbatch.models import tree


def test_what_a_future_is():
    w, x = jnp.ones((2, 3)), np.arange(3, dtype=np.float32)
    with jedbatch.lazy() as scope:
        y = w @ x + 1
        assert isinstance(y, jax.Array)
        assert (y.shape, y.dtype, y.ndim, y.size, len(y)) == ((2,), jnp.float32, 1, 2, 2)
        a, b = y
        z = -y[0] * 2 / y.sum() - a * b
        assert not scope.rounds
    assert len(scope.rounds) == 1
    np.testing.assert_allclose(y, [4, 4])
    assert float(z) == -17


def test_nodes_of_all_instances_share_batches():
    with jedbatch.lazy() as scope:
        results = [encode(PARAMS, t) for t in TREES]
    (found,) = scope.rounds
    plan = jedbatch.batch(encode).plan(PARAMS, TREES)
    assert (found.nodes, found.batches) == (len(plan.graph.node_type), len(plan.schedule))
    assert found.futures == len(results)
    assert "1 round" in str(scope)


# --- when values are needed ---


@pytest.mark.parametrize(
    ("want", "expected"),
    [
        (float, 3.0),
        (int, 3),
        (bool, True),
        (complex, 3 + 0j),
        (str, "3.0"),
        (lambda x: repr(x).split("(")[0], "Array"),
        (lambda x: f"{x:.2f}", "3.00"),
        (lambda x: x.item(), 3.0),
        (lambda x: x.tolist(), 3.0),
        (lambda x: np.asarray(x).tolist(), 3.0),
        (lambda x: np.asarray(x, np.int32).dtype, np.int32),
        (lambda x: jax.device_get(x).tolist(), 3.0),
        (lambda x: float(jax.block_until_ready(x)), 3.0),
        (lambda x: pickle.loads(pickle.dumps(x)).tolist(), 3.0),
        (lambda x: copy.deepcopy(x).tolist(), 3.0),
        (lambda x: 1 if x > 2 else 2, 1),
        (lambda x: [5, 6, 7, 8][x.astype(int)], 8),
        (lambda x: list(range(x.astype(int))), [0, 1, 2]),
        (lambda x: x == 3, True),
        (lambda x: max(x, 2 * x).item(), 6.0),
    ],
)
def test_what_needs_a_value(want, expected):
    """Inside of the scope and after it."""
    w = jnp.ones(3)
    with jedbatch.lazy() as scope:
        x = w @ np.ones(3, np.float32)
        assert not scope.rounds
        assert want(x) == expected
        assert scope.rounds
    assert want(x) == expected


def test_hashing_and_membership():
    w = jnp.ones(3)
    with jedbatch.lazy():
        x = w @ np.ones(3, np.float32)
        with pytest.raises(TypeError, match="unhashable"):
            hash(x)
    with pytest.raises(TypeError, match="unhashable"):
        dict.fromkeys([x])
    assert x in [x]


def test_a_tree_that_grows_as_its_values_say():
    """Several rounds; what is computed is never computed again."""

    def grown(params, x):
        h = jnp.tanh(x * params["b"] + 1)
        for _ in range(5):
            if not h.sum() > 0.5:
                break
            h = node(params, h, -h) * 0.5
        return h

    xs = [np.full(H, i / 4, np.float32) for i in range(6)]
    assert_close(loop_in_scope(grown, PARAMS, xs), loop(grown, PARAMS, xs), 1e-5)
    slope = jax.grad(lambda p: number(loop(grown, p, xs)))(PARAMS)
    assert_close(jax.grad(lambda p: number(loop_in_scope(grown, p, xs)))(PARAMS), slope, 1e-5)
    with jedbatch.lazy() as scope:
        kept = [grown(PARAMS, x) for x in xs]
    assert len(scope.rounds) > 6
    once = sum(r.nodes for r in scope.rounds)
    jax.block_until_ready(kept)
    assert once == sum(r.nodes for r in scope.rounds)


def test_rounds_in_step():
    """All instances go on together: a round computes the same step of each."""
    with jedbatch.lazy() as scope:
        states = [leaf(PARAMS, i) for i in range(8)]
        for _ in range(3):
            signs = [h.sum() > 0 for h in states]
            states = [
                node(PARAMS, h, h) if positive else node(PARAMS, h, -h)
                for h, positive in zip(states, signs, strict=True)
            ]
    expected = [leaf(PARAMS, i) for i in range(8)]
    for _ in range(3):
        expected = [node(PARAMS, h, h if h.sum() > 0 else -h) for h in expected]
    assert_close([jnp.asarray(h) for h in states], expected, 1e-5)
    assert len(scope.rounds) == 4


# --- what is computed ---


def test_what_nobody_holds_is_not_computed():
    with jedbatch.lazy() as scope:
        h = leaf(PARAMS, 1)
        for _ in range(10):
            node(PARAMS, h, h)
        kept = node(PARAMS, h, h)
        chain = h
        for _ in range(10):
            chain = node(PARAMS, chain, h)
        del chain
    assert [(r.nodes, r.futures) for r in scope.rounds] == [(2, 2)]
    assert_close(jnp.asarray(kept), node(PARAMS, leaf(PARAMS, 1), leaf(PARAMS, 1)), 1e-5)


def test_a_scope_without_futures():
    with jedbatch.lazy() as scope:
        leaf(PARAMS, 1)
    assert not scope.rounds
    with jedbatch.lazy() as scope:
        zeros = jnp.zeros(3) + 1 + 0 * jnp.arange(3) + 0 * jnp.eye(3)[0]
    assert not scope.rounds
    assert zeros.tolist() == [1, 1, 1]


def test_what_depends_on_weights_only():
    """Is computed once, before the nodes, and is a future too."""
    w = jnp.arange(6.0).reshape(2, 3)
    with jedbatch.lazy() as scope:
        turned = [w.T @ np.ones(2, np.float32) * i for i in range(8)]
        norm = (w**2).sum()
        big = norm > 3
        more = w.T * norm
    assert float(norm) == 55
    assert bool(big)
    np.testing.assert_allclose(more, w.T * 55)
    np.testing.assert_allclose(turned[2], w.sum(0) * 2)
    assert sum(r.nodes for r in scope.rounds) < 30
    with jedbatch.lazy():
        again = more @ np.ones(2, np.float32)
    np.testing.assert_allclose(again, 55 * w.sum(0))


def test_what_depends_on_weights_only_is_a_weight_afterwards():
    def run(w):
        with jedbatch.lazy():
            turned = w.T * 2
            big = turned.sum() > 3
            found = [turned @ x for x in np.ones((3, 2), np.float32)] if big else []
        return sum(found).sum()

    w = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(run(w), 90)
    np.testing.assert_allclose(jax.grad(run)(w), 6)


@pytest.mark.slow
def test_functions_that_close_over_weights():
    def states(w, b, xs):
        double = jax.jit(lambda x: x @ w + b)
        cell = jedbatch.cell(lambda x: jnp.tanh(x @ w) * b)

        def scanned(x):
            return jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, length=2)[0]

        def chosen(x):
            return jax.lax.cond(x.sum() > 0, lambda: x * b, lambda: x @ w)

        return [chosen(scanned(cell(double(x)))) for x in xs]

    def by_scope(w, b):
        with jedbatch.lazy():
            return sum(h.sum() for h in states(w, b, xs))

    xs = np.random.default_rng(0).normal(size=(4, H)).astype(np.float32)
    w, b = PARAMS["W"][:H], PARAMS["b"]
    by_loop = lambda w, b: sum(h.sum() for h in states(w, b, xs))  # noqa: E731
    got = jax.value_and_grad(by_scope, argnums=(0, 1))(w, b)
    assert_close(got, jax.value_and_grad(by_loop, argnums=(0, 1))(w, b), 1e-5)
    assert_close(jnp.asarray(by_scope(w, b)), by_loop(w, b), 1e-5)


def test_arrays_may_change_after_they_were_read():
    buffer = np.zeros(3, np.float32)
    times = jedbatch.cell(lambda w, x: w * x)
    w = jnp.ones(3)
    with jedbatch.lazy():
        got = []
        for i in range(4):
            buffer[:] = i
            got.append((times(w, buffer), w * buffer, jnp.asarray(buffer) + w))
    assert [[float(x[0]) for x in xs] for xs in got] == [[i, i, i + 1] for i in range(4)]


def test_weights_may_be_exchanged_in_a_container():
    """The same dict with other arrays in it, between two calls of a cell."""
    params = dict(PARAMS)
    nested = {"in": {"b": PARAMS["b"]}, "list": [PARAMS["b"]]}
    shift = jedbatch.cell(lambda p, x: p["in"]["b"] * x + p["list"][0])
    with jedbatch.lazy():
        got = []
        for i in range(4):
            params["b"] = PARAMS["b"] + i // 2
            nested["in"]["b"] = params["b"]
            nested["list"][0] = params["b"]
            got += [encode(params, (1, 2)), shift(nested, 2.0)]
    expected = []
    for i in range(4):
        b = PARAMS["b"] + i // 2
        expected += [encode({**PARAMS, "b": b}, (1, 2)), b * 2 + b]
    assert_close([jnp.asarray(x) for x in got], expected, 1e-5)


def test_numbers_are_weakly_typed():
    x = jnp.ones(3, jnp.bfloat16)
    add = jedbatch.cell(lambda x, y: x + y)
    with jedbatch.lazy():
        y = add(x, 0.5) * 2
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, 3)


def test_integers_and_keys_are_data():
    table = jnp.arange(12.0).reshape(4, 3)
    look_up = jedbatch.cell(lambda t, i: t[i].sum(axis=0))
    tokens = [jnp.array([i % 4, 1]) for i in range(8)]
    keys = jax.random.split(jax.random.key(0), 8)
    noise = jedbatch.cell(lambda t, key: t[0] * jax.random.normal(key, (3,)))
    with jedbatch.lazy() as scope:
        got = [look_up(table, t) + noise(table, key) for t, key in zip(tokens, keys, strict=True)]
    expected = [look_up(table, t) + noise(table, k) for t, k in zip(tokens, keys, strict=True)]
    assert_close([jnp.asarray(x) for x in got], expected, 1e-5)
    assert scope.rounds[0].batches == 3


def test_many_arrays_that_count_as_weights():
    xs = [jnp.full(3, float(i)) for i in range(64)]
    with pytest.warns(RecompilationWarning, match=r"numpy\.asarray"), jedbatch.lazy():
        sum(xs)


# --- scopes ---


def test_nested_scopes():
    with jedbatch.lazy() as outer:
        a = encode(PARAMS, (1, 2))
        with jedbatch.lazy() as inner:
            b = node(PARAMS, a, a)
        assert inner is outer
        assert len(outer.rounds) == 1
        c = node(PARAMS, b, a)
        assert len(outer.rounds) == 1
    assert len(outer.rounds) == 2
    a = encode(PARAMS, (1, 2))
    assert_close(jnp.asarray(c), node(PARAMS, node(PARAMS, a, a), a), 1e-5)


def test_a_scope_left_by_an_exception():
    with pytest.raises(KeyError, match="stop"), jedbatch.lazy() as scope:  # noqa: PT012
        done = leaf(PARAMS, 1)
        float(done.sum())
        lost = node(PARAMS, done, done)
        raise KeyError("stop")
    assert len(scope.rounds) == 1
    assert_close(jnp.asarray(done), leaf(PARAMS, 1), 1e-6)
    assert "failed" in repr(lost)
    for use in (
        float,
        lambda x: x + 1,
        np.asarray,
        lambda x: x.shape,
        lambda x: jax.jit(jnp.sin)(x),
    ):
        with pytest.raises(EscapedValueError, match="left by an exception"):
            use(lost)
    with pytest.raises(EscapedValueError), jedbatch.lazy():
        node(PARAMS, lost, lost)
    assert float(total(PARAMS)) == pytest.approx(float(total_by_loop(PARAMS)))
    assert not isinstance(leaf(PARAMS, 1) + 1, jax.core.Tracer)


def test_a_round_that_fails():
    @jedbatch.cell
    def bad(x):
        return x

    def policy(frontier):
        raise ZeroDivisionError

    scope = jedbatch.Lazy(policy=policy)
    with scope():  # nothing is wanted
        bad(np.ones(3, np.float32))
    with pytest.raises(ZeroDivisionError), scope():
        x = bad(np.ones(3, np.float32))
    with pytest.raises(EscapedValueError, match="computation failed"):
        x + 1
    with pytest.raises(ZeroDivisionError), scope():  # noqa: PT012
        x = bad(np.ones(3, np.float32))
        float(x[0])


def test_a_value_wanted_inside_of_a_cell():
    with pytest.raises(SymbolicValueError, match="ask for the value before"), jedbatch.lazy():  # noqa: PT012
        h = leaf(PARAMS, 1)
        held = collections.deque([h[0]])
        half = lambda: float(held[0]) / 2  # noqa: E731
        jedbatch.cell(lambda x: x * half())(h)


def test_threads_have_scopes_of_their_own():
    found = {}

    def run(i):
        with jedbatch.lazy():
            states = [encode(PARAMS, t) for t in TREES[i:]]
            barrier.wait()
            found[i] = float(sum(h.sum() for h in states))

    barrier = threading.Barrier(3, timeout=60)
    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    expected = {i: float(sum(encode(PARAMS, t).sum() for t in TREES[i:])) for i in range(3)}
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_future_of_another_thread():
    caught = []

    def use(x):
        try:
            float(x)
        except SymbolicValueError as error:
            caught.append(str(error))

    with jedbatch.lazy():
        x = leaf(PARAMS, 1)
        thread = threading.Thread(target=use, args=(x[0],))
        thread.start()
        thread.join()
    assert "another thread" in caught[0]


@pytest.mark.slow
def numbers(count=3):
    with jedbatch.lazy():
        for i in range(count):
            yield leaf(PARAMS, i)


def test_a_suspended_generator_leaves_other_calls_as_they_are():
    """Meanwhile, and afterwards, however it ends."""
    batched = jedbatch.batch(leaf)
    expected = jnp.stack([leaf(PARAMS, i) for i in (1, 2)])

    def check():
        assert_close(batched(PARAMS, [1, 2]), expected, 1e-6)

    def fail(generator):
        with pytest.raises(KeyError, match="stop"):
            generator.throw(KeyError("stop"))

    for end in (list, fail, lambda g: g.close(), lambda g: None):
        generator, beside = numbers(), numbers(1)
        first, _ = next(generator), next(beside)
        check()
        assert_close(jnp.asarray(first), leaf(PARAMS, 0), 1e-6)
        end(generator)
        del generator
        check()
        beside.close()
        assert not isinstance(leaf(PARAMS, 1) + 1, jax.core.Tracer)
    for i, (a, b) in enumerate(zip(numbers(), numbers(), strict=True)):
        assert_close([np.asarray(a), np.asarray(b)], [np.asarray(leaf(PARAMS, i))] * 2, 1e-6)
    check()


def test_tasks_that_wait_inside_of_scopes():
    async def encode(i):
        with jedbatch.lazy():
            x = leaf(PARAMS, i)
            await asyncio.sleep(0.01 * (3 - i))
            x = node(PARAMS, x, x)
        return np.asarray(x)

    async def together():
        return await asyncio.gather(*map(encode, range(3)))

    leaves = [leaf(PARAMS, i) for i in range(3)]
    assert_close(asyncio.run(together()), [np.asarray(node(PARAMS, x, x)) for x in leaves], 1e-6)


@pytest.mark.parametrize("end", [lambda g: g.close(), list])
def test_a_scope_is_left_in_the_thread_that_opened_it(end):
    errors = []

    def run():
        with pytest.raises(RuntimeError, match=r"left in another thread .* in one thread"):
            end(generator)
        errors.append(leaf(PARAMS, 1) + 1)  # of this thread, which has no scope

    def begin():
        generator = numbers()
        first = next(generator)
        return generator, first

    def there():
        nonlocal generator
        generator, first = begin()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        got.append((np.asarray(first), np.asarray(leaf(PARAMS, 2))))  # where the scope lasts

    generator, got = None, []
    other = threading.Thread(target=there)
    other.start()
    other.join()
    assert not isinstance(errors[0], jax.core.Tracer)
    assert_close(got, [(np.asarray(leaf(PARAMS, 0)), np.asarray(leaf(PARAMS, 2)))], 1e-6)


def test_options():
    for options in (
        {"policy": jedbatch.policies.agenda},
        {"reuse": True},
    ):
        scope = jedbatch.Lazy(**options)
        assert_close(jnp.asarray(total(PARAMS, scope=scope)), total_by_loop(PARAMS), 1e-5)
        got = jax.grad(lambda p, scope=scope: total(p, scope=scope))(PARAMS)
        assert_close(got, jax.grad(total_by_loop)(PARAMS), 1e-5)
        assert scope.compilations
        scope.clear()
        assert not scope.compilations
    with pytest.raises(ValueError, match="`Lazy` got layout"):
        jedbatch.Lazy(layout="fast")
    with pytest.raises(TypeError, match="`Lazy` got reuse"):
        jedbatch.Lazy(reuse=1)


# --- many scopes ---


@pytest.mark.slow
def test_a_training_loop():
    """One line makes the loop batched: the same steps, and nothing is compiled after a while."""
    cells = tree.plain_cells(num_words=500, num_labels=5, hidden=8)
    score = tree.scorer(cells)
    optimizer = optax.adam(0.01)
    trees = synthetic_treebank(60, mean_length=6)
    minibatches = [trees[i : i + 6] for i in range(0, 60, 6)]

    def loss_in_scope(params, minibatch):
        with jedbatch.lazy():
            losses = [score(params, t)[0] for t in minibatch]
        return jnp.stack(losses).mean()

    def loss_by_loop(params, minibatch):
        return jnp.stack([score(params, t)[0] for t in minibatch]).mean()

    def steps(loss, minibatches, params, state):
        values = []
        for minibatch in minibatches:
            value, slope = jax.value_and_grad(loss)(params, minibatch)
            updates, state = optimizer.update(slope, state, params)
            params = optax.apply_updates(params, updates)
            values.append(value)
        return params, state, values

    start = cells.init(jax.random.key(0))
    state = optimizer.init(start)
    got, _, values = steps(loss_in_scope, minibatches[:3], start, state)
    expected, _, by_loop = steps(loss_by_loop, minibatches[:3], start, state)
    assert_close(values, by_loop, 1e-4)
    assert_close(got, expected, 1e-3)

    params, state, _ = steps(loss_in_scope, minibatches[:7], start, state)
    with assert_no_recompile():
        steps(loss_in_scope, minibatches[7:], params, state)


def test_rows_of_a_table_are_one_type():
    """Single operations: topologies and rows are new, programs are not."""

    def states(params, trees):
        with jedbatch.lazy():
            return [
                programs.recursion(programs.leaf, programs.node, programs.out)(params, t)
                for t in trees
            ]

    for seed in range(4):
        states(programs.tree_params(seed), programs.trees(6, seed))
    with assert_no_recompile():
        states(programs.tree_params(9), programs.trees(6, 9))


def test_formulas_of_a_few_weights():
    """Each formula does something else to the same weights; programs do not grow with formulas."""
    operations = {"+": jnp.add, "*": jnp.multiply, "sin": jnp.sin}

    def formula(rng, depth):
        if depth == 0:
            return int(rng.integers(3))
        name = list(operations)[rng.integers(3)]
        return name, *[formula(rng, depth - 1) for _ in range(1 if name == "sin" else 2)]

    def evaluate(weights, tree):
        if isinstance(tree, int):
            return weights[tree]
        return operations[tree[0]](*[evaluate(weights, part) for part in tree[1:]])

    weights = jnp.array([0.5, -1.0, 2.0])
    rng = np.random.default_rng(0)
    for k in range(4):
        trees = [formula(rng, 4) for _ in range(8)]
        expected = loop(evaluate, weights, trees)
        with compilations() as compiled, jedbatch.lazy():
            values = [evaluate(weights, tree) for tree in trees]
        assert_close(jnp.stack(values), expected, 1e-5)
        assert k < 2 or not compiled


def test_many_scopes_keep_nothing():
    scope = jedbatch.Lazy()

    def step(seed, alive=None):
        params = programs.tree_params(seed)
        with scope():
            states = [encode(params, t) for t in programs.trees(4, seed)]
            h = jnp.zeros(H) + states[0] * params["b"].sum()
        if alive is not None:
            alive += [weakref.ref(x) for x in (params["W"], states[1], h)]
        return jnp.stack(states).sum() + h.sum()

    def sizes():
        (kept,) = scope._free[next(iter(scope._free))]
        r, s = kept.session.registry, kept.session.programs
        parts = r.node_types, r.shared, r.call_specs, r.groups, r._ids, r.constants, s._signatures
        return [*map(len, parts), len(s._statics)]

    for seed in range(5):
        step(seed)
    before, alive = sizes(), []
    for seed in range(20):
        step(seed % 5, alive)
    gc.collect()
    assert sizes() == before
    assert not any(ref() is not None for ref in alive)


def test_reading_values_keeps_nothing():
    """JAX keeps programs by the trace they are called under; there is one for all reads."""

    def read():
        with jedbatch.lazy():
            h = node(PARAMS, leaf(PARAMS, 1), leaf(PARAMS, 2)).sum()
            assert float(h) < 99
            jnp.asarray(h)

    read()
    before = some_rows._cache_size()
    for _ in range(5):
        read()
    assert some_rows._cache_size() == before


def test_training_inside_of_one_scope():
    """Weights that are gone make room for new ones."""
    scope = jedbatch.Lazy()
    with scope():
        for seed in range(6):
            params = programs.tree_params(seed)
            float(encode(params, (1, (2, 3))).sum())
            del params
        with assert_no_recompile():
            params = programs.tree_params(9)
            got = float(encode(params, (1, (2, 3))).sum())
    assert got == pytest.approx(float(encode(params, (1, (2, 3))).sum()), rel=1e-5)


def test_more_inputs_than_results_and_results_that_nobody_reads():
    @jedbatch.cell
    def scaled_sum(p, *xs):
        return p * sum(xs)

    p, xs = jnp.arange(3.0), [jnp.float32(i) for i in range(8)]
    with jedbatch.lazy():
        scaled_sum(p, *xs)  # computed in vain
        found = scaled_sum(p, *xs) + scaled_sum(p, xs[7], xs[6])
    assert_close(found, p * 28 + p * 13, 1e-5)
