"""Bad input: what came, what was expected, what to write instead."""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check

import jedbatch
from jedbatch import Graph
from jedbatch.errors import EscapedValueError, NothingReadyError, SymbolicValueError

P = jnp.ones(3)
X = np.ones(3, np.float32)
double = jedbatch.cell(lambda p, x: p * x)


# --- arguments ---


@pytest.mark.parametrize("leaf", [object(), np.array([None])])
def test_params_with_a_leaf_that_is_not_an_array(leaf):
    batched = jedbatch.batch(lambda p, x: p["w"] * x)
    with pytest.raises(TypeError, match=r"\['config'\].*expected arrays, functions and"):
        batched({"w": P, "config": leaf}, [X])


@pytest.mark.parametrize("in_axes", [(), 1, (None, 1), (None,), None, (None, None), (True, 0)])
def test_in_axes_that_make_no_sense(in_axes):
    with pytest.raises(ValueError, match="`batch` got in_axes="):
        jedbatch.batch(lambda p, x: x, in_axes=in_axes)


@pytest.mark.parametrize("axis", [-1, {"x": 0, "shared": None}])
def test_in_axes_of_vmap_that_have_another_form_here(axis):
    with pytest.raises(ValueError, match=r"give `jnp.moveaxis.* is an argument of its own"):
        jedbatch.batch(lambda p, x: x, in_axes=(None, axis))


def test_plans_of_other_functions_and_for_other_arguments():
    tripled, halved = (jedbatch.batch(lambda p, x, k=k: p * x * k) for k in (3.0, 0.5))
    plan = tripled.plan(P, [X])
    with pytest.raises(ValueError, match="a plan that another batched function made"):
        halved.apply(P, plan)
    with pytest.raises(
        ValueError, match=r"the plan was made for: p: f32\[1,.*, the plan has f32\["
    ):
        tripled.apply(P[None], plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"emb": jnp.ones((5, 2))},
            r"made for: params\['emb'\]: f32\[5,2\], the plan has f32\[9,2\]; make",
        ),
        ({"emb": None}, r"made for: params\['emb'\] is missing, the plan has f32\[9,2\]; make"),
        ({"b": 1.0}, r"made for: params\['b'\]: f32\[\]~, the plan has none; make"),
        ({"w": [jnp.ones(2)]}, "made for: containers or functions in them are others"),
    ],
)
def test_plans_for_other_parameters_name_the_leaf(changes, message):
    def row(i, params):
        return params["emb"][i] + params["w"][0]

    batched = jedbatch.batch(row, in_axes=(0, None))
    params = {"emb": jnp.ones((9, 2)), "w": (jnp.ones(2),)}
    plan = batched.plan([1, 2], params)
    with pytest.raises(ValueError, match=message):
        batched.apply({**params, **changes}, plan)


def test_in_axes_of_another_length():
    with pytest.raises(ValueError, match=r"got 3 arguments and `in_axes` has 2 entries"):
        jedbatch.batch(lambda p, x, y: x)(P, [X], [X])


@pytest.mark.parametrize("instances", [3.0, {}, "text", None, jnp.float32(1), (x for x in [X])])
def test_instances_that_are_no_sequence(instances):
    with pytest.raises(TypeError, match="expected a sequence of instances"):
        jedbatch.batch(double)(P, instances)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"x": x}])
def test_vmap_of_a_batched_function(wrap):
    batched = jax.vmap(jedbatch.batch(double), in_axes=(None, 0))
    with pytest.raises(TypeError, match="the function is batched already"):
        batched(P, wrap(jnp.arange(3.0)))


def test_iterators_of_instances():
    with pytest.raises(TypeError, match=r"of type map, .* write `list\(\.\.\.\)`"):
        jedbatch.batch(double)(P, map(jnp.float32, range(3)))


def test_arguments_by_name():
    batched = jedbatch.batch(lambda p, x, scale=1.0: p * x * scale)
    with pytest.raises(TypeError, match=r"got scale=.*functools.partial\(fn, scale=\.\.\.\)"):
        batched(P, [X], scale=2.0)


