"""Numbers in the bodies of operations and in what cells hold: data, not types."""

import contextlib
import cProfile
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import check, mostly_slow

import jedbatch
from jedbatch._jaxpr.numbers import numbers_of, with_numbers
from jedbatch._record.types.registry import Registry

W = jnp.array([0.3, -0.7])


def scan(w, x, rate, n):
    return jax.lax.scan(lambda c, _: (c * rate * w, None), x, None, length=3)[0]


def branch(w, x, rate, n):
    return jax.lax.cond(x[0] > 2, lambda y: (y * w, rate), lambda y: (y * rate, 1.5), x)


def loop(w, x, rate, n):
    return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * rate), (0, x))[1] * w


def remat(w, x, rate, n):
    return jax.checkpoint(lambda y: jnp.sin(y * rate) * w)(x)


def jitted(w, x, rate, n):
    table = np.array([rate, n], np.float32)
    return jax.jit(lambda y: jnp.sin(y * rate) * w + table)(x)


def nested(w, x, rate, n):
    def body(c, _):
        halved = jax.checkpoint(lambda y: y * rate + n)
        return jax.lax.cond(c.sum() > rate, halved, lambda y: jnp.full(2, rate), c), None

    return jax.lax.scan(body, x, None, length=2)[0] * w


def with_rules(w, x, rate, n):
    """Functions with rules of differentiation of their own."""

    def body(c, _):
        return jax.nn.relu(c * rate) + jax.nn.softplus(c) * w, None

    return jax.lax.scan(body, x, None, length=2)[0] + n


def on_parameters(w, x, rate, n):
    return jax.lax.scan(lambda c, _: (c * rate, None), w, None, length=2)[0] + x


def cell(w, x, rate, n):
    table = np.array([rate, n], np.float32)
    bias = jnp.full(2, rate)  # not of the instance, but computed from it
    return jedbatch.cell(lambda w, y: jnp.tanh(y * rate) * w + table + bias)(w, x)


def decay(rate, x, *, by=1.0):
    return jnp.sin(x * rate) * by


class ScaledDecay:
    def __init__(self, scale):
        self.scale = scale

    def run(self, rate, x):
        return x * rate * self.scale


DECAY = ScaledDecay(2.0)


def of_partial(rate):
    return functools.partial(decay, rate)


def of_partial_by_name(rate):
    return jax.tree_util.Partial(decay, rate, by=rate)


def of_partial_of_partial(rate):
    return functools.partial(functools.partial(decay, by=rate), rate)


def of_method(rate):
    return functools.partial(DECAY.run, rate)


def of_default(rate):
    held = of_partial(rate)
    return lambda x, *, to=rate, by=held: by(x) + to


def of_function_inside(rate):
    def down(x, n):
        return x if n == 0 else down(x * rate, n - 1)

    return lambda x: down(x, 2) + of_partial(rate)(x)


def of_loop_inside(rate):
    body = functools.partial(lambda rate, c, _: (jnp.tanh(c * (1 - rate)), None), rate)
    return lambda x: jax.lax.scan(body, x, None, length=2)[0]


def of_derivative(rate):
    return jax.grad(lambda x: decay(rate, x).sum())


@jax.custom_jvp
def ruled(x, rate):
    return jnp.sin(x) * rate


ruled.defjvp(lambda at, moved: (ruled(*at), jnp.cos(at[0]) * at[1] * moved[0]))


def of_function_with_rule(rate):
    return lambda x: ruled(x, rate) + jnp.logaddexp(x, rate)


def of_checkpoint(rate):
    return jax.checkpoint(lambda x: jnp.sin(x * rate))


@dataclasses.dataclass(frozen=True)
class Rated:
    rate: float


