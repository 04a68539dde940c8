"""Arrangements of variables, against the enumeration of all orders."""

import itertools

import numpy as np
import pytest

from jedbatch._layout.pq_planner import arrange

# The worked example of ED-Batch: x1, ..., x8 are 0, ..., 7.
FIGURE_3 = [
    [[3, 4], [0, 2], [1, 0]],
    [[7, 5, 6], [2, 3, 4]],
]


def runs(operand, row):
    """The operations of an operand in the order of memory; None if it is not adjacent."""
    if len(set(operand)) < len(operand):
        return None
    order = sorted(range(len(operand)), key=lambda k: row[operand[k]])
    adjacent = row[operand[order[-1]]] - row[operand[order[0]]] == len(operand) - 1
    return order if adjacent else None


def rows_of(order):
    """The place of each variable."""
    row = [0] * len(order)
    for place, v in enumerate(order):
        row[v] = place
    return row


def judge(found, num_variables, batches):
    """Every claim, from the order and the operations alone."""
    found.check(batches)
    assert sorted(found.order) == list(range(num_variables))
    row = rows_of(found.order)
    for batch, operations, contiguous in zip(
        batches, found.operations, found.contiguous, strict=True
    ):
        assert sorted(operations) == list(range(len(batch[0])))
        for operand, claim in zip(batch, contiguous, strict=True):
            same = len(set(operand)) == 1
            assert claim == (same or runs(operand, row) == list(operations))
    refused = {(b, k) for b, k, _ in found.dropped}
    assert len(refused) == len(found.dropped)
    for b, batch in enumerate(batches):
        for k, operand in enumerate(batch):
            if len(set(operand)) == len(operand) and (b, k) not in refused:
                assert found.contiguous[b][k]


def greedy(num_variables, batches):
    """The operands that cannot be admitted in turn, by trying all orders."""
    rows = [rows_of(order) for order in itertools.permutations(range(num_variables))]
    refused = []
    for b, batch in enumerate(batches):
        admitted = []
        for k, operand in enumerate(batch):
            if len(set(operand)) < len(operand):
                continue
            left = []
            for row in rows:
                order = runs(operand, row)
                if order and all(runs(other, row) == order for other in admitted):
                    left.append(row)
            if left:
                rows = left
                admitted.append(operand)
            else:
                refused.append((b, k))
    return sorted(refused), rows


def test_figure_3():
    found = arrange(8, FIGURE_3)
    judge(found, 8, FIGURE_3)
    assert found.order == (1, 0, 2, 3, 4, 7, 5, 6)
    assert found.operations == ((0, 1), (0, 1, 2))
    assert all(map(all, found.contiguous))
    assert found.dropped == ()
    assert str(found) == (
        "order 1 0 2 3 4 7 5 6\nbatch 0 runs 0 1: no gather\nbatch 1 runs 0 1 2: no gather"
    )


@pytest.mark.parametrize("seed", range(10))
def test_random_programs(seed):
    """What is admitted is what trying all orders admits; so whatever can hold does."""
    rng = np.random.default_rng(seed)
    outcomes = {"all": 0, "adjacent": 0, "aligned": 0}
    for _ in range(150):
        num_variables = int(rng.choice([1, 2, 3, 4, 5, 5, 6]))
        batches = []
        for _ in range(int(rng.integers(1, 5))):
            width = int(rng.integers(1, min(5, num_variables) + 1))
            operands = int(rng.integers(1, 4))
            batch = [rng.permutation(num_variables)[:width].tolist() for _ in range(operands)]
            if rng.random() < 0.1:
                batch[-1] = rng.integers(0, num_variables, width).tolist()
            batches.append(batch)
        found = arrange(num_variables, batches)
        judge(found, num_variables, batches)
        refused, rows = greedy(num_variables, batches)
        assert [(b, k) for b, k, _ in found.dropped] == refused, batches
        assert rows_of(found.order) in rows
        outcomes["all"] += not refused
        for word in ("adjacent", "aligned"):
            outcomes[word] += any(word in reason for _, _, reason in found.dropped)
    assert min(outcomes.values()) > 10


def sliced(rng, num_variables, num_batches, width):
    """Batches that a hidden order satisfies."""
    hidden = rng.permutation(num_variables)
    batches = []
    for _ in range(num_batches):
        count = int(rng.integers(1, width + 1))
        firsts = rng.integers(0, num_variables - count + 1, int(rng.integers(1, 5)))
        shuffled = rng.permutation(count)
        batches.append([hidden[first : first + count][shuffled].tolist() for first in firsts])
    return batches