class Pair(NamedTuple):
    x: object
    y: object


@pytest.mark.parametrize(
    ("stacked", "error", "match"),
    [
        (
            {"x": X, "y": {"z": X[:2]}},
            ValueError,
            r"3 at \['x'\], 2 at \['y'\]\['z'\]; expected one",
        ),
        (
            Pair(X, [X, 2.0]),
            TypeError,
            r"a Pair with 2.0 of type float at \.y\[1\]; expected arrays",
        ),
        ({"x": X, "name": "y"}, TypeError, r"'y' of type str at \['name'\].*Write a list"),
        ({"x": X, "y": jnp.float32(1)}, TypeError, r"at \['y'\].*whose rows belong"),
        ({"x": X[:0]}, ValueError, "empty list of instances"),
    ],
)
def test_pytrees_whose_rows_are_no_instances(stacked, error, match):
    with pytest.raises(error, match=match):
        jedbatch.batch(double)(P, stacked)


def test_no_instances():
    with pytest.raises(ValueError, match="empty list of instances"):
        jedbatch.batch(double)(P, [])


def test_mapped_arguments_of_different_lengths():
    with pytest.raises(ValueError, match=r"\[1, 2\] instances"):
        jedbatch.batch(lambda p, x, y: x, in_axes=(None, 0, 0))(P, [X], [X, X])


@pytest.mark.parametrize("out_axes", [1, -1, "list"])
def test_out_axes(out_axes):
    with pytest.raises(ValueError, match="None for a list"):
        jedbatch.batch(double, out_axes=out_axes)


@pytest.mark.parametrize("executor", ["dispatch", "fused", "tiered", None])
def test_there_is_one_executor(executor):
    for make in (lambda **options: jedbatch.batch(double, **options), jedbatch.Lazy):
        with pytest.raises(TypeError, match=r"leave it out.*disable_jit.*jax_debug_nans.*warm"):
            make(executor=executor)


@pytest.mark.parametrize("make", [jedbatch.batch, jedbatch.cell])
def test_what_is_no_function(make):
    with pytest.raises(TypeError, match="3"):
        make(3)


def test_float64_without_x64():
    with pytest.raises(TypeError, match="jax_enable_x64") as caught:
        jedbatch.batch(double)(P, [X, np.ones(3)])
    assert "instance 1" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="astype"):
        jedbatch.batch(double)(np.ones(3), [X])


def test_integers_that_do_not_fit():
    with pytest.raises(OverflowError, match="instance 1"):
        jedbatch.batch(lambda x: x + 1, in_axes=0)([np.array([1]), np.array([2**40])])


# --- results ---


def test_results_that_do_not_stack():
    fn = lambda p, n: jnp.ones(n) * p[0]  # noqa: E731
    with pytest.raises(ValueError, match=r"instances 0 and 1.*out_axes=None") as caught:
        jedbatch.batch(fn)(P, [2, 3])
    assert "float32[2]" in str(caught.value)
    assert "float32[3]" in str(caught.value)


def test_results_of_different_structure():
    fn = lambda p, n: [p] * n  # noqa: E731
    with pytest.raises(ValueError, match="out_axes=None"):
        jedbatch.batch(fn)(P, [2, 3])


def test_a_function_that_returns_something_else():
    with pytest.raises(TypeError, match="'ok'") as caught:
        jedbatch.batch(lambda p, x: (x, "ok"))(P, [X])
    assert "instance 0" in caught.value.__notes__[0]


# --- cells ---


def test_a_cell_that_returns_something_else():
    bad = jedbatch.cell(lambda x: (x, "ok"), name="bad")
    with pytest.raises(TypeError, match="cell `bad` returned 'ok'"):
        jedbatch.batch(lambda p, x: bad(x))(P, [X])