def of_containers(rate):
    """Numbers in lists, dicts and objects, and in functions that JAX compiles."""
    held = {"rates": [rate, (2.0, {"by": rate})], "name": "decay"}
    me, frozen, compiled = ScaledDecay(rate), Rated(rate), jax.jit(functools.partial(decay, rate))

    def scaled(x):
        of_list = compiled(x) * held["rates"][0] + held["rates"][1][1]["by"]
        return of_list * me.run(0.5, x) + frozen.rate

    return scaled


def of_method_of_an_object(rate):
    return functools.partial(ScaledDecay(rate).run, 0.5)


HOLDERS = [
    of_containers,
    of_method_of_an_object,
    of_partial,
    of_partial_by_name,
    of_partial_of_partial,
    of_method,
    of_default,
    of_function_inside,
    of_loop_inside,
    of_derivative,
    of_function_with_rule,
    of_checkpoint,
]


def held_twice(w, x, rate, n):
    """One function in two places, or two that are equal but for what they hold."""
    first, second = of_partial(rate), of_partial(1 - rate)
    three = lambda a, b, c, x: a(x) + 2 * b(x) + 4 * c(x)  # noqa: E731
    places = (first, first, second) if n % 2 else (first, second, second)
    return jedbatch.cell(functools.partial(three, *places))(x) * w


FUNCTIONS = [scan, branch, loop, remat, jitted, nested, with_rules, on_parameters, cell]


def instances(number=float, count=12):
    return [(np.full(2, k + 1, np.float32), number(k / 10), k % 7) for k in range(count)]


@pytest.mark.parametrize("number", [float, np.float32])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_numbers_of_instances_make_no_types(fn, number):
    batched = jedbatch.batch(lambda w, i: fn(w, *i))
    batched.plan(W, instances(number), gradient=False)
    graph = batched.plan(W, instances(number, 30), gradient=False).graph
    assert len(set(graph.node_type.tolist())) <= 3


def test_values_and_gradients():
    def every(w, i):
        return [fn(w, *i) for fn in (branch, nested, with_rules, on_parameters, cell)]

    check(every, W, instances(count=6), rtol=1e-4)


@pytest.mark.parametrize("number", [np.float32, lambda x: np.array([x, 1], np.float32)])
@pytest.mark.parametrize("make", HOLDERS)
def test_what_functions_that_are_cells_hold_is_data(make, number):
    """Numbers, and arrays of the instance: those are symbolic."""
    fn = lambda w, i: jedbatch.cell(make(i[1]))(i[0] * w)  # noqa: E731
    batched = check(fn, W, instances(number, 8), rtol=1e-4)
    assert len(set(batched.plan(W, instances(number, 30)).graph.node_type.tolist())) <= 2


@pytest.mark.parametrize("number", [float, lambda x: np.array([x, 1], np.float32)])
def test_numbers_of_functions_that_are_held_twice(number):
    check(lambda w, i: held_twice(w, *i), W, instances(number), rtol=1e-4)


@pytest.mark.parametrize("number", [np.float64, lambda x: np.linspace(0, x, 2)])
def test_wide_numbers_that_cells_close_over(number):
    def fn(w, instance):
        x, rate, _ = instance
        rate = number(rate)
        return jedbatch.cell(lambda w, x: jnp.tanh(x * rate) * w)(w, x)

    batched = check(fn, W, instances(count=8))
    graph = batched.plan(W, instances(count=8)).graph
    assert len(set(graph.node_type.tolist())) == 1


def test_wide_numbers_of_instances():
    scaled = jedbatch.cell(lambda w, x, rate: jnp.tanh(x * rate) * w)
    check(lambda w, i: scaled(w, i[0], i[1]), W, instances(np.float64, 3))


def test_few_numbers_are_constants():
    def fn(w, i):
        x, _, n = i
        return scan(w, x, (0.5, 2.0)[n % 2], n)

    graph = jedbatch.batch(fn).plan(W, instances(), gradient=False).graph
    assert len(set(graph.node_type.tolist())) == 2  # types with constants are faster
    assert np.all(np.diff(graph.operand_ptr) == 1)


