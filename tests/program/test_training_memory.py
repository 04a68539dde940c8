"""Memory of training: rows of cotangents that are used again, and nothing stored twice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import mostly_slow

import jedbatch
from jedbatch import testing

SIZE = 4
RNG = np.random.default_rng(0)
PARAMS = {
    name: jnp.asarray(RNG.normal(size=shape) / 2, jnp.float32)
    for name, shape in {
        "table": (7, SIZE),
        "w": (SIZE, SIZE),
        "gates": (2 * SIZE, 4 * SIZE),
    }.items()
}


@jedbatch.cell
def step(params, h, x):
    return jnp.tanh(x + h @ params["w"])


@jedbatch.cell
def looked_up(params, h, word):
    return jnp.tanh(params["table"][word] + h @ params["w"])


@jedbatch.cell
def gated(params, h, c, x):
    i, f, o, u = jnp.split(jnp.concatenate([h, x]) @ params["gates"], 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def start():
    return np.zeros(SIZE, np.float32)


def recurrent(params, words):
    h = start()
    for word in words:
        h = step(params, h, params["table"][word])
    return h


def with_look_ups(params, words):
    h = start()
    for word in words:
        h = looked_up(params, h, word)
    return h


def lstm(params, words):
    h, c = start(), start()
    for word in words:
        h, c = gated(params, h, c, params["table"][word])
    return h


def with_many_readers(params, words):
    """The state after the first word has a reader for every word, and more than one result."""
    first = h = step(params, start(), params["table"][words[0]])
    for word in words:
        h = step(params, h + first, first * params["table"][word])
    return {"last": h, "first": first.sum()}


CHAINS = [recurrent, with_look_ups, lstm, with_many_readers]


def chains(count, longest, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 7, rng.integers(1, longest + 1)).tolist()) for _ in range(count)]


@pytest.fixture
def sharing(monkeypatch):
    monkeypatch.setattr("jedbatch._program.cotangent_rows.MIN_SHARED_BYTES", -1)
    monkeypatch.setattr("jedbatch._program.cotangent_rows.MAX_SHARED_SHARE", np.inf)


def kernels(plan):
    return {kernel.node_type.name: kernel for kernel in plan.static.signature.kernels}


def sent(fn, instances, **options):
    """(plan, rows for cotangents that operands share, rows if every lane had its own)."""
    plan = jedbatch.batch(fn, out_axes=None, **options).plan(PARAMS, instances)
    testing.check_plan(plan)
    reverse = plan.static.reverse
    lanes = sum(
        n * sum(base >= 0 for base in bases)
        for n, bases in zip(reverse.forward.lanes, reverse.bases, strict=True)
    )
    return plan, sum(reverse.sent), lanes


@pytest.mark.parametrize("target", mostly_slow(["cpu", "gpu"], "cpu"))
@pytest.mark.parametrize("fn", mostly_slow(CHAINS, "with_many_readers"))
def test_gradients_are_the_loops(fn, target, sharing):
    testing.check_against_loop(fn, PARAMS, chains(5, 6), target=target)


def test_a_chain_needs_the_cotangents_of_two_steps(sharing):
    short, long = (sent(with_look_ups, [tuple(range(7)) * n] * 2) for n in (20, 40))
    assert long[2] >= 7 * 40 * 2
    assert long[1] == short[1] <= 64  # of the widest chunk


def test_cotangents_of_looked_up_rows_wait_for_the_end(sharing):
    """A table's gradient is made of them: they take a row each, those of states do not."""
    _, rows, lanes = sent(recurrent, [tuple(range(7)) * 20] * 2)
    assert 7 * 20 * 2 <= rows <= 0.8 * lanes


def test_small_programs_do_not_share():
    plan = jedbatch.batch(recurrent).plan(PARAMS, chains(3, 5))
    assert plan.static.reverse.sent is None