def test_a_cell_that_prints():
    @jedbatch.cell
    def bad(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(TypeError, match="cell `bad` has the side effect"):
        jedbatch.batch(lambda p, x: bad(x))(P, [X])


def test_a_cell_that_is_a_method_of_no_pytree():
    class Model:
        @jedbatch.cell
        def step(self, x):
            return 2 * x

    model = Model()
    with pytest.raises(TypeError, match="`self` of a method, make its class a pytree"):
        jedbatch.batch(lambda p, x: model.step(x))(P, [X])


def test_a_print_outside_of_cells():
    def bad(p, x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(TypeError, match="has the side effect"):
        jedbatch.batch(bad)(P, [X])


def test_functions_that_ask_for_arrays_of_numpy():
    def total(p, tree):
        if isinstance(tree, np.ndarray):
            return p * tree.sum()
        left, right = tree
        return total(p, left) + total(p, right)

    for tree, is_told in (((X, (X, X)), True), ((jnp.asarray(X), 1), False)):
        with pytest.raises((ValueError, TypeError)) as caught:
            jedbatch.batch(total)(P, [tree])
        told = ["(np.ndarray, jax.Array)" in note for note in caught.value.__notes__]
        assert any(told) == is_told


def test_a_cell_that_keeps_a_value():
    kept = []

    @jedbatch.cell
    def bad(x):
        kept.append(x * 2)
        return x

    @jedbatch.cell
    def worse(x):
        return x + kept[0]

    with pytest.raises((TypeError, EscapedValueError), match="pure function"):
        jedbatch.batch(lambda p, x: worse(bad(x)))(P, [X])


def test_a_cell_that_decides_on_a_value():
    bad = jedbatch.cell(lambda x, n: x if n > 1 else -x)
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        jedbatch.batch(lambda p, x: bad(x, 2))(P, [X])
    assert "keyword" in "".join(caught.value.__notes__)


LAYER = {"w": jnp.ones((3, 4)), "b": jnp.ones(5)}


@jedbatch.cell
def layer(p, x, *others, power=1):
    y = p["w"] @ x + sum(others)
    return y**power


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("call", "error", "in_cell", "types"),
    [
        (lambda p, x: layer(p, x), TypeError, 2, "['w']: f32[3,4]; x: f32[3]."),
        (lambda p, x: layer(p, p["w"][0], x[:2], 1.5), TypeError, 2, "others[0]: f32[2]; others[1"),
        (lambda p, x: layer(p, [x], power=2), TypeError, 2, "x[0]: f32[3]."),
        (lambda p, x: layer(p), TypeError, None, "with p['b']: f32[5], p['w']: f32[3,4]."),
        (lambda p, x: layer(ONE, x), Exception, 2, "with p: f32[1]; x: f32[3]."),
        (lambda p, x: layer([ONE] * 10, x), TypeError, 2, "and 2 more of p; x"),
    ],
)
def test_an_error_in_a_cell_names_the_cell_its_types_and_lines(call, error, in_cell, types):
    line = call.__code__.co_firstlineno
    first = layer.__wrapped__.__code__.co_firstlineno  # of the decorator
    for options in ({}, {"granularity": "auto"}):
        with pytest.raises(error) as caught:
            jedbatch.batch(call, **options)(LAYER, [X])
        (note,) = [x for x in caught.value.__notes__ if "cell `layer" in x]
        assert f"called at {__file__}:{line} with" in note
        assert types in note
        assert (
            (f"at {__file__}:{first + in_cell} in cell" in note) if in_cell else "in cell" in note
        )
        assert any("while instance 0 was recorded" in x for x in caught.value.__notes__)


def test_an_error_in_a_cell_of_a_lazy_scope_or_where_python_decides():
    def decide(p, x):
        return layer(p, x) if x.sum() > 0 else x

    def scope():
        with jedbatch.lazy():
            return layer(LAYER, X)

    for run in (scope, lambda: jedbatch.batch(decide)(LAYER, [X])):
        with pytest.raises(TypeError) as caught:
            run()
        assert any("in cell `layer`" in note and "x: f32[3]" in note for note in notes_of(caught))


def notes_of(caught):
    return caught.value.__notes__


@pytest.mark.parametrize(
    ("fn", "note"),
    [
        (lambda p, x: p["w"] @ x, "in the operation `__matmul__` of f32[3,4], f32[3]."),
        (lambda p, x: jax.lax.add(2 * x, x[:2]), "in the operation `add` of f32[3], f32[2]."),
        (lambda p, x: jnp.stack([x, x[:2]]), "while instance 1 was recorded."),
        (lambda p, x: p["w"] + x, "in the operation `__add__` of f32[3,4], f32[3]."),
        (lambda p, x: p["w"] @ p["b"] + x, "in the operation `__matmul__` of f32[3,4], f32[5]."),
    ],
)
def test_an_error_of_an_operation_names_its_types_and_line(fn, note):
    def broken(p, x):
        return x if float(len(x)) != 3 else fn(p, x)

    with pytest.raises((TypeError, ValueError)) as caught:
        jedbatch.batch(broken, out_axes=None)(LAYER, [X[:1], X])
    assert len([x for x in notes_of(caught) if note in x]) == 1
    said = [x for x in notes_of(caught) if f"at {__file__}:{fn.__code__.co_firstlineno} " in x]
    assert len(said) == 1


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**70, np.int64(2**40)])
def test_numbers_that_do_not_fit(number, monkeypatch):
    scale = jedbatch.cell(lambda p, n: p["b"].sum() * n)
    batched = jedbatch.batch(lambda p, n: scale(p, n))
    for native in ("0", "1"):
        monkeypatch.setenv("JEDBATCH_NATIVE", native)
        batched.plan(LAYER, [1, 2])
        with pytest.raises(OverflowError, match=rf"instance 2 has the number {number}, .* int32"):
            batched.plan(LAYER, [1, 2, number])


