"""Instructions run exactly the chunks they were made of, in order."""

import dataclasses

import numpy as np
import pytest

from jedbatch._program.instructions import Branch, InstructionSet

KINDS, WIDTHS = 3, (2, 8)


def instruction_set(branches=(), reverse=False):
    opcodes = range(KINDS * len(WIDTHS))
    return InstructionSet(
        "switch",
        (*(Branch((x,)) for x in opcodes), *branches),
        np.repeat(np.arange(KINDS), len(WIDTHS)),
        np.tile(WIDTHS, KINDS),
        reverse,
    )


def runs_of(opcodes, reverse=False):
    """One run a chunk; the lanes of every kind follow one another."""
    lanes = [0] * KINDS
    rows = []
    for opcode in opcodes:
        kind, column = divmod(opcode, len(WIDTHS))
        rows.append((opcode, lanes[kind], 1))
        lanes[kind] += WIDTHS[column]
    return np.array(rows[::-1] if reverse else rows, np.int64).reshape(-1, 3)


def chunks(runs):
    return [(opcode, lane) for opcode, lane, _ in runs.tolist()]


def decoded(made, rows):
    """(opcode, first lane) of every chunk that instructions run, in order."""
    found, sign = [], -1 if made.reverse else 1
    for row in rows.tolist():
        if made.control == "loops":
            opcode, start, stop = row
            width = made.width_of[opcode]
            lanes = range(start, stop, sign * width)
            found += [(opcode, lane) for lane in lanes]
            continue
        branch, trips, *first = row
        opcodes = made.branches[branch].opcodes
        steps = made.steps(opcodes)
        for trip in range(trips):
            found += [(x, first[k] + trip * steps[k]) for k, x in enumerate(opcodes)]
    return found


@pytest.mark.parametrize("reverse", [False, True])
def test_what_is_decoded_is_what_was_encoded(reverse):
    """With branches learned from one sequence, for it and for others."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        motif = rng.integers(0, 6, rng.integers(1, 5)).tolist()
        seen = motif * 6 + rng.integers(0, 6, 20).tolist() + [3] * 9
        learned = instruction_set(reverse=reverse).learn(runs_of(seen, reverse), 8)
        made = instruction_set(learned, reverse)
        for sequence in (seen, rng.integers(0, 6, 40).tolist(), motif * 3, []):
            runs = runs_of(sequence, reverse)
            rows = made.encode(runs)
            assert rows.shape[1] == made.columns
            assert decoded(made, rows) == chunks(runs)


def test_runs_of_several_chunks():
    runs = np.array([(1, 0, 3), (0, 24, 2), (2, 0, 1)])
    expected = [(1, 0), (1, 8), (1, 16), (0, 24), (0, 26), (2, 0)]
    made = instruction_set()
    assert decoded(made, made.encode(runs)) == expected
    backwards = instruction_set(reverse=True)
    expected = [(1, 16), (1, 8), (1, 0), (0, 26), (0, 24), (2, 0)]
    assert decoded(backwards, backwards.encode(runs)) == expected


def test_runs_become_loops_and_patterns_superinstructions():
    runs = runs_of([1] * 40)
    (loop, *_) = instruction_set().learn(runs, 8)
    assert loop == Branch((1,), True)
    assert len(instruction_set([Branch((1,), True)]).encode(runs)) == 1
    pattern = runs_of([0, 2, 5] * 30)
    learned = instruction_set().learn(pattern, 8)
    assert any(len(branch.opcodes) > 1 for branch in learned)
    assert len(instruction_set(learned).encode(pattern)) < 30
    assert max(len(branch.opcodes) for branch in learned) <= 8


def test_what_occurs_once_is_not_compiled_twice():
    assert instruction_set().learn(runs_of(range(6)), 8) == ()
    assert instruction_set().learn(runs_of([1] * 40), 1)[0] == Branch((1,), True)


def test_loops_are_runs():
    made = InstructionSet("loops", (), np.zeros(2, int), np.array([2, 8]))
    runs = np.array([(1, 0, 3), (0, 24, 2)])
    rows = made.encode(runs)
    assert rows.tolist() == [[1, 0, 24], [0, 24, 28]]  # from a lane up to another
    assert made.columns == 3
    assert made.learn(runs, 8) == ()
    assert decoded(made, rows) == [(1, 0), (1, 8), (1, 16), (0, 24), (0, 26)]
    backwards = dataclasses.replace(made, reverse=True)
    rows = backwards.encode(runs)
    assert rows.tolist() == [[1, 16, -8], [0, 26, 22]]
    assert decoded(backwards, rows) == [(1, 16), (1, 8), (1, 0), (0, 26), (0, 24)]
