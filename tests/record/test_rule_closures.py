"""Derivative rules that read arrays besides their arguments, against the loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, mostly_slow
from jax import lax

import jedbatch
from jedbatch._record.types.custom_rules import CustomFunctions
from jedbatch.errors import EscapedValueError, RecompilationWarning

WEIGHT = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)
MIXES = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)), jnp.float32)
INSTANCES = [jnp.asarray(np.random.default_rng(k).normal(size=3), jnp.float32) for k in range(3)]
STATE = {"scale": jnp.ones(3)}
PASS_IT = "Pass the value to the function as an argument"


@jax.custom_vjp
def mixed(x):
    """tanh(x G) of an array G that it closes over, with twice the gradient."""
    return jnp.tanh(x @ MIXES)


def mixed_back(kept, slope):
    return (2 * (slope * (1 - kept**2)) @ MIXES.T,)


mixed.defvjp(lambda x: (mixed(x),) * 2, mixed_back)


@jax.custom_vjp
def scaled(x):
    """x, with its gradient multiplied by what is in `STATE` then."""
    return 1.0 * x


scaled.defvjp(lambda x: (scaled(x), None), lambda _, slope: (slope * STATE["scale"],))

CALLS = {
    "plain": lambda w, x: mixed(x @ w),
    "cell": jedbatch.cell(lambda w, x: mixed(x @ w)),
    "jit": lambda w, x: jax.jit(mixed)(x @ w),
    "mapped": lambda w, x: jax.vmap(mixed)(jnp.stack([x, x @ w])),
    "in a loop": lambda w, x: lax.scan(lambda c, i: (mixed(c @ w + i), c), x, jnp.arange(3.0)),
    "in a branch": lambda w, x: lax.cond(x[0] > 0, mixed, jnp.sin, x @ w),
    "array read elsewhere": lambda w, x: mixed(x @ w) + x @ MIXES,
}


def slopes(fn, batched=None):
    """Gradients of the weight and the instances."""

    def loss(weight, instances):
        run = batched or (lambda w, xs: [fn(w, x) for x in xs])
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(run(weight, instances)))

    return jax.grad(loss, argnums=(0, 1))(WEIGHT, INSTANCES)


@pytest.mark.parametrize("name", mostly_slow(CALLS, "plain", "in a loop"))
def test_arrays_that_functions_with_rules_close_over(name):
    fn = CALLS[name]
    batched = jedbatch.batch(fn)
    assert_close(slopes(fn, batched), slopes(fn), 2e-5)


@pytest.mark.parametrize("make", [lambda fn: fn, jedbatch.cell], ids=["plain", "cell"])
def test_rules_read_what_is_there_now(make, monkeypatch):
    inner = make(lambda w, x: scaled(x @ w))
    fn = lambda w, x: inner(w, x)  # noqa: E731
    batched = jedbatch.batch(fn)
    for scale in (2.0, 3.0):
        monkeypatch.setitem(STATE, "scale", jnp.full(3, scale))
        jax.clear_caches()  # JAX keeps rules, too
        assert_close(slopes(fn, batched), slopes(fn), 2e-5)


def test_what_is_differentiated_is_not_taken_for_an_array_without_a_gradient():
    def loss(mixes):
        @jax.custom_vjp
        def inner(x):
            return jnp.tanh(x @ mixes)

        inner.defvjp(lambda x: (inner(x), x), lambda x, slope: (slope @ mixes.T,))
        return jedbatch.batch(inner, in_axes=0)(INSTANCES).sum()

    with pytest.raises(EscapedValueError, match=PASS_IT):
        jax.grad(loss)(MIXES)


# --- functions made in the batched function, over something of the instance ---


def sine_over(t, p):
    f = jax.custom_jvp(lambda y: jnp.sin(y * t))
    f.defjvp(lambda y, slope: (f(*y), 2 * f(y[0]) * t * slope[0] + jax.nn.relu(y[0]) * slope[0]))
    return f(p)


def sine_with_reverse(t, p):
    f = jax.custom_vjp(lambda y, k: {"a": jnp.sin(y * t) + k, "b": y.sum()})
    back = lambda kept, slope: (slope["a"] * kept[1] + slope["b"] * t, None)  # noqa: E731
    f.defvjp(lambda y, k: (f(y, k), (y, t)), back)
    out = f(p, jnp.int32(3))
    return out["a"] * out["b"]


def clipped_back(t, p):
    scale = lambda y: y * t  # noqa: E731
    f = jax.custom_vjp(lambda y: y)
    f.defvjp(lambda y: (y, None), lambda _, slope: (jnp.clip(slope, -scale(0.1), scale(0.1)),))
    return f(p) ** 2


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def clipped_by(t, y):
    return y


clipped_by.defvjp(lambda t, y: (y, None), lambda t, _, slope: (jnp.clip(slope, -t, t),))

MADE = {
    "forward": sine_over,
    "reverse": sine_with_reverse,
    "rule alone": clipped_back,
    "not differentiated": lambda t, p: clipped_by(t, p) ** 2,
}
MADE_IN = {
    "loop": lambda f, y: lax.scan(lambda c, _: (f(c), None), y, None, length=2)[0],
    "branch": lambda f, y: lax.cond(y.sum() > 0, f, jnp.cos, y),
    "call in a loop": lambda f, y: lax.scan(lambda c, _: (jax.jit(f)(c), c), y, None, length=2)[0],
    "checkpoint": lambda f, y: jax.checkpoint(lambda z: 2 * f(z))(y),
}


def assert_like_the_loop(batched, fn, xs):
    loop = lambda w: sum(x.sum() for v in xs for x in jax.tree.leaves(fn(w, v)))  # noqa: E731
    ours = lambda w: sum(x.sum() for x in jax.tree.leaves(batched(w, xs)))  # noqa: E731
    assert_close(jax.value_and_grad(ours)(WEIGHT), jax.value_and_grad(loop)(WEIGHT), 2e-5)


@pytest.mark.parametrize("name", MADE)
def test_numbers_that_rules_close_over_make_types_of_their_own(name):
    fn = lambda w, x: MADE[name](x[1], x[0] @ w)  # noqa: E731
    xs = [(x, 0.1 + k / 20) for k, x in enumerate(INSTANCES)]
    batched = jedbatch.batch(fn)
    assert_like_the_loop(batched, fn, xs)
    assert_like_the_loop(batched, fn, xs[::-1])
    others = [(INSTANCES[0], 0.1 + k / 100) for k in range(33)]
    with pytest.warns(RecompilationWarning, match="has a derivative rule"):
        batched.plan(WEIGHT, others)


@pytest.mark.parametrize("make", [sine_over, sine_with_reverse], ids=["forward", "reverse"])
@pytest.mark.parametrize("name", mostly_slow(MADE_IN, "loop", "branch"))
def test_rules_of_numbers_that_are_made_in_bodies(name, make):
    fn = lambda w, x: MADE_IN[name](lambda y: make(x[1], y), x[0] @ w)  # noqa: E731
    xs = [(x, 0.1 + k / 20) for k, x in enumerate(INSTANCES)]
    assert_like_the_loop(jedbatch.batch(fn), fn, xs)


def in_place(f, y):
    return f(y)


@pytest.mark.parametrize("inside", [in_place, *MADE_IN.values()], ids=["in place", *MADE_IN])
@pytest.mark.parametrize("name", ["forward", "reverse", "rule alone"])
def test_rules_that_hold_arrays_of_instances_say_what_to_write(name, inside):
    fn = lambda w, x: inside(lambda y: MADE[name](x[1], y), x[0] @ w)  # noqa: E731
    xs = list(zip(INSTANCES, INSTANCES[1:] + INSTANCES[:1], strict=True))
    with pytest.raises(EscapedValueError, match=PASS_IT) as caught:
        jedbatch.batch(fn).plan(WEIGHT, xs)
    assert any("test_rule_closures.py" in note for note in caught.value.__notes__)


def test_functions_that_hold_shared_arguments_say_what_to_write():
    batched = jedbatch.batch(lambda w, x: sine_over(w[0], x))
    with pytest.raises(EscapedValueError, match=PASS_IT):
        batched(WEIGHT, INSTANCES)


@jax.custom_vjp
def clipped_to(y, bound):
    return 2 * y


def clipped_to_back(bound, slope):
    return jnp.clip(slope, -bound, bound), None


clipped_to.defvjp(lambda y, bound: (2 * y, bound), clipped_to_back)


@pytest.mark.parametrize("inside", [in_place, *MADE_IN.values()], ids=["in place", *MADE_IN])
def test_what_is_passed_as_an_argument_is_read_by_rules(inside):
    def fn(w, x):
        bound = 0.1 + x[0] ** 2
        return inside(lambda y: clipped_to(y, bound), x @ w) ** 2

    assert_like_the_loop(jedbatch.batch(fn), fn, INSTANCES)
    cell = jedbatch.cell(fn)
    of_cell = lambda w, x: cell(w, x)  # noqa: E731
    assert_like_the_loop(jedbatch.batch(of_cell), of_cell, INSTANCES)


@jedbatch.cell
def clipped_in_a_cell(w, x, bound):
    f = jax.custom_vjp(lambda y: 2 * y)
    f.defvjp(lambda y: (2 * y, None), lambda _, slope: (jnp.clip(slope, -bound, bound),))
    return f(jnp.sin(x @ w))


@jedbatch.cell
def calling_itself_in_a_cell(w, x, bound):
    f = jax.custom_jvp(lambda y: jnp.sin(y) * bound)
    f.defjvp(lambda y, slope: (f(y[0]), 2 * bound * jnp.cos(y[0]) * slope[0]))
    return f(x @ w)


@jedbatch.cell
def in_a_loop_of_a_cell(w, x, bound):
    f = jax.custom_vjp(lambda y: 2 * y)
    f.defvjp(lambda y: (2 * y, None), lambda _, slope: (jnp.clip(slope, -bound, bound),))
    return lax.scan(lambda h, _: (f(jnp.sin(h @ w)), None), x, None, length=2)[0]


@jedbatch.cell
def in_a_branch_of_a_cell(w, x, bound):
    f = jax.custom_vjp(lambda y: bound * y)
    f.defvjp(lambda y: (bound * y, None), lambda _, slope: (jnp.clip(slope, -bound, bound),))
    return lax.cond(x[0] > 0, lambda y: f(y @ w), jnp.sin, x)


IN_CELLS = [
    clipped_in_a_cell,
    calling_itself_in_a_cell,
    in_a_loop_of_a_cell,
    in_a_branch_of_a_cell,
]


@pytest.mark.parametrize("fn", IN_CELLS)
def test_rules_in_cells_that_hold_what_the_cell_gets_say_what_to_write(fn):
    xs = [(x, 0.2 + k) for k, x in enumerate(INSTANCES)]
    with pytest.raises(EscapedValueError, match=PASS_IT):
        jedbatch.batch(lambda w, x: fn(w, *x)).plan(WEIGHT, xs)


# --- cells that are made over a number ---


class Scaled:
    """A function whose gradient is of another scale, as an object."""

    def __init__(self, t):
        self.t = t
        self.f = jax.custom_vjp(self.value)
        self.f.defvjp(lambda y: (self.f(y), None), self.back)

    def value(self, y):
        return y * self.t

    def back(self, _, slope):
        return (slope * self.t**3,)


def made_inside(fn):
    return lambda t: jedbatch.cell(lambda w, x: fn.__wrapped__(w, x, t))


def made_with(t):
    f = jax.custom_vjp(lambda y: jnp.tanh(y * t))
    f.defvjp(lambda y: (f(y), y), lambda y, s: (s * t * y,))
    return jedbatch.cell(lambda w, x: jax.nn.relu(f(x @ w)) + t)


def made_with_two_rules(t):
    inner = jax.custom_vjp(lambda y: y * t)
    inner.defvjp(lambda y: (inner(y), None), lambda _, s: (s * t**2,))
    outer = jax.custom_jvp(lambda y: inner(y) + t)
    outer.defjvp(lambda y, s: (outer(y[0]), inner(y[0]) * s[0]))
    return jedbatch.cell(lambda w, x: outer(x @ w) + inner(x))


def made_with_an_object(t):
    scaled = Scaled(t)
    return jedbatch.cell(lambda w, x: scaled.f(x @ w))


def made_beside_a_number(t):
    f = jax.custom_vjp(lambda y: jnp.tanh(y))
    f.defvjp(lambda y: (f(y), y), lambda y, s: (3 * s * y,))
    return jedbatch.cell(lambda w, x: lax.cond(x[0] > 0, lambda y: t * f(y @ w), jnp.sin, x))


MADE_OVER = [
    *(made_inside(fn) for fn in (clipped_in_a_cell, calling_itself_in_a_cell)),
    *(made_inside(fn) for fn in (in_a_loop_of_a_cell, in_a_branch_of_a_cell)),
    made_with,
    made_with_two_rules,
    made_with_an_object,
    made_beside_a_number,
]


@pytest.mark.parametrize("make", MADE_OVER)
def test_cells_with_rules_are_made_over_numbers(make):
    """Rules, which are no derivatives here, read the numbers, too."""
    fn = lambda w, x: make(x[1])(w, x[0])  # noqa: E731
    xs = [(INSTANCES[k % 3], 0.1 + k / 20) for k in range(4)]
    assert_like_the_loop(jedbatch.batch(fn), fn, xs)


FLOATS = [0.1 + k / 20 for k in range(8)]
OTHER_RULES = {
    "decides": (FLOATS, lambda t, s: s if t > 0.3 else 3 * s),
    "asks": (FLOATS, lambda t, s: 2 * s if isinstance(t, float) and t > 0.3 else t * s),
    "is exact": ([*range(33_000, 40_000, 1000), 60_000], lambda n, s: s * (n * n / 1e9)),
}


@pytest.mark.parametrize("name", OTHER_RULES)
def test_rules_that_do_something_else_with_other_numbers_are_told_apart(name):
    """Functions in the cells do the same with all of them; 60,000 squared has 33 bits."""
    numbers, scaled = OTHER_RULES[name]

    def fn(w, instance):
        x, number = instance
        f = jax.custom_vjp(lambda y: 2 * y)
        f.defvjp(lambda y: (2 * y, None), lambda _, s: (scaled(number, s),))
        return jedbatch.cell(lambda w, x: f(x @ w))(w, x)

    xs = [(INSTANCES[k % 3], t) for k, t in enumerate(numbers)]
    batched = jedbatch.batch(fn)
    batched.plan(WEIGHT, xs)
    assert_like_the_loop(batched, fn, xs)


def test_what_functions_with_rules_of_cells_close_over_may_be_assigned():
    def fn(w, x):
        t = 1.0
        f = jax.custom_vjp(lambda y: y * t)
        f.defvjp(lambda y: (f(y), None), lambda _, s: (s,))
        node, found = jedbatch.cell(lambda w, x: f(x @ w)), []
        for k in range(4):
            t = float(k)
            found.append(node(w, x))
        return jnp.stack(found)

    loop = jnp.stack([fn(WEIGHT, x) for x in INSTANCES])
    assert_close(jedbatch.batch(fn)(WEIGHT, INSTANCES), loop, 2e-5)


def test_functions_with_rules_that_cells_hold_hold_no_values_of_the_instance():
    def fn(w, x):
        t, y = jnp.sin(x[0]), jnp.cos(x)
        f = jax.custom_vjp(lambda y: y * t)
        f.defvjp(lambda y: (f(y), None), lambda _, s: (s * t**2,))
        return jedbatch.cell(lambda w, x: f(x @ w) + y)(w, x)

    with pytest.raises(EscapedValueError, match=PASS_IT):
        jedbatch.batch(fn).plan(WEIGHT, INSTANCES)


def test_known_functions_with_rules_are_not_run_again(monkeypatch):
    """A run tells of each type what its results are made of."""
    runs = []
    run = CustomFunctions.note_run

    def noted(self, fun, key, args):
        known = len(self._stores)
        run(self, fun, key, args)
        runs.append(len(self._stores) > known)

    monkeypatch.setattr(CustomFunctions, "note_run", noted)

    @jax.custom_jvp
    def parts(x):
        return {"all": jnp.tanh(x), "sum": (x.sum(),)} if x.ndim else (x, 2 * x)

    parts.defjvp(lambda x, t: (parts(*x), jax.tree.map(lambda y: 3 * y * t[0].sum(), parts(*x))))

    def fn(w, instance):
        x, times = instance
        for _ in range(times):
            found = parts(x * w)
            x = found["all"] + parts(found["sum"][0])[1]
        return x

    batched = jedbatch.batch(fn, granularity="cell")
    for first in (1, 4):
        few = [(x, first + k) for k, x in enumerate(INSTANCES)]
        assert_close(batched(WEIGHT[0], few), jnp.stack([fn(WEIGHT[0], x) for x in few]), 1e-5)
        loss = lambda w, few=few: (batched(w, few) ** 2).sum()  # noqa: E731
        judge = lambda w, few=few: sum((fn(w, x) ** 2).sum() for x in few)  # noqa: E731
        assert_close(jax.grad(loss)(WEIGHT[0]), jax.grad(judge)(WEIGHT[0]), 1e-3)
    assert 0 < sum(runs) <= 8  # those of 21 calls for either type
