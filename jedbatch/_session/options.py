"""The options of `jedbatch.batch` and `jedbatch.Lazy`, checked once and passed on as one value.

A policy is none of them, since it can be assigned later.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

from jedbatch import checks
from jedbatch._jaxpr.configuration import finds_faults
from jedbatch._jaxpr.lane_steps import LaneCounter
from jedbatch._kernel.target import Target
from jedbatch._layout.node_order import checked_order
from jedbatch._support.types import ControlFlowName

GRANULARITIES = ("auto", "cell")
ONE_EXECUTOR = (
    "Programs run as one; leave it out. To look for errors, `jax.disable_jit()` runs Python line "
    "by line, and `jax_debug_nans` names the cell. `batched.warm` compiles before the first call, "
    "and JAX keeps programs for the next process where `jax_compilation_cache_dir` is set."
)
ONE_LANE_POLICY = (
    "The block of loops that runs next is the one at which most lanes wait; leave the option out."
)
NO_OP = (
    'There is no "op" any more: with "cell", operations outside of cells are nodes of their own. '
    "Leave out `jedbatch.cell` and `jax.jit` where each operation is to be a node."
)
MOST = (1 << 31) - 1  # that int32 has


@dataclass(frozen=True, eq=False)
class Options:
    """Options of batching; `jedbatch.batch` describes each of these.

    Attributes:
      layout: the order of nodes within batches, by its name.
      reuse: whether inference uses rows again.
      control_flow: how loops and branches run that values decide on, by its name.
      max_steps: how many steps loops take at most; None for any number.
      counter: counts the steps of loops and branches; None to count none.
      packs: whether rows of arrays of any length may run packed, ahead of the graph.
      granularity: the name of what a node is; None is "auto" once enough has been met.
      key: gives the part of an instance that decides its graph.
      cache_size, cache_bytes: most instances that are kept, and bytes of all caches of a session.
      target: what programs are made for; None takes that of the shared arguments.
    """

    layout: str = "auto"
    reuse: bool | None = None
    control_flow: ControlFlowName = "auto"
    granularity: str | None = None
    key: Callable[..., Hashable] | None = None
    cache_size: int = 65536
    cache_bytes: int = 1 << 30
    target: Target | None = None
    max_steps: int | None = None
    counter: LaneCounter | None = None
    packs: bool = True

    @property
    def plans(self) -> bool:
        """True if every minibatch is planned, also where another way is known to run it.

        Plans tell which cell made a NaN.
        """
        return self.key is not None or finds_faults()

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from the defaults, by their names."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "packs"}
        defaults = {f.name: f.default for f in fields(self)}
        given = {name: x for name, x in given.items() if x != defaults[name]}
        return {**given, "count_steps": True} if given.pop("counter", None) else given

    def checked(self, name: str) -> "Options":
        """Returns the same, as the function `name` was given them.

        Raises:
          ValueError, TypeError: one of them makes no sense.
        """
        checked_order(self.layout, f"`{name}` got layout")
        if self.reuse is not None and not isinstance(self.reuse, bool):
            raise TypeError(
                f"`{name}` got reuse={checks.brief(self.reuse)}; expected True or False, or None "
                "to use rows again where it saves much."
            )
        checks.one_of(name, "control_flow", self.control_flow, ("auto", "lanes", "lockstep"))
        grain = self.granularity
        instead = NO_OP if isinstance(grain, str) and grain == "op" else ""
        checks.one_of(name, "granularity", grain, (*GRANULARITIES, None), instead)
        if self.key is not None:
            expected = "a function of the mapped arguments of an instance"
            checks.function(name, "key", self.key, expected, "It gives something hashable.")
        bound = self.max_steps
        return replace(
            self,
            cache_size=checks.whole(name, "cache_size", self.cache_size),
            cache_bytes=checks.whole(name, "cache_bytes", self.cache_bytes),
            max_steps=None if bound is None else checks.whole(name, "max_steps", bound, 1, MOST),
        )


def written(given: dict[str, Any]) -> str:
    """Options as they may be written in a call: functions by their names, as are targets."""
    names = {k: x.name if isinstance(x, Target) else x for k, x in given.items()}
    return ", ".join(f"{k}={getattr(x, '__name__', checks.brief(x))}" for k, x in names.items())