def test_lengths_in_closures_are_static():
    """Python reads `n`; the other number is an operand all the same."""

    def fn(w, i):
        x, rate, n = i
        return jedbatch.cell(lambda w, y: sum([jnp.tanh(y * rate)] * (n + 1)) * w)(w, x)

    batched = jedbatch.batch(fn)
    numbers = instances(count=14)
    found = batched(W, numbers)
    np.testing.assert_allclose(found, [fn(W, i) for i in numbers], rtol=1e-5)
    graph = jedbatch.batch(fn).plan(W, instances(count=30), gradient=False).graph
    assert len(set(graph.node_type.tolist())) == 7


def doubled_if_whole(n, y):
    return y * 2 if isinstance(n, int) else y * 3


@pytest.mark.parametrize(
    "scale",
    [
        doubled_if_whole,
        lambda n, y: y * (2 * n if isinstance(n, int) else n),
        lambda n, y: y + len(f"{n}"),
    ],
)
def test_cells_that_ask_what_a_number_is(scale):
    """As an operand it would be something else, without an error."""

    def fn(w, i):
        x, _, n = i
        return jedbatch.cell(lambda w, y: scale(n, y) * w + n)(w, x)

    numbers = instances()
    found = jedbatch.batch(fn)(W, numbers)
    np.testing.assert_allclose(found, [fn(W, i) for i in numbers], rtol=1e-5)


def seldom_two(n):
    return 2 if hasattr(n, "bit_length") and n == -3 else 3


def tried(n):
    try:
        return 2 if int(n) == -3 else 3
    except TypeError:  # as of JAX, of an operand
        return 3


@pytest.mark.parametrize(
    "scale",
    [
        lambda n, y: y * (n**3 / 1e9),
        lambda n, y: jax.jit(lambda y: y * (n * n / 1e6))(y),
        lambda n, y: y * (2 if isinstance(n, int) and n > 0 else 3),
        lambda n, y: y * ((n + 2_147_450_000) / 1e9),
        lambda n, y: y * (1 - 1e-9) ** (abs(n) ** 3.0),
        lambda n, y: y * (2 if isinstance(n, int) and n == -3 else 3),
        lambda n, y: y * seldom_two(n),
        lambda n, y: y * tried(n),
    ],
)
def test_numbers_that_differ_more_later(scale):
    """Python computes with more digits, and what it decides on may be the sign, or one number."""

    def fn(w, i):
        x, n = i
        return jedbatch.cell(lambda w, y: scale(n, y) * w)(w, x)

    batched = jedbatch.batch(fn)
    x = np.ones(2, np.float32)
    for numbers in (range(-12, 0), [2000, 60000]):
        found = batched(W, [(x, n) for n in numbers])
        np.testing.assert_allclose(found, [fn(W, (x, n)) for n in numbers], rtol=1e-5)


class Schedule:
    """An object that cells of the user may hold, whose methods decide on a number."""

    def rate(self, t):
        return self.warm(t) + 1

    def warm(self, t):
        return 7.0 if isinstance(t, float) and t == 0.5 else t


class Rate:
    """An object that a cell makes of a number, and asks."""

    def __init__(self, t):
        self.t = t

    @property
    def value(self):
        return 7.0 if isinstance(self.t, float) and self.t == 0.5 else self.t


@functools.singledispatch
def rate(t):
    return t


@rate.register
def _(t: float):
    return 7.0 if t == 0.5 else t


def matched(t):
    match t:
        case float() if t == 0.5:
            return 7.0
    return t


schedule = Schedule()
RATES = {"matched": matched}


def held(t, y):
    me = schedule
    return lambda y: y * me.rate(t)


NAMED = {}  # objects by themselves


def looked_up(t, y):
    """A cell over an object that a table knows, which a copy with another number is not."""
    me = Rate(t)
    if t == 0.5:
        NAMED[me] = 7.0
    return lambda y: y * NAMED.get(me, me.t)


