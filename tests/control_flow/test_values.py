"""Python that decides on computed values, against the plain loop; counts of what was computed."""

import contextvars
import gc
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import values
from cases.helpers import assert_close, check, loop, mostly_slow

import jedbatch
from jedbatch._control_flow.attempt import Attempt

cell = jedbatch.cell
TABLE = pytest.mark.parametrize("make", values.VALUES, ids=lambda f: f.__name__)
W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)) / 3, jnp.float32)


# --- the table ---


@TABLE
def test_decisions_are_clear(make):
    """Rounding does not change them: results are close when parameters are moved a little."""
    fn, params, instances = make(7, seed=1)
    moved = jax.tree.map(lambda x: x * (1 + 3e-5), params)
    assert_close(loop(fn, moved, instances), loop(fn, params, instances), 3e-3)


@TABLE
def test_instances_decide_differently(make):
    """Results of small integers, counts of decisions mostly, are not all the same."""
    fn, params, instances = make(7, seed=1)
    whole = [
        tuple(x for x in jax.tree.leaves(fn(params, i)) if isinstance(x, int)) for i in instances
    ]
    assert not any(whole) or len(set(whole)) > 1


FAST = ("values_of_params",)


@pytest.mark.parametrize("make", mostly_slow(values.VALUES, *FAST), ids=lambda f: f.__name__)
def test_agrees_with_loop(make):
    check(*make(7, seed=1), rtol=3e-5, plans=False, inference=True)


@pytest.mark.parametrize("num", mostly_slow([1, 2, 40], 2))
def test_numbers_of_instances(num):
    check(*values.mixed_with_none(num, seed=3), rtol=3e-5, plans=False)


def test_constants_of_cells_stay_in_them(monkeypatch):
    """Cells that are first met after a decision are traced once, as others are."""
    traced = []
    make_jaxpr = jax.make_jaxpr
    monkeypatch.setattr(jax, "make_jaxpr", lambda f: traced.append(f) or make_jaxpr(f))
    read = cell(lambda w, h: w @ h)
    step = cell(lambda w, h: jnp.tanh((w + jnp.eye(3)) @ h))

    def encode(w, n):
        h = read(w, jnp.ones(3))
        if h.sum() > -1e9:
            for _ in range(n):
                h = step(w, h)
        return h

    batched = jedbatch.batch(encode)
    batched(W, [2, 3])
    once = len(traced)
    assert_close(batched(W, [4, 5]), jnp.stack([encode(W, n) for n in (4, 5)]), 1e-6)
    assert len(traced) == once


@pytest.mark.parametrize("sign", [1, -1])
def test_decisions_while_an_arena_has_no_rows(sign):
    """A type is known that has not run, and nothing of the shape that it reads is computed."""
    step = cell(lambda w, h: jnp.tanh(w * h))

    def encode(w, t):
        if not isinstance(t, tuple):
            return w * t
        h = step(w, encode(w, t[0]) + encode(w, t[1]))
        return h * 0.5 if h.sum() > 0.1 else h

    def fn(w, t):
        return encode(w, t) > 0

    w, x = jnp.full(2, sign, jnp.float32), np.arange(2, dtype=np.float32)
    trees = [((x, x), x), (x, x)]
    assert_close(jedbatch.batch(fn)(w, trees), loop(fn, w, trees), 1e-5)


def test_permuting_instances_permutes_results():
    fn, params, instances = values.read_twice(7, seed=1)
    batched = jedbatch.batch(fn)
    order = np.random.default_rng(0).permutation(7)
    straight = batched(params, instances)
    got = batched(params, [instances[i] for i in order])
    assert_close(got, jax.tree.map(lambda x: x[order], straight), 1e-5)


def test_again_with_other_params():
    """Decisions are made again in every call, not remembered with the instance."""
    fn, params, instances = values.shift_reduce(7, seed=1)
    batched = jedbatch.batch(fn)
    for scale in (1.0, -1.0, 1.0):
        other = params | {"judge": scale * params["judge"]}
        assert_close(batched(other, instances), loop(fn, other, instances), 3e-5)


