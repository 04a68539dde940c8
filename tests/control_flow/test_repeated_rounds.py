"""Rounds like rounds before, which are not planned again, against the plain loop.

Every table is run on symbols, too, and compared with a plan of the whole.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, loop, mostly_slow

import jedbatch
from jedbatch._control_flow.attempt import Attempt
from jedbatch._control_flow.recorded import Beginning, Recorded
from jedbatch._support import native

cell = jedbatch.cell
W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)) / 3, jnp.float32)


@cell
def step(w, a, b):
    return jnp.tanh(w @ a + 0.5 * b)


@cell
def goes_on(h, left):
    return (jnp.abs(h).sum() + left) > 0.5


@cell
def add(total, h):
    return total + h.sum()


@cell
def advance(w, state, left):
    h, c = state
    return (jnp.tanh(w @ h), c + h), left - 1


def start(n):
    return jnp.full(3, 0.1) * n


def counted_down(w, n):
    h, left = start(n), n
    while goes_on(h, left):
        h, left = step(w, h, h), left - 1
    return h


def two_rounds_before(w, n):
    """Each step reads what the round before the last one made, too."""
    a, b, left = start(n), start(1), n
    while goes_on(b, left):
        a, b, left = b, step(w, a, b), left - 1
    return b


def here_and_there(w, n):
    """Reads values of any earlier round, and each instance another."""
    made = [start(n), start(1)]
    for k in range(n):
        made.append(step(w, made[-1], made[(k * k + n) % len(made)]))
        if not goes_on(made[-1], 1):
            break
    return made[-1]


def two_loops(w, n):
    h = counted_down(w, n)
    left = 7 - n
    while goes_on(step(w, h, h), left):
        h, left = step(w, h, start(n)), left - 1
    return h


def put_off(w, n):
    """A sum that no decision needs but every third."""
    h, total = start(n), 0.0
    for k in range(n):
        h = step(w, h, h)
        total = add(total, h)
        if k % 3 == 2 and not total > -100:
            break
        if not goes_on(h, 1):
            break
    return h, total


def rows_read_anew(w, x):
    h = x[0]
    for k in range(1, len(x)):
        h = step(w, h, x[k])
        if not goes_on(h, 1):
            break
    return h


def other_types(w, n):
    """Python reads a number of another type in every round, and arrays."""
    h = start(n)
    for k in range(n):
        h = step(w, h, h)
        read = [h.sum() > -9, add(0.0, h), (10 * h).astype(int)[0]][k % 3]
        h = h * (0.5 if read > 0 else 0.25)
    return h


def states(w, n):
    """A state (h, c) is one reference to two values."""
    state, left = (start(n), start(1)), n
    while left > 0:
        state, left = advance(w, state, left * 1.0)
    return state[0] + state[1]


def random_keys(w, n):
    draw = cell(lambda key: (jax.random.split(key)[0], jax.random.uniform(key)))
    key, h = jax.random.key(n), start(n)
    for _ in range(n):
        key, u = draw(key)
        h = step(w, h, h) if u > 0.5 else step(w, h, start(2))
    return h


COUNTS = [3, 5, 1, 6, 5]
LENGTHS = (4, 7, 2, 6, 6)
CASES = {
    counted_down: COUNTS,
    two_rounds_before: COUNTS,
    here_and_there: COUNTS,
    two_loops: COUNTS,
    put_off: COUNTS,
    rows_read_anew: [np.full((n, 3), 0.1 * n, np.float32) for n in LENGTHS],
    other_types: COUNTS,
    states: COUNTS,
    random_keys: COUNTS,
}


FAST = ("two_rounds_before", "here_and_there", "two_loops", "put_off", "rows_read_anew")


@pytest.mark.parametrize("fn", mostly_slow(CASES, *FAST), ids=lambda fn: fn.__name__)
def test_again_and_with_others(fn, planned, monkeypatch):
    """Values are the loop's when rounds are new, are repeated, and when some are like others."""
    monkeypatch.setenv("JEDBATCH_CHECK", "1")
    instances, batched, num_planned = CASES[fn], jedbatch.batch(fn), []
    others = instances[::-1], instances[1:] + instances[:1]
    for some in (instances, instances, *others, instances):
        planned.clear()
        results = batched(W, some)
        num_planned.append(len(planned))
        assert_close(results, loop(fn, W, some), 1e-5)
    assert num_planned[1] <= num_planned[0]
    if fn is not put_off:
        assert num_planned[1] <= 3  # those in which steps run ahead for the first time
        assert num_planned[-1] <= 1  # the last one, if it has nodes


@pytest.mark.parametrize("fn", mostly_slow(CASES, "counted_down"), ids=lambda fn: fn.__name__)
def test_derivatives(fn):
    """The reverse runs over repeated rounds as over others."""
    batched = check(fn, W, CASES[fn], rtol=3e-5, plans=False, inference=False)
    some = CASES[fn][::-1]
    total = lambda run: lambda w: sum(x.sum() for r in run(w) for x in jax.tree.leaves(r))  # noqa: E731
    found = jax.grad(total(lambda w: [batched(w, some)]))(W)
    assert_close(found, jax.grad(total(lambda w: [fn(w, i) for i in some]))(W), 3e-5)