@pytest.mark.parametrize(
    ("num_variables", "num_batches", "width", "repeats"),
    [(6, 3, 4, 100), (12, 6, 6, 100), (40, 15, 12, 40), (40, 100, 12, 10), (1_000, 150, 40, 3)],
)
def test_a_hidden_order_is_found(num_variables, num_batches, width, repeats):
    rng = np.random.default_rng(num_variables)
    for _ in range(repeats):
        batches = sliced(rng, num_variables, num_batches, width)
        found = arrange(num_variables, batches)
        judge(found, num_variables, batches)
        assert found.dropped == ()
        assert all(map(all, found.contiguous))


def test_permutations_must_agree():
    """Two batches tie four variables to another four, by different bijections."""
    forward = [[4, 5, 6, 7], [0, 1, 2, 3]]
    found = arrange(8, [forward, [[4, 5, 6, 7], [1, 2, 3, 0]]])
    judge(found, 8, [forward, [[4, 5, 6, 7], [1, 2, 3, 0]]])
    ((b, k, reason),) = found.dropped
    assert (b, k) == (1, 1)
    assert "aligned" in reason
    assert found.contiguous == ((True, True), (True, False))
    assert "gathers operand 1 (it cannot be aligned" in str(found)


def test_lstm():
    """Sequences of different length in no order: only who ends when decides theirs."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 25, 20)
    num_variables, batches, last = 0, [], {}
    for step in range(int(lengths.max())):
        running = np.flatnonzero(lengths > step).tolist()
        made = [num_variables + np.arange(len(running)) + i * len(running) for i in range(3)]
        num_variables += 3 * len(running)
        inputs, hidden, memory = (dict(zip(running, m.tolist(), strict=True)) for m in made)
        operands = [hidden, inputs, last] if last else [hidden, inputs]
        batches.append([[source[i] for i in running] for source in operands])
        batches.append([[memory[i] for i in running], [hidden[i] for i in running]])
        last = memory
    found = arrange(num_variables, batches)
    judge(found, num_variables, batches)
    assert found.dropped == ()
    assert all(map(all, found.contiguous))


def test_conflicts_are_reported():
    """The pairs of a triangle and of a star cannot all be adjacent."""
    triangle = [[[0, 1]], [[1, 2]], [[0, 2]]]
    found = arrange(3, triangle)
    assert found.dropped == ((2, 0, "its variables cannot be adjacent"),)
    assert found.contiguous == ((True,), (True,), (False,))
    assert found.operations[2] == (0, 1)
    star = [[[0, 1]], [[0, 2]], [[0, 3]]]
    assert [d.batch for d in arrange(4, star).dropped] == [2]


def test_the_rest_of_a_batch_is_kept():
    swapped = [[[2, 3], [0, 1], [1, 0], [4, 5]]]
    found = arrange(6, swapped)
    judge(found, 6, swapped)
    assert [(b, k) for b, k, _ in found.dropped] == [(0, 2)]
    assert found.contiguous == ((True, True, False, True),)


def test_repeated_variables():
    batches = [[[0, 1, 2], [3, 3, 3], [4, 5, 4]]]
    found = arrange(6, batches)
    judge(found, 6, batches)
    assert found.dropped == ()
    assert found.contiguous == ((True, True, False),)
    assert str(found).endswith("gathers operand 2 (repeats variables)")


def test_degenerate_arguments():
    assert arrange(0, []).order == ()
    assert arrange(3, []).order == (0, 1, 2)
    assert arrange(2, [[]]).contiguous == ((),)
    assert arrange(2, [[[], []]]).operations == ((),)
    found = arrange(4, [np.array([[0, 1], [3, 2]])])
    assert all(type(v) is int for v in found.order)
    assert found.order == (0, 1, 3, 2)


def test_deterministic():
    rng = np.random.default_rng(0)
    batches = [[rng.permutation(60)[:5].tolist() for _ in range(3)] for _ in range(40)]
    first = arrange(60, batches)
    judge(first, 60, batches)
    assert arrange(60, batches) == first


def test_misuse():
    with pytest.raises(ValueError, match="as many in each"):
        arrange(3, [[[0, 1], [2]]])
    with pytest.raises(ValueError, match=r"variable 3; expected 0 to 2"):
        arrange(3, [[[0, 3]]])
