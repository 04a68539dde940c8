"""Extents inside of programs, and in a form in which the names of symbols do not matter."""

from collections.abc import Hashable, Iterator

from jedbatch._jaxpr.symbolic_dims import SYMBOL, Base, symbols_in
from jedbatch._jaxpr.versions import is_program, without_consts
from jedbatch._support.types import AxisSize


def extents_in(value: object) -> Iterator[AxisSize]:
    """The extents that are somewhere inside of parameters of a primitive, or of a program."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, Base):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from extents_in(x)
    elif is_program(value):
        jaxpr = without_consts(value)
        for eqn in jaxpr.eqns:
            yield from extents_in(eqn.params)
            for v in (*eqn.invars, *eqn.outvars):
                yield from extents_in(v.aval.shape)


def numbered_extent(extent: AxisSize, numbers: dict[str, int]) -> Hashable:
    """An extent with numbers for symbols; a new one gets the next number."""
    if not isinstance(extent, Base):
        return extent
    for s in sorted(symbols_in(extent)):
        numbers.setdefault(s, len(numbers))
    names = {s: f"s{k}" for s, k in numbers.items()}
    return "extent", SYMBOL.sub(lambda found: names.get(found[0], found[0]), str(extent))
