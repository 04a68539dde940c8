"""The readers of every value, against a walk over the nodes of the graph one by one."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest
from cases import programs

import jedbatch
from jedbatch._program import lower_vjp
from jedbatch._program.lower_vjp import MAX_READERS, find_readers
from jedbatch.testing import check_plan


def widely_read(num, seed):
    """A value that all steps of an instance read, and inputs that many instances read."""
    step = jedbatch.cell(lambda params, h, x: jnp.tanh(params["b"] * h + x))

    def fn(params, n):
        first = h = step(params, params["b"] * 1.0, 1.0)
        for _ in range(n):
            h = step(params, h, first)
        return h

    return fn, programs.weights(seed, b=(4,)), [3, 1, 70, 17][:num]


def is_float(value_type):
    return jnp.issubdtype(value_type.dtype, jnp.floating)


def kernel_of(placed, node):
    return placed.kernels[list(placed.type_ids).index(placed.graph.node_type[node])]


def alive_nodes(placed):
    """The nodes of which something comes back: a result is returned, or read by one of them."""
    graph = placed.graph
    wanted = {int(v) for outputs in placed.outputs for v in outputs if v >= 0}
    alive = set()
    for node in reversed(range(len(graph.node_type))):  # operands come before their readers
        if wanted & set(range(graph.value_ptr[node], graph.value_ptr[node + 1])):
            alive.add(node)
            first, end = graph.operand_ptr[node : node + 2]
            kinds = kernel_of(placed, node).operands
            pairs = zip(graph.operand[first:end].tolist(), kinds, strict=True)
            wanted |= {v for v, kind in pairs if v >= 0 and is_float(kind)}
    return alive


def expected_rows(placed, signature):
    """The rows whose sum is the cotangent of each value, or of input i at -1 - i."""
    graph, bases = placed.graph, signature.cotangent_rows[0]
    rows = collections.defaultdict(list)
    for outputs, kind in zip(placed.outputs, placed.arenas, strict=True):
        if jnp.issubdtype(kind[1], jnp.floating):
            for row, value in enumerate(outputs.tolist()):
                rows[value].append(row)
    for node in alive_nodes(placed):
        kernel = kernel_of(placed, node)
        k = signature.kernels.index(kernel)
        for j, kind in enumerate(kernel.operands):
            if is_float(kind):
                value = int(graph.operand[graph.operand_ptr[node] + j])
                rows[value].append(bases[k][j] + int(placed.layout.lane[node]))
    return {value: sorted(of) for value, of in rows.items()}


def listed_rows(readers):
    """The same, from the lists and the sums of sums that they lead to."""

    def expanded(row, sums):
        if row < lower_vjp.FIRST_SUM_ROW:
            return [row]
        members = sums[:, row - lower_vjp.FIRST_SUM_ROW].tolist()
        return [x for member in members if member >= 0 for x in expanded(member, sums)]

    def total(listed):
        """A row number below the first sum says nothing of its arena, one from there on does."""
        for sums in readers.sums:
            try:
                yield sorted(x for row in listed for x in expanded(row, sums))
            except IndexError:
                continue

    table = np.stack(readers.columns, axis=1)
    found = {}
    for place, listed in enumerate(table.tolist()):
        found[place] = list(total([row for row in listed if row >= 0]))
    return found, len(table)


@pytest.mark.parametrize(
    ("make", "num"),
    [(programs.tree_cells, 7), (programs.dag, 9), (programs.unread_and_twice, 9), (widely_read, 4)],
)
def test_every_reader_is_listed_once(make, num):
    fn, params, instances = make(num, seed=1)
    plan = jedbatch.batch(fn, out_axes=None).plan(params, instances)
    placed, signature = plan.host.placed, plan.static.signature
    readers = find_readers(placed, signature, shares=False)
    assert len(readers.columns) <= MAX_READERS
    expected = expected_rows(placed, signature)
    found, size = listed_rows(readers)
    for value in range(size):
        rows = expected.get(value, expected.get(value - size, []))
        assert rows in found[value], value
    assert make is not widely_read or max(map(len, expected.values())) > MAX_READERS**2


def test_sums_of_sums_are_read_once():
    fn, params, instances = widely_read(4, seed=1)
    plan = jedbatch.batch(fn, out_axes=None).plan(params, instances)
    readers = find_readers(plan.host.placed, plan.static.signature, shares=False)
    (sums,) = [table for table in readers.sums if table.size]
    of_sums = sums[sums >= lower_vjp.FIRST_SUM_ROW] - lower_vjp.FIRST_SUM_ROW
    assert len(of_sums) > 0  # 72 readers take sums of sums
    assert len(set(of_sums.tolist())) == len(of_sums)


def test_inputs_of_kinds_that_a_minibatch_lacks_get_no_cotangent():
    """The program of others, with rows for such inputs, serves it."""
    fn = lambda params, x: params * x[0].sum() if x else params * 1.0  # noqa: E731
    batched, params = jedbatch.batch(fn), jnp.ones(4)
    some, none = (np.ones(3, np.float32),), ()
    whole = batched.plan(params, [some, none])
    part = batched.plan(params, [none, none])
    assert part.static.reverse == whole.static.reverse
    check_plan(part)