def test_an_error_names_the_instance_by_its_number_among_all():
    """Those that were met before, and are not recorded again, count."""

    def broken(p, n):
        return p["b"].sum() / n if n != 3 else len(n)

    batched = jedbatch.batch(broken)
    batched.plan(LAYER, [1, 2])
    ragged = jedbatch.batch(lambda p, x: broken(p, 3) if x.ndim > 1 else x.sum())
    ragged.plan(LAYER, [X, X[:2]])
    for function, instances in ((batched, [1, 2, 1, 3]), (ragged, [X, X[:2], X[:1], X[None]])):
        with pytest.raises(TypeError) as caught:
            function.plan(LAYER, instances)
        assert any("while instance 3 was recorded." in note for note in notes_of(caught))


@pytest.mark.parametrize("rows", [2, 3])
def test_an_error_names_the_instance_and_its_arrays(rows):
    """Whichever instances are known, and not recorded with it."""

    def instance(rows, dtype=jnp.int32):
        return {"x": jnp.ones((rows, 3)), "at": jnp.zeros(2, dtype)}

    batched = jedbatch.batch(lambda p, x: x["x"][x["at"]] @ p["w"], out_axes=None)
    batched(LAYER, good := [instance(2), instance(rows)])
    bad = instance(rows, float)
    for number, instances in ((2, [*good, bad]), (0, [bad, *good])):
        with pytest.raises(TypeError) as caught:
            batched(LAYER, instances)
        assert any(f"while instance {number} was recorded." in x for x in notes_of(caught))
        assert f"Its arrays are ['at']: f32[2], ['x']: f32[{rows},3]." in notes_of(caught)


@pytest.mark.parametrize(
    ("instance", "end"),
    [({1: X, "1": X}, "are f32[3], f32[3]."), ([X] * 10, "[7]: f32[3], and 2 more.")],
)
def test_an_error_with_arrays_without_order_or_with_many(instance, end):
    with pytest.raises(TypeError) as caught:
        jedbatch.batch(lambda p, x: p["w"] @ x[1])(LAYER, [instance])
    assert any(x.endswith(end) for x in notes_of(caught))


def test_arguments_of_a_cell():
    with pytest.raises(TypeError, match="Pass a tuple instead of a list"):
        jedbatch.batch(lambda p, x: jedbatch.cell(lambda x, *, axes: x)(x, axes=[1]))(P, [X])
    with pytest.raises(TypeError, match="Pass it by keyword"):
        jedbatch.batch(lambda p, x: double(x, {1, 2}))(P, [X])


