"""The benchmarks' workloads: all that is timed computes the same."""

import functools
import sys
from pathlib import Path

import helpers
import jax
import jax.numpy as jnp
import pytest

import jedbatch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("benchmarks are not installed", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import by_hand  # noqa: E402
from workloads import WORKLOADS  # noqa: E402

H = 4
COUNT = 2


def small(name):
    """(instances, parameters): a few short instances of a workload."""
    workload = WORKLOADS[name]
    bank = workload.load(None, 24)
    instances = sorted(bank.instances, key=lambda x: len(str(x)))[2 : 2 + COUNT]
    params = workload.parameters(bank.sizes, H)
    keys = jax.random.split(jax.random.key(1), len(params))
    noise = zip(params.items(), keys, strict=True)
    return instances, {n: x + 0.1 * jax.random.normal(key, x.shape) for (n, x), key in noise}


def value_and_gradient(loss, params):
    with jax.numpy_rank_promotion("allow"):  # rows and biases
        return jax.value_and_grad(loss)(params)


@pytest.fixture(params=WORKLOADS, scope="module")
def case(request):
    """(name, instances, parameters, loss and gradient of the loop)."""
    instances, params = small(request.param)
    loss = WORKLOADS[request.param].loss
    expected = value_and_gradient(lambda p: sum(loss(p, x) for x in instances), params)
    return request.param, instances, params, expected


def test_jedbatch_is_the_loop(case):
    name, instances, params, expected = case
    batched = jedbatch.batch(WORKLOADS[name].loss)
    got = value_and_gradient(lambda p: batched(p, instances).sum(), params)
    helpers.assert_close(got, expected, 1e-4)


def test_by_hand_is_the_loop(case):
    name, instances, params, expected = case
    prepared = by_hand.prepare(name, instances)
    run = jax.jit(by_hand.loss(name))
    got = value_and_gradient(lambda p: run(p, prepared), params)
    helpers.assert_close(got, expected, 1e-4)


def test_torch_is_the_loop(case):
    pytest.importorskip("torch")
    import in_torch

    name, instances, params, expected = case
    sides = [lambda p: in_torch.eager(name)(p, instances)]
    if name == "bilstm_chars":
        with pytest.raises(ValueError, match="no form batched by hand"):
            in_torch.prepare(name, instances)
    else:
        prepared = in_torch.prepare(name, instances)
        sides.append(lambda p: in_torch.by_hand(name)(p, prepared))
    for side in sides:
        tensors = in_torch.parameters(params)
        loss = side(tensors)
        loss.backward()
        slope = {n: jnp.asarray(x.grad.numpy()) for n, x in tensors.items() if x.grad is not None}
        assert slope.keys() == params.keys()
        helpers.assert_close((jnp.asarray(loss.item()), slope), expected, 1e-4)


# h² operations of an instance: 19.1 leaves; 23 words; 44.1 characters and 23.3 words
PEERS = {"treelstm": 405, "bilstm": 1564, "lattice_lstm": 1064}


@pytest.mark.parametrize("name", PEERS)
def test_operations_are_the_peers(name):
    """Ten instances with, together, ten times the mean size."""
    expected = PEERS[name]
    if name == "treelstm":
        lengths = [19] * 9 + [20]
        instances = [functools.reduce(lambda a, b: (0, a, b), [(0, 0)] * n) for n in lengths]
    elif name == "bilstm":
        instances = [((0,) * 23, (0,) * 23)] * 10
    else:
        counts = zip([44] * 9 + [45], [23] * 7 + [24] * 3, strict=True)
        instances = [((0,) * n, ((0, 2, 0),) * words, (0,) * n) for n, words in counts]
    h = 256
    assert WORKLOADS[name].flop(instances, h) / 10 / h**2 == pytest.approx(expected, rel=0.02)