def counted_up(w, x):
    """Reads arrays of the instance at first, and one of their rows later; returns a number, too."""
    h, steps = x["rows"][1] + x["shift"], 0
    while goes_on(h, -0.4) and steps < 9:
        h, steps = step(w, h, x["rows"][0] if steps == 2 else x["shift"]), steps + 1
    return h, steps


def arrays_of(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    pairs = [(rng.normal(size=(2, 3)), rng.normal(size=3) * k) for k in (0.1, 2, 0.01, 1)]
    return [{"rows": (scale * a).astype("f"), "shift": b.astype("f")} for a, b in pairs]


def test_rounds_that_read_other_arrays_are_not_planned_again(planned, monkeypatch):
    """Nor is the last one, where all is computed by then and some of it are numbers."""
    monkeypatch.setenv("JEDBATCH_CHECK", "1")
    batched = jedbatch.batch(counted_up)
    num_planned = []
    for scale in (1.0, 1.0, 1.001, 0.999):  # which changes no decision
        planned.clear()
        instances = arrays_of(0, scale)
        expected = loop(counted_up, W, instances)
        assert_close(batched(W, instances), expected, 1e-5)
        num_planned.append(len(planned))
        assert len(set(np.asarray(expected[1]).tolist())) > 1
    assert num_planned[0] > 2
    assert num_planned[2:] == [0, 0]


def test_derivatives_of_arrays_of_first_rounds():
    """Arrays of instances that are read by rounds like others, pulled back."""
    batched = jedbatch.batch(counted_up)
    total = lambda run: lambda xs: sum((h**2).sum() for h in run(xs))  # noqa: E731
    by_loop = total(lambda xs: [counted_up(W, x)[0] for x in xs])

    for seed in (0, 0, 1):
        instances = arrays_of(seed)
        found = jax.grad(total(lambda xs: batched(W, xs)[0]))(instances)
        assert_close(found, jax.grad(by_loop)(instances), 3e-5)


def test_who_is_left_does_not_matter(planned, monkeypatch):
    """Rounds of as many instances are alike, whoever they are."""
    monkeypatch.setattr(Attempt, "_ahead", lambda attempt: None)  # a round for every step
    batched = jedbatch.batch(counted_down)
    batched(W, [2, 6, 4, 5])
    planned.clear()
    batched(W, [5, 4, 6, 2])
    assert len(planned) <= 2  # the last one, and perhaps the first one
    assert {4, 3, 2, 1} <= {r.instances for r in batched.last_rounds}


def test_one_instance_more_is_another_round(planned):
    batched = jedbatch.batch(counted_down)
    batched(W, [6] * 3)
    planned.clear()
    batched(W, [6] * 4)
    assert len(planned) > 1
    planned.clear()
    batched(W, [6] * 4)
    assert not planned


def test_errors_name_the_instance_in_rounds_that_are_repeated():
    table = jnp.ones((4, 3))
    look_up = cell(lambda table, h, k: h + table[k])

    def fn(params, n):
        h = jnp.zeros(3)
        for k in range(n):
            h = look_up(params["table"], h, k)
            if not h.sum() > 0:
                break
        return h

    batched = jedbatch.batch(fn)
    params = {"table": table}
    for _ in range(2):
        assert_close(batched(params, [4, 2, 4]), loop(fn, params, [4, 2, 4]), 1e-6)
    with pytest.raises(IndexError, match=r"instance 1 looks up row 4 of a table of 4 rows"):
        batched(params, [4, 5, 4])


# --- what rounds are known by ---


def recorded(calls, references, groups, turns, first=(0, 0, 0, 0, 0)):
    compiled = native.core()
    ints = list if compiled is None else compiled.Ints
    recorder = SimpleNamespace(
        call_specs=ints(calls), references=ints(references), input_group=ints(groups)
    )
    return Recorded(Beginning(*first), recorder, ints(turns))


def shifted(by_nodes, by_inputs, by_values, old=0):
    """The same round, behind others: it reads value `old` of them."""
    calls = [7] * by_nodes + [3, 4, 3, 4]
    references = [0] * by_nodes + [by_values, -1 - by_inputs, old, -2 - by_inputs, by_values + 1]
    groups = [1] * by_inputs + [2, 2]
    turns = [5, by_nodes + 2, by_inputs + 1, 8, by_nodes + 4, by_inputs + 2]
    return recorded(
        calls, references, groups, turns, (by_nodes, by_nodes, by_inputs, by_values, 0)
    ), np.array([by_values + 1, by_values + 3])


def changed(**parts):
    """The key of a round that differs from `shifted(2, 3, 4)` in some part."""
    calls, references = [7, 7, 3, 4, 3, 4], [0, 0, 4, -4, 0, -5, 5]
    groups, turns, values = [1, 1, 1, 2, 2], [5, 4, 4, 8, 6, 5], [5, 7]
    given = {"calls": calls, "references": references, "groups": groups, "turns": turns}
    new = recorded(
        **given | {k: v for k, v in parts.items() if k != "values"}, first=(2, 2, 3, 4, 0)
    )
    return new.key(np.array(parts.get("values", values)))


CHANGES = {
    "a call": {"calls": [7, 7, 3, 4, 3, 3]},
    "a value of this round": {"references": [0, 0, 4, -4, 0, -5, 4]},
    "an older value in place of a new one": {"references": [0, 0, 3, -4, 0, -5, 5]},
    "a new value in place of an older one": {"references": [0, 0, 4, -4, 4, -5, 5]},
    "an older input in place of a new one": {"references": [0, 0, 4, -3, 0, -5, 5]},
    "another new input": {"references": [0, 0, 4, -5, 0, -5, 5]},
    "the group of an input": {"groups": [1, 1, 1, 2, 3]},
    "who recorded a node": {"turns": [5, 3, 4, 8, 6, 5]},
    "who recorded an input": {"turns": [5, 4, 5, 8, 6, 5]},
    "one instance in two turns": {"turns": [5, 4, 4, 5, 6, 5]},
    "the order of instances": {"turns": [8, 4, 4, 5, 6, 5]},
    "what is wanted": {"values": [5, 6]},
    "its order": {"values": [7, 5]},
    "how much is wanted": {"values": [5]},
    "an instance in between": {"turns": [5, 3, 4, 6, 4, 4, 8, 6, 5]},
}


@pytest.mark.parametrize("way", ["compiled", "in Python"])
@pytest.mark.parametrize("name", CHANGES)
def test_rounds_that_differ_are_told_apart(name, way, monkeypatch):
    if way == "in Python":
        monkeypatch.setenv(native.SWITCH, "0")
    assert changed() is not None
    assert changed(**CHANGES[name]) not in (None, changed())


@pytest.mark.parametrize("way", ["compiled", "in Python"])
def test_rounds_are_alike_wherever_they_come(way, monkeypatch):
    if way == "in Python":
        monkeypatch.setenv(native.SWITCH, "0")
    keys = set()
    for by in ((2, 3, 4), (9, 6, 12)):
        for old in (0, 2, -1):
            new, values = shifted(*by, old)
            keys.add(new.key(values))
    keys |= {changed(), changed(turns=[2, 4, 4, 3, 6, 5])}
    keys.add(changed(turns=[1, 2, 3, 5, 4, 4, 6, 4, 4, 8, 6, 5]))  # two who record nothing
    assert len(keys) == 1
    assert changed(values=[3]) is None
    assert changed(values=[]) is None


@pytest.mark.skipif(native.core() is None, reason="no compiled core")
@pytest.mark.parametrize("name", CHANGES)
def test_keys_are_the_same_in_python(name, monkeypatch):
    compiled = changed(**CHANGES[name])
    monkeypatch.setenv(native.SWITCH, "0")
    assert changed(**CHANGES[name]) == compiled


def test_many_decisions_are_advised_on():
    """The print of a call in which Python decides often says what to write instead."""
    batched = jedbatch.batch(counted_down)
    batched(W, [2, 3])
    assert "while_loop" not in str(batched.last_rounds)
    batched(W, [2, 14])
    assert "`jax.lax.while_loop`" in str(batched.last_rounds)


# --- results that are numbers ---


def with_steps(w, n):
    h, steps = start(n), 0
    while goes_on(h, n - steps):
        h, steps = step(w, h, h), steps + 1
    return {"h": h, "steps": [steps, steps > 2], "n": n}


def some_with_steps(w, n):
    """Numbers beside computed values of the same type."""
    found = with_steps(w, n)
    return found["h"], add(jnp.float32(n), found["h"]) if n % 2 else found["steps"][0] / 4


@pytest.mark.parametrize("out_axes", [0, None])
def test_no_program_is_called_for_numbers_that_are_returned(out_axes, programs_run):
    batched = jedbatch.batch(with_steps, out_axes=out_axes)
    for instances in ([3, 1, 4], [3, 1, 4], [2, 5, 1]):
        programs_run.clear()
        results = batched(W, instances)
        expected = loop(with_steps, W, instances)
        if out_axes is None:
            results = jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
        assert_close(results, expected, 1e-5)
    assert len(programs_run) == len(batched.last_rounds) - 1
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(results))


def test_numbers_beside_computed_values(programs_run):
    batched = jedbatch.batch(some_with_steps)
    for instances in ([3, 2, 4], [3, 2, 4], [2, 5, 1]):
        programs_run.clear()
        assert_close(batched(W, instances), loop(some_with_steps, W, instances), 1e-5)
    assert len(programs_run) == len(batched.last_rounds)
