"""Instances with symbols for arrays, and the symbols that functions of them return."""

from collections.abc import Collection, Sequence
from typing import Any

from jax.core import Tracer

from jedbatch import checks
from jedbatch._jaxpr.symbolic_dims import as_number
from jedbatch._record.identity.arithmetic import read_by_jax
from jedbatch._record.instances.arrays import array_type, is_array, replace_arrays
from jedbatch._record.operations.floats import Floating
from jedbatch._record.operations.sequences import Elements, Sequenced
from jedbatch._record.operations.stacking import Stacking
from jedbatch._record.operations.symbols import Shared, Value
from jedbatch._record.run.rows import ArrayRows
from jedbatch._record.types.tracing import NUMBER_TYPES
from jedbatch._support.types import Array, Leaf, PyTree


def symbolic(
    recorder: Any,
    instance: PyTree,
    arrays: Sequence[Array],
    types: Any = None,
    rows: Collection[int] = (),
) -> PyTree:
    """The instance with its arrays replaced by symbols; for arguments see
    `Recorder.begin`.
    """
    if not arrays:
        return instance
    types = list(map(array_type, arrays)) if types is None else types
    kind_of = {id(t): recorder.registry.value_type(*t) for t in {id(t): t for t in types}.values()}
    kinds = [kind_of[id(t)] for t in types]
    recorder.has_numbers = type(instance) in (Floating, Sequenced)
    symbols: list[Any]
    if type(instance) is Floating:
        symbols = instance.as_symbols(recorder, kinds)
        sequences, instance = instance.sequences, instance.with_arrays()
    else:
        symbols = [recorder.leaf_value(kind, leaf, ()) for leaf, kind in enumerate(kinds)]
        sequences = {}
        if type(instance) is Sequenced:
            sequences, instance = instance.sequences, tuple(instance)
    for leaf in rows:
        sequence = sequences.get(id(arrays[leaf]))
        shape, *kind = types[leaf]
        row = shape[1:], *kind
        if sequence and not row[0]:
            row = array_type(sequence.numbers[0])
        number = recorder.registry.value_type(*row)
        values = [recorder.leaf_value(number, leaf, (k,)) for k in range(shape[0])]
        kind_of_sequence: Any = type(sequence.numbers) if sequence else ArrayRows
        symbols[leaf] = kind_of_sequence(values)
    if sequences:
        recorder.stacking = Stacking(recorder)
        for leaf, x in enumerate(arrays):
            if id(x) in sequences and leaf not in rows:
                given = symbols[leaf], leaf, sequences[id(x)], recorder.stacking.rows
                symbols[leaf] = Elements(recorder, *given).given
    return replace_arrays(instance, iter(symbols))


def output(recorder: Any, leaf: Leaf) -> tuple[int, tuple]:
    """(reference, (shape, dtype)) of a leaf of what the function returns."""
    if type(leaf) is Value and leaf._trace is recorder:
        return _output_of(recorder, leaf)
    if type(leaf) is int or type(leaf) is float:
        return _output_of(recorder, recorder.input(leaf))
    leaf = result_leaf(read_by_jax(leaf))
    if isinstance(leaf, Tracer) or recorder.is_weight_reached(leaf):
        symbol = recorder.symbol(leaf)
    else:
        recorder.trust(leaf)
        symbol = recorder.input(leaf)
    if isinstance(symbol, Shared):
        symbol = recorder.shared_value(symbol)
    return _output_of(recorder, symbol)


def _output_of(recorder: Any, symbol: Value) -> tuple[int, tuple]:
    value_type = recorder.registry.value_types[symbol.type]
    return symbol.index, (value_type.shape, value_type.dtype)


def result_leaf(leaf: Leaf) -> Leaf:
    """Returns a leaf of what a function returns; raises `TypeError` if it is no array or number."""
    leaf = as_number(leaf)
    if not (is_array(leaf) or isinstance(leaf, NUMBER_TYPES)):
        raise TypeError(
            f"the function returned {checks.shown(leaf)}; expected an array, a number or a pytree "
            "of them."
        )
    return leaf
