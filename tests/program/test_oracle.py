"""A table of programs against the plain Python loop: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import programs
from cases.helpers import assert_close, check, loop, mostly_slow, number, random_tree
from cases.scopes import loop_in_scope

import jedbatch
from jedbatch.testing import check_plan

FAST = {
    "batch": [
        programs.dag,
        programs.no_work,
        programs.unread_and_twice,
        programs.custom_rules,
    ],
    "lazy": [programs.unread_and_twice],
    "auto": [programs.tree_linen, programs.values_and_options],
}
# A scope records the same nodes; what it does with them does not depend on how they are spelled,
# nor on what kernels compute.
NOT = {
    "batch": [],
    "lazy": [
        programs.tree_raw,
        programs.tree_jit,
        programs.chain_nnx,
        programs.dag,
        programs.no_work,
        programs.division,
    ],
    "auto": [  # all that they do is in cells
        programs.tree_cells,
        programs.chain_nnx,
        programs.dag,
        programs.no_work,
        programs.unread_and_twice,
        programs.several_results,
    ],
}
CASES = [
    pytest.param(make, way, marks=[] if make in FAST[way] else pytest.mark.slow)
    for make in programs.PROGRAMS
    for way in FAST
    if make not in NOT[way]
]


@functools.cache
def by_loop(make):
    """(function, parameters, instances, results of the loop, their gradient)."""
    fn, params, instances = make(7, seed=1)
    slope, results = differentiated(lambda p: loop(fn, p, instances))(params)
    return fn, params, instances, results, slope


def differentiated(run):
    """A function of parameters to (gradient, results)."""

    def weighted(params):
        results = run(params)
        return number(results), results

    return jax.grad(weighted, has_aux=True, allow_int=True)


@pytest.mark.parametrize(("make", "way"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_agrees_with_loop(make, way):
    """In batches of cells, of what always runs together, and in a lazy scope."""
    fn, params, instances, results, slope = by_loop(make)
    if way == "lazy":
        scope = jedbatch.Lazy()  # programs of other models are not to grow
        run = lambda p: loop_in_scope(fn, p, instances, scope)  # noqa: E731
    else:
        batched = jedbatch.batch(fn, granularity="cell" if way == "batch" else way)
        check_plan(batched.plan(params, instances))
        run = lambda p: batched(p, instances)  # noqa: E731
    rtol = 3e-5 if way == "auto" else 1e-5
    if way == "batch":
        assert_close(run(params), results, rtol, by_instance=True)
    gradient, found = differentiated(run)(params)
    assert_close(found, results, rtol, by_instance=True)
    assert_close(gradient, slope, rtol)


@pytest.mark.parametrize("num", [1, 2, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", mostly_slow([programs.tree_cells, programs.no_work], "no_work"))
def test_numbers_of_instances(make, num):
    check(*make(num, seed=num))


@pytest.mark.parametrize(
    "make",
    mostly_slow(
        [programs.several_results, programs.dag],
    ),
)
def test_all_ways_to_run(make):
    check(*make(5, seed=2), thorough=True, inference=True)


@pytest.mark.parametrize(
    "make",
    mostly_slow(
        [programs.tree_cells, programs.dag, programs.several_results, programs.control_flow],
        "tree_cells",
    ),
)
def test_float64(make, x64):
    fn, params, instances = make(7, seed=3)

    def wide(tree):
        is_float = lambda x: getattr(x, "dtype", None) == np.float32  # noqa: E731
        return jax.tree.map(lambda x: np.asarray(x, np.float64) if is_float(x) else x, tree)

    check(fn, wide(params), wide(instances), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rtol"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_half_precision(dtype, rtol):
    fn, params, instances = programs.tree_cells(7, seed=4)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    check(fn, params, instances, rtol=rtol)


def test_weak_types_stay_weak():
    """bfloat16 times a Python float is bfloat16, in cells and outside."""
    half = jedbatch.cell(lambda params, x, factor: x * factor + params)

    def fn(params, n):
        h = params * 0.5
        for i in range(n):
            h = half(params, h, 0.25 * i) * 1.5
        return h

    check(fn, jnp.ones(3, jnp.bfloat16), [0, 1, 3], rtol=2e-2)


def test_integers_and_bools():
    count = jedbatch.cell(lambda params, a, b: (a[0] + b[0], a[1] & b[1]))

    def fn(params, tree):
        if isinstance(tree, tuple):
            return count(params, fn(params, tree[0]), fn(params, tree[1]))
        return params["E"][tree], params["E"][tree] > 2

    params = {"E": jnp.arange(programs.WORDS)}
    check(fn, params, programs.trees(7, 5), gradients=False)


def test_complex():
    turn = jedbatch.cell(lambda params, z: z * params / jnp.abs(z))

    def fn(params, n):
        z = params
        for _ in range(n):
            z = turn(params, z)
        return z, jnp.imag(z)

    check(fn, jnp.complex64([1 + 2j, 3 - 1j]), [1, 4, 2])


def test_complex_products(x64):
    """Products of complex weights, of which operands and results are read again in reverse."""
    spins = jax.random.normal(jax.random.key(0), (3, 3, 2)) @ jnp.array([1.0, 1j])
    params = {"turn": spins, "phase": jnp.arange(1.0, 4.0)}

    @jedbatch.cell
    def leaf(params, number):
        return jnp.exp(1j * params["phase"] * number)

    @jedbatch.cell
    def join(params, a, b):
        return params["turn"] @ (a * b.conj()) / (1 + jnp.abs(a).sum())

    @jedbatch.cell
    def spectrum(params, x):
        return jnp.abs(jnp.fft.fft(x.real) @ params["turn"]).sum()

    def encode(params, tree):
        if isinstance(tree, float):
            return leaf(params, tree)
        return join(params, *(encode(params, part) for part in tree))

    def fn(params, tree):
        z = encode(params, tree)
        return jnp.abs(z), z.real * z.imag, spectrum(params, z)

    check(fn, params, [(0.5, 1.5), ((1.0, 2.0), (0.25, (3.0, 1.0))), 2.0])


def test_nan_stays_in_its_instance():
    """Values and input gradients of the others stay what they are, to the bit."""
    fn, params, instances = programs.chain_nnx(7, seed=6)
    batched = jedbatch.batch(fn)
    clean = np.asarray(batched(params, instances))
    sick = [x.copy() for x in instances]
    sick[3][:] = np.nan
    got = np.asarray(batched(params, sick))
    others = [0, 1, 2, 4, 5, 6]
    assert np.isnan(got[3]).all()
    np.testing.assert_array_equal(got[others], clean[others])

    def slopes(instances):
        return jax.grad(lambda xs: batched(params, xs).sum())(list(map(jnp.asarray, instances)))

    for i, (a, b) in enumerate(zip(slopes(instances), slopes(sick), strict=True)):
        assert (i == 3) == bool(np.isnan(b).any())
        if i != 3:
            np.testing.assert_array_equal(a, b)


def test_bitwise_the_same_every_time():
    """Also in a program that was compiled for a larger minibatch."""
    fn, params, instances = programs.tree_cells(7, seed=7)
    batched = jedbatch.batch(fn, out_axes=None)
    slope = jax.grad(lambda p, xs: sum(map(number, batched(p, xs))))
    first, first_slope = batched(params, instances), slope(params, instances)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, batched(params, instances), first)
        jax.tree.map(np.testing.assert_array_equal, slope(params, instances), first_slope)
    other = jedbatch.batch(fn, out_axes=None)
    other(params, programs.trees(40, 8))
    jax.tree.map(np.testing.assert_array_equal, other(params, instances), first)


def test_permuting_instances_permutes_results():
    fn, params, instances = programs.tree_cells(9, seed=9)
    batched = jedbatch.batch(fn)
    order = np.random.default_rng(0).permutation(9)
    got = batched(params, [instances[i] for i in order])
    assert_close(got, batched(params, instances)[order], 1e-6)


def test_splitting_a_minibatch_changes_nothing():
    fn, params, instances = programs.mixed(8, seed=10)
    batched = jedbatch.batch(fn)
    parts = [batched(params, instances[:3]), batched(params, instances[3:])]
    assert_close(jnp.concatenate(parts), batched(params, instances), 1e-6)


def test_many_readers():
    """A value read by more nodes than the reverse lists readers for."""
    use = jedbatch.cell(lambda params, h, x: h * x + params)

    def fn(params, n):
        h = use(params, params, 0.5)
        total = h
        for i in range(n):
            total = use(params, total, 0.1) + use(params, h, 0.01 * i)
        return total

    check(fn, jnp.arange(1.0, 4.0), [3, 40, 5])


def test_out_axes_none():
    """Results of different shapes come as a list."""

    def fn(params, tree):
        if isinstance(tree, tuple):
            return [fn(params, t) for t in tree]
        return params["E"][tree]

    params, instances = programs.tree_params(0), programs.trees(5, 11)
    got = jedbatch.batch(fn, out_axes=None)(params, instances)
    assert isinstance(got, list)
    for mine, instance in zip(got, instances, strict=True):
        assert_close(mine, fn(params, instance), 1e-6)


def test_in_axes():
    """Shared and mapped arguments in any order; arrays as sequences of instances."""
    fn = lambda x, params, n: x * params + n  # noqa: E731
    x, params, n = np.ones((4, 3), np.float32), jnp.arange(3.0), [1, 2, 3, 4]
    expected = jnp.stack([fn(a, params, b) for a, b in zip(x, n, strict=True)])
    assert_close(jedbatch.batch(fn, in_axes=(0, None, 0))(x, params, n), expected, 1e-6)
    only = jedbatch.batch(lambda n: jnp.sin(n * 1.0), in_axes=0)
    assert_close(only(n), jnp.sin(jnp.arange(1.0, 5.0)), 1e-6)


def test_gradient_of_instances():
    """With respect to array leaves of instances, called and by `plan.inputs`."""
    fn, params, instances = programs.values_and_options(6, seed=12)
    batched = jedbatch.batch(fn)
    expected = jax.grad(lambda xs: number(loop(fn, params, xs)))(instances)
    assert_close(jax.grad(lambda xs: number(batched(params, xs)))(instances), expected, 1e-5)

    plan = batched.plan(params, instances)

    def by_inputs(inputs):
        return number(batched.apply(params, plan, inputs=inputs))

    got = jax.grad(by_inputs, allow_int=True)(plan.inputs)[f"float32[{programs.H}]"]
    rows = np.stack([example.x for example in expected])
    found = [(np.abs(np.asarray(got) - r).max(axis=1) < 1e-4).any() for r in rows]
    assert all(found)


def random_programs(seed, count):
    """A function that runs one of `count` random recursive programs, and random instances.

    A program folds a tree bottom-up. At every node, a random rule (which depends on the height of
    the node and the labels below it) picks operations among random cells, jit-ted functions and
    single operations, reads values again that were made earlier, and keeps several results.
    """
    rng = np.random.default_rng(seed)
    params = programs.weights(seed, E=(programs.WORDS, 3), A=(3, 3), B=(3, 3), c=(3,))
    unary = [jnp.sin, jnp.tanh, jnp.square, lambda x: x / (2 + jnp.abs(x)), jax.nn.silu]
    binary = [jnp.add, jnp.multiply, jnp.maximum, lambda x, y: x @ y * 0.1 + x, jnp.subtract]

    def body():
        f, g = unary[rng.integers(5)], binary[rng.integers(5)]
        weight = "AB"[rng.integers(2)]
        style = rng.integers(3)

        def one(params, x, y):
            if style == 0:
                return g(f(x @ params[weight] + params["c"]), y)
            if style == 1:
                return f(g(x, y) @ params[weight])
            return f(params[weight] @ g(y, x)) * params["c"]

        return one

    bodies = [body() for _ in range(3)]
    step = [jedbatch.cell(bodies[0]), jax.jit(bodies[1]), bodies[2]]
    pair = jedbatch.cell(lambda params, x, y: (jnp.sin(x) + y, (x * y).sum()))
    rules = rng.integers(0, 6, (count, 7, 3))

    def fn(params, instance):
        which, tree = instance
        rule = rules[which]
        kept = [params["c"]]

        def visit(t):
            if not isinstance(t, tuple):
                return params["E"][t], 0, t
            (x, p, a), (y, q, b) = visit(t[0]), visit(t[1])
            depth = 1 + max(p, q)
            action, other, keep = rule[(depth + a + 2 * b) % 7].tolist()
            if action < 3:
                h = step[action](params, x, y if other % 2 else kept[-1])
            elif action == 3:
                h, total = pair(params, x, y)
                h = h * total
            elif action == 4:
                h = x if other < 3 else unary[other % 5](y) + 0.25 * other
            else:
                h = step[0](params, x, x) - y
            if keep < 3:
                kept.append(h)
            return h, depth, (a + b) % programs.WORDS

        return visit(tree)[0] + sum(kept[1:], start=kept[0])

    word = lambda: int(rng.integers(programs.WORDS))  # noqa: E731
    instances = [(which, random_tree(rng, int(rng.integers(1, 7)), word)) for which in range(count)]
    return fn, params, instances


@pytest.mark.parametrize("seed", mostly_slow(range(4)))
def test_random_programs(seed):
    """4 times 20 programs."""
    check(*random_programs(seed, 20), rtol=3e-5)
