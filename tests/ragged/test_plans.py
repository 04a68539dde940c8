"""Plans of ragged instances: arranged once for minibatches that differ in lengths and numbers."""

import dataclasses
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jedbatch
from jedbatch._kernel.target import CPU
from jedbatch._layout.bucketing import Buckets, blocks_of, in_blocks
from jedbatch._ragged.packed_program import PackedProgram
from jedbatch._ragged.packing import RowCapacity, whole_blocks
from jedbatch._ragged.phases import find_phases
from jedbatch._ragged.row_phase import RowArguments, RowFunction
from jedbatch._session.plans import pipeline
from jedbatch._session.records.arguments import TypesOfLeaves

W = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32) / 2
WEIGHTS = {"w": W, "classes": W[:3] * 2}


@pytest.fixture
def arranged(monkeypatch):
    """The numbers of instances of minibatches that were arranged."""
    sizes = []
    arrange = pipeline.arrange

    def noting(minibatch, *args):
        sizes.append(len(minibatch.records))
        return arrange(minibatch, *args)

    monkeypatch.setattr(pipeline, "arrange", noting)
    return sizes


def loss(weights, instance):
    x, label = instance
    state = jax.nn.softmax(x @ weights["w"] @ x.T) @ x
    return -jax.nn.log_softmax(weights["classes"] @ state.sum(axis=0))[label]


def instances(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(n, 4)).astype(np.float32), np.int32(rng.integers(3))) for n in lengths
    ]


def compare(batched, fn, minibatch, gradient=True):
    """Values, and gradients of their sum, are those of the loop."""

    def total(weights, run):
        return sum(x.sum() for x in run(weights))

    runs = [lambda w: list(batched(w, minibatch)), lambda w: [fn(w, x) for x in minibatch]]
    found, expected = (run(WEIGHTS) for run in runs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    if gradient:
        found, expected = (jax.grad(total)(WEIGHTS, run) for run in runs)
        for name, x in expected.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-3, atol=1e-4, err_msg=name)


def test_minibatches_of_other_lengths_and_labels_are_arranged_once(arranged):
    batched = jedbatch.batch(loss)
    rng = np.random.default_rng(1)
    minibatches = [instances(rng.integers(1, 9, 6), seed) for seed in range(8)]
    compare(batched, loss, minibatches[0])
    assert len(arranged) == 2  # with and without what the reverse reads
    for minibatch in minibatches[1:]:
        compare(batched, loss, minibatch)
    assert len(arranged) == 2
    compare(batched, loss, minibatches[0][:5])
    assert arranged[2:] == [5, 5]


def test_plans_of_other_instances_share_an_arrangement(arranged):
    batched = jedbatch.batch(loss)
    batched.plan(WEIGHTS, instances([3, 5, 1, 7, 2]))
    plans = [batched.plan(WEIGHTS, instances([n, 2, 9, n, 1], n)) for n in range(1, 6)]
    assert arranged == [5]
    for n, plan in enumerate(plans, 1):
        expected = [loss(WEIGHTS, x) for x in instances([n, 2, 9, n, 1], n)]
        np.testing.assert_allclose(batched.apply(WEIGHTS, plan), expected, rtol=1e-5)


def test_instances_of_two_forms_are_arranged_in_their_order(arranged):
    def fn(weights, instance):
        kind, x = instance
        rows = x @ weights["w"]
        if kind == "sum":
            return rows.sum(axis=0)
        return jnp.tanh(rows.sum(axis=0)) * 2 + weights["w"][0]

    batched = jedbatch.batch(fn)
    orders = list(itertools.product(["sum", "tanh"], repeat=5))[::4]
    rng = np.random.default_rng(0)
    for _ in range(2):
        before = len(arranged)
        for order in orders:
            lengths = rng.integers(1, 8, len(order))
            minibatch = [
                (kind, rng.normal(size=(n, 4)).astype(np.float32))
                for kind, n in zip(order, lengths, strict=True)
            ]
            compare(batched, fn, minibatch, gradient=False)
    assert len(arranged) == before  # all orders were known in the second round


