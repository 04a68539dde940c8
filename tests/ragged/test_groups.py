"""Groups of calls that run without loops: the cheapest, with a slot for every call."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import check, compilations

import jedbatch
from jedbatch import ragged, testing
from jedbatch._ragged import groups as _groups
from jedbatch._ragged.groups import (
    LEAST_SAVED,
    MAX_LENGTH_STEP,
    LengthCosts,
    find_groups,
    fitted_lengths,
    pairs_in,
    row_lengths,
    slots_of,
)

GPU = jedbatch.Target.named("gpu")
W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)) / 2, jnp.float32)


def lengths_like(seed, count=40, most=200):
    return np.random.default_rng(seed).integers(0, most, count)


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_the_cheapest(seed, monkeypatch):
    monkeypatch.setattr(_groups, "START_PAIRS", 3000 * 10**seed)
    longest = lengths_like(seed, most=96)
    rounded = np.maximum(16, -(-longest // 16) * 16)
    present = np.unique(rounded).tolist()
    found = []
    for n in range(len(present)):
        for cuts in itertools.combinations(present[:-1], n):
            bounds = [0, *cuts, present[-1]]
            calls = [
                int(((rounded > a) & (rounded <= b)).sum()) for a, b in itertools.pairwise(bounds)
            ]
            slots = [8 * -(-int(1.25 * k) // 8) for k in calls]
            pairs = sum(b * b * s for b, s in zip(bounds[1:], slots, strict=True))
            found.append(pairs + len(slots) * _groups.START_PAIRS)
    groups = find_groups(longest, 0)
    assert pairs_in(groups) + len(groups[0]) * _groups.START_PAIRS == min(found)


def test_lengths_of_programs():
    assert row_lengths(8, 50, 1) == (8, 16, 32, 64)
    assert row_lengths(8, 75, 4) == (8, 16, 24, 32, 40, 48, 56, 64, 80)
    assert fitted_lengths(np.array([3, 5, 2]), 8, LengthCosts(2, 2, 0.2)) == (8, 16)
    assert fitted_lengths(np.array([0]), 8, LengthCosts(2, 2, 0.2)) == (8,)
    assert fitted_lengths(np.array([1000, 999]), 8, LengthCosts(1, 2, 0.2)) == (32, 128, 512, 1024)


@pytest.mark.parametrize(("power", "saving"), [(2, 0.2), (3, 0.1)])
@pytest.mark.parametrize("seed", range(4))
def test_lengths_fit_the_calls(seed, power, saving, monkeypatch):
    """No others of those to choose from cost less; what comes later is not padded to much more."""
    longest = lengths_like(seed, most=60 + 40 * seed)
    lengths = fitted_lengths(longest, 8, LengthCosts(1.5, power, saving))
    grid = row_lengths(8, 1.5 * longest.max(), 8)
    assert lengths[-1] == grid[-1]
    assert all(b <= MAX_LENGTH_STEP * a for a, b in itertools.pairwise((8, *lengths)))
    monkeypatch.setattr(_groups, "MAX_LENGTH_STEP", 1000)
    rounded = np.array(grid)[np.searchsorted(grid, longest)]
    present = np.unique(rounded).tolist()
    least = max(LEAST_SAVED, saving * float((rounded.astype(float) ** power).sum()))

    def cost(chosen):
        padded = np.array(chosen)[np.searchsorted(chosen, longest)]
        return float((padded.astype(float) ** power).sum()) + least * len(chosen)

    some = range(min(4, len(present)))
    options = [(*x, present[-1]) for n in some for x in itertools.combinations(present[:-1], n)]
    *fitted, _ = fitted_lengths(longest, 8, LengthCosts(1.5, power, saving))
    assert cost(fitted) <= min(map(cost, options)) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_every_call_has_a_slot(seed):
    longest = lengths_like(seed)
    lengths, sizes = groups = find_groups(longest, 320)
    slots = slots_of(longest, groups)
    assert len(set(slots.tolist())) == len(longest)
    begins = np.repeat(lengths, sizes)
    assert (longest <= begins[slots]).all()


def test_what_does_not_fit():
    groups = ((16, 64), (2, 1))
    assert slots_of(np.array([3, 16, 20]), groups).tolist() == [0, 1, 2]
    assert slots_of(np.array([1, 2, 3]), groups).tolist() == [0, 1, 2]  # a longer one is free
    assert slots_of(np.array([1, 20, 20]), groups) is None
    assert slots_of(np.array([65]), groups) is None
    assert slots_of(np.array([], int), groups).tolist() == []


def attend(params, x):
    rows = x @ params
    return jnp.tanh(ragged.attention(rows, rows, rows, causal=True) @ params).mean(0)


def sentences(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, 4)).astype(np.float32) for n in lengths]


def test_values_and_gradients_are_the_loops(monkeypatch):
    monkeypatch.setenv("JEDBATCH_CHECK", "1")
    monkeypatch.setattr(_groups, "START_PAIRS", 0)  # groups of several lengths
    monkeypatch.setattr(_groups, "SLOT_STEP", 1)
    lengths = [1, 3, 40, 17, 2, 90, 16]
    batched = check(attend, W, sentences(lengths), target="gpu", alone=jax.jit(attend))
    plan = batched.plan(W, sentences(lengths))
    (stage,) = plan.static.stages
    assert len(stage.capacity.slots) > 2


def test_there_are_no_loops():
    """But for the one over the instructions of what follows."""

    def loops(target):
        batched = jedbatch.batch(attend, target=target)
        plan = batched.plan(W, sentences([3, 9, 4]))
        run = jax.jit(jax.grad(lambda p, plan: batched.apply(p, plan).sum()))
        return run.lower(W, plan).as_text().count("stablehlo.while")

    assert loops("gpu") == 0
    assert loops(dataclasses.replace(GPU, name="loops", straight_rows=0)) > 6


def test_other_lengths_compile_nothing():
    batched = jedbatch.batch(attend, target="gpu")
    run = jax.jit(batched.apply)
    lengths = np.random.default_rng(0).integers(3, 30, (6, 20))
    for some in (lengths[0], [30] * 20):
        run(W, batched.plan(W, sentences(some)))
    with compilations() as compiled:
        for some in lengths[1:]:
            run(W, batched.plan(W, sentences(some)))
    assert not compiled


@pytest.mark.slow
def test_too_much_at_once_runs_in_loops():
    """And what follows, if it is little, does not."""
    small = dataclasses.replace(GPU, name="small", straight_rows=1024)
    batched = jedbatch.batch(attend, target=small)
    for lengths, straight in (([5, 9], True), ([500, 3], False), ([7, 20, 2], True)):
        xs = sentences(lengths)
        (stage,) = batched.plan(W, xs).static.stages
        assert bool(stage.capacity.slots) == straight
        expected = jnp.stack([attend(W, x) for x in xs])
        np.testing.assert_allclose(batched(W, xs), expected, rtol=1e-5, atol=1e-6)


def test_what_is_wrong_is_found():
    batched = jedbatch.batch(attend, target="gpu")
    plan = batched.plan(W, sentences([3, 9, 4]))
    testing.check_plan(plan)
    (stage,) = plan.static.stages
    table = plan.ragged[0][0].copy()
    order = stage.region.packed.form(stage.capacity).view(table, "order")
    order[order == 0] = 1  # a call twice, and one not at all
    broken = jedbatch.Plan(
        plan.static, plan.table, plan.reverse_table, plan.inputs, ((table,), plan.ragged[1])
    )
    with pytest.raises(AssertionError, match="not a valid plan"):
        testing.check_plan(broken)