def test_python_runs_for_every_instance_in_every_call():
    """Also where the same instances come again and the same is recorded for each of them."""
    ran = []

    def halved_until_small(w, x):
        ran.append(x)
        while jnp.abs(x).max() > 0.1:
            x = jnp.tanh(w @ x) / 2
        return x

    batched = jedbatch.batch(halved_until_small)
    minibatch = [np.full(3, s, np.float32) for s in (0.1, 1, 2)]
    first = batched(W, minibatch)
    ran.clear()
    for called in range(1, 5):
        assert_close(batched(W, minibatch), first, 1e-6)
        assert len(ran) == 3 * called


def test_what_was_seen_compiles_nothing():
    fn, params, instances = values.read_twice(7, seed=1)
    batched = jedbatch.batch(fn)
    first = batched(params, instances)
    before = batched.compilations
    assert_close(batched(params, instances), first, 1e-6)
    assert batched.compilations == before


def test_in_a_list():
    """Results of different shapes, `out_axes=None`."""
    layer = cell(lambda w, h: jnp.tanh(w @ h))

    def fn(w, x):
        kept = [layer(w, x)]
        while kept[-1].max() > 0.1:
            kept.append(layer(w, kept[-1] * 0.8))
        return kept

    instances = [np.full(3, s, np.float32) for s in (-1, 0.3, 4)]
    got = jedbatch.batch(fn, out_axes=None)(W, instances)
    expected = [fn(W, x) for x in instances]
    assert_close(got, expected, 1e-5)
    assert len({len(x) for x in got}) > 1


# --- what is not possible ---


def test_under_jit_there_are_no_values():
    fn, params, instances = values.read_at_the_end(4, seed=1)
    batched = jedbatch.batch(fn)
    with pytest.raises(jedbatch.errors.SymbolicValueError, match=r"under `jax\.jit`"):
        jax.jit(lambda p: batched(p, instances))(params)
    assert_close(batched(params, instances), loop(fn, params, instances), 1e-5)


def test_a_plan_decides_on_nothing():
    fn, params, instances = values.read_at_the_end(4, seed=1)
    with pytest.raises(jedbatch.errors.SymbolicValueError):
        jedbatch.batch(fn).plan(params, instances)


# --- counts ---


def countdown(calls):
    """A function that calls one cell as often as its instance says, and a last one.

    Every call tells whether to go on: one value is read after each, nothing else is computed.
    """

    @cell
    def step(w, h, left):
        return jnp.tanh(w @ h), left - 1, left > 1

    @cell
    def finish(w, h):
        return (w @ h).sum()

    def fn(w, n):
        h, left, goes_on = jnp.ones(3), n, n > 0
        while goes_on:
            calls.append("step")
            h, left, goes_on = step(w, h, left)
        calls.append("finish")
        return finish(w, h)

    return fn


@pytest.fixture
def step_by_step(monkeypatch):
    """No steps are run ahead."""
    monkeypatch.setattr(Attempt, "_ahead", lambda attempt: None)


@pytest.mark.parametrize("instances", [[3], [1, 4, 2, 2], [0, 5, 0], [2, 2, 2], [9, 1]])
def test_rounds(instances, step_by_step):
    """As many as the longest instance reads values, and one to finish."""
    batched = jedbatch.batch(countdown([]))
    batched(W, instances)
    waiting = [sum(n > k for n in instances) for k in range(max(instances))]
    assert [r.instances for r in batched.last_rounds] == [*waiting, 0]


