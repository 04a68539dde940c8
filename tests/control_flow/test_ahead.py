"""Steps that run before anyone asks for them, against the plain loop.

How many calls of programs there are, and how many steps they run, follows from the rule by which
steps are run ahead, so it is counted here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, loop

import jedbatch
from jedbatch._control_flow import depths as counting
from jedbatch._control_flow.depths import Depths, steps_of_use
from jedbatch._support import native

cell = jedbatch.cell
W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)) / 3, jnp.float32)
TABLE = {"rows": jnp.asarray(np.random.default_rng(1).normal(size=(40, 3)), jnp.float32)}


@cell
def step(w, h, pace):
    return jnp.tanh(w @ h) + 0.1, pace


@cell
def goes_on(h, taken, depth):
    return taken + 0 * h.sum() < depth - 0.5


@cell
def advance(w, state, depth):
    h, taken = state
    return (jnp.tanh(w @ h) + 0.1, taken + 1), taken + 1 < depth - 0.5


@cell
def write(params, h, word, left):
    h = jnp.tanh(h + params["rows"][word])
    return h, (3 * word + left + jnp.where(h.sum() > 0, 1, 2)) % 40


def start(n):
    return jnp.full(3, 0.1) * n


def states(w, depth):
    """A state and a decision in one cell."""
    state, more = (start(depth), 0.0), True
    while more:
        state, more = advance(w, state, depth)
    return state[0]


def operations(w, x):
    """Without cells: what is done is recorded operation by operation."""
    h, taken, depth = x / 10, x[0] * 0, x[0]
    while taken < depth:
        h, taken = jnp.tanh(w @ h) + 0.1, taken + 1.0
    return h


def words(params, depth):
    """A word that was read is a number of the next step, and another number counts down."""
    h, word, written = start(1), 2, []
    for k in range(depth):
        h, best = write(params, h, word, depth - k)
        word = int(best)
        written.append(word)
    return h, word, sum(written)


def other_numbers(w, depth):
    """The number that a step brings cannot be foreseen."""
    h, taken = start(1), 0.0
    for k in range(depth):
        h, taken = step(w, h, float(k * k))
        if not taken >= 0:
            break
    return h, taken


def changing(w, depth):
    """Numbers stay for a while."""
    h, taken = start(1), 0.0
    for k in range(depth):
        h, taken = step(w, h, k // 5)
        if not taken >= 0:
            break
    return h, taken


def two_back(w, depth):
    """Each step reads the step before the last one, too."""
    a, b = start(1), start(2)
    for k in range(depth):
        a, b = b, step(w, a, 1.0)[0] + b
        if not goes_on(b, k, 100.0):
            break
    return b


def stops_moving(w, depth):
    """From some step on, steps read what the same step left."""
    state = start(depth)
    for k in range(depth):
        new = step(w, state, 1.0)[0]
        if k < 10:
            state = new
        if not goes_on(new, 1.0, 100.0):
            break
    return new


@cell
def narrow(w, h, depth):
    h = jnp.tanh(w @ h)
    return h, (jnp.floor(5 * h.sum()) - depth).astype(jnp.int8)


def small_ints(w, depth):
    """Decides by ints of 8 bits, one of them an index."""
    h, total, names = start(1), 0, list(range(-300, 300))
    for k in range(depth):
        h, found = narrow(w, h, depth)
        total += int(found) if k % 2 else names[found]
    return h, total


@cell
def halve(w, h):
    h = jnp.tanh(w @ h)
    return h, h.sum() * 0.5, h.sum().astype(jnp.bfloat16)


def halves(w, depth):
    """Decides by floats, those of 16 bits at the end."""
    h, total = start(1), 0.0
    for _ in range(depth):
        h, found, rough = halve(w, h)
        total += float(found)
    for _ in range(depth):
        h, found, rough = halve(w, h)
        total += float(rough)
    return h, total


def in_turns(w, depth):
    """Two decisions in each step."""
    h = start(1)
    for k in range(depth):
        h = step(w, h, 1.0)[0]
        if h.sum() > 0.2:
            h = h * 0.5
        if not goes_on(h, k, 100.0):
            break
    return h


def begun(w, depth):
    """Something comes before the loop, in its first step."""
    state, more = (step(w, step(w, start(depth), 1.0)[0], 2.0)[0], 0.0), True
    while more:
        state, more = advance(w, state, depth)
    return state[0]


def begun_otherwise(w, depth):
    """The first decision is another one."""
    state = step(w, start(depth), 0.0)
    more = goes_on(step(w, state[0], 1.0)[0], 1.0, 100.0)
    while more:
        state, more = advance(w, state, depth)
    return state[0]


def read_again(w, depth):
    """Reads values twice, and others later."""
    state, more, read = (start(depth), 0.0), True, []
    while more and bool(more):
        state, more = advance(w, state, depth)
        read.append(more)
    return state[0], sum(map(int, map(bool, read)))


def two_loops(w, depth):
    h = states(w, depth)
    state, more = (h, 0.0), True
    while more:
        state, more = advance(w, state, 12 - depth % 5)
    return state[0]


def put_off(w, depth):
    """Results that no decision needs."""
    state, more, total = (start(depth), 0.0), True, 0.0
    while more:
        state, more = advance(w, state, depth)
        total = step(w, state[0] + total, 1.0)[0]
    return total


def older_numbers(w, depth):
    """A number that was brought before is read again, later."""
    h, taken, all_taken = start(1), 0.0, []
    for k in range(depth):
        h, taken = step(w, h, k)
        all_taken.append(taken)
        if not taken >= 0:
            break
    return h, all_taken[depth // 2] + all_taken[-1]


DEPTHS = [3, 17, 9, 1, 30, 17]
CASES = (
    states,
    operations,
    other_numbers,
    changing,
    two_back,
    stops_moving,
    small_ints,
    halves,
    begun,
    begun_otherwise,
    in_turns,
    read_again,
    two_loops,
    put_off,
    older_numbers,
    words,
)


def arguments(fn):
    return TABLE if fn is words else W


def instances(fn, depths):
    return [np.full(3, n, np.float32) for n in depths] if fn is operations else depths


def num_ahead(batched):
    return sum(r.ahead for r in batched.last_rounds)


def used(batched):
    return sum(r.used for r in batched.last_rounds)


def foreseen(batched):
    return sum(r.foreseen for r in batched.last_rounds)


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_values(fn):
    """They are those of the plain loop, in whichever order instances come."""
    batched, params = jedbatch.batch(fn), arguments(fn)
    for depths in (DEPTHS, DEPTHS, DEPTHS[::-1], [5, 5, 5], [40], DEPTHS[2:]):
        some = instances(fn, depths)
        assert_close(batched(params, some), loop(fn, params, some), 1e-5)
    batched(params, instances(fn, DEPTHS))
    if fn in (other_numbers, two_back, in_turns):
        assert num_ahead(batched) == 0
    else:
        assert used(batched) > 0


@pytest.mark.parametrize(
    "fn", [states, words, put_off, operations, small_ints, halves], ids=lambda fn: fn.__name__
)
def test_in_python(fn, monkeypatch):
    """The same runs without the compiled core."""
    some, params, compiled = instances(fn, DEPTHS), arguments(fn), jedbatch.batch(fn)
    expected = [compiled(params, some) for _ in range(5)]
    monkeypatch.setenv(native.SWITCH, "0")
    batched = jedbatch.batch(fn)
    assert_close([batched(params, some) for _ in range(5)], expected, 1e-6)
    counts = lambda b: [(r.instances, r.nodes, r.ahead, r.used) for r in b.last_rounds]  # noqa: E731
    assert counts(batched) == counts(compiled)
    assert used(batched) > 0


@pytest.fixture
def forgetful(monkeypatch):
    """Nothing is known of earlier calls."""
    monkeypatch.setattr(Depths, "finish", lambda self: None)


def warmed(fn, params, *minibatches):
    """The function, once it has programs and templates for some minibatches."""
    batched = jedbatch.batch(fn)
    for some in minibatches:
        for _ in range(3):
            batched(params, some)
    return batched


def test_calls_of_programs_and_steps(planned, forgetful):
    """The number of steps ahead doubles; none but those after the last one are for nothing."""
    batched = warmed(states, W, [18] * 4)
    planned.clear()
    batched(W, [18] * 4)
    first, *rounds, last = batched.last_rounds
    assert [r.ahead for r in rounds] == [2, 4, 8]  # steps 2 to 4, 5 to 9, 10 to 18
    assert [r.used for r in rounds] == [8, 16, 32] == [r.foreseen for r in rounds]
    assert sum(r.nodes for r in batched.last_rounds) == 4 * 18
    assert (first.nodes, last.nodes) == (4, 0)
    assert not planned  # nor the last one, where all is computed


def test_as_many_steps_as_in_earlier_calls(planned):
    """One round runs them all, and those after the last one are none of them."""
    batched = warmed(states, W, [19] * 4)
    planned.clear()
    batched(W, [19] * 4)
    assert [r.ahead for r in batched.last_rounds] == [0, 17, 0]
    assert used(batched) == foreseen(batched) == 4 * 17
    assert not planned
    batched(W, [25] * 4)  # more than ever: from there on the number doubles
    assert [r.ahead for r in batched.last_rounds] == [0, 17, 4, 8, 0]
    batched(W, [3, 25, 25, 4])
    assert_close(batched(W, [3, 25, 25, 4]), loop(states, W, [3, 25, 25, 4]), 1e-5)


def test_something_before_a_loop_makes_no_difference():
    batched = warmed(begun, W, [19] * 4)
    assert [r.ahead for r in batched.last_rounds] == [0, 17, 0]
    assert used(batched) == foreseen(batched) == 4 * 17


def test_a_loop_that_does_not_begin_as_it_goes_on():
    """It has to repeat itself first in every call, once that is known."""
    batched = warmed(begun_otherwise, W, [19] * 4)
    assert [r.ahead for r in batched.last_rounds] == [0, 0, 0, 16, 0]
    assert used(batched) == foreseen(batched) == 4 * 16


def test_steps_for_nothing_cost_no_more_than_rounds(monkeypatch):
    """The more work a step is, the fewer are run ahead of those that most will not take.

    No more, in any case, than are of use.
    """
    monkeypatch.setattr(counting, "NUM_CALLS", 1)
    some, counts = [6] * 15 + [40], []
    for work in (5e7, 6e4, 1e3):
        monkeypatch.setattr(counting, "ROUND_WORK", work)
        batched = warmed(states, W, some)
        counts.append([r.ahead for r in batched.last_rounds])
    assert counts == [[0, 8, 29, 0], [0, 5, 32, 0], [0, 4, 33, 0]]


def test_print(forgetful):
    batched = warmed(states, W, [19] * 4)
    text = str(batched.last_rounds)
    assert "4 waited: 12 nodes in 3 batches, 2 steps ahead (8 of 8 used), " in text
    assert "`jax.lax.while_loop`" in text  # 19 decisions


def test_few_steps_are_for_nothing():
    """However instances stop, steps for nothing are fewer than those of use and a few more."""
    rng = np.random.default_rng(0)
    for k in range(12):
        depths = (1 + rng.geometric([0.5, 0.2, 0.05][k % 3], 16)).tolist()
        batched = jedbatch.batch(states)
        batched(W, depths)
        needed = sum(depths)
        nodes = sum(r.nodes for r in batched.last_rounds)
        assert nodes == needed + foreseen(batched) - used(batched)
        assert foreseen(batched) - used(batched) <= needed


def test_fewer_steps_ahead_after_steps_for_nothing(forgetful):
    """All but one instance stop at once; the number of steps ahead is halved, and doubles again."""
    batched = warmed(states, W, [6] * 15 + [40])
    assert [r.ahead for r in batched.last_rounds] == [0, 2, 4, 2, 4, 8, 16, 0]


def test_rounds_of_as_many_are_alike(planned):
    """Rounds repeat whoever is left, and whatever was foreseen before."""
    batched = warmed(states, W, [4, 8, 20, 20, 5])
    planned.clear()
    batched(W, [20, 5, 8, 4, 20])
    assert len(planned) == 1  # the first one


def test_the_first_round_of_its_kind_runs_ahead(forgetful):
    """There need not be a template of rounds of as many instances."""
    batched = warmed(states, W, [30] * 6)
    batched(W, [3, 30, 30, 8, 14, 30])
    assert [r.instances for r in batched.last_rounds] == [6, 6, 5, 4, 3, 0]
    assert [r.ahead for r in batched.last_rounds] == [0, 2, 4, 8, 16, 0]


def test_a_number_that_changes_ends_what_is_foreseen():
    batched = warmed(changing, W, [12] * 3)
    rounds = batched.last_rounds  # the number is 0 five times, then 1 five times, then 2
    assert used(batched) < foreseen(batched)
    nodes = 2 * (3 * 12 + foreseen(batched) - used(batched))  # of a step and a comparison
    assert sum(r.nodes for r in rounds) == nodes


def test_words_that_are_not_there_are_errors():
    """A number that is no row of a table is an error, whether its row was foreseen or not."""

    @cell
    def follow(params, word, last):
        return (0 * params["rows"][word].sum()).astype(int) + last + 3

    def fn(params, n):
        word, taken = n, 0
        while taken < 9:
            word = int(follow(params, word, n + 3 * taken))
            taken += 1
        return word

    batched = jedbatch.batch(fn)
    for _ in range(3):
        assert batched(TABLE, [2, 5, 1]).tolist() == [29, 32, 28]
        assert used(batched) > 0
        with pytest.raises(IndexError, match=r"instance 1 looks up row 4[0-2] of a table of 40"):
            batched(TABLE, [2, 18, 1])


def test_max_steps_count_what_was_foreseen():
    batched = jedbatch.batch(states, max_steps=12)
    for _ in range(3):
        batched(W, [12, 3, 12])
        assert used(batched) > 0 or num_ahead(batched) == 0
    with pytest.raises(jedbatch.errors.UnfinishedLoopError, match="instance 1 needs values"):
        batched(W, [12, 13, 12])


def test_errors_name_the_instance():
    def fn(w, depth):
        state, more, taken = (start(depth), 0.0), True, 0
        while more:
            state, more = advance(w, state, depth)
            taken += 1
            if taken == 9:
                raise RuntimeError("nine steps are too many")
        return state[0]

    batched = jedbatch.batch(fn)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nine steps") as caught:
            batched(W, [3, 12, 4])
        assert "instance 1" in "".join(caught.value.__notes__)
        assert_close(batched(W, [3, 8, 4]), loop(fn, W, [3, 8, 4]), 1e-6)


def test_derivatives_do_not_run_ahead():
    """The reverse would walk over steps for nothing, so there are none."""
    batched = jedbatch.batch(states)
    total = lambda run: lambda w: sum(x.sum() for x in run(w))  # noqa: E731
    found = jax.grad(total(lambda w: batched(w, DEPTHS)))(W)
    assert num_ahead(batched) == 0
    assert_close(found, jax.grad(total(lambda w: [states(w, n) for n in DEPTHS]))(W), 3e-5)
    batched(W, DEPTHS)
    assert used(batched) > 0


def test_many_instances_against_the_loop():
    rng = np.random.default_rng(3)
    batched = jedbatch.batch(read_again)
    for _ in range(4):
        depths = rng.integers(1, 50, 23).tolist()
        assert_close(batched(W, depths), loop(read_again, W, depths), 1e-5)


def test_parts_of_instances():
    """Instances that fall into parts before, between and after steps that were foreseen."""
    inner = jedbatch.batch(states)

    def fn(w, depth):
        before = inner(w, [depth, 2 * depth, 5])
        state, more, taken = (before[0], 0.0), True, 0
        while more:
            state, more = advance(w, state, depth)
            taken += 1
            if taken == 12:
                state = inner(w, [7, depth])[0] + state[0], state[1]
        return state[0] + inner(w, [3, depth])[1]

    batched = jedbatch.batch(fn)
    for depths in ([8, 20, 3], [8, 20, 3], [20, 1, 13, 30], [20, 13, 30, 1]):
        assert_close(batched(W, depths), loop(fn, W, depths), 1e-5)
    assert used(batched) > 0


def test_errors_of_parts_may_be_caught():
    """The instance goes on with its own arrays, after others have gone on as foreseen."""

    def until(w, depth, stop=None):
        state, more, taken = (start(depth), 0.0), True, 0
        while more:
            state, more = advance(w, state, depth)
            taken += 1
            if taken == stop:
                raise ValueError("a part stops")
        return state[0]

    inner = jedbatch.batch(lambda w, depth: until(w, depth, 3 if depth == 7 else None))

    def fn(w, rows):
        depth = len(rows)
        h = until(w, depth)
        try:
            h = h + inner(w, [depth, 7, 30])[0]
        except ValueError:
            h = 2 * h + rows[0] * rows[1]
        return until(w, 20 - depth % 5) * h + rows[-1]

    rng, batched = np.random.default_rng(0), jedbatch.batch(fn)
    for depths in ([5, 9, 3], [5, 9, 3], [12, 4, 25, 6]):
        some = [rng.normal(size=(n, 3)).astype(np.float32) for n in depths]
        assert_close(batched(W, some), loop(fn, W, some), 1e-5)
        assert used(batched) > 0


def test_steps_of_use():
    rng = np.random.default_rng(0)
    for _ in range(20):
        counts, begin = rng.integers(1, 12, 7), int(rng.integers(0, 12))
        left = [int(n) - begin for n in counts if n >= begin]
        expected = [np.mean([n >= k for n in left]) for k in range(1, max(left, default=0) + 1)]
        np.testing.assert_allclose(steps_of_use(counts, begin), expected)


# --- steps behind the last one ---


@cell
def count_down(w, h, left):
    """A loop that ends for numbers that are not negative."""
    run = lambda s: (s[0] - 1, jnp.tanh(w @ s[1]))  # noqa: E731
    return jax.lax.while_loop(lambda s: s[0] != 0, run, (left, h))[1], left - 1


@cell
def call_python(w, h, left):
    def less(x):
        assert x > 0
        return np.asarray(x - 1, np.int32)

    kind = jax.ShapeDtypeStruct((), jnp.int32)
    return jnp.tanh(w @ h), jax.pure_callback(less, kind, left, vmap_method="sequential")


@cell
def take_logarithm(w, h, left):
    return jnp.tanh(w @ h + jnp.log(left)), left - 1


BEHIND = {"loop": count_down, "call of Python": call_python, "logarithm": take_logarithm}


@pytest.mark.parametrize("name", BEHIND)
def test_what_must_not_run_on_other_values_does_not_run_ahead(name):
    """Behind its last step this does not end, is an error, or is a NaN where JAX looks for them."""

    def fn(w, n):
        h, left = BEHIND[name](w, start(n), n)
        while left > 0:
            h, left = BEHIND[name](w, h, left)
        return h

    batched, depths = jedbatch.batch(fn), [8, 4, 8]
    expected = loop(fn, W, depths)
    with jax.debug_nans(name == "logarithm"):
        for _ in range(2):
            assert_close(batched(W, depths), expected, 1e-5)
            assert num_ahead(batched) == 0
    if name == "logarithm":
        assert_close(batched(W, depths), expected, 1e-5)
        assert num_ahead(batched) > 0
