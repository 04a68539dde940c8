"""Loops in loops, one after the other, and branches in loops, against the loop over instances."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import mostly_slow
from cases.loops import (
    PROGRAMS,
    W,
    branch_in_loop,
    loop_after_loop,
    loop_in_loop,
    loop_in_scan,
    spin,
    through_calls,
)
from jax import lax

import jedbatch
from jedbatch._jaxpr import basic_blocks
from jedbatch._jaxpr.basic_blocks import cut, is_nest
from jedbatch._jaxpr.divergent import without_lock_step
from jedbatch._jaxpr.interpret import work
from jedbatch._jaxpr.program_counters import LEAST_WIDTH, STEP_WORK, LaneRule, run_lanes, widths
from jedbatch._jaxpr.registers import BasicBlock, Instruction, Slot


def stacked(fn, *args):
    """Returns the results of one instance after the other."""
    fn = jax.jit(fn)
    rows = [jax.tree.map(lambda x, i=i: x[i], args) for i in range(len(jax.tree.leaves(args)[0]))]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *[fn(*row) for row in rows])


def by_counters(fn, *args, shared=(), rule=None):
    """Returns the results of lanes with program counters; `shared` arguments are of all."""
    one = [x if k in shared else jax.tree.map(lambda x: x[0], x) for k, x in enumerate(args)]
    program, shape = jax.make_jaxpr(fn, return_shape=True)(*one)
    leaves = jax.tree.leaves(args)
    flags = [k not in shared for k, x in enumerate(args) for _ in jax.tree.leaves(x)]
    size = next(len(x) for x, of_lane in zip(leaves, flags, strict=True) if of_lane)
    given = [Slot(x.shape[1:], x.dtype) if f else x for x, f in zip(leaves, flags, strict=True)]
    cut(program.jaxpr, program.consts, given).check()
    run = jax.jit(lambda *xs: run_lanes(program, xs, flags, size, rule=rule))
    return jax.tree.unflatten(jax.tree.structure(shape), run(*leaves))


def assert_same(ours, theirs, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            wide = jnp.promote_types(x.dtype, jnp.float32)
            x, y = x.astype(wide), y.astype(wide)
            allowed = atol * max(1, np.abs(y).max())  # by sums of terms that cancel
            np.testing.assert_allclose(x, y, rtol=rtol, atol=allowed)
        else:
            np.testing.assert_array_equal(x, y)


EVERY = pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)


def numbers(size, most=7):
    return jnp.asarray(np.random.default_rng(0).integers(0, most, size), jnp.int32)


def vectors(size, width=4):
    return jnp.asarray(np.random.default_rng(1).normal(size=(size, width)), jnp.float32)


@EVERY
def test_lanes_give_what_instances_give_alone(fn):
    n, x = numbers(37), vectors(37)
    assert_same(by_counters(fn, n, x), stacked(fn, n, x))


@pytest.mark.parametrize("fn", mostly_slow(PROGRAMS, "loop_in_loop", "switch_in_loop_in_loop"))
def test_steps_without_loops_inside(fn):
    n, x = numbers(37), vectors(37)
    ours = by_counters(fn, n, x, rule=LaneRule(nests=False))
    assert_same(ours, stacked(fn, n, x))


def heavy_around_light(n, x):
    """A loop with little work, of many trips, beside a product with much in the loop around it."""
    weights = jnp.sin(jnp.arange(4 * 256).reshape(4, 256))

    def body(c):
        i, x = c
        x = jnp.tanh(jnp.tanh(x @ weights) @ weights.T / 256 + x)
        return i + 1, lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + x), (i, x))[1]

    return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))


def test_a_loop_with_little_work_beside_that_around_it_is_no_block():
    n, x = numbers(37), vectors(37)
    program = jax.make_jaxpr(heavy_around_light)(n[0], x[0])
    heavy = cut(program.jaxpr, program.consts, [Slot((), n.dtype), Slot((4,), x.dtype)])
    program = jax.make_jaxpr(loop_in_loop)(n[0], x[0])
    light = cut(program.jaxpr, program.consts, [Slot((), n.dtype), Slot((4,), x.dtype)])
    assert len(heavy.blocks) == 3  # before the loop, its body, and after it
    assert len(light.blocks) > 3
    assert_same(by_counters(heavy_around_light, n, x), stacked(heavy_around_light, n, x))


@pytest.mark.parametrize("size", [1, 2, 5, 150])
def test_any_number_of_lanes(size):
    n, x = numbers(size), vectors(size)
    assert_same(by_counters(loop_after_loop, n, x), stacked(loop_after_loop, n, x))


COUNTS = {
    "equal": np.full(20, 4),
    "none": np.zeros(20, int),
    "one has many": np.eye(1, 40, 20, dtype=int)[0] * 30,
    "one has none": 3 - 3 * np.eye(1, 40, 20, dtype=int)[0],
}


@pytest.mark.parametrize("counts", COUNTS)
def test_numbers_of_trips(counts):
    n = jnp.asarray(COUNTS[counts], jnp.int32)
    for fn in (loop_in_loop, loop_in_scan, branch_in_loop):
        x = vectors(len(n))
        assert_same(by_counters(fn, n, x), stacked(fn, n, x))


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "complex64", "int8", "uint32", "bool"]
)
def test_dtypes(dtype):
    def fn(n, x):
        def flip(x):
            return ~x if x.dtype == bool else (x[::-1] + x.astype(x.dtype)).astype(x.dtype)

        def body(c):
            i, x = c
            return i + 1, lax.fori_loop(0, i % 3, lambda _, x: flip(x), x)

        return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))

    n = numbers(20)
    x = jnp.asarray(np.random.default_rng(1).integers(0, 2, (20, 3)), dtype)
    assert_same(by_counters(fn, n, x), stacked(fn, n, x))


@pytest.mark.usefixtures("x64")
def test_64_bits():
    n = numbers(20).astype(jnp.int64)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(20, 4)))

    def fn(n, x):
        def body(c):
            i, x = c
            return i + 1, lax.fori_loop(0, i % 3, lambda _, x: x @ W.astype(x.dtype), x)

        return lax.while_loop(lambda c: c[0] < n, body, (0, x))

    ours = by_counters(fn, n, x)
    assert ours[0].dtype == jnp.int64
    assert_same(ours, stacked(fn, n, x), rtol=1e-12)


def test_what_all_lanes_share_stays_shared():
    """A loop that all lanes run alike is no loop of blocks, and shared arrays are no registers."""

    def fn(w, n, x):
        def inner(c):
            i, x = c
            x = lax.fori_loop(0, 5, lambda _, x: jnp.sin(x @ w), x)
            x = lax.while_loop(
                lambda c: c[0] < w[0, 0], lambda c: (c[0] + 1, c[1] * 0.9), (-2.0, x)
            )[1]
            return i - 1, x

        def body(c):
            i, x = c
            return i + 1, lax.while_loop(lambda c: c[0] > 0, inner, (i, x))[1]

        return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))

    n, x = numbers(30), vectors(30)
    ours = by_counters(fn, W, n, x, shared=(0,))
    assert_same(ours, stacked(lambda n, x: fn(W, n, x), n, x))
    program = jax.make_jaxpr(fn)(W, n[0], x[0])
    slots = [Slot((), n.dtype), Slot((4,), x.dtype)]
    blocks = cut(program.jaxpr, program.consts, [W, *slots])
    assert len(blocks.blocks) == 5  # before, outer before inner, inner, outer after inner, end
    assert [block.repeats for block in blocks.blocks] == [False, False, True, False, False]
    assert {x.shape for x in blocks.registers} == {(), (4,)}
    assert len(str(blocks).splitlines()) == 5


def test_each_lane_has_random_numbers_of_its_own():
    def walk(key, n):
        def body(c):
            key, i, x = c
            key, now = jax.random.split(key)
            often = jax.random.randint(now, (), 0, 5)

            def step(j, x):
                return x + jax.random.normal(jax.random.fold_in(now, j))

            return key, i + 1, lax.fori_loop(0, often, step, x)

        return lax.while_loop(lambda c: c[1] < n, body, (key, jnp.int32(0), jnp.float32(0)))

    keys, n = jax.random.split(jax.random.key(0), 40), numbers(40)
    assert_same(by_counters(walk, keys, n), stacked(walk, keys, n))


def test_nan_in_one_lane_stays_there():
    n = jnp.full(30, 5, jnp.int32)
    x = jnp.ones((30, 4)).at[7].set(jnp.nan)
    out = by_counters(loop_in_loop, n, x)[1]
    assert np.isnan(out[7]).all()
    assert np.isfinite(np.delete(out, 7, axis=0)).all()


def test_places_without_a_lane_repeat_one_that_is_there():
    """Nothing is computed on registers that nobody has written: zeros would be divided here."""

    def fn(n, x):
        def inner(c):
            i, x = c
            return i - 1, x / x.sum()

        def body(c):
            i, x = c
            return i + 1, lax.while_loop(lambda c: c[0] > 0, inner, (i, x))[1]

        return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))

    n, x = numbers(21), jnp.abs(vectors(21)) + 1
    with jax.debug_nans(True):
        ours = by_counters(fn, n, x)
    assert_same(ours, stacked(fn, n, x))


@EVERY
def test_forward_mode(fn):
    n, x = numbers(20), vectors(20)
    if fn is through_calls:  # of `custom_vjp`, JAX has no forward mode

        def run(x):
            return by_counters(fn, n, x)

        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jvp(run, (x,), (x,))
        return

    def tangents(n, x):
        out, moved = jax.jvp(functools.partial(fn, n), (x,), (jnp.cos(x),))
        kept = [t for t in jax.tree.leaves(moved) if t.dtype != jax.dtypes.float0]
        return out, kept

    out, moved = jax.jvp(lambda x: by_counters(fn, n, x), (x,), (jnp.cos(x),))
    ours = out, [t for t in jax.tree.leaves(moved) if t.dtype != jax.dtypes.float0]
    assert_same(ours, stacked(tangents, n, x), rtol=1e-3, atol=5e-5)  # sums of some that cancel


def test_rules_of_derivatives_are_kept():
    @jax.custom_jvp
    def root(n, x):
        return spin(n % 3, x)[1]

    root.defjvp(lambda xs, ts: (root(*xs), 3 * ts[1]))

    def fn(n, x):
        def body(c):
            i, x = c
            return i + 1, root(n, spin(i, x)[1])

        return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))[1]

    n, x = numbers(20, 3), vectors(20)

    def slope(n, x):
        return jax.jacfwd(functools.partial(fn, n))(x)

    def ours(x):
        return by_counters(fn, n, x)

    basis = jnp.eye(4)[:, None] * jnp.ones((4, 20, 1))
    pushed = jax.vmap(lambda t: jax.jvp(ours, (x,), (t,))[1], out_axes=-1)(basis)
    assert_same(pushed, stacked(slope, n, x), rtol=1e-4)


def test_second_derivatives():
    n, x = numbers(10, 4), vectors(10)

    def twice(fn):
        def once(x):
            return jax.jvp(fn, (x,), (x,))[1]

        return lambda x: jax.jvp(once, (x,), (jnp.cos(x),))[1]

    ours = twice(lambda x: by_counters(loop_in_loop, n, x)[1])(x)
    theirs = stacked(lambda n, x: twice(lambda x: loop_in_loop(n, x)[1])(x), n, x)
    assert_same(ours, theirs, rtol=1e-3)


# --- what is run ---


def counted(seen, x):
    """The value, while a host counts the lanes that it is computed for."""

    def note(x):
        seen.append(math.prod(x.shape))
        return x

    return jax.pure_callback(note, x, x, vmap_method="broadcast_all")


def test_few_steps_are_run_for_lanes_that_are_not_there():
    rows = np.random.default_rng(1)
    often = jnp.asarray(rows.geometric(1 / 8, (64, 20)), jnp.int32)

    def run(mode):
        seen = []

        def fn(often):
            def inner(c):
                i, x = c
                return counted(seen, i) - 1, jnp.tanh(x @ jnp.ones((64, 64)))

            def body(c):
                i, x = c
                return i + 1, lax.while_loop(lambda c: c[0] > 0, inner, (often[i], x))[1]

            return lax.while_loop(lambda c: c[0] < 20, body, (jnp.int32(0), jnp.zeros(64)))

        program = without_lock_step(jax.make_jaxpr(fn)(often[0]), mode)
        run = jax.vmap(functools.partial(jax.core.eval_jaxpr, program.jaxpr, program.consts))
        np.testing.assert_array_equal(jax.jit(run)(often)[0], jnp.full(64, 20))
        jax.effects_barrier()
        return sum(seen) / float(often.sum())

    assert run("lockstep") == pytest.approx(64 * float(often.max(0).sum() / often.sum()))
    assert run("lockstep") > 3
    assert run("lanes") < 1.3


def block_of(work):
    return BasicBlock(instructions=[Instruction(list, (), (), work)])


def test_widths_follow_what_a_block_costs():
    assert widths(block_of(1), 256) == [256]  # for all who wait
    assert widths(block_of(int(STEP_WORK)), 256) == [8, LEAST_WIDTH, 256]
    assert widths(block_of(int(STEP_WORK)), 16) == [8, 16]
    assert widths(block_of(int(STEP_WORK)), 3) == [1, 3]
    narrow, middle, every = widths(block_of(int(STEP_WORK) // 16), 256)
    assert narrow < LEAST_WIDTH < middle < every == 256


def test_only_loops_in_loops_are_nests():
    x = jnp.ones(4)
    (single,) = jax.make_jaxpr(spin)(3, x).eqns
    assert not is_nest(single)
    for fn in PROGRAMS:
        assert any(map(is_nest, jax.make_jaxpr(fn)(3, x).eqns)), fn


def test_work_is_looked_at_in_proportion_to_a_body(monkeypatch):
    looked_at = []
    monkeypatch.setattr(basic_blocks, "work", lambda eqn: looked_at.append(eqn) or work(eqn))

    def counted(length):
        body = lambda x: functools.reduce(lambda y, _: jnp.sin(y), range(length), x)  # noqa: E731
        loop = lambda x: lax.while_loop(lambda y: y.sum() < 9, body, x)  # noqa: E731
        (eqn,) = jax.make_jaxpr(loop)(jnp.ones(3)).eqns
        looked_at.clear()
        assert not is_nest(eqn)
        return len(looked_at)

    assert counted(80) < 3 * counted(40)


# --- in batched functions ---


def in_a_tree(fn):
    """Returns a function of (parameters, tree): nodes with such loops feed others."""

    @jedbatch.cell
    def leaf(params, n, x):
        return jax.tree.leaves(fn(n, x * params["scale"]))[-1].reshape(-1)[-4:]

    @jedbatch.cell
    def node(params, left, right):
        n = jnp.abs(left.sum() * 9).astype(jnp.int32) % 5
        return jnp.tanh(jax.tree.leaves(fn(n, left + params["scale"] * right))[-1].reshape(-1)[-4:])

    def whole(params, tree):
        if len(tree) == 1:
            return leaf(params, *tree[0])
        return node(params, whole(params, tree[0]), whole(params, tree[1]))

    return whole


def trees(count, seed):
    draws = np.random.default_rng(seed)

    def grow(depth):
        if depth == 0 or draws.random() < 0.3:
            return ((int(draws.integers(6)), draws.normal(size=4).astype(np.float32)),)
        return grow(depth - 1), grow(depth - 1)

    return [grow(3) for _ in range(count)]


PARAMS = {"scale": jnp.float32(0.8)}


CASES = [
    (fn, mode)
    for fn in (loop_in_loop, loop_in_scan, branch_in_loop)
    for mode in ("lanes", "auto", "lockstep")
]


@pytest.mark.parametrize("case", mostly_slow(CASES, (loop_in_loop, "lanes")))
def test_nodes_of_trees(case):
    fn, mode = case
    whole = in_a_tree(fn)
    batched = jedbatch.batch(whole, control_flow=mode)
    for seed in (0, 1):
        given = trees(9, seed)
        theirs = jnp.stack([whole(PARAMS, tree) for tree in given])
        np.testing.assert_allclose(batched(PARAMS, given), theirs, rtol=1e-4, atol=1e-5)


def test_new_numbers_of_trips_compile_nothing():
    whole = in_a_tree(loop_in_loop)
    batched = jedbatch.batch(whole, control_flow="lanes")
    given = trees(9, 0)
    batched(PARAMS, given)
    compiled = batched.compilations
    for _ in range(3):
        given = jax.tree.map(lambda x: (x * 3 + 1) % 9 if isinstance(x, int) else x + 1, given)
        theirs = jnp.stack([whole(PARAMS, tree) for tree in given])
        np.testing.assert_allclose(batched(PARAMS, given), theirs, rtol=1e-4, atol=1e-5)
    assert batched.compilations == compiled


def heavy(params, n, x):
    """Enough work in the inner loop for `auto`."""

    def inner(c):
        i, x = c
        return i - 1, jnp.tanh(params @ x) + 0.1

    def body(c):
        i, x = c
        return i + 1, lax.while_loop(lambda c: c[0] > 0, inner, ((i * n) % 5, x))[1]

    return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))[1]


@pytest.fixture
def counting(monkeypatch):
    """Returns a list that has a number of lanes for each machine that is made."""
    made = []
    run = run_lanes

    def note(program, args, in_batched, size, *rest):
        made.append(size)
        return run(program, args, in_batched, size, *rest)

    monkeypatch.setattr("jedbatch._jaxpr.divergent.run_lanes", note)
    return made


def test_rows_of_arrays(counting):
    """Where it pays, and under `jit`, `vmap` over parameters, `jvp` and `grad`."""
    params = vectors(64, 64) / 8
    n, x = numbers(100), vectors(100, 64)
    batched = jedbatch.batch(heavy, in_axes=(None, 0, 0))
    lockstep = jedbatch.batch(heavy, in_axes=(None, 0, 0), control_flow="lockstep")

    def theirs(params):
        return jnp.stack([jax.jit(heavy)(params, a, b) for a, b in zip(n, x, strict=True)])

    np.testing.assert_allclose(batched(params, n, x), theirs(params), rtol=1e-5, atol=1e-5)
    assert counting == [100]
    np.testing.assert_allclose(lockstep(params, n, x), theirs(params), rtol=1e-5, atol=1e-5)
    assert counting == [100]
    under_jit = jax.jit(batched)(params, n, x)
    np.testing.assert_allclose(under_jit, theirs(params), rtol=1e-5, atol=1e-5)
    both = jnp.stack([params, params * 0.5])
    over_params = jax.vmap(lambda p: batched(p, n, x))(both)
    for ours, p in zip(over_params, both, strict=True):
        np.testing.assert_allclose(ours, theirs(p), rtol=1e-5, atol=1e-5)
    ours = jax.jvp(lambda p: batched(p, n, x), (params,), (params * 0.1,))[1]
    expected = jax.jvp(theirs, (params,), (params * 0.1,))[1]
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match=r"(?i)reverse-mode"):
        jax.grad(lambda p: batched(p, n, x).sum())(params)


def test_reverse_mode_where_the_loops_are_not_differentiated():
    """As JAX allows: what flows around the loops has a gradient."""

    def fn(params, n, x):
        def step(h, row):
            often = spin((n + row[0].astype(jnp.int32)) % 4, lax.stop_gradient(x))[1]
            return jnp.tanh(h @ params + often), h

        return lax.scan(step, x, jnp.stack([x, x + 1, x + 2]))[0]

    n, x = numbers(40), vectors(40)
    batched = jedbatch.batch(fn, in_axes=(None, 0, 0), control_flow="lanes")

    def loss(run, params):
        return jnp.square(run(params)).sum()

    def theirs(params):
        return jnp.stack([fn(params, a, b) for a, b in zip(n, x, strict=True)])

    def ours(params):
        return batched(params, n, x)

    np.testing.assert_allclose(ours(W), theirs(W), rtol=1e-4, atol=1e-5)
    found = jax.grad(functools.partial(loss, ours))(W)
    expected = jax.grad(functools.partial(loss, theirs))(W)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_trees_whose_nodes_are_not_differentiated_through_their_loops():
    whole = in_a_tree(lambda n, x: x + lax.stop_gradient(loop_in_loop(n, x)[1]))
    batched = jedbatch.batch(whole, control_flow="lanes")
    given = trees(6, 3)

    def loss(run, params):
        return jnp.square(run(params)).sum()

    def theirs(params):
        return jnp.stack([whole(params, tree) for tree in given])

    found = jax.grad(lambda p: loss(lambda p: batched(p, given), p))(PARAMS)
    expected = jax.grad(functools.partial(loss, theirs))(PARAMS)
    np.testing.assert_allclose(found["scale"], expected["scale"], rtol=1e-3)
    pushed = jax.jvp(lambda p: batched(p, given), (PARAMS,), (PARAMS,))[1]
    expected = jax.jvp(theirs, (PARAMS,), (PARAMS,))[1]
    np.testing.assert_allclose(pushed, expected, rtol=1e-3, atol=1e-5)