class Anyway:
    """A `with` statement that goes on after any error."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return True


def compared_in(context):
    """A cell that compares a number in a `with` statement, which goes on if it cannot."""

    def scaled(t, y):
        def of(y):
            rate = t
            with context():
                rate = 7.0 if t == 0.5 else t
            return y * rate

        return of

    return scaled


@pytest.mark.parametrize(
    "scaled",
    [
        compared_in(lambda: contextlib.suppress(TypeError)),
        compared_in(Anyway),
        looked_up,
        lambda t, y: lambda y: y * (7 if isinstance(t, float) and t == 0.5 else t),
        lambda t, y: lambda y: y * schedule.rate(t),
        held,
        lambda t, y: lambda y: y * Rate(t).value,
        lambda t, y: lambda y: y * rate(t),
        lambda t, y: lambda y: y * RATES["matched"](t),
        lambda t, y: lambda y: y * {"0.5": 7.0}.get(f"{t}", t),
    ],
)
def test_numbers_decided_on_after_many_others(scaled):
    """Whatever Python makes of a number, its result is what the program holds."""

    def fn(_, i):
        x, t = i
        return jedbatch.cell(scaled(t, x))(x)

    batched = jedbatch.batch(fn)
    x = np.ones(2, np.float32)
    for numbers in ([k + 0.25 for k in range(20)], [3.25, 0.5, 0.75]):
        found = batched(W, [(x, t) for t in numbers])
        np.testing.assert_allclose(found, [fn(W, (x, t)) for t in numbers], rtol=1e-5)
    many = [(x, k / 2) for k in range(40)]
    assert len(set(batched.plan(W, many, gradient=False).graph.node_type.tolist())) == 1


SPECIAL = Rate(0.5)


@pytest.mark.parametrize(
    "is_special",
    [
        lambda me: me is SPECIAL,
        lambda me: me == SPECIAL,
        lambda me: me in (SPECIAL,),
        lambda me: {id(SPECIAL): True}.get(id(me), False),
        lambda me: len({me, SPECIAL}) == 1,
    ],
)
def test_one_of_many_objects_that_hold_the_same_numbers(is_special):
    """A copy with a number as an operand is none of them."""

    def fn(_, i):
        x, t, special = i
        me = SPECIAL if special else Rate(t)
        return jedbatch.cell(lambda y: y * (7.0 if is_special(me) else me.t))(x)

    batched = jedbatch.batch(fn)
    x = np.ones(2, np.float32)
    for numbers in ([0.25, 0.5, 0.75, 0.5, 1.25, 1.5], [0.5, 1.75, 0.25]):
        instances = [(x, t, False) for t in numbers]
        instances.insert(1, (x, 0.5, len(numbers) == 3))
        found = batched(W, instances)
        np.testing.assert_allclose(found, [fn(W, i) for i in instances], rtol=1e-5)
    assert len(set(batched.plan(W, instances, gradient=False).graph.node_type.tolist())) <= 3


@pytest.mark.parametrize("is_special", ["in", "id"])
def test_objects_with_values_are_not_told_apart_by_identity(is_special):
    def fn(_, x):
        me, other = Rate(x), Rate(2 * x)
        special, number = {me}, id(me)
        tells = {"in": lambda: me in special, "id": lambda: id(me) == number}[is_special]
        scaled = jedbatch.cell(lambda y: y * (me.t if tells() else other.t))
        try:
            return scaled(x)
        except jedbatch.errors.SymbolicValueError:
            return scaled(x)  # which has been traced by now

    with pytest.raises(jedbatch.errors.SymbolicValueError, match="as an argument"):
        jedbatch.batch(fn)(W, [np.ones(2, np.float32), np.zeros(2, np.float32)])


def test_a_class_made_for_each_instance_is_recorded_a_few_times():
    runs = []

    def fn(_, x):
        class Scale:
            pass

        runs.append(x)
        scale, total = Scale(), 0.0
        for k in range(4):
            scale.by = 0.5 * k
            total = total + jedbatch.cell(lambda y: y * scale.by)(x)
        return total

    xs = [np.full(2, k, np.float32) for k in range(3)]
    np.testing.assert_allclose(jedbatch.batch(fn)(W, xs), [3 * x for x in xs])
    assert len(runs) <= 40 * len(xs)


def test_cells_are_traced_once_for_each_number_that_they_hold(monkeypatch):
    traced, trace = [], Registry.trace
    counting = lambda *args, **named: (traced.append(args), trace(*args, **named))[1]  # noqa: E731
    monkeypatch.setattr(Registry, "trace", counting)

    def fn(_, i):
        x, t, _ = i
        scaled = jedbatch.cell(lambda x: sum([x * t * k for k in (1.0, 2.0)]))
        return scaled(scaled(x))

    batched = jedbatch.batch(fn)
    x = np.ones(2, np.float32)
    batched.plan(W, [(x, 1 + k / 64, 0) for k in range(20)])
    assert len(traced) <= 20 + 6  # those with constants once more, and with operands once
    before = len(traced)
    batched.plan(W, [(x, 1 + k / 64, 1) for k in range(30)])
    assert len(traced) == before + 10


def test_numbers_decided_on_under_a_profiler():
    batched = jedbatch.batch(lambda _, t: jedbatch.cell(lambda: jnp.float32(matched(t)))())
    profiler = cProfile.Profile()
    for numbers in ([k + 0.25 for k in range(20)], [3.25, 0.5, 0.75]):
        found = profiler.runcall(batched, W, numbers)
        np.testing.assert_allclose(found, list(map(matched, numbers)), rtol=1e-5)


def test_errors_of_cells_are_theirs():
    def fn(w, i):
        x, rate, _ = i
        return jedbatch.cell(lambda w, y: y @ jnp.ones((3, 3)) * rate)(w, x)

    with pytest.raises(TypeError, match="dot_general requires contracting"):
        jedbatch.batch(fn)(W, instances())


def test_each_number_alone():
    """Numbers are counted in one order: each is replaced by itself, and by no other."""

    def program(a, b, c, d, e):
        def body(y, _):
            y = jax.lax.cond(y.sum() < a, lambda y: y * b, lambda y: (y + c) * c, y)
            return y, jax.jit(lambda y: y - np.array([d, d], np.float32))(y)

        def fn(x):
            y, rows = jax.lax.scan(body, x, None, length=2)
            y = jax.lax.while_loop(lambda y: y.sum() < e, lambda y: y * 1.5, y)
            return y, rows, jax.checkpoint(lambda y: y / b)(y)

        return fn

    first, other = (0.5, 2.0, 3.0, 4.0, 60.0), (30.0, 0.25, 0.125, 7.0, 90.0)
    x = jnp.array([1.0, 2.0])
    traced = jax.make_jaxpr(jax.jit(program(*first)))(x)
    (body,) = (eqn.params["jaxpr"] for eqn in traced.eqns)
    values = [float(n.value.ravel()[0]) for n in numbers_of(body)]
    assert {*first}.issubset(values)
    for k, (a, b) in itertools.product(range(5), [(first, other)]):
        mixed = [b[j] if j == k else a[j] for j in range(5)]
        numbers = {
            place: jnp.full(number.value.shape, b[k], number.value.dtype)
            for place, number in enumerate(numbers_of(body))
            if values[place] == a[k]
        }
        out = with_numbers(traced, numbers, [x])
        expected = jax.tree.leaves(program(*mixed)(x))
        for found, right in zip(out, expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-6)


@pytest.mark.parametrize(("how", "types"), [("full", 4), ("sum of constants", 3), ("NumPy", 2)])
def test_arrays_made_of_numbers_of_the_instance(how, types):
    """Weights meet them in operations without values of the instance; JAX makes them in nodes."""

    def fn(w, x):
        made = {"full": lambda: jnp.full(2, x), "NumPy": lambda: np.full(2, x)}
        return jnp.tanh(w * made.get(how, lambda: jnp.zeros(2) + x)())

    numbers = list(np.linspace(0, 1, 20, dtype=np.float32))
    batched = check(fn, W, numbers)
    assert len(batched.plan(W, numbers).graph.present_types) == types


def test_few_arrays_stay_constants():
    masks = [np.array([k % 2, 1], np.float32) for k in range(3)]

    def fn(w, x):
        return x * sum(w * mask for mask in masks)

    plan = jedbatch.batch(fn).plan(W, [np.float32(x) for x in range(20)])
    assert len(plan.graph.node_type) == 20  # what depends on weights alone is computed once


TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)), jnp.float32)


@pytest.mark.parametrize("granularity", mostly_slow(["cell", "auto"], "cell"))
def test_rows_of_a_table_that_is_closed_over(granularity):
    """Which row it is, is data as for a table among the arguments; a few stay constants."""

    def fn(w, word):
        return jnp.tanh(TABLE[word] * w) + TABLE[0] * TABLE[-1]

    words = [int(k) for k in np.random.default_rng(1).integers(20, size=24)]
    batched = check(fn, jnp.float32(0.5), words, granularity=granularity)
    assert len(batched.plan(jnp.float32(0.5), words).graph.present_types) <= 6

    def total(table):
        closing = jedbatch.batch(lambda word: jnp.sin(table[word]), 0)
        return closing(words).sum()

    def loop_total(table):
        return sum(jnp.sin(table[word]).sum() for word in words)

    np.testing.assert_allclose(
        jax.grad(total)(TABLE), jax.grad(loop_total)(TABLE), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_rows_negative_and_numbers_beside_are_those_of_each_call():
    """An operation recorded at once the second time reads its own index and number."""

    def fn(w, n):
        h = w["E"][n % 5] + w["E"][-1 - n % 4]
        h = jnp.where(h > 0.1 * n, h, 0.3) - jnp.maximum(-h, n) + h[n % 3] * h[1:].sum()
        return abs(h) * (h > 0.7)

    weights = {"E": TABLE[:5]}
    for granularity in ("cell", "auto"):
        check(fn, weights, list(range(9)), granularity=granularity, rtol=3e-5)
    with pytest.raises(OverflowError):
        jedbatch.batch(fn).plan(weights, [1, 2, 3 << 40])


def test_places_in_a_table_by_several_numbers_are_data():
    """Scores of transitions from one tag to the next, and columns, make one type each."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(9, 9, 2)), jnp.float32)

    def score(table, tags):
        pairs = itertools.pairwise(tags)
        scores = [table[a, b] + table[a - 9, b, 1] * table[b, 0, ::-1] for a, b in pairs]
        return sum(scores, start=jnp.zeros(2))

    rng = np.random.default_rng(1)
    sentences = [rng.integers(9, size=n).tolist() for n in (3, 1, 8, 7)]
    plan = check(score, table, sentences).plan(table, sentences)
    types = [plan.graph.types[t] for t in set(plan.graph.node_type.tolist())]
    assert sorted(len(t.operands) for t in types if t.name == "row") == [2, 2, 3]
    with pytest.raises(IndexError, match="index 9 is out of bounds for an axis of length 9"):
        jedbatch.batch(lambda table, k: table[0, k]).plan(table, [9])