def test_ragged_results_are_as_long_as_they_are():
    def fn(weights, x):
        return jnp.tanh(x @ weights["w"]), x.sum()

    batched = jedbatch.batch(fn, out_axes=None)
    for seed in range(4):
        rows = [x for x, _ in instances(np.random.default_rng(seed).integers(1, 9, 5), seed)]
        for (found, total), x in zip(batched(WEIGHTS, rows), rows, strict=True):
            expected = fn(WEIGHTS, x)
            np.testing.assert_allclose(found, expected[0], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(total, expected[1], rtol=1e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("few", "together"), [((), (4, 4, 4)), ((9, 2, 1), (4, 2, 1))])
def test_every_call_runs_once_in_a_group_that_is_long_enough(seed, few, together):
    rng = np.random.default_rng(seed)
    n = jax.export.symbolic_shape("n")[0]
    closed = jax.make_jaxpr(lambda x: jnp.tanh(x).sum(axis=0))(
        jax.ShapeDtypeStruct((n,), "float32")
    )
    packed = PackedProgram(find_phases(closed, 0))
    capacity = RowCapacity(16, (512,), (8, 24, 32), False, CPU, few=few)
    assert capacity.together == together
    lengths = rng.integers(0, 33, rng.integers(1, 17))
    table = packed.table(capacity, {str(n): lengths})
    form = packed.form(capacity)
    order, trips = form.view(table, "order"), form.view(table, "trips").tolist()
    first, met = 0, []
    least = (-1, *capacity.lengths)
    for shortest, longest, together, count in zip(
        least, capacity.lengths, capacity.together, trips, strict=False
    ):
        for _ in range(count):
            group = order[first : first + together]
            calls = group[group < len(lengths)].tolist()
            assert group[0] == calls[0]  # which takes the place of those missing
            assert all(shortest < lengths[call] <= longest for call in calls)
            met += calls
            first += together
    assert sorted(met) == list(range(len(lengths)))
    assert (order[first:] == capacity.calls).all()
    for e, counts in enumerate(packed.row_counts({str(n): lengths})):
        given = packed.table(capacity, {str(n): lengths}, [counts])
        np.testing.assert_array_equal(given, table, err_msg=str(e))


@pytest.mark.parametrize("capacity", [16, 192, 208, 384, 576])
def test_rows_that_no_block_writes_are_zeros(capacity):
    blocks = Buckets((16, 192) if capacity >= 192 else (16,), 16)
    function = RowFunction(None, capacity, 1, blocks, ())

    @jax.jit
    def fill(trips):
        arguments = RowArguments([], [], jnp.zeros(0), jnp.int32(0), trips, jnp.int32(0))
        rows = function.unfilled(arguments, ((2,), np.float32), "rows")
        return lax.fori_loop(0, jnp.dot(trips, jnp.array(blocks.widths)), put_one, rows)

    def put_one(i, rows):
        return rows.at[i].set(1)

    for total in range(0, capacity + 1, 13):
        trips = np.array(blocks_of(total, blocks), np.int32)
        written = int(blocks.lanes(trips))
        assert total <= written
        np.testing.assert_array_equal(fill(trips)[:, 0], np.arange(capacity) < written)


def test_capacities_are_equal_in_other_processes():
    capacity = RowCapacity(16, (512,), (8, 24, 32), False, CPU)
    assert hash(capacity) == hash(RowCapacity(16, (512,), (8, 24, 32), False, CPU))
    copy = pickle.loads(pickle.dumps(capacity))
    assert "_hash" not in copy.__dict__
    assert copy == capacity
    assert hash(copy) == hash(capacity)


def test_types_are_those_of_the_leaves_that_come():
    types = TypesOfLeaves()
    a, b = jnp.ones((2, 3)), jnp.ones(4, jnp.int32)
    expected = ((2, 3), jnp.dtype("float32"), False), ((4,), jnp.dtype("int32"), False)
    for _ in range(2):
        assert types.of([a, b])[0] == expected
        assert types.of([b, a])[0] == expected[::-1]
        assert types.of([a])[0] == expected[:1]
    c = np.ones((2, 3), np.float32)
    assert types.of([c, b])[0] == expected
    c.resize((3, 2), refcheck=False)  # arrays of NumPy may change
    assert types.of([c, b])[0][0] == ((3, 2), jnp.dtype("float32"), False)
    with jax.enable_x64(True):
        d = jnp.ones(3, jnp.float64)
        assert types.of([d])[0] == (((3,), jnp.dtype("float64"), False),)
    with pytest.raises(TypeError, match="jax_enable_x64"):
        types.of([d])
    del a
    assert types.of([jnp.ones((2, 3), jnp.bfloat16)])[0][0][1] == jnp.bfloat16
    jax.jit(lambda x: types.of([x, b]) and x)(jnp.ones(5))
    assert types.of([jnp.ones(5), b])[0][0] == ((5,), jnp.dtype("float32"), False)


@pytest.mark.parametrize(
    "blocks",
    [
        CPU.blocks,
        CPU.forward_blocks,
        Buckets((512, 2048), 512),
        Buckets((16,)),
        Buckets((32, 192), 32),
    ],
    ids=str,
)
def test_blocks_of_any_rows_have_room(blocks):
    """As many rows as a capacity has room for, or fewer, take no more blocks than fit into it."""
    most, step = 4 * blocks.widths[-1], max(1, blocks.widths[-1] // 64)
    for need in range(1, most, step):
        rows = whole_blocks(need, blocks)
        used = RowCapacity(1, (rows,), (8,), False, dataclasses.replace(CPU, blocks=blocks)).blocks(
            0
        )
        assert need <= rows < need + 1.5 * blocks.widths[-1]
        assert max(in_blocks(n, used) for n in range(rows + 1)) <= rows


def test_rows_of_small_minibatches_have_half_a_block_less():
    """200 rows run in a wide block and a few narrow ones, of the room of one and a half."""
    rows = whole_blocks(256, CPU.blocks)
    assert rows == 288
    assert RowCapacity(8, (rows,), (8,), False, CPU).blocks(0).widths == CPU.blocks.widths
    assert whole_blocks(1, CPU.blocks) == whole_blocks(96, CPU.blocks) == 192
    assert whole_blocks(97, CPU.blocks) == whole_blocks(192, CPU.blocks) == 288
    assert whole_blocks(0, CPU.blocks) == 0
    assert whole_blocks(97, CPU.forward_blocks) == 384


def test_rows_run_in_more_widths_where_no_gradient_is_planned():
    rng = np.random.default_rng(0)
    instances = [rng.normal(size=(n, 3)).astype(np.float32) for n in (30, 20, 25, 35, 50, 40)]
    params = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)
    model = lambda w, x: jnp.tanh(x @ w).sum(0)  # noqa: E731
    batched = jedbatch.batch(model)
    for gradient, computed in ((False, 224), (True, 208), (False, 224)):
        plan = batched.plan(params, instances, gradient=gradient)
        assert plan.ragged_rows == (computed, 200)
        expected = np.stack([model(params, x) for x in instances])
        np.testing.assert_allclose(batched.apply(params, plan), expected, rtol=1e-5, atol=1e-5)