# --- symbolic values ---


@pytest.mark.parametrize(
    "decide",
    [
        lambda h: 1 if h.sum() > 0 else 2,
        lambda h: int(h[0] * 2),
        lambda h: float(h[0] * 2),
        lambda h: list(range(h.argmax())),
        lambda h: np.asarray(h * 2),
        lambda h: h.sum().item(),
        lambda h: (h * 2).tolist(),
        lambda h: bool(h.any()),
        lambda h: [1, 2, 3][h.argmax()],
    ],
)
def test_deciding_on_a_symbolic_value(decide):
    """There are no values in a plan or under `jax.jit`; in a plain call there are."""
    fn = lambda p, x: x + jnp.sum(jnp.asarray(decide(x)))  # noqa: E731
    batched = jedbatch.batch(fn)
    for run in (batched.plan, jax.jit(lambda p, xs: batched(p, xs)), batched.learn):
        with pytest.raises(SymbolicValueError, match=r"help\(jedbatch.errors.SymbolicValueError\)"):
            run(P, [X])
    assert_close(batched(P, [X]), jnp.stack([fn(P, X)]), 1e-6)
    assert "jnp.where" in SymbolicValueError.__doc__


def test_a_value_that_escapes():
    kept = []

    def fn(p, x):
        kept.append(p * x)
        return x

    jedbatch.batch(fn)(P, [X])
    with pytest.raises(EscapedValueError, match="returned from the function"):
        kept[0] + 1
    with pytest.raises(EscapedValueError):
        jedbatch.batch(lambda p, x: x + kept[0])(P, [X])
    with pytest.raises(EscapedValueError):
        jedbatch.batch(lambda p, x: double(kept[0], x))(P, [X])


def test_after_an_error_the_function_still_works():
    def fn(p, x):
        if x.shape[0] == 2:
            raise KeyError("two")
        return double(p[:1], x)

    batched = jedbatch.batch(fn)
    with pytest.raises(KeyError, match="two") as caught:
        batched(P, [X, X[:2]])
    assert "instance 1" in caught.value.__notes__[0]
    assert batched(P, [X]).tolist() == [[1, 1, 1]]
    assert float(double(jnp.float32(2), 3.0)) == 6


def test_indices_out_of_bounds():
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        jedbatch.batch(lambda p, x: p[3])(P, [X])
    with pytest.raises(IndexError, match="index -4 is out of bounds"):
        jedbatch.batch(lambda p, x: x[-4])(P, [X])


TABLE = jnp.arange(15.0).reshape(5, 3)
row = jedbatch.cell(lambda p, w: p[w], name="row")
LOOK_UPS = {
    "a number": (row, 5, 4),
    "from the end": (row, -6, -5),
    "an array": (row, np.array([0, 5]), np.array([0, -5])),
    "a part of an array": (lambda p, w: row(p, w[1]), np.array([9, 7]), np.array([9, 0])),
    "two axes": (lambda p, w: jedbatch.cell(lambda p, i, k: p[i, k])(p, *w), (1, 3), (1, -3)),
    "a column": (jedbatch.cell(lambda p, w: p[:, w]), 3, -3),
    "a graph": (
        lambda p, w: jedbatch.evaluate(
            Graph.from_dag([0], [[-1]], names=["row"], inputs=[np.array([w], np.int32)]),
            {"row": functools.partial(lambda p, w: p[w])},
            p,
        )[0],
        5,
        4,
    ),
}


@pytest.mark.parametrize(("fn", "bad", "good"), LOOK_UPS.values(), ids=list(LOOK_UPS))
def test_rows_of_a_table_that_are_not_there(fn, bad, good):
    batched = jedbatch.batch(fn)
    batched.plan(TABLE, [good, good])
    with pytest.raises(IndexError, match=r"of instance 1 looks up row .* of a table of [35] rows"):
        batched.plan(TABLE, [good, bad])


