"""Plans made in a thread, against those made one after the other."""

import gc
import queue
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.totals import W, assert_no_planning_threads, total

import jedbatch


def weighed(w, tree, weight):
    return weight * total(w, tree)


MINIBATCHES = [[(1.0, 2.0), ((3.0, 4.0), 5.0)], [6.0, (7.0, (8.0, 9.0))], [((1.0, 2.0), 3.0)]]


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_plans_are_those_made_one_by_one(ahead):
    batched, other = jedbatch.batch(total), jedbatch.batch(total)
    plans = list(batched.plans(W, MINIBATCHES, ahead=ahead))
    assert len(plans) == len(MINIBATCHES)
    for plan, minibatch in zip(plans, MINIBATCHES, strict=True):
        expected = other.plan(W, minibatch)
        np.testing.assert_array_equal(plan.table, expected.table)
        np.testing.assert_array_equal(plan.reverse_table, expected.reverse_table)
        loop = jnp.stack([total(W, tree) for tree in minibatch])
        np.testing.assert_allclose(batched.apply(W, plan), loop, rtol=1e-6)
    assert_no_planning_threads()


def test_minibatches_of_several_arguments():
    batched = jedbatch.batch(weighed, in_axes=(None, 0, 0))
    weights = [[1.0, 2.0], [3.0, 4.0], [5.0]]
    plans = batched.plans(W, iter(MINIBATCHES), (x for x in weights), gradient=False)
    for plan, trees, of_trees in zip(plans, MINIBATCHES, weights, strict=True):
        loop = [weighed(W, *both) for both in zip(trees, of_trees, strict=True)]
        np.testing.assert_allclose(batched.apply(W, plan), jnp.stack(loop), rtol=1e-6)
    with pytest.raises(ValueError, match="different numbers of minibatches"):
        list(batched.plans(W, MINIBATCHES, weights[:2]))


def test_no_more_is_read_than_asked_for():
    taken = []

    def minibatches():
        for i in range(100):
            taken.append(i)
            yield [float(i)]

    plans = jedbatch.batch(total).plans(W, minibatches(), ahead=3)
    assert not taken
    next(plans)
    for _ in range(100):
        if len(taken) == 4:
            break
        time.sleep(0.05)
    time.sleep(0.1)
    assert len(taken) == 4  # the one that was asked for and three ahead
    plans.close()
    assert_no_planning_threads()
    assert len(taken) <= 5


@pytest.mark.parametrize("ahead", [0, 2])
def test_errors_come_in_their_turn(ahead):
    wrong = [*MINIBATCHES[:2], [1.0, "word"], MINIBATCHES[2]]
    plans = jedbatch.batch(total).plans(W, wrong, ahead=ahead)
    next(plans)
    next(plans)
    with pytest.raises(TypeError) as caught:
        next(plans)
    notes = "\n".join(caught.value.__notes__)
    assert "instance 1 was recorded" in notes
    assert "minibatch 2 was planned" in notes
    assert_no_planning_threads()


def test_errors_of_what_is_read():
    def minibatches():
        yield MINIBATCHES[0]
        raise OSError("no such file")

    plans = jedbatch.batch(total).plans(W, minibatches())
    next(plans)
    with pytest.raises(OSError, match="no such file"):
        next(plans)


def test_python_ends_while_plans_are_made():
    code = """if True:
        import jedbatch
        def total(w, tree):
            return w * tree if isinstance(tree, float) else total(w, tree[0]) + total(w, tree[1])
        def minibatches():
            tree = 1.0
            for _ in range(500):
                tree = tree, 2.0
                yield [tree] * 9
        plans = jedbatch.batch(total).plans(2.0, minibatches(), ahead=9)
        print(next(plans).graph.num_instances)
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "9\n"), run.stderr


@pytest.mark.parametrize("ahead", [0, 1])
def test_it_is_planned_as_jax_is_configured_where_it_is_called(ahead):
    batched = jedbatch.batch(total)
    with jax.enable_x64(True):
        wide = jnp.ones(3, jnp.float64)
        plans = batched.plans(wide, MINIBATCHES[:1], ahead=ahead)
    (plan,) = plans
    with jax.enable_x64(True):
        assert batched.apply(wide, plan).dtype == jnp.float64


@pytest.mark.parametrize("ahead", [0, 2])
def test_the_iterator_ends_with_an_error(ahead):
    def stops(w, number):
        if number == 1.0:
            raise StopIteration
        return w * number

    plans = jedbatch.batch(stops).plans(W, [[0.0], [1.0], [2.0]], ahead=ahead)
    next(plans)
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(plans)
    assert not list(plans)


def test_closing_does_not_wait():
    """Neither for data that never comes, nor for a lock that is held where it is closed."""
    data = queue.SimpleQueue()
    data.put([1.0])
    batched = jedbatch.batch(total)
    for plan in batched.plans(W, iter(data.get, None)):
        assert batched.apply(W, plan).shape == (1, 3)
        break
    data.put(None)
    assert_no_planning_threads()

    kept = types.SimpleNamespace(plans=batched.plans(W, MINIBATCHES * 20))
    kept.circle = kept
    next(kept.plans)
    del kept

    def collects(frontier):
        gc.collect()
        return jedbatch.policies.agenda(frontier)

    batched.policy = collects
    assert batched(W, MINIBATCHES[1]).shape == (2, 3)
    assert_no_planning_threads()


def test_training_while_plans_are_made():
    batched = jedbatch.batch(total)

    @jax.jit
    def step(w, plan):
        loss, gradient = jax.value_and_grad(lambda w: batched.apply(w, plan).sum())(w)
        return w - 0.1 * gradient, loss

    w, expected = W, W
    for plan, minibatch in zip(batched.plans(W, MINIBATCHES), MINIBATCHES, strict=True):
        w, _ = step(w, plan)
        expected -= 0.1 * jax.grad(lambda w, m=minibatch: sum(total(w, t).sum() for t in m))(
            expected
        )
    np.testing.assert_allclose(w, expected, rtol=1e-5)


def test_bad_arguments():
    batched = jedbatch.batch(total)
    with pytest.raises(TypeError, match="expected an iterable of minibatches"):
        batched.plans(W, 3)
    with pytest.raises(TypeError, match="For a single minibatch write `plan`"):
        batched.plans(W, {"x": [1.0]})
    with pytest.raises(ValueError, match="got 1 arguments"):
        batched.plans(W)
    with pytest.raises(ValueError, match="ahead=-1"):
        batched.plans(W, MINIBATCHES, ahead=-1)
    with pytest.raises(TypeError, match="gradient"):
        batched.plans(W, MINIBATCHES, gradient="yes")
    with pytest.raises(TypeError, match="minibatch") as caught:
        list(batched.plans(W, [1.0, 2.0]))
    assert "minibatch 0" in caught.value.__notes__[-1]
