"""Cells with their products put together compute what they computed, in fewer products."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.gates import (
    CELLS,
    GATES,
    H,
    array,
    lstm,
    own_forget_gates,
    params,
    sigmoid,
    tree_lstm_leaf,
)
from cases.helpers import assert_close, loop, mostly_slow, number

import jedbatch
from jedbatch._graph.types import NodeType, ValueType
from jedbatch._jaxpr.interpret import inlined
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.pack import fused
from jedbatch._kernel.products import CellProgram
from jedbatch._kernel.target import CPU

# --- looking at programs ---


def program(fn, p, *args):
    """(inlined program, number of shared arguments, arguments)."""
    leaves, tree = jax.tree.flatten(p)
    closed = jax.make_jaxpr(lambda xs, *rest: fn(jax.tree.unflatten(tree, xs), *rest))
    return inlined(closed(leaves, *args)), len(leaves), [*leaves, *jax.tree.leaves(args)]


def evaluate(closed, args):
    return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def compare(fn, p, *args, rtol=1e-12):
    """Values, types and gradients of a cell are what they were; returns (before, after)."""
    closed, num_shared, flat = program(fn, p, *args)
    new = fused(closed, num_shared)
    assert new.in_avals == closed.in_avals
    assert new.out_avals == closed.out_avals
    assert_close(evaluate(new, flat), evaluate(closed, flat), rtol)

    def slope(which):
        return jax.grad(lambda xs: number(evaluate(which, xs)), allow_int=True)(flat)

    assert_close(slope(new), slope(closed), rtol)
    return closed, new


def count_products(closed, num_shared):
    """Number of products of a row value and a weight, outside of loops."""
    return len(CellProgram(closed, num_shared).products)


def products(fn, p, *args, **options):
    """Number of products before and after."""
    num_shared = len(jax.tree.leaves(p))
    return tuple(count_products(x, num_shared) for x in compare(fn, p, *args, **options))


def unchanged(fn, p, *args):
    closed, num_shared, _ = program(fn, p, *args)
    return fused(closed, num_shared) is closed


def kernel_of(closed, num_shared, **options):
    """The kernel of a node type with this program, for CPUs with some options."""
    kinds = [ValueType(a.shape, a.dtype) for a in closed.in_avals[num_shared:]]
    results = [ValueType(a.shape, a.dtype) for a in closed.out_avals]
    operation = types.SimpleNamespace(jaxpr=closed, lists=None)
    return Kernel(
        NodeType("cell", operation, tuple(kinds), tuple(range(num_shared)), tuple(results)),
        dataclasses.replace(CPU, **options),
    )


def compiled_products(run, *args):
    """Matrix products in what XLA makes of a function."""
    text = jax.jit(run).lower(*args).compile().as_text()
    calls = re.findall(r'custom_call_target="([^"]*)"', text)
    names = "matmul", "gemm", "times_matrix"
    return len(re.findall(r"= \S+ dot\(", text)) + sum(any(n in x for n in names) for x in calls)


def agrees(fn, p, instances):
    """Results and gradients of the batched function are those of the loop."""
    batched = jedbatch.batch(fn)

    def both(run):
        def value(p):
            result = run(p)
            return number(result), result

        return jax.value_and_grad(value, has_aux=True)

    got = both(lambda p: batched(p, instances))(p)
    assert_close(got, jax.jit(both(lambda p: loop(fn, p, instances)))(p), 1e-9)


# --- cells ---


@pytest.mark.parametrize("name", mostly_slow(CELLS, "lstm", "gru", "mv_rnn", "nnx GRUCell"))
def test_values_and_gradients(name, x64):
    cell, p, args, _ = CELLS[name]()
    compare(cell, p, *args)


@pytest.mark.parametrize("name", CELLS)
def test_number_of_products(name):
    cell, p, args, dots = CELLS[name]()
    closed, num_shared, flat = program(cell, p, *args)
    kernel = kernel_of(closed, num_shared)
    batch = [jnp.stack([x] * 5) for x in flat[num_shared:]]
    run = jax.vmap(kernel.forward, in_axes=(None, 0))
    assert compiled_products(run, kernel.prologue(flat[:num_shared]), batch) == dots


NEXT = {  # from results and operands to the operands of the next call
    "lstm": lambda out, args: (*out, args[2]),
    "gru": lambda out, args: (out, args[1]),
    "child_sum": lambda out, args: (out, args[1]),
    "mv_rnn": lambda out, args: (out, args[1]),
    "linen LSTMCell": lambda out, args: (out[0], args[1]),
    "nnx GRUCell": lambda out, args: (out[0], args[1]),
}


@pytest.mark.parametrize("name", mostly_slow(NEXT, "child_sum"))
def test_batched(name, x64):
    """Chains of cells, each instance of its own length."""
    cell, p, args, _ = CELLS[name]()
    cell = jedbatch.cell(cell)

    def fn(p, length):
        operands = args
        for _ in range(length):
            out = cell(p, *operands)
            operands = NEXT[name](out, operands)
        return out

    agrees(fn, p, [1, 2, 1])


@pytest.mark.slow
def test_inside_of_a_model(x64):
    """Trees of `own_forget_gates`, with gradients of the embedding."""
    leaf, node = jedbatch.cell(tree_lstm_leaf), jedbatch.cell(own_forget_gates)

    def fn(p, tree):
        if isinstance(tree, int):
            return leaf(p, p["Wz"][tree])
        return node(p, fn(p, tree[0]), fn(p, tree[1]))

    agrees(fn, params(GATES), [((0, 1), 2), 3])


# --- what is put together, and what is not ---


def test_a_weight_read_by_several_products_and_as_it_is(x64):
    p = params("W U b")
    run = lambda p, x, y: (jnp.tanh(x @ p["W"] + y @ p["U"]), x @ p["U"] + p["b"], p["U"].T)  # noqa: E731
    assert products(run, p, array(1), array(2)) == (3, 2)


def test_columns_keep_their_value_for_other_readers(x64):
    def run(p, x, y):
        product = x @ p["W"]
        total = product + y @ p["U"]
        return product, jnp.sin(total), total + p["b"], total + x @ p["V"]

    assert products(run, params("W U V b"), array(1), array(2)) == (3, 2)
    both = lambda p, x: (x @ p["W"] + p["b"], (x @ p["W"] + p["b"]) ** 2, x @ p["U"])  # noqa: E731
    assert products(both, params("W U b"), array(1)) == (3, 1)


def test_a_product_added_to_itself(x64):
    assert products(lambda p, x: (x @ p["W"]) + (x @ p["U"]), params("W U"), array(1)) == (2, 1)

    def twice(p, x):
        y = x @ p["W"]
        return y + y + x @ p["U"]

    assert products(twice, params("W U"), array(1)) == (2, 1)


def test_what_is_written_twice_is_computed_once(x64):
    run = lambda p, x: (jnp.tanh(x @ p["W"]), jnp.sin(x @ p["W"]), x @ p["U"])  # noqa: E731
    _, new = compare(run, params("W U"), array(1))
    (dot,) = (e for e in new.jaxpr.eqns if e.primitive.name == "dot_general")
    assert dot.outvars[0].aval.shape == (2 * H,)


def test_other_terms_and_constants_of_sums(x64):
    def run(p, x, y):
        shared = jnp.sin(p["b"])
        return (shared + x @ p["W"]) + (y + (p["c"] + (x * y) @ p["U"])) + 1.0, y @ p["V"] + shared

    p = params("W U V b") | {"c": array(9)}
    assert products(run, p, array(1), array(2)) == (3, 2)


def test_biases_of_some_columns_and_none(x64):
    run = lambda p, x: (x @ p["W"], x @ p["U"] + p["b"], x @ p["V"] + p["b"])  # noqa: E731
    _, new = compare(run, params("W U V b"), array(1))
    assert [e.primitive.name for e in new.jaxpr.eqns].count("add") == 1
    without = lambda p, x: (x @ p["W"], x @ p["U"])  # noqa: E731
    _, new = compare(without, params("W U"), array(1))
    assert "add" not in [e.primitive.name for e in new.jaxpr.eqns]


def test_products_that_wait_for_each_other(x64):
    def run(p, x, y):
        first = jnp.tanh(x @ p["W"] + p["b"])
        second = jnp.tanh(first @ p["U"] + x @ p["V"])
        return second @ p["W"] + y @ p["V"], first

    assert products(run, params("W U V b"), array(1), array(2)) == (5, 3)


def test_widths_and_heights_may_differ(x64):
    p = {"W": array(1, 3, 5), "U": array(2, 2, 5), "V": array(3, 3, 1), "F": array(4, 2, 1)}
    run = lambda p, x, y: (x @ p["W"] + y @ p["U"], x @ p["V"] + y @ p["F"])  # noqa: E731
    assert products(run, p, array(5, 3), array(6, 2)) == (4, 1)


def test_slices_of_a_packed_matrix(x64):
    p = {"W": array(1, 2 * H, 3 * H), "b": array(2, 3 * H)}

    def run(p, x, y):
        cut = [slice(k * H, (k + 1) * H) for k in range(3)]
        return [x @ p["W"][:H, s] + y @ p["W"][H:, s] + p["b"][s] for s in cut]

    assert products(run, p, array(3), array(4)) == (6, 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_by_hand(side, x64):
    """A cell that an expert wrote is left as it is."""
    p = {"W": array(1, 2 * H, 4 * H), "b": array(2, 4 * H)}

    def run(p, c, h, x):
        both = jnp.concatenate([x, h])
        z = (both @ p["W"] if side == "left" else p["W"].T @ both) + p["b"]
        i, f, o, u = jnp.split(z, 4)
        c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(u)
        return c, sigmoid(o) * jnp.tanh(c)

    arguments = array(3), array(4), array(5)
    if side == "left":
        assert unchanged(run, p, *arguments)
    else:
        assert products(run, p, *arguments) == (1, 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_weights_are_read_along_rows(side, x64):
    """Transposed once per program if need be, not in the lane."""
    p = {"W": array(1, 3 * H, H) if side == "left" else array(1, H, 3 * H)}

    def run(p, x):
        return jnp.tanh(p["W"] @ x if side == "left" else x @ p["W"])

    compare(run, p, array(2))
    closed, num_shared, _ = program(run, p, array(2))
    kernel = kernel_of(closed, num_shared, called_work=0)
    assert [kind[0] for kind in kernel.const_kinds] == [(H, 3 * H)]
    lane = jax.make_jaxpr(kernel.forward)(kernel.prologue(jax.tree.leaves(p)), [array(2)])
    (product,) = (e for e in lane.eqns if e.primitive.name == "dot_general")
    assert product.params["dimension_numbers"][0] == ((0,), (0,))


def test_cells_without_products():
    assert unchanged(lambda p, x: jnp.tanh(x) * p["b"], params("b"), array(1))
    assert unchanged(lambda p, x: x @ p["W"] + p["b"], params("W b"), array(1))
    assert unchanged(lambda p: p["W"] @ p["b"] + p["U"] @ p["b"], params("W U b"))
    assert unchanged(lambda p, x: x, params("W"), array(1))
    assert unchanged(lambda p, x, y: x @ y + y @ x, params("W"), array(1, H, H), array(2, H, H))


def both(p, x):
    """Two products that could be one."""
    return x @ p["W"], x @ p["U"]


def test_inner_programs_are_left_alone():
    p, x = params("W U b"), array(1)
    scan = lambda p, x: jax.lax.scan(lambda h, _: (sum(both(p, h)), None), x, length=2)[0]  # noqa: E731
    branch = lambda p, x: jax.lax.cond(x[0] > 0, both, lambda p, x: (x, x), p, x)  # noqa: E731
    kept = lambda p, x: jax.checkpoint(both)(p, x)  # noqa: E731

    @jax.custom_vjp
    def own(p, x):
        return both(p, x)

    own.defvjp(lambda p, x: (own(p, x), (p, x)), lambda saved, g: saved)
    for run in (scan, branch, kept, own):
        assert unchanged(run, p, x)
        jax.eval_shape(run, p, x)


def test_jitted_functions_are_not_inner_programs(x64):
    assert products(lambda p, x: jax.jit(both)(p, x), params("W U"), array(1)) == (2, 1)


def test_unusual_products_are_left_alone():
    p = {
        "W": array(1, 2, H, H),
        "w": array(2),
        "I": jnp.ones((H, H), int),
        "J": jnp.eye(H, dtype=int),
    }
    p |= {"k": array(3, 2, 2, 3, 1), "E": jnp.ones((H, 0)), "F": jnp.ones((0, H))}
    assert unchanged(lambda p, x: (x @ p["w"], p["w"] @ x), p, array(4))
    assert unchanged(lambda p, x: [jnp.einsum("kij,j->ki", p["W"], x)] * 2, p, array(4))
    assert unchanged(lambda p, x: (x @ p["I"], x @ p["J"]), p, jnp.arange(H))
    assert unchanged(lambda p, x: (x @ p["E"], x[:0] @ p["F"]), p, array(4))
    conv = functools.partial(jax.lax.conv, window_strides=(1, 1), padding="SAME")
    assert unchanged(lambda p, x: (conv(x, p["k"]), conv(x, p["k"] + 1)), p, array(4, 1, 2, 5, 5))


def test_precision_and_types_are_not_mixed():
    p, x = params("W U V F"), array(1)

    def run(p, x):
        high = functools.partial(jnp.matmul, precision="highest")
        return x @ p["W"], x @ p["U"], high(x, p["V"]), high(x, p["F"])

    assert products(run, p, x, rtol=1e-5) == (4, 2)

    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    wide = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)

    def mixed(p, x):
        low = x.astype(jnp.bfloat16)
        return wide(low, p["W"]) + x @ p["U"].astype(x.dtype), wide(low, p["V"]), low @ p["F"]

    closed, new = compare(mixed, half, x, rtol=2e-2)
    assert (count_products(closed, 4), count_products(new, 4)) == (4, 3)
    wanted = [
        e.params["preferred_element_type"] for e in new.jaxpr.eqns if "dot" in str(e.primitive)
    ]
    assert sorted(map(str, wanted)) == ["bfloat16", "float32", "float32"]


def test_bfloat16():
    p = params(GATES, dtype=jnp.bfloat16)
    state = [array(k, dtype=jnp.bfloat16) for k in range(3)]
    assert products(lstm, p, *state, rtol=3e-2) == (8, 1)


def test_no_zeros_are_multiplied(x64):
    """A missing entry of the table is not filled up: 0·inf would make NaN of other columns."""
    run = lambda p, x, y: (x @ p["W"] + y @ p["U"], x @ p["V"])  # noqa: E731
    closed, num_shared, flat = program(run, params("W U V"), array(1), array(2))
    flat[-1] = jnp.full(H, jnp.inf)
    out = evaluate(fused(closed, num_shared), flat)
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("steep", [True, False])
def test_products_that_different_results_depend_on(steep, x64):
    """Two of one matrix stay two where zeros that come back would meet an infinite derivative."""

    def cell(p, x):
        y = jnp.tanh(x)
        return jnp.tanh(y @ p["W"]), (jnp.sqrt(0 * y) if steep else jnp.sin(y)) @ p["W"]

    p, x = params("W"), array(9)
    closed, num_shared, _ = program(cell, p, x)
    assert count_products(fused(closed, num_shared), num_shared) == (2 if steep else 1)
    batched = jedbatch.batch(jedbatch.cell(cell), out_axes=None)
    plan = batched.plan(p, [x, x])
    gradient = jax.grad(lambda p: number(batched.apply(p, plan)[0][0]))(p)
    assert_close(gradient, jax.grad(lambda p: number(cell(p, x)[0]))(p), 1e-12)


def test_products_with_roots_of_weights(x64):
    """They stay apart from those that other results depend on, not from others."""

    def cell(p, x, y):
        root, sine = jnp.sqrt(0 * p["W"]), jnp.sin(p["U"])
        return x @ jnp.tanh(p["U"]), x @ sine, x @ root, x @ root + y @ sine, y @ root

    p, x, y = params("W U"), array(9), array(10)
    assert products(cell, p, x, y) == (6, 4)
    batched = jedbatch.batch(jedbatch.cell(cell), in_axes=(None, 0, 0), out_axes=None)
    plan = batched.plan(p, [x, x], [y, x])
    for k, reads_roots in enumerate([False, False, True, True, True]):
        gradient = jax.grad(lambda p, k=k: number(batched.apply(p, plan)[0][k]))(p)
        expected = jax.grad(lambda p, k=k: number(cell(p, x, y)[k]))(p)
        assert np.isfinite(expected["W"]).all() != reads_roots
        assert_close(gradient, expected, 1e-12)


def test_a_column_of_products_with_one_weight(x64):
    """Its rows could be stacked; the constant is added once."""
    run = lambda p, x, y: (x @ p["W"] + y @ p["W"] + p["b"], x @ p["U"])  # noqa: E731
    assert products(run, params("W U b"), array(1), array(2)) == (3, 2)


def test_large_cells_are_planned_in_time(x64):
    def run(p, x):
        h = x
        for k in range(1, 30):
            h = jnp.tanh((x * k) @ p["W"] + h @ p["U"] + p["b"])
        return h

    assert products(run, params("W U b"), array(1)) == (58, 29)


# --- random cells ---


def random_cell(rng):
    """A cell of random products, sums, gates and shared transposes."""
    count = int(rng.integers(2, 9))
    plan = [
        (
            [
                (int(rng.integers(99)), int(rng.integers(6)), bool(rng.integers(2)))
                for _ in range(n)
            ],
            rng.integers(3) > 0,
            int(rng.integers(99)),
        )
        for n in rng.integers(1, 4, count)
    ]

    def run(p, *rows):
        rows = list(rows)
        kept = []
        for terms, biased, other in plan:
            total = None
            for row, weight, turned in terms:
                x = rows[row % len(rows)]
                w = p[f"W{weight}"]
                y = w @ x if turned else x @ w
                total = y if total is None else total + y
            if biased:
                total = p["b"] + total
            if other % 3 == 0:
                total = total + rows[other % len(rows)]
            kept.append(total)
            if other % 2:
                rows.append(jnp.tanh(total) * rows[other % len(rows)])
        return kept, rows[-1]

    return run


@pytest.mark.parametrize("seed", mostly_slow(range(8), 0, 1))
def test_random_cells(seed, x64):
    rng = np.random.default_rng(seed)
    run, p = random_cell(rng), params("W0 W1 W2 W3 W4 W5 b")
    rows = [array(seed + k) for k in range(int(rng.integers(1, 4)))]
    before, after = products(run, p, *rows, rtol=1e-10)
    assert after <= before


def test_random_cells_batched(x64):
    run = jedbatch.cell(random_cell(np.random.default_rng(100)))
    instances = [(array(k), array(50 + k)) for k in range(4)]
    agrees(lambda p, rows: run(p, *rows), params("W0 W1 W2 W3 W4 W5 b"), instances)


def test_weights_of_low_precision_are_not_added_up():
    """Their sum might round, or overflow."""
    p = {"a": jnp.full((H, H), 6e4, jnp.float16), "b": jnp.full((H, H), 5e4, jnp.float16)}

    def run(p, x):
        product = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
        return product(x, p["a"]) + product(x, p["b"])

    x = jnp.full(H, 1e-3, jnp.float16)
    closed, num_shared, _ = program(run, p, x)
    found = fused(closed, num_shared)
    (got,) = jax.core.eval_jaxpr(found.jaxpr, found.consts, *jax.tree.leaves(p), x)
    assert_close(got, run(p, x), 1e-6)