@pytest.mark.parametrize("instances", [[3], [1, 4, 2, 2], [0, 5, 0], [9, 1]])
def test_nothing_is_computed_in_vain(instances):
    """As many nodes as the loop calls cells, none twice, besides steps ahead that nobody took."""
    calls = []
    fn = countdown(calls)
    loop(fn, W, instances)
    expected = len(calls)
    batched = jedbatch.batch(fn)
    batched(W, instances)
    rounds = batched.last_rounds
    assert sum(r.nodes - (r.foreseen - r.used) for r in rounds) == expected
    assert all(r.lanes >= r.nodes >= r.batches for r in rounds)
    assert rounds[0].nodes >= sum(n > 0 for n in instances)


def test_one_batch_for_all_who_wait(step_by_step):
    """Batches do not multiply with instances: a step of all is one batch."""
    few, many = jedbatch.batch(countdown([])), jedbatch.batch(countdown([]))
    few(W, [4] * 2)
    many(W, [4] * 40)
    batches = lambda batched: [r.batches for r in batched.last_rounds]  # noqa: E731
    assert batches(few) == batches(many) == [1] * 5


def test_nothing_is_computed_for_a_branch_not_taken():
    calls = []
    judge = cell(lambda w, x: (w @ x).sum() > 0)
    yes, no = cell(lambda x: jnp.sin(x)), cell(lambda x: jnp.cos(x))

    def fn(w, x):
        calls.append("judge")
        if judge(w, x):
            calls.append("yes")
            return yes(x)
        calls.extend(["no"] * 3)
        return no(no(no(x)))

    instances = list(np.random.default_rng(1).normal(size=(12, 3)).astype(np.float32))
    loop(fn, W, instances)
    expected = len(calls)
    assert 14 <= expected <= 46  # both branches occur
    batched = check(fn, W, instances, gradients=False, plans=False)
    assert sum(r.nodes for r in batched.last_rounds) == expected


def test_a_value_read_again_costs_no_round():
    step = cell(lambda w, h: jnp.tanh(w @ h))

    def fn(w, n):
        h = step(w, jnp.ones(3) * n)
        first = [float(x) for x in h.tolist()]
        return step(w, h * (1.0 if first == h.tolist() and bool(h.any()) else 0.0))

    batched = jedbatch.batch(fn)
    batched(W, [1.0, 2.0, 3.0])
    # `h.any()` is another value than `h`, so it may take a round of its own.
    assert [r.instances for r in batched.last_rounds] in ([3, 0], [3, 3, 0])


def test_inputs_are_there_at_once():
    """To read what came with the instance or with the parameters nobody has to wait."""
    step = cell(lambda w, h: jnp.tanh(w @ h))

    def fn(w, x):
        h = step(w, x) if x[0] > 0 else x
        return step(w, h) if w[0, 0] > 0 else h

    instances = [np.full(3, s, np.float32) for s in (-1, 1)]
    batched = check(fn, W, instances, gradients=False, plans=False)
    # Two comparisons of x; of w, a look-up and a comparison each; and three steps.
    assert sum(r.nodes for r in batched.last_rounds) == 2 + 4 + 3


def test_without_decisions_there_is_one_round():
    batched = jedbatch.batch(lambda w, n: w[0] * n)
    batched(W, [1, 2])
    assert [r.instances for r in batched.last_rounds] == [0]


@pytest.mark.usefixtures("older_frozen")
def test_a_call_leaves_nothing_to_the_collector():
    """All that was recorded is freed with the call: nothing of it refers to itself."""
    step = cell(lambda w, h: (jnp.tanh(w @ h), jnp.abs(h).sum() < 0.5))

    def fn(w, x):
        h, done, steps = x["start"], False, 0
        while not done:
            (h, done), steps = step(w, h), steps + 1
        return h, steps

    instances = [{"start": np.full(3, s, np.float32)} for s in (0.1, 1, 2, 3)]
    batched = jedbatch.batch(fn)
    for _ in range(5):  # the first ones trace and compile
        batched(W, instances)
    gc.collect()
    gc.disable()
    left = []  # of which the first may be of other tests, as what is collected lets others go
    try:
        for _ in range(3):
            results = batched(W, instances)
            left.append(gc.collect())
    finally:
        gc.enable()
    assert min(left) < len(instances)
    assert_close(results, loop(fn, W, instances), 1e-5)


