"""Taking calls apart: the nodes inside of a node.

A cell is one node because the user marked it. With `granularity="op"` marks are ignored: every
cell and every jit-ted function is replaced by the primitives it performs, which is the
granularity of DyNet. Running the cell's Python for that at every call would cost tens of
microseconds a primitive, so each type of node is recorded from the inside once, on stand-ins for
its operands, as a *template*: kinds of calls and what each of them reads. A call is then taken
apart by copying the template with its own operands filled in.

A template is made with a recorder of its own, so what happens to shared values, constants and
literals inside a cell is what happens to them outside (see `Recorder`).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.extend.core import set_current_trace, take_current_trace

from jedbatch._graph.types import operation_of
from jedbatch._jaxpr.interpret import inlined, performs
from jedbatch._record.cell import recording
from jedbatch._record.grouping import Grouping
from jedbatch._record.recorder import Recorder
from jedbatch._record.registry import CallSpec, Registry
from jedbatch._record.symbols import Shared
from jedbatch._support.types import Leaf

RECORDS_CALLS = True  # see `_support.frames`


class Template(NamedTuple):
    """The nodes that a call stands for.

    A read is a result of the template, or `-1 - k`: operand `k` of the call, or, beyond the
    operands, an input of the template.

    Attributes:
      call_specs, sites: the kind and the call site of every node.
      operands: what each node reads.
      inputs: group and value of the literals.
      num_values: how many results its nodes have.
      results: what the call returns, as reads.
    """

    call_specs: tuple[int, ...]
    sites: tuple[tuple[int, bool], ...]
    operands: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, Any], ...]
    num_values: int
    results: tuple[int, ...]


@dataclass
class Nodes:
    """Recorded nodes, one by one; every operand is one value.

    Attributes:
      call_specs, sites, operands: of every node; operands are results or inputs as `-1 - i`.
      input_group, input_value: as the recorder has them.
      outputs: what the instances return.
      ends: where each instance ends: its last node, input and output.
      num_values: how many results the nodes have.
    """

    call_specs: list[int] = field(default_factory=list)
    sites: list[tuple[int, bool]] = field(default_factory=list)
    operands: list[Sequence[int]] = field(default_factory=list)
    input_group: list[int] = field(default_factory=list)
    input_value: list[Leaf] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    ends: list[tuple[int, int, int]] = field(default_factory=lambda: [(0, 0, 0)])
    num_values: int = 0

    def add(self, call_spec: CallSpec, site: tuple[int, bool], operands: Sequence[int]) -> int:
        """Appends a node; returns the number of its first result."""
        first = self.num_values
        self.call_specs.append(call_spec.node_type)
        self.sites.append(site)
        self.operands.append(operands)
        self.num_values = first + len(call_spec.results)
        return first

    def end(self) -> None:
        """Ends an instance."""
        self.ends.append((len(self.call_specs), len(self.input_group), len(self.outputs)))

    def written(self) -> tuple[tuple[list, ...], list[int], list[tuple[int, ...]]]:
        """Everything as a recorder writes it: (its lists, outputs, ends)."""
        references = list(itertools.chain.from_iterable(self.operands))
        counts = [0, *itertools.accumulate(map(len, self.operands))]
        ends: list[tuple[int, ...]] = [(n, counts[n], i, o) for n, i, o in self.ends]
        written: tuple[list, ...] = self.call_specs, references, self.input_group, self.input_value
        return written, self.outputs, ends

    def starts(self, registry: Registry) -> list[int]:
        """The first result of every node, and the number of results."""
        counts = (len(registry.call_specs[c].results) for c in self.call_specs)
        return list(itertools.accumulate(counts, initial=0))

    def makers(self, registry: Registry) -> list[int]:
        """The node of every result."""
        return [n for n, c in enumerate(self.call_specs) for _ in registry.call_specs[c].results]

    def instances(self) -> list[tuple[range, range]]:
        """The nodes and the outputs of every instance."""
        return [(range(a[0], b[0]), range(a[2], b[2])) for a, b in itertools.pairwise(self.ends)]


def apart(
    registry: Registry,
    recorder: Recorder,
    outputs: Sequence[int],
    ends: Sequence[tuple[int, ...]],
    template_of: Callable[[CallSpec], Template | None],
) -> Nodes:
    """Returns the recorded nodes, with every node taken apart that there is a template for.

    Args:
      registry: where types are interned.
      recorder: whose lists to read.
      outputs: what the instances return.
      ends: for each instance, after (0, 0, 0, 0), how many nodes, references, inputs and outputs
        had been recorded when it was done.
      template_of: the template of a kind of call, or None to keep it whole.
    """
    nodes = Nodes()
    all_call_specs, references = registry.call_specs, recorder.references
    sites = recorder.sites or [(0, False)] * len(recorder.call_specs)
    place: list[int] = []  # where the results are now
    node = read = given = returned = 0
    for last_node, _, last_input, last_output in ends[1:]:
        down = given - len(nodes.input_group)  # inputs moved: others have come before them
        nodes.input_group += recorder.input_group[given:last_input]
        nodes.input_value += recorder.input_value[given:last_input]
        for call_spec_id, site in zip(
            recorder.call_specs[node:last_node], sites[node:last_node], strict=True
        ):
            call_spec = all_call_specs[call_spec_id]
            reads = references[read : read + call_spec.arity]
            operands = [r + down if r < 0 else place[r] for r in reads]
            read += call_spec.arity
            template = template_of(call_spec)
            if template is not None:
                place += _fill(nodes, registry, template, operands)
                continue
            first = nodes.add(call_spec, site, operands)
            place += range(first, nodes.num_values)
        nodes.outputs += [place[r] if r >= 0 else r + down for r in outputs[returned:last_output]]
        node, given, returned = last_node, last_input, last_output
        nodes.end()
    return nodes


def _fill(
    nodes: Nodes, registry: Registry, template: Template, operands: Sequence[int]
) -> list[int]:
    """Appends the nodes of a template; returns what the call returns."""
    base, first_input = nodes.num_values, len(nodes.input_group)
    sources = operands
    if template.inputs:
        sources = [*operands, *range(-1 - first_input, -1 - first_input - len(template.inputs), -1)]
        nodes.input_group += [group for group, _ in template.inputs]
        nodes.input_value += [value for _, value in template.inputs]
    nodes.call_specs += template.call_specs
    nodes.sites += template.sites
    nodes.operands += [
        [base + r if r >= 0 else sources[~r] for r in reads] for reads in template.operands
    ]
    nodes.num_values = base + template.num_values
    return [base + r if r >= 0 else sources[~r] for r in template.results]


def make_template(
    registry: Registry,
    call: Callable,
    shared: Sequence[int],
    operands: Sequence[int],
    template_of: Callable[[CallSpec], Template | None],
    grouping: Grouping | None = None,
) -> Template:
    """Records what `call(shared values, operand values)` does on stand-ins.

    Args:
      registry: where types are interned.
      call: returns a pytree of arrays.
      shared: ids of the shared values.
      operands: value type ids of the operands.
      template_of: the template of what is called inside, or None to keep it whole.
      grouping: learns what is recorded, as for `Recorder`.
    """
    with take_current_trace() as current:
        recorder = Recorder(registry, getattr(current, "caller", current), grouping)
        values = [recorder.stand_in(kind) for kind in operands]
        before, recording.recorder = recording.recorder, recorder
        try:
            with set_current_trace(recorder):
                out = call([Shared(recorder, s) for s in shared], values)
                outputs = [recorder.output(leaf)[0] for leaf in jax.tree.leaves(out)]
        finally:
            recording.recorder = before
            recorder.forget()
    counts = recorder.call_specs, recorder.references, recorder.input_group, outputs
    ends = [(0, 0, 0, 0), tuple(map(len, counts))]
    nodes = apart(registry, recorder, outputs, ends, template_of)
    inputs = list(zip(nodes.input_group, nodes.input_value, strict=True))
    return Template(
        tuple(nodes.call_specs),
        tuple(nodes.sites),
        tuple(map(tuple, nodes.operands)),
        tuple(inputs[len(operands) :]),
        nodes.num_values,
        tuple(nodes.outputs),
    )


class Primitives:
    """Takes all cells and jit-ted functions apart: `granularity="op"`."""

    here = met = None  # nothing to learn while recording
    picks = False
    revision = 0

    def __init__(self, registry: Registry):
        self._registry = registry
        self._templates: dict[int, Template | None] = {}

    def group(self, recorder: Recorder, outputs: list[int], ends: list[tuple[int, ...]]) -> Nodes:
        """Returns the recorded nodes as nodes of primitives."""
        return apart(self._registry, recorder, outputs, ends, self._template)

    def _template(self, call_spec: CallSpec) -> Template | None:
        number = call_spec.node_type
        if number not in self._templates:
            node_type = self._registry.node_types[number]
            operation = operation_of(node_type)
            template = None
            # A `while` has no reverse of its own; what is around it may do without one.
            if _is_call(operation.key[0]) and not performs(operation.jaxpr, "while"):
                closed = inlined(operation.jaxpr)
                kinds = self._registry.kinds_of(node_type.operands)

                def call(shared_values, operand_values):
                    values = (*shared_values, *operand_values)
                    return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *values)

                template = make_template(
                    self._registry, call, node_type.shared, kinds, self._template
                )
            self._templates[number] = template
        return self._templates[number]


def _is_call(key: Any) -> bool:
    """True of the keys of cells and of jit-ted functions (see `Recorder`)."""
    return key[0] == "cell" or getattr(key[0][0], "name", "") == "jit"