def test_rows_that_are_not_there_where_python_decides():
    def fn(p, words):
        h = row(p, words[0])
        for word in words[1:]:
            h = h + row(p, word) if h[0] > 0 else h - row(p, word)
        return h

    batched = jedbatch.batch(fn)
    words = [(4, 3, -5), (1, -2), (3,)]
    assert_close(batched(TABLE, words), jnp.stack([fn(TABLE, w) for w in words]), 1e-6)
    for bad, found in ((1, 2, 5), 5), ((-6, 2), -6):
        with pytest.raises(IndexError, match=f"`row` of instance 1 looks up row {found} of a"):
            batched(TABLE, [(0, 4), bad])


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, w: jnp.where(w < 5, p[w], -1.0),
        lambda p, w: jnp.take(p, w, axis=0, mode="clip"),
        lambda p, w: p[jnp.clip(w, 0, 4)],
        lambda p, w: (2 * p)[w],
        lambda p, w: p[w] * w,
    ],
)
def test_rows_that_are_masked_or_clipped_are_left_alone(fn):
    check(jedbatch.cell(fn), TABLE, [7, 2], gradients=False)


# --- policies, plans, transformations ---


def test_a_policy_that_computes_nan():
    policy = lambda frontier: float("nan")  # noqa: E731
    with pytest.raises(NothingReadyError, match="nan"):
        jedbatch.batch(double, policy=policy)(P, [X])


def test_what_is_no_plan():
    batched = jedbatch.batch(double)
    with pytest.raises(TypeError, match=r"batched\.plan\(params, instances\)"):
        batched.apply(P, [X])


def test_a_plan_for_other_params():
    batched = jedbatch.batch(double)
    plan = batched.plan(P, [X])
    with pytest.raises(ValueError, match="make a new one"):
        batched.apply({"w": P}, plan)


def test_a_plan_for_inference_is_not_differentiated_under_jit():
    batched = jedbatch.batch(double)
    plan = batched.plan(P, [X], gradient=False)
    with pytest.raises(ValueError, match="gradient=True"):
        jax.jit(jax.grad(lambda p, plan: batched.apply(p, plan).sum()))(P, plan)


def test_rules_for_reverse_mode_only():
    """A rule of the user's has no forward mode, and its transpose is not known."""

    @jax.custom_vjp
    def ruled(x):
        return x * 2

    ruled.defvjp(lambda x: (x * 2, None), lambda _, g: (jnp.clip(g, -1, 1),))
    batched = jedbatch.batch(lambda p, x: ruled(p * x) ** 2)
    total = lambda p: batched(p, [X]).sum()  # noqa: E731
    for run in (
        lambda: jax.jvp(total, (P,), (P,)),
        lambda: jax.linearize(total, P)[1](P),
        lambda: jax.grad(lambda p: jax.grad(total)(p).sum())(P),
    ):
        with pytest.raises(TypeError, match=r"(?s)rule.*jax\.custom_vjp.*forward over reverse"):
            run()


def test_loops_without_a_reverse_name_their_cell():
    @jedbatch.cell
    def settle(p, x):
        return jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h + p, x)

    batched = jedbatch.batch(settle)
    plan = batched.plan(P, [X])
    for total in (
        lambda p: batched(p, [X]).sum(),
        lambda p: jax.jit(batched.apply)(p, plan).sum(),
        lambda p: batched(P, [p]).sum(),
    ):
        with pytest.raises(ValueError, match="Reverse-mode") as caught:
            jax.grad(total)(P)
        assert any(
            "`settle(f32[3]) -> f32[3]`" in note and "jax.lax.stop_gradient" in note
            for note in notes_of(caught)
        )
    assert_close(jax.jvp(lambda p: batched(p, [X]), (P,), (P,))[1], jnp.full((1, 3), 2.0), 1e-6)