def test_numbers_too_large_for_jax_in_closures_are_not_computed_with():
    """A hash by which a wrapper knows what it wraps, as `chex.assert_max_traces` has one."""
    calls = {}

    def counted(fn, key):
        def wrapper(w, x):
            calls[key] = calls.get(key, 0) + 1
            return fn(w, x)

        return wrapper

    cells = [jedbatch.cell(counted(lambda w, x: jnp.sin(w * x), key)) for key in (1 << 60, -7)]
    check(lambda w, n: cells[n % 2](w, jnp.full(2, 0.5)), jnp.float32(0.3), list(range(4)))
    assert calls.keys() == {1 << 60, -7}


def some_steps(w, x, rate, n):
    bias = jax.lax.fori_loop(0, n, lambda k, y: jnp.sin(y + k), w)  # of weights alone
    return jax.lax.fori_loop(0, n, lambda k, y: jnp.sin(y * w + rate * k), x + bias)


def last_count(w, x, rate, n):
    """The number of the step is returned, and what it is made of beside it."""
    count, y = jax.lax.fori_loop(2, n + 3, lambda k, s: (s[0] + 1, s[1] * w + k), (5, x))
    return y * count


def steps_over_rows(w, x, rate, n):
    """A scan over rows that are at hand, in reverse, which gives a row for each."""
    step = lambda y, row: (jnp.tanh(y * row + w), y * rate)  # noqa: E731
    y, rows = jax.lax.scan(
        step, x, np.arange(2.0 * n + 2, dtype=np.float32).reshape(-1, 2), reverse=True
    )
    return y + rows.sum(0) + rows[0]


