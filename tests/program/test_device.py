"""On an accelerator: values and gradients are the loop's, in float32 with highest precision.

These tests are left out unless they are asked for, `pytest -m device`, which `benchmarks/gpu.py`
does on the device there is. Programs for GPUs are tested on the CPU too, in `test_target.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check

import jedbatch
from jedbatch import ragged
from jedbatch.data import END, as_arrays
from jedbatch.models import WORKLOADS, deepsets, transformer

pytestmark = pytest.mark.device
HIDDEN = 8
RTOL = 5e-5


@pytest.fixture(autouse=True)
def _highest():
    with jax.default_matmul_precision("highest"):
        yield


def judged(fn, params, instances, **options):
    return check(fn, params, instances, rtol=RTOL, target="gpu", **options)


@pytest.mark.parametrize("name", WORKLOADS, ids=lambda name: f"{name}-")
def test_models(name):
    workload = WORKLOADS[name]
    instances, sizes = workload.load(limit=5)
    cells = workload.cells(hidden=HIDDEN, **sizes)
    params = cells.init(jax.random.key(0))
    instances = sorted(instances, key=lambda x: len(str(x)))[:3]
    judged(workload.scorer(cells), params, instances)


SIZES = {"hidden": HIDDEN, "heads": 2, "layers": 1, "max_length": 64}
ROWS = {
    "tagger": (
        transformer.flax_encoder(6, 3, **SIZES),
        transformer.tagger,
        as_arrays([((3, 1, 4), (0, 2, 1)), ((5, 0), (1, 1)), ((2, 2, 1, 0), (0, 0, 2, 1))]),
    ),
    "translator": (
        transformer.flax_encoder_decoder(6, 5, **SIZES),
        transformer.translator,
        as_arrays([((3, 1, 4), (2, END)), ((5, 0), (4, 2, END)), ((0, 2, 1, 3), (3, END))]),
    ),
    "sets": (
        deepsets.flax_model(2, 3, 4, layers=1, pool=jnp.mean),
        deepsets.scorer,
        [(np.linspace(0, 1, 2 * n, dtype=np.float32).reshape(n, 2), np.int32(1)) for n in (3, 1)],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_models_of_rows(name):
    model, function, instances = ROWS[name]
    fn = function(model)
    judged(fn, model.init(jax.random.key(0)), instances, alone=jax.jit(fn))


def test_attention_between_rows_of_any_length():
    def attend(params, x):
        rows = x @ params
        return ragged.attention(rows[:, None], rows[:, None], rows[:, None]).sum((0, 1))

    rng = np.random.default_rng(0)
    sentences = [rng.normal(size=(n, 6)).astype(np.float32) for n in (3, 9, 4, 17, 1)]
    judged(attend, jnp.asarray(rng.normal(size=(6, 6)), jnp.float32), sentences)


@jedbatch.cell
def leaf(params, x):
    return jnp.tanh(params["w"] * x)


@jedbatch.cell
def node(params, left, right):
    return jnp.tanh(jnp.concatenate([left, right]) @ params["u"])


def encode(params, tree):
    if isinstance(tree, float):
        return leaf(params, tree)
    return node(params, encode(params, tree[0]), encode(params, tree[1]))


TREES = [((0.1, 0.2), 0.3), (0.4, (0.5, (0.6, 0.7))), (0.8, 0.9), 1.0]


@pytest.fixture
def params():
    keys = jax.random.split(jax.random.key(0))
    return {"w": jax.random.normal(keys[0], (4,)), "u": jax.random.normal(keys[1], (8, 4))}


def test_lazy_scope(params):
    def loss(params):
        with jedbatch.lazy():
            states = [encode(params, tree) for tree in TREES]
        return jnp.stack(states).sum()

    def loop(params):
        return jnp.stack([encode(params, tree) for tree in TREES]).sum()

    assert_close(jax.value_and_grad(loss)(params), jax.value_and_grad(loop)(params), RTOL)


def test_decisions_on_values(params):
    def settle(params, tree):
        state = encode(params, tree)
        for _ in range(4):
            if jnp.abs(state).max() < 0.6:
                break
            state = node(params, state, -0.5 * state)
        return state

    judged(settle, params, TREES, plans=False)


@jedbatch.cell
def spin(params, n, x):
    """A loop whose trips the number says, in one of as many."""

    def inner(state):
        return state[0] - 1, jnp.tanh(state[1] @ params["u"][:4]) + 0.1

    def outer(state):
        i, x = state
        return i + 1, jax.lax.while_loop(lambda s: s[0] > 0, inner, (i * n % 5, x))[1]

    return jax.lax.while_loop(lambda s: s[0] < n, outer, (0, x))[1]


@jedbatch.cell
def settle(params, n, x):
    """A loop whose trips the number says."""
    step = lambda s: (s[0] - 1, jnp.tanh(s[1] @ params["u"][4:]))  # noqa: E731
    return jax.lax.while_loop(lambda s: s[0] > 0, step, (n, x))[1]


@jedbatch.cell
def choose(params, n, x):
    branches = [lambda x, k=k: jnp.tanh(x @ params["u"][k : k + 4]) for k in range(4)]
    return jax.lax.switch(n, branches, x)


def numbers_and_vectors(count):
    rng = np.random.default_rng(0)
    numbers = rng.geometric(1 / 4, count).tolist()
    return list(zip(numbers, rng.normal(size=(count, 4)).astype(np.float32), strict=True))


@pytest.mark.parametrize("cell", [spin, settle, choose], ids=["nest", "loop", "branches"])
def test_what_does_not_run_in_lock_step(params, cell):
    """Alone, and where results feed the next loop, in minibatches of many widths."""

    def twice(params, given):
        n, x = given
        return cell(params, n, cell(params, n % 3, x)) if n % 2 else cell(params, n, x)

    given = numbers_and_vectors(700)
    batched = jedbatch.batch(twice, target="gpu", control_flow="lanes")
    theirs = jax.jit(jax.vmap(lambda n, x: twice_by_value(params, cell, n, x)))
    expected = theirs(jnp.asarray([n for n, _ in given]), jnp.stack([x for _, x in given]))
    for count in (700, 90, 3):
        assert_close(batched(params, given[:count]), expected[:count], RTOL)


def twice_by_value(params, cell, n, x):
    first = jnp.where(n % 2 == 1, cell(params, n % 3, x), x)
    return cell(params, n, first)


def test_branches_are_differentiated(params):
    judged(lambda params, given: choose(params, *given), params, numbers_and_vectors(40))


def test_graphs(params):
    """Rows read and added up by index, of graphs of any size."""

    def network(params, graph):
        x, source, target = graph
        sent = jnp.tanh(x @ params["u"][:4])[source]
        received = jax.ops.segment_sum(sent, target, x.shape[0])
        return jnp.tanh(received @ params["u"][4:]).sum(0)

    rng = np.random.default_rng(0)
    graphs = []
    for n, e in [(3, 7), (9, 30), (1, 0), (40, 200), (6, 5)]:
        ends = rng.integers(0, n, (2, e)).astype(np.int32)
        graphs.append((rng.normal(size=(n, 4)).astype(np.float32), *ends))
    judged(network, params, graphs)


def test_types_that_a_minibatch_lacks(params):
    batched = jedbatch.batch(encode, target="gpu")
    batched.plan(params, TREES)
    slope = jax.grad(lambda p, plan: batched.apply(p, plan).sum())
    found = slope(params, batched.plan(params, [1.0] * 4))
    assert_close(found, jax.grad(lambda p: 4 * encode(p, 1.0).sum())(params), RTOL)


def test_rows_are_used_again(params):
    judged(encode, params, TREES, reuse=True)


def test_arenas_are_handed_from_call_to_call(params):
    """More than the bytes above which arenas are donated."""
    wide = {"w": jnp.ones(2048) / 2, "u": jnp.ones((4096, 2048)) / 4096}
    batched = jedbatch.batch(encode, target="gpu")
    trees = [TREES[i % 4] for i in range(64)]
    plan = batched.plan(wide, trees, gradient=False)
    expected = jnp.stack([encode(wide, tree) for tree in TREES])
    for _ in range(3):
        assert_close(batched.apply(wide, plan)[:4], expected, RTOL)


def test_results_of_both_targets_agree(params):
    sides = [jedbatch.batch(encode, target=name)(params, TREES) for name in ("cpu", "gpu")]
    assert_close(*sides, RTOL)
