"""Workspaces of rounds: arrays that grow, and programs with room for more."""

import numpy as np
import pytest
from cases import programs

import jedbatch
from jedbatch._control_flow.growth import NO_CAPACITY, grown_program
from jedbatch._control_flow.recorded_graph import GrowingArray
from jedbatch._kernel.target import CPU
from jedbatch._layout.bucketing import in_blocks
from jedbatch._program.capacity import Capacity


@pytest.mark.parametrize("seed", range(4))
def test_growing_arrays_are_lists(seed):
    rng = np.random.default_rng(seed)
    array, expected = GrowingArray(np.int64), []
    for _ in range(20):
        values = rng.integers(0, 99, int(rng.choice([0, 1, 7, 300])))
        array.extend(values)
        expected += values.tolist()
        assert array.array.tolist() == expected
    assert array.array.dtype == np.int64


def test_lanes_in_whole_blocks():
    """As many as there are at least; whole blocks stay what they are."""
    widths = CPU.blocks.widths
    for lanes in range(1, 3 * widths[-1], 7):
        rounded = in_blocks(lanes, CPU.blocks)
        assert lanes <= rounded
        assert rounded == in_blocks(rounded, CPU.blocks)


def kernels():
    fn, params, instances = programs.tree_cells(3, seed=1)
    return jedbatch.batch(fn).plan(params, instances).static.signature.kernels


def need_of(lanes):
    """Returns the need of a round that runs some lanes of each kernel, one width of each."""
    parts = {"lanes": lanes, "widest": dict.fromkeys(lanes, 1), "inputs": {}, "outputs": {}}
    return Capacity({**parts, "num_instructions": {None: len(lanes)}})


def test_programs_have_room_for_more_than_is_needed():
    first, *others = kernels()
    program = grown_program(NO_CAPACITY, need_of({first: 5}), CPU)
    lanes = dict(zip(program.kernels, program.lanes, strict=True))
    assert lanes[first] >= 20
    more = grown_program(program.capacity, need_of(dict.fromkeys(others, 2)), CPU)
    assert set(more.kernels) == {first, *others}
    assert dict(zip(more.kernels, more.lanes, strict=True))[first] == lanes[first]
    again = grown_program(more.capacity, need_of({first: lanes[first]}), CPU)
    assert again.lanes == more.lanes


def test_programs_have_room_for_numbers_of_many_decisions():
    """A number is a few bytes, a new program seconds; arrays are many bytes."""
    number, array = ((), np.dtype(np.float32)), ((1 << 12,), np.dtype(np.float32))
    need = need_of(dict.fromkeys(kernels(), 1))
    need.sizes["inputs"].update({number: 5, array: 5})
    program = grown_program(NO_CAPACITY, need, CPU)
    assert program.input_rooms[number] >= 64 * 5
    assert program.input_rooms[array] <= 8 * 5
    same = grown_program(program.capacity, need_of({}), CPU)
    assert same.input_rooms == program.input_rooms


def test_every_arena_has_a_row_to_read():
    """Also those that nothing was written to: kernels that have not run read some row."""
    for kernel in kernels():
        program = grown_program(NO_CAPACITY, need_of({kernel: 1}), CPU)
        assert all(rows >= 1 for rows in program.rows)


@jedbatch.cell
def quarter_of_both(x, n):
    return (x + n) / 4