def odd_carries(w, x, rate, n):
    """A constant, a number that wraps around, random keys in a scan, and none at all in the end."""

    def body(c, key):
        y, flag, byte = c
        y = jnp.tanh(y * w + byte * flag) + jax.random.uniform(key, (2,))
        return (y, 0.5, byte + jnp.uint8(100)), key

    keys = jax.random.split(jax.random.key(3), 9)[: n % 7]
    (y, flag, byte), read = jax.lax.scan(body, (x, 0.0, jnp.uint8(7)), keys)
    return y * flag + byte + len(read)


def over_a_list(w, x, rate, n):
    """A scan over a list of as many as there are."""
    rows = jnp.stack([jnp.cos(x * k) for k in range(n + 1)])
    return jax.lax.scan(lambda y, row: (jnp.tanh(y * w + row), None), x, rows)[0]


def power(w, x, rate, n):
    return (x * w / 10) ** n + rate * w**n


MOST_TYPES = {
    some_steps: 5,
    last_count: 3,
    odd_carries: 4,
    steps_over_rows: 5,
    over_a_list: 5,
    power: 6,
}


@pytest.mark.parametrize("fn", mostly_slow(MOST_TYPES, "some_steps", "odd_carries"))
def test_numbers_that_jax_keeps_as_parameters(fn):
    """Loops of any length, whose steps are nodes, and powers of any exponent."""
    batched = check(lambda w, i: fn(w, *i), W, instances(count=9))
    for count in (14, 5, 11):
        batched(W, instances(count=count))
    assert len(batched.plan(W, instances(count=9)).graph.present_types) <= MOST_TYPES[fn]
    with jedbatch.testing.assert_no_recompile():
        batched(W, [(x, rate, (5 * n) % 8) for x, rate, n in instances(count=14)])


@pytest.mark.parametrize(
    ("first", "by"),
    [
        (np.uint64(3), np.uint64(2**64 - 1)),
        (np.int64(2**63 - 3), np.int64(1)),
        (np.int8(125), np.int8(1)),
    ],
)
def test_counters_of_loops_of_any_length_wrap_around(first, by):
    with jax.enable_x64():

        def fn(w, i):
            step = lambda c, _: ((c[0] + by, c[1] * w + c[0] / 2), None)  # noqa: E731
            count, y = jax.lax.scan(step, (first, i[0]), None, length=i[1])[0]
            return y + count

        w, numbers = jnp.float64(0.5), [(np.ones(1) * n, n) for n in range(1, 9)]
        found = jedbatch.batch(fn)(w, numbers)
        np.testing.assert_allclose(found, [fn(w, i) for i in numbers], rtol=1e-12)