def test_rows_are_shared_only_where_it_saves_much(monkeypatch):
    """Where all cotangents wait for the end there is nothing to be gained."""
    monkeypatch.setattr("jedbatch._program.cotangent_rows.MIN_SHARED_BYTES", -1)
    add = jedbatch.cell(lambda p, x, y: jnp.tanh(x * y))

    def wide(params, words):
        return add(params, *(params["table"][w] for w in words[:2]))

    plan = jedbatch.batch(wide).plan(PARAMS, [(1, 2)] * 30)
    assert plan.static.reverse.sent is None
    plan = jedbatch.batch(with_look_ups).plan(PARAMS, [tuple(range(7)) * 10])
    assert plan.static.reverse.sent is not None


def test_a_row_that_is_alive_twice_is_found(sharing):
    plan, _, _ = sent(lstm, chains(4, 8))
    reverse = plan.static.reverse
    names = list(kernels(plan))
    spoiled = dataclasses.replace(plan, reverse_table=plan.reverse_table.copy())
    rows = reverse.form.view(spoiled.reverse_table, "sent", names.index("gated"))
    rows[0] = rows[1]  # h and c of a step in the same rows
    with pytest.raises(AssertionError):
        testing.check_plan(spoiled)
    rows[0] = -1
    with pytest.raises(AssertionError, match="not shared"):
        testing.check_plan(spoiled)


def test_longer_minibatches_find_room(sharing):
    batched = jedbatch.batch(lstm)
    for count, longest in ((2, 3), (9, 12), (3, 5)):
        instances = chains(count, longest, seed=count)
        plan = batched.plan(PARAMS, instances)
        testing.check_plan(plan)


def test_look_ups_run_nothing_backwards():
    """A row of a table gets the cotangents that its readers sent."""
    plan = jedbatch.batch(recurrent).plan(PARAMS, chains(3, 5))
    found = kernels(plan)
    row = found["row"].reverse
    assert row.is_leaf
    assert not found["step"].reverse.is_leaf
    k = list(found).index("row")
    assert plan.static.reverse.widths[k] == ()
    testing.check_plan(plan)


def test_a_look_up_and_a_product_that_are_added_share_a_cotangent():
    reverse = kernels(jedbatch.batch(with_look_ups).plan(PARAMS, [(1, 2)]))["looked_up"].reverse
    assert (len(reverse.taps), len(reverse.cotangents), reverse.extra) == (2, 1, ())


# --- inputs that are not differentiated ---

FEATURES = 50  # in no other array


def read_twice(params, xs):
    project = jedbatch.cell(lambda w, h, x: jnp.tanh(h + x @ w))
    h = jnp.zeros(3)
    for x in xs:
        h = project(params["in"], project(params["in"], h, x), x)
    return h


def of_features():
    rng = np.random.default_rng(0)
    params = {"in": jnp.asarray(rng.normal(size=(FEATURES, 3)) / FEATURES, jnp.float32)}
    lengths = (5, 2, 7)
    return params, [list(rng.normal(size=(n, FEATURES)).astype(np.float32)) for n in lengths]


@pytest.mark.parametrize("argument", [0, 1, (0, 1)], ids=str)
def test_features_have_no_cotangents_unless_they_are_wanted(argument):
    params, instances = of_features()
    batched = jedbatch.batch(read_twice)

    def total(params, instances):
        return jnp.sum(batched(params, instances) ** 2)

    def loop(params, instances):
        return sum(jnp.sum(read_twice(params, xs) ** 2) for xs in instances)

    slope = jax.grad(total, argument)
    found, expected = slope(params, instances), jax.grad(loop, argument)(params, instances)
    testing.assert_close(found, expected, 1e-5)
    lowered = jax.jit(slope).lower(params, instances).as_text()
    written = [x for x in lowered.splitlines() if "dynamic_update_slice" in x]
    features = [x for x in written if f"x{FEATURES}xf32>" in x]
    assert (len(features) > 1) == (argument != 0)  # once as inputs
