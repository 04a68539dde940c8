"""Facts about a kernel: all that lowering reads of one, without its program."""

import functools
from dataclasses import MISSING, dataclass, fields
from typing import Any

from jedbatch._graph.types import ValueType
from jedbatch._jaxpr.storage import Kind, distinct_kinds
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.operand_lists import ListPlaces, Parameter
from jedbatch._layout.bucketing import Buckets


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelFacts:
    """Facts about a kernel; see `Kernel` for its attributes."""

    operands: tuple[ValueType, ...]
    results: tuple[ValueType, ...]
    parameters: tuple[Parameter, ...]
    lists: ListPlaces | None
    buckets: Buckets
    blocks: Buckets
    loose: tuple[bool, ...]
    lane_work: int
    result_bytes: int
    cotangent_bytes: int
    transient: bool = False
    reached: bool = False

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """(shape, dtype) of the rows it reads and writes, each once."""
        return distinct_kinds((*self.operands, *self.results))


def facts_of(kernel: Kernel) -> dict[str, Any]:
    """Returns the arguments that `KernelFacts` of a kernel needs, by name."""
    needed = [f.name for f in fields(KernelFacts) if f.default is MISSING]
    facts = {name: getattr(kernel, name) for name in needed}
    return facts | {"parameters": tuple(kernel.parameters)}
