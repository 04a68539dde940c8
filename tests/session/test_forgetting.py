"""Node types that are not used leave the programs that are compiled."""

import jax
import jax.numpy as jnp
import pytest
from cases.helpers import assert_close, loop

import jedbatch
from jedbatch._session.programs import types_in_use

P = jnp.arange(1.0, 4.0)
STEPS = [jedbatch.cell(lambda p, x, k=k: sum([p] * k, x + p), name=f"step{k}") for k in range(30)]
ROW = jedbatch.cell(lambda p, i: p * i, name="row")


def walk(p, instance):
    """Rows, and a step of each kind that the instance names."""
    start, kinds = instance
    h = ROW(p, start)
    for k in kinds:
        h = STEPS[k](p, h)
    return h


def names(plan):
    return {kernel.node_type.name for kernel in plan.static.signature.kernels}


def minibatch(*kinds):
    return [(i, kinds) for i in range(3)]


@pytest.mark.filterwarnings("ignore:6 minibatches in a row")
def test_types_of_every_minibatch_its_own():
    """Programs do not grow; going back to minibatches compiles nothing."""
    batched = jedbatch.batch(walk)
    sizes = []
    minibatches = [minibatch(*range(2 * i, 2 * i + 2)) for i in range(15)]
    for instances in minibatches:
        plan = batched.plan(P, instances)
        assert names(plan) >= {"row", *(f"step{k}" for k in instances[0][1])}
        sizes.append(len(names(plan)))
    assert max(sizes) == sizes[-1] == sizes[8]
    assert max(sizes) <= 3 + types_in_use.FEW_TYPES
    forms = [jax.tree.structure(batched.plan(P, instances)) for instances in minibatches]
    assert forms == [jax.tree.structure(batched.plan(P, x)) for x in minibatches]
    assert len(set(forms)) <= len(minibatches)


def test_alternating_minibatches_compile_once(monkeypatch):
    monkeypatch.setattr(types_in_use, "FEW_TYPES", 1)
    batched = jedbatch.batch(walk)
    minibatches = [minibatch(k) for k in range(4)]

    def run(instances):
        found = jax.value_and_grad(lambda p: batched(p, instances).sum())(P)
        expected = jax.value_and_grad(lambda p: loop(walk, p, instances).sum())(P)
        assert_close(found, expected, 1e-5)

    for instances in minibatches:
        run(instances)
    assert len(names(batched.plan(P, minibatches[3]))) < 5
    before = batched.compilations
    for instances in [*minibatches, *reversed(minibatches)]:
        run(instances)
    assert batched.compilations == before


@pytest.mark.filterwarnings("ignore:6 minibatches in a row")
def test_types_that_come_back_stay():
    """Few of many types in each minibatch: programs are made until one has all, then none."""
    batched = jedbatch.batch(walk)
    num_types = 3 * types_in_use.FEW_TYPES

    def some(i):
        return minibatch(*sorted({(5 * i + 7 * j) % num_types for j in range(3)}))

    forms = [jax.tree.structure(batched.plan(P, some(i))) for i in range(4 * num_types)]
    assert len(set(forms)) <= num_types
    assert set(forms[num_types:]) <= set(forms[:num_types])


def test_types_not_used_for_long_leave(monkeypatch):
    monkeypatch.setattr(types_in_use, "LONG_AGO", 10)
    batched = jedbatch.batch(walk)
    for sizes in (1, 2):  # two programs have them
        batched.plan(P, [(0, (1, 2))] * (100 * sizes))
        batched.plan(P, [(0, (1, 2))] * 100 * sizes)
    for _ in range(12):
        batched.plan(P, minibatch(3))
    assert names(batched.plan(P, minibatch(4))) == {"row", "step3", "step4"}


def test_what_was_warmed_stays():
    batched = jedbatch.batch(walk)
    kinds = range(3 * types_in_use.FEW_TYPES)
    batched.warm(P, minibatch(*kinds), batch_size=3, calls=False)
    plan = batched.plan(P, minibatch(29))
    assert names(plan) == {"row", "step29", *(f"step{k}" for k in kinds)}