# --- errors ---


def greenlets():
    """How many there are besides the running one."""
    greenlet = pytest.importorskip("greenlet")
    gc.collect()
    found = [x for x in gc.get_objects() if issubclass(type(x), greenlet.greenlet)]
    return len([x for x in found if x is not greenlet.getcurrent()])


@pytest.mark.usefixtures("older_frozen")
def test_an_error_names_its_instance_and_leaves_nothing_behind():
    step = cell(lambda w, h: jnp.tanh(w @ h))

    def fn(w, n):
        h = jnp.ones(3)
        for i in range(n):
            h = step(w, h)
            if h.max() > -2 and n == 4 and i == 2:
                raise KeyError("four")
        return h

    before = greenlets()
    batched = jedbatch.batch(fn)
    with pytest.raises(KeyError, match="four") as caught:
        batched(W, [5, 1, 0, 4, 6])
    assert "instance 3" in "".join(caught.value.__notes__)
    del caught
    assert greenlets() <= before + 3  # those that were done are parked
    for _ in range(3):
        assert_close(batched(W, [5, 1, 0, 6]), loop(fn, W, [5, 1, 0, 6]), 1e-5)
        assert greenlets() == before + 4
    del batched
    assert greenlets() == before


@pytest.mark.usefixtures("older_frozen")
def test_an_error_before_anything_is_read():
    def fn(w, n):
        if n == 2:
            raise ValueError("two")
        return -w[0] if (w @ jnp.ones(3) * n).sum() > 0 else w[0]

    before = greenlets()
    with pytest.raises(ValueError, match="two") as caught:
        jedbatch.batch(fn)(W, [0, 1, 2, 3])
    assert "instance 2" in "".join(caught.value.__notes__)
    del caught
    assert greenlets() == before


def test_finally_runs():
    """Whoever is suspended when another instance fails gets to clean up."""
    cleaned = []

    def fn(w, n):
        try:
            if (w[0] * n).sum() > 1e9:
                return w[0]
            if n == 1:
                raise KeyError("one")
            return w[1] if (w[1] * n).sum() > 1e9 else w[2]
        finally:
            cleaned.append(n)

    with pytest.raises(KeyError, match="one"):
        jedbatch.batch(fn)(W, [0, 1, 2])
    gc.collect()
    assert set(cleaned) == {0, 1, 2}  # 0 twice: its first decision starts the call over


def test_catching_ones_own_errors():
    """`try` around a read works, and suspension is no exception that it could catch."""

    def fn(w, n):
        try:
            choice = [w[0], w[1]][jnp.argmax((w @ jnp.ones(3)) * n)]
        except IndexError:
            choice = w[2]
        except BaseException as error:
            raise AssertionError("the suspension was caught") from error
        return choice * 2

    check(fn, W, [-1.0, 1.0, 2.0], plans=False)


# --- inside of each other ---


def test_a_batched_function_inside():
    """The inner one decides on values as well, and so does the outer one."""
    step = cell(lambda w, h: jnp.tanh(w @ h))

    def grow(w, x):
        while jnp.abs(x).max() < 1.0:
            x = 1.5 * x + 0.1
        return step(w, x)

    inner = jedbatch.batch(grow)

    def fn(w, xs):
        total = inner(w, xs).sum(0)
        return total if total[0] > 0 else step(w, total)

    rng = np.random.default_rng(3)
    instances = [
        list(rng.normal(size=(n, 3)).astype(np.float32) * scale)
        for n, scale in ((1, 0.01), (3, 1.0), (2, 0.1))
    ]

    def plain(w, xs):
        total = sum(grow(w, x) for x in xs)
        return total if total[0] > 0 else step(w, total)

    assert_close(jedbatch.batch(fn)(W, instances), loop(plain, W, instances), 1e-5)


