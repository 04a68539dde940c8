"""Rounds: the nodes that are computed together while a function or a lazy scope goes on."""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from jedbatch._graph.types import NodeType
from jedbatch._jaxpr.lane_steps import LaneForms, LaneSteps
from jedbatch._layout.layout import Layout

MANY_DECISIONS = 12  # times that instances wait before a printed call says how to avoid it
ADVICE = """\
Python decides after each of these rounds. Where a loop does little between two decisions, put it
into a cell with `jax.lax.while_loop`: `help(jedbatch.errors.SymbolicValueError)`"""

FormsOfTypes = Callable[[Collection[NodeType]], Mapping[NodeType, LaneForms]]


@dataclass(frozen=True)
class Round:
    """The nodes that ran between two decisions, or between two times that values were needed.

    Attributes:
      instances: how many instances waited for values; 0 in the last round, and in lazy scopes.
      nodes: how many nodes ran.
      batches: in how many batches.
      lanes: rows computed, padding included.
      ran: (type, batches, nodes) for every type that ran.
      seconds: from the first instance that recorded to the values in hand; in the last round, to
        the work handed to the device. In lazy scopes, from the first thing that is done about a
        round to the work handed to the device.
      futures: how many futures of a lazy scope became values.
      ahead: how many further steps of a loop ran, before anyone asked for them (see
        `_control_flow.ahead`); nodes, batches and lanes are those of all.
      foreseen: how many steps of single instances these are.
      used: how many of those were asked for in the end.
    """

    instances: int
    nodes: int
    batches: int
    lanes: int
    ran: tuple[tuple[NodeType, int, int], ...]
    seconds: float
    futures: int = 0
    ahead: int = 0
    foreseen: int = 0
    used: int = 0

    def and_ahead(self, ahead: int) -> "Round":
        """The same round with as many further steps like it."""
        ran = tuple((t, (1 + ahead) * b, (1 + ahead) * n) for t, b, n in self.ran)
        nodes, batches, lanes = ((1 + ahead) * x for x in (self.nodes, self.batches, self.lanes))
        return replace(self, nodes=nodes, batches=batches, lanes=lanes, ran=ran, ahead=ahead)

    @staticmethod
    def of(layout: Layout, instances: int, seconds: float, futures: int = 0) -> "Round":
        """The round that ran a layout."""
        nodes, batches, lanes, ran = layout.counts
        return Round(instances, nodes, batches, lanes, ran, seconds, futures)

    def __str__(self) -> str:
        who = f"{self.instances} waited" if self.instances else "the rest"
        who = f"{self.futures} futures" if self.futures else who
        what = f"{self.nodes} nodes in {self.batches} batches"
        if self.ahead:
            plural = "" if self.ahead == 1 else "s"
            used = f"{self.used} of {self.foreseen} used"
            what = f"{what}, {self.ahead} step{plural} ahead ({used})"
        lines = [f"{who}: {what}, {1e3 * self.seconds:.1f} ms"]
        lines += [f"  {batches:4} × {t}: {nodes} nodes" for t, batches, nodes in self.ran]
        return "\n".join(lines)


class Rounds(tuple[Round, ...]):
    """The rounds of a call, in order; printed one after the other.

    Attributes:
      lane_steps: the counts of the steps of loops and branches that values decide on, if the
        function is batched with `count_steps`; else None.
    """

    lane_steps: LaneSteps | None = None
    _forms: Callable[[], FormsOfTypes | None] = staticmethod(lambda: None)

    @staticmethod
    def of(rounds: Iterable[Round], forms: FormsOfTypes) -> "Rounds":
        """Returns rounds of types whose loops and branches run as a method `forms` says."""
        made = Rounds(rounds)
        made._forms = weakref.WeakMethod(forms)  # or its programs would be kept with the rounds
        return made

    @property
    def forms(self) -> Mapping[NodeType, LaneForms]:
        """How loops and branches that values decide on run, for types that have some.

        A program has one form for each number of nodes that it runs at a time. Those of another
        call of the function may be among them. There are none once the function is gone, or has
        forgotten its programs.
        """
        forms = self._forms()
        return {} if forms is None else forms({t for r in self for t, _, _ in r.ran})

    def __str__(self) -> str:
        nodes, batches = sum(r.nodes for r in self), sum(r.batches for r in self)
        plural = "" if len(self) == 1 else "s"
        head = f"{len(self)} round{plural}: {nodes} nodes in {batches} batches"
        lines = [head, *(f"{i}. {r}" for i, r in enumerate(self, 1))]
        if sum(1 + r.ahead for r in self if r.instances) >= MANY_DECISIONS:
            lines.append(ADVICE)
        lines += [f"{t}: {forms}" for t, forms in self.forms.items()]
        if self.lane_steps is not None:
            lines.append(str(self.lane_steps))
        return "\n".join(lines)

    __repr__ = __str__