@pytest.mark.slow
def test_second_derivatives_where_python_decides():
    def decide(p, x):
        h = double(p, double(p, x))
        return double(p, h) if h.sum() > 4 else 3 * h

    xs = [X, 2 * X]
    batched = jedbatch.batch(decide)

    def loop(p):
        return jnp.stack([decide(p, x) for x in xs]).sum()

    def in_a_scope(p):
        with jedbatch.lazy():
            return loop(p)

    def twice(total):
        return jax.grad(lambda p: jax.grad(total)(p).sum())(P)

    with pytest.raises(SymbolicValueError, match=r"second derivative.*`jedbatch.lazy` has values"):
        twice(lambda p: batched(p, xs).sum())
    assert_close(twice(in_a_scope), twice(loop), 1e-6)


def test_a_plan_cannot_keep_a_tracer():
    def outer(w):
        batched = jedbatch.batch(lambda p, x: p * x * w)
        return batched.apply(P, batched.plan(P, [X])).sum()

    with pytest.raises(ValueError, match="shared argument"):
        jax.grad(outer)(2.0)


def test_every_error_has_a_page_of_help():
    for name in jedbatch.errors.__all__:
        page = getattr(jedbatch.errors, name).__doc__
        assert all(word in page for word in ("**Symptom.**", "**Reason.**", "**Cure.**"))


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", ">u2", ">c8"])
def test_arrays_whose_bytes_are_in_another_order(dtype):
    """JAX takes none; the message says what to write, wherever they are."""
    x = np.ones(4).astype(dtype)
    fn = lambda p, x: jnp.tanh(x) * p  # noqa: E731
    batched, named = jedbatch.batch(fn), jedbatch.cell(lambda p, x: x * p)
    calls = [
        lambda: batched(1.0, [x]),
        lambda: batched(1.0, np.ones((9, 4)).astype(dtype)),
        lambda: batched(1.0, [x[:n] for n in (2, 3)]),
        lambda: batched(x, [np.float32(1)]),
        lambda: jedbatch.batch(lambda p, y: named(y, x))(1.0, [np.ones(4, np.float32)]),
        lambda: jedbatch.batch(lambda p, y: (y, x))(1.0, [np.float32(1)]),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"got >.. values .* Write `x.astype\(x.dtype.newbyte"):
            call()
    cured = x.astype(x.dtype.newbyteorder("="))
    with jax.enable_x64(True):
        assert_close(batched(1.0, [cured]), jnp.stack([fn(1.0, cured)]), 1e-6)


@pytest.mark.parametrize("function", [lambda p, x: x * p, jedbatch.cell(lambda p, x: x * p)])
def test_threads_that_compute_with_symbolic_values(function):
    def fn(p, x):
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(function, p, x).result()

    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        jedbatch.batch(fn)(2.0, [np.ones(3, np.float32)])
    assert any("give them no symbolic values" in note for note in caught.value.__notes__)

    def prepared(p, x):  # what threads may do
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(lambda: np.arange(3.0, dtype=np.float32)).result() * x * p

    given = [np.ones(3, np.float32)] * 2
    expected = jnp.stack([prepared(2.0, x) for x in given])
    assert_close(jedbatch.batch(prepared)(2.0, given), expected, 1e-6)


def test_modules_of_nnx_that_change():
    """Dropout and batch normalization: an error says what to write, and that works."""
    nnx = pytest.importorskip("flax.nnx")
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    xs = [np.full(4, i + 1, np.float32) for i in range(3)]
    for module in (drop, norm):
        with pytest.raises(Exception, match="different trace level") as caught:
            jedbatch.batch(lambda p, x, module=module: module(x[None]) * p)(1.0, xs)
        assert any("rngs=nnx.Rngs(key)" in note for note in caught.value.__notes__)

    def dropped(p, instance):
        key, x = instance
        return drop(x, rngs=nnx.Rngs(key)) * p

    def normalized(p, x):
        return norm(x[None], use_running_average=True)[0] * p

    keyed = list(zip(jax.random.split(jax.random.key(1), 3), xs, strict=True))
    for fn, given in ((dropped, keyed), (normalized, xs)):
        expected = jnp.stack([fn(2.0, x) for x in given])
        assert_close(jedbatch.batch(fn)(2.0, given), expected, 1e-5)