def test_a_batched_function_called_by_itself():
    """Recursion through the batched function: while one call waits, another one runs."""

    def fn(w, n):
        h = jnp.tanh(w[0] * n)
        if n > 0 and h.sum() < 1e9:
            return h + batched(w, [n - 1])[0]
        return h

    def plain(w, n):
        return jnp.tanh(w[0] * n) + (plain(w, n - 1) if n > 0 else 0.0)

    batched = jedbatch.batch(fn)
    assert_close(batched(W, [2, 0, 1]), loop(plain, W, [2, 0, 1]), 1e-5)


def test_deep_recursion_with_decisions():
    """Python stacks of suspended instances may be deep."""
    step = cell(lambda w, h: (h * 0.99 + w[0, 0] * 0, h.max() > 0.5))

    def fn(w, h):
        def visit(h, depth):
            h, goes_on = step(w, h)
            return visit(h, depth + 1) + 1 if goes_on and depth < 60 else depth

        return visit(h, 0)

    instances = [np.full(3, s, np.float32) for s in (0.4, 0.6, 0.9)]
    batched = jedbatch.batch(fn)
    assert batched(W, instances).tolist() == [fn(W, x) for x in instances]


def test_threads():
    """Functions that decide are called from several threads at once."""
    fn, params, instances = values.read_twice(5, seed=1)
    batched, expected = jedbatch.batch(fn), loop(fn, params, instances)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: batched(params, instances), range(8)):
            assert_close(got, expected, 1e-5)


def test_what_was_met_in_review():
    """A tracer first met when it is read; a caller's context; a call inside of a constant `jit`."""
    x = np.ones(3, np.float32)

    def closes_over(v, run):
        return run(lambda w, x: x * v if v.sum() > 1 else x, W, [x]).sum()

    v = jnp.full(3, 2.0)
    slope = jax.grad(lambda v: closes_over(v, lambda fn, *args: jedbatch.batch(fn)(*args)))(v)
    assert_close(slope, jax.grad(lambda v: closes_over(v, loop))(v), 1e-6)

    setting = contextvars.ContextVar("setting", default=1.0)
    setting.set(5.0)
    fn = lambda w, x: x * setting.get() if (w @ x).sum() > -99 else x  # noqa: E731
    batched = jedbatch.batch(fn)
    assert_close(jax.jit(lambda: batched(W, [x]))(), loop(fn, W, [x]), 1e-6)
    assert_close(batched(W, [x]), loop(fn, W, [x]), 1e-6)


def test_waiting_inside_of_a_block_that_configures_jax():
    """The block would hold for other instances too, so it is an error."""

    def fn(w, x):
        with jax.default_matmul_precision("highest"):
            return w @ x if (w @ x).sum() > 0 else x

    batched = jedbatch.batch(fn)
    with pytest.raises(ValueError, match="Put the block around"):
        batched(W, [np.ones(3, np.float32)] * 2)
    assert jax.config.jax_default_matmul_precision is None


def test_an_error_while_others_clean_up():
    """It does not replace the error that made them stop, and all of them clean up."""
    cleaned = []

    def fn(w, n):
        try:
            if (w[0] * n).sum() > 1e9 or n == 2:
                raise ValueError("the real error")
            return w[0] if (w[1] * n).sum() > 1e9 else w[2]
        finally:
            cleaned.append(n)
            if n == 0:
                raise KeyError("cleaning up")

    batched = jedbatch.batch(fn)
    with pytest.raises((ValueError, KeyError)):
        batched(W, [0, 1, 2])
    cleaned.clear()
    with pytest.raises(ValueError, match="the real error") as caught:
        batched(W, [0, 1, 2])
    assert "cleaning up" in "".join(caught.value.__notes__)
    assert sorted(cleaned) == [0, 1, 2]
