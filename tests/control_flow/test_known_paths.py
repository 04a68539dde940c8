"""Instances that go along paths known from earlier calls, against the plain loop."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, loop

import jedbatch
from jedbatch._control_flow import known_paths
from jedbatch._control_flow.known_paths import Guess, KnownPaths, PathSegment, Written
from jedbatch._control_flow.workspace import Workspace
from jedbatch._record.registry import Registry
from jedbatch._support import native

pytestmark = pytest.mark.unoptimized

cell = jedbatch.cell
W = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)) / 3, jnp.float32)
SCALE = 1.0  # of `scaled`


@pytest.fixture(params=["1", "0"], ids=["compiled", "in Python"])
def either_core(request, monkeypatch):
    monkeypatch.setenv(native.SWITCH, request.param)


@cell
def shrink(w, h, by):
    h = jnp.tanh(w @ h) * by
    return h, jnp.abs(h).sum() < 0.05


@cell
def classify(w, h):
    h = jnp.tanh(w @ h)
    return h, jnp.argmax(h), h.sum() > 0


def settle(w, instance):
    h, steps = instance["start"], 0
    done = False
    while not done and steps < 9:
        h, done = shrink(w, h, instance["by"])
        steps += 1
    return {"h": h, "steps": steps, "by": instance["by"]}


def two_answers(w, instance):
    """Both values that are asked for are recorded before the first decision."""
    h, place, is_positive = classify(w, instance["start"])
    total = h.sum()
    if is_positive and int(place) < 2:
        return h, total
    if int(place) == 0:
        return -h, total
    return h * 2, total + 1


def operations(w, instance):
    x = instance["start"] / 4
    while jnp.abs(x).max() > 0.05:  # NaN is not
        x = 0.6 * (w @ x) if x[0] > 0 else x / 2
    return x


def ints(w, instance):
    h, found = instance["start"], []
    for _ in range(3):
        h, place, _ = classify(w, h)
        found.append(int(place))
        h = h + found[-1]
    return h, sum(found)


def instances_of(seed, count=5):
    rng = np.random.default_rng(seed)
    found = [{"start": rng.normal(size=3).astype(np.float32), "by": 0.7} for _ in range(count)]
    return [*found, {"start": np.full(3, 0.3, np.float32), "by": 0.5}]


def counted(fn):
    """The function, and a list of the arguments that Python ran it with."""
    ran = []

    def run(*args):
        ran.append(args)
        return fn(*args)

    return run, ran


def called(batched, w, minibatch, times):
    for _ in range(times):
        results = batched(w, minibatch)
    return results


@pytest.mark.parametrize("fn", [settle, two_answers, operations, ints], ids=lambda f: f.__name__)
def test_other_arrays(fn, either_core):
    """Instances that differ in arrays alone follow others, and leave their path where they must."""
    batched = jedbatch.batch(fn)
    for seed in range(7):
        minibatch = instances_of(seed)
        assert_close(batched(W, minibatch), loop(fn, W, minibatch), 1e-5)


def test_nan():
    batched = jedbatch.batch(operations)
    known = [{"start": np.full(3, s, np.float32)} for s in (1, 2, 3)]
    called(batched, W, known, 4)
    known[1] = {"start": np.full(3, np.nan, np.float32)}
    assert_close(batched(W, known), loop(operations, W, known), 1e-5)


def test_python_does_not_run():
    """Neither for the same instances, nor for others that do what these did; one round is left."""
    fn, ran = counted(settle)
    batched = jedbatch.batch(fn)
    same = [{"start": np.full(3, s, np.float32), "by": 0.7} for s in (0.1, 1, 2, 3)]
    called(batched, W, same, 4)
    ran.clear()
    compilations = batched.compilations
    assert_close(batched(W, same), loop(settle, W, same), 1e-5)
    other = [{"start": x["start"] * 1.01, "by": 0.7} for x in same]
    assert_close(batched(W, other), loop(settle, W, other), 1e-5)
    assert not ran
    assert batched.compilations == compilations


def test_python_does_not_run_where_jax_or_numpy_brings_numbers():
    """`%` brings literals of JAX; they and scalars of NumPy are numbers like others."""

    def wrapped(w, x):
        x = (w @ x) % 1.0
        return x * np.float32(0.5) if x[0] > 0.5 else x

    fn, ran = counted(wrapped)
    batched = jedbatch.batch(fn)
    for seed in range(5):
        ran.clear()
        minibatch = [x["start"] for x in instances_of(seed, 8)]
        assert_close(batched(W, minibatch), loop(wrapped, W, minibatch), 1e-5)
    assert not ran


def check_known(batched, fn, ran, minibatch):
    """Python runs no more for a minibatch, and from the second call on nothing is compiled."""
    ran.clear()
    batched(W, minibatch)
    assert not ran
    compilations = batched.compilations
    assert_close(batched(W, minibatch), loop(fn, W, minibatch), 1e-5)
    assert batched.compilations == compilations


def test_learned_from_the_first_call_on():
    """Python runs in two calls, and the larger rounds are compiled in the third."""
    fn, ran = counted(settle)
    batched = jedbatch.batch(fn)
    for seed in range(2):
        batched(W, instances_of(seed))
    minibatch = [instances_of(0)[k] for k in (0, 2, 4, 1, 3, 5)]  # each has its path in call 0
    check_known(batched, settle, ran, minibatch)


def parts(w, x):
    """The place of a part is data: it is when another place comes, in a later round."""
    h = jnp.tanh(w @ x)
    if h[0] > 0:
        return h + h[1]
    return h * h[2] if h[1] > 0 else -h


def test_places_of_parts_are_numbers_from_the_first_on():
    fn, ran = counted(parts)
    batched = jedbatch.batch(fn)
    minibatch = [x["start"] for x in instances_of(1, 8)]
    called(batched, W, minibatch, 2)
    check_known(batched, parts, ran, minibatch)


def turned(w, x):
    """Nothing is left to compute in the end, but for a result that is turned around."""
    h, steps = x, 0
    done = False
    while not done:
        h, done = shrink(w, h, 0.7)
        steps += 1
    return (-h, -steps) if h[0] < 0 else (h, steps)


def test_results_are_others_than_those_prepared():
    """While the round runs that is expected to be the last, what is returned is prepared."""
    batched = jedbatch.batch(turned)
    alike = [np.float32(s) * np.linalg.solve(W, np.ones(3)) for s in (0.1, 0.101, 0.102, 0.103)]
    alike = [x.astype(np.float32) for x in alike]
    for _ in range(5):
        assert_close(batched(W, alike), loop(turned, W, alike), 1e-5)
    assert len(batched.last_rounds) == 2
    for other in (-alike[0], -9 * alike[0], 9 * alike[2], np.zeros(3, np.float32)):
        for place in (0, 3):
            minibatch = [*alike]
            minibatch[place] = other
            assert_close(batched(W, minibatch), loop(turned, W, minibatch), 1e-5)
            assert_close(batched(W, alike), loop(turned, W, alike), 1e-5)


def test_results_are_prepared_once(monkeypatch):
    """Also where the last round reads bools and ints, which are of two arenas."""

    def read(w, h):
        h, place, is_positive = classify(w, h)
        return h, int(place) if is_positive else 3

    returned, results = [], Workspace.results
    monkeypatch.setattr(Workspace, "results", lambda *x: returned.append(x) or results(*x))
    batched, minibatch = jedbatch.batch(read), [np.full(3, s, np.float32) for s in (1, 2)]
    for _ in range(5):
        returned.clear()
        assert_close(batched(W, minibatch), loop(read, W, minibatch), 1e-5)
        assert len(returned) == 1


def from_zeros(w, x):
    """All instances read one array that is computed once."""
    h, steps = jnp.zeros(3), 0
    while steps < 4 and h[0] < 0.5:  # an index is another operation when it comes again
        h, steps = jnp.tanh(w @ (h + x)), steps + 1
    return h, steps


def test_python_does_not_run_where_constants_are_read():
    fn, ran = counted(from_zeros)
    batched = jedbatch.batch(fn)
    minibatch = [x["start"] for x in instances_of(0)]
    called(batched, W, minibatch, 4)
    ran.clear()
    minibatch = [x * 1.001 for x in minibatch[::-1]]
    assert_close(batched(W, minibatch), loop(from_zeros, W, minibatch), 1e-5)
    assert not ran


def test_rows_that_need_not_be_there():
    """An instance is not expected to look up what it might not."""
    table = jnp.arange(6.0).reshape(2, 3)
    look_up = cell(lambda table, row: table[row])

    def fn(w, instance):
        h = jnp.tanh(w @ instance["start"])
        if instance["row"] < 2:
            h = h + look_up(table, instance["row"])
            return -h if h.sum() > 0 else h
        return h

    batched = jedbatch.batch(fn)
    for seed in range(4):
        rows = [0, 1, 1, 0, 7 if seed == 3 else 1]
        found = zip(instances_of(seed)[:5], rows, strict=True)
        minibatch = [{**x, "row": np.asarray(row, np.int32)} for x, row in found]
        assert_close(batched(W, minibatch), loop(fn, W, minibatch), 1e-5)


class Labelled:
    """A result with something beside it that `==` does not compare to a bool."""

    def __init__(self, h, label):
        self.h, self.label = h, label


jax.tree_util.register_pytree_node(
    Labelled, lambda x: ((x.h,), x.label), lambda label, h: Labelled(h[0], label)
)


def test_results_that_are_not_compared():
    def fn(w, instance):
        h, done = shrink(w, instance["start"], 1.0)
        return Labelled(h, np.arange(2 if done else 3))

    batched = jedbatch.batch(fn, out_axes=None)
    for seed in range(4):
        minibatch = instances_of(seed)
        for x, found in zip(minibatch, batched(W, minibatch), strict=True):
            expected = fn(W, x)
            assert_close(found.h, expected.h, 1e-5)
            assert found.label.tolist() == expected.label.tolist()


def test_an_exact_guess_is_one_round(planned):
    """Each of them has a key of its own, and goes exactly as far as it did before."""
    batched = jedbatch.batch(settle)
    minibatch = [{"start": np.ones(3, np.float32), "by": by} for by in (0.3, 0.5, 0.9, 0.95)]
    called(batched, W, minibatch, 4)
    planned.clear()
    results = batched(W, minibatch)
    first, last = batched.last_rounds
    assert (first.instances, first.nodes, last.nodes) == (4, int(results["steps"].sum()), 0)
    assert first.used == first.foreseen == first.nodes - 4
    assert not planned


def test_one_that_leaves():
    """Python runs for it alone, and afterwards it is known."""
    fn, ran = counted(settle)
    batched = jedbatch.batch(fn)
    known = [{"start": np.full(3, s, np.float32), "by": 0.7} for s in (1, 1.1, 1.2)]
    called(batched, W, known, 4)
    known[1] = {"start": np.full(3, 1e-3, np.float32), "by": 0.7}
    for runs in (1, 0):
        ran.clear()
        assert_close(batched(W, known), loop(settle, W, known), 1e-5)
        assert len(ran) == runs


def test_errors_name_the_instance():
    def fn(w, instance):
        h, done = shrink(w, instance["start"], 1.0)
        if done:
            raise ValueError("too small")
        return h

    batched = jedbatch.batch(fn)
    minibatch = [{"start": np.ones(3, np.float32)} for _ in range(4)]
    called(batched, W, minibatch, 4)
    minibatch[2] = {"start": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match="too small") as caught:
        batched(W, minibatch)
    assert "in instance 2" in "".join(caught.value.__notes__)


def test_what_is_read_besides(monkeypatch):
    def fn(w, instance):
        h, done = shrink(w, instance["start"], SCALE)
        return (h if done else h * SCALE), SCALE

    batched = jedbatch.batch(fn)
    minibatch = instances_of(0)
    called(batched, W, minibatch, 4)
    for scale in (2.0, 1.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        assert_close(batched(W, minibatch), loop(fn, W, minibatch), 1e-5)


@dataclasses.dataclass(frozen=True)
class Factored:
    """A start, and a factor that all of its class have."""

    start: np.ndarray
    factor = 1.0


def test_classes_that_come_later(monkeypatch):
    """Objects read attributes of a class that no instance of the first call had."""

    def fn(w, instance):
        h, done = shrink(w, getattr(instance, "start", instance), 1.0)
        factor = getattr(instance, "factor", 0.5)
        return h * factor if done else h + factor

    batched = jedbatch.batch(fn)
    minibatch = [np.full(3, s, np.float32) for s in (1, 2)]
    called(batched, W, minibatch, 1)
    minibatch = [Factored(x) for x in minibatch]
    called(batched, W, minibatch, 4)
    for factor in (2.0, 3.0):
        monkeypatch.setattr(Factored, "factor", factor)
        assert_close(batched(W, minibatch), loop(fn, W, minibatch), 1e-5)


def test_what_varies_from_call_to_call():
    """A function that is not pure is run by Python every time."""
    numbers = itertools.count()

    def fn(w, instance):
        h, done = shrink(w, instance["start"], 1.0)
        return -h if done else h, next(numbers)

    batched, latest = jedbatch.batch(fn), -1
    for _ in range(6):
        found = batched(W, [{"start": np.ones(3, np.float32)}])[1].tolist()
        assert found[0] > latest
        latest = found[0]


def test_calls_that_vary_from_call_to_call():
    """Nor is it pure if it does more in every other call, though all of that was met before."""
    numbers = itertools.count()

    def fn(w, instance):
        h, done = shrink(w, instance["start"], 1.0)
        if next(numbers) % 2:
            h, _ = shrink(w, h, 1.0)
        return -h if done else h

    batched, minibatch = jedbatch.batch(fn), [{"start": np.ones(3, np.float32)}]
    found = np.array([batched(W, minibatch)[0] for _ in range(8)])
    assert_close(found[2:], found[:-2], 1e-6)
    assert (np.abs(found[1:] - found[:-1]).max(axis=1) > 1e-3).all()


def floats(w, instance):
    """A number that Python made of a value is data."""
    h, _ = shrink(w, instance["start"], 1.0)
    return h * float(h[0])


def on_shared(w, instance):
    h, done = shrink(w, instance["start"], 1.0)
    return h if w[0, 0] > 0 and not done else -h


@pytest.mark.parametrize("fn", [floats, on_shared])
def test_what_has_no_paths(fn):
    batched = jedbatch.batch(fn)
    for seed in range(5):
        minibatch, w = instances_of(seed), W if seed % 2 else -W
        assert_close(batched(w, minibatch), loop(fn, w, minibatch), 1e-5)


def test_gradients():
    batched, minibatch = jedbatch.batch(settle), instances_of(1)
    called(batched, W, minibatch, 4)
    found = jax.grad(lambda w: (batched(w, minibatch)["h"] ** 2).sum())(W)
    expected = jax.grad(lambda w: (loop(settle, w, minibatch)["h"] ** 2).sum())(W)
    assert_close(found, expected, 1e-4)


def test_what_must_not_run_on_other_values():
    """A loop on the device might not end on them: there is a round for every decision."""

    @cell
    def halve(h):
        h = jax.lax.while_loop(lambda h: h.max() > 1, lambda h: h / 2, h) * 1.5
        return h, h.sum() < 3.2

    def fn(w, instance):
        h, done, steps = instance["start"], False, 0
        while not done and steps < 4:
            (h, done), steps = halve(h), steps + 1
        return h, steps

    batched, minibatch = jedbatch.batch(fn), instances_of(2)
    called(batched, W, minibatch, 4)
    assert_close(batched(W, minibatch), loop(fn, W, minibatch), 1e-5)
    assert not any(r.ahead for r in batched.last_rounds)


def test_with_debug_nans():
    batched, minibatch = jedbatch.batch(settle), instances_of(3)
    called(batched, W, minibatch, 4)
    with jax.debug_nans(True):
        assert_close(batched(W, minibatch), loop(settle, W, minibatch), 1e-5)
    assert not any(r.ahead for r in batched.last_rounds)


def test_what_is_kept_is_bounded(monkeypatch):
    fn, ran = counted(settle)
    minibatch = [{"start": np.ones(3, np.float32), "by": by} for by in (0.3, 0.5, 0.9)]
    batched = jedbatch.batch(fn, cache_size=2)  # instances
    called(batched, W, minibatch, 4)
    ran.clear()
    assert_close(batched(W, minibatch), loop(settle, W, minibatch), 1e-5)
    assert ran
    monkeypatch.setattr(known_paths, "MAX_BYTES", 1)
    batched = jedbatch.batch(fn)
    called(batched, W, minibatch, 4)
    ran.clear()
    assert_close(batched(W, minibatch), loop(settle, W, minibatch), 1e-5)
    assert len(ran) == 3


def segment_that_asks(value):
    nothing = np.zeros(0, np.int64)
    return PathSegment((0, 0), Written(nothing, nothing, nothing, [], 0), nothing, value)


def guess_of_a_loop(length):
    """The expectations of a loop of so many steps, which needs nothing of programs."""
    path = [segment_that_asks(k) for k in range(length)]
    for before, after in itertools.pairwise(path):
        before.after = {1: segment_that_asks(None), 0: after}
    programs = types.SimpleNamespace(registry=Registry((), jax.tree.structure(())))
    return Guess(path[0], programs), programs


@pytest.mark.parametrize("seed", range(6))
def test_rounds_that_cost_least(seed):
    """Against all ways to cut a loop into rounds: work for nothing, and rounds that come."""
    rng = np.random.default_rng(seed)
    guess, _ = guess_of_a_loop(10)
    guess.stops = rng.integers(0, 4, 10).tolist()
    guess._work = [0.0, *rng.uniform(1, 3, 9)]
    instances, round_work = int(rng.integers(1, 9)), float(rng.choice([2.0, 20.0]))
    begun = np.append(np.cumsum(guess.stops[::-1])[::-1] / sum(guess.stops), 0) * instances

    def cost(cuts):
        ran = sum(
            (begun[a] if a else instances) * sum(guess._work[a:b])
            for a, b in itertools.pairwise([0, *cuts])
        )
        return ran + round_work * sum(1 - np.exp(-begun[b]) for b in cuts)

    sizes = [size for size in known_paths.SIZES if size < 10]
    cuts = [(*x, 10) for n in range(len(sizes) + 1) for x in itertools.combinations(sizes, n)]
    found = guess.size_worth(instances, round_work)
    least = min(map(cost, cuts))
    assert min(cost(x) for x in cuts if x[0] == found) == pytest.approx(least)


def test_most_answers_are_expected():
    """Not the first ones, and what was noted before the place where they differ is kept."""
    guess, programs = guess_of_a_loop(6)
    first = guess.path[0]
    guess.note(2, 1)
    for place in (5, 5, 1, 5):
        guess.note(place, 1 if place < 5 else None)
    first.guess = guess
    guess.settle(programs)
    assert first.guess is guess
    for _ in range(known_paths.FEW_USES + 2 * 3):
        guess.note(2, 1)
    guess.settle(programs)
    assert first.guess.answers == [0, 0, 1]
    assert first.guess.stops == [0, 1, 3, 11]


def test_paths_that_do_not_come_again_are_forgotten():
    """Otherwise what ran along them would be for nothing in every call."""
    known = KnownPaths(segment_that_asks(None), calls=known_paths.MIN_CALLS)
    for _ in range(known_paths.MAX_BALANCE):
        known.note(done=True)
        known.note(done=False)
    assert known.is_sure
    for _ in range(2 * known_paths.MAX_BALANCE + 1):
        known.note(done=False)
    assert not known.is_sure
    assert not known.learns
