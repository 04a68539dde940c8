"""`Batched.export`: from a batched function to programs that need no Python."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jedbatch import checks
from jedbatch._export import archive
from jedbatch._export.encoding import to_json, version_of
from jedbatch._export.exported import HEURISTICS, Exported, member_name
from jedbatch._export.programs import Variant, default_platform, programs_of_variant
from jedbatch._export.trees import parameter_types, structure_to_json
from jedbatch._graph.graph import Graph
from jedbatch._graph.inputs import InputRows
from jedbatch._graph.types import NodeType, ValueType
from jedbatch._jaxpr.configuration import without_mesh
from jedbatch._jaxpr.storage import from_stored, is_key, stored, to_stored
from jedbatch._kernel.kernel_spec import KernelSpec
from jedbatch._kernel.target import Target, target_of_platform
from jedbatch._learn.adaptive import Adaptive
from jedbatch._program.executors import Executor
from jedbatch._program.fit import make_ample_reverse, make_ample_signature
from jedbatch._program.host_arrays import rows_of_inputs
from jedbatch._program.lower import narrowed
from jedbatch._program.lower_vjp import MAX_READERS, ReverseSignature, find_readers
from jedbatch._program.output_spec import OutputSpec
from jedbatch._program.placement import Placement
from jedbatch._program.plan import input_name
from jedbatch._program.returned import results_of_rows, told_apart
from jedbatch._program.signature import Signature
from jedbatch._ragged.padded_records import PaddedRecord
from jedbatch._schedule.fsm import FSM
from jedbatch._schedule.policy import schedule
from jedbatch._session.core import Core
from jedbatch._session.plans.indices import table_rows
from jedbatch._session.plans.outputs import with_room
from jedbatch._session.programs.portable import described
from jedbatch._session.session import Minibatch, Session, graph_of
from jedbatch._support.samples import cut_evenly

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
MANY_INSTRUCTIONS = 2048  # of which there is room at least, unless there are fewer lanes


def export(
    core: Core,
    args: tuple,
    batch_size: int | None,
    gradient: bool,
    platforms: Sequence[str] | None,
    sizes: Mapping[str, int] | None,
) -> Exported:
    """Exports the function; see `Batched.export`."""
    checks.flag("export", "gradient", gradient)
    if batch_size is not None:
        checks.whole("export", "batch_size", batch_size, least=1)
    policy_to_json(core)
    if core.options.counter is not None:
        raise ValueError(
            "`export` got a function that is batched with count_steps=True, whose programs tell "
            "this process how many steps they run; export one that is batched without."
        )
    shared, instances = core.arguments.split(args)
    targets = _targets(core, shared, platforms)
    room = batch_size or len(instances)
    samples = [Sample.of(core, target, shared, instances, room) for target, _ in targets]
    first = samples[0]
    types = first.types
    members: dict[str, bytes] = {}
    constants: dict[tuple, int] = {}
    written = []
    used: set[str] = set()
    for number, (sample, (_, own)) in enumerate(zip(samples, targets, strict=True)):
        ids = sample.numbers_of(types)
        kernels = [sample.session.programs.kernel(t) for t in ids]
        variants: dict[str, Any] = {}
        for kind in ("inference", "training") if gradient else ("inference",):
            signature, reverse = sample.programs(kind == "training", sizes or {}, used)
            variant, arrays = _exported_variant(sample, signature, reverse, own)
            keys = [_written_array(x, constants, members) for x in arrays]
            variant = replace(variant, constants=tuple(keys))
            variants[kind] = variant.to_json(kernels)
            for name, data in variant.data.items():
                members[member_name(number, kind, name)] = data
        specs = [
            KernelSpec.of(kernel, None, gradient, sorted(table_rows(kernel.node_type).items()))
            for kernel in kernels
        ]
        written.append({"platforms": own, "kernels": to_json(specs), "variants": variants})
    _check_sizes(sizes or {}, used)
    header = {
        "name": core.name,
        "jedbatch": version_of("jedbatch"),
        "jax": version_of("jax"),
        "types": to_json(types),
        "parameters": to_json(parameter_types(shared, len(first.leaves))),
        "batch_size": room,
        "stacked": core.out_axes is not None,
        "order": core.options.layout,
        "policy": policy_to_json(core),
        "constants": [[f"constants/{i}", *key[1:]] for key, i in constants.items()],
        "targets": written,
        **first.result_form(),
    }
    # read again, so that what is returned here is what other processes will have
    return Exported.deserialize(archive.pack(header, members))


def graph(core: Core, args: tuple) -> Graph:
    """Returns the graph of instances; see `Batched.graph`."""
    shared, instances = core.arguments.split(args)
    minibatch = _recorded(core, shared, instances)
    whole = graph_of(minibatch.records)
    inputs = []
    for i, (record, own) in enumerate(zip(minibatch.records, minibatch.arrays, strict=True)):
        for chunk in record.whole.chunks[record.index]:
            rows = np.asarray(rows_of_inputs(chunk, own, i))
            kind = chunk.type if is_key(chunk.type.dtype) else ValueType(*stored(chunk.type))
            inputs.append(InputRows(kind, rows.astype(stored(chunk.type)[1], copy=False)))
    with core.planning:
        types = described_types(minibatch.session, whole.present_types)
    place = np.zeros(len(whole.types), np.int32)
    place[whole.present_types] = np.arange(len(types))
    columns = whole.operand_ptr, whole.operand, tuple(inputs), whole.outputs
    ends = whole.node_ptr, whole.input_ptr, whole.output_ptr
    return Graph(tuple(types), place[whole.node_type], *columns, *ends)


def _recorded(core: Core, shared: tuple, instances: list[tuple]) -> Minibatch:
    """Returns recorded instances, or an error if they are no data."""
    minibatch = core.record_graphs(shared, instances)
    core.refuse_tracers(minibatch.tracers)
    if any(isinstance(r, PaddedRecord) and r.padded for r in minibatch.records):
        raise ValueError(
            f"instances of the batched `{core.name}` return arrays that differ in length, which "
            "graphs cannot say; return lists of arrays of one shape, `list(array)`, or reduce them."
        )
    return minibatch


def described_types(session: Session, ids: Sequence[int]) -> list[NodeType]:
    """Returns some node types with all that another process can know of them."""
    programs = session.programs
    return [described(k, programs.identity(k)) for k in map(programs.kernel, ids)]


class Sample:
    """Recorded instances, for which programs are made, also for shorter arrays than they have.

    Attributes:
      session: that recorded them.
      leaves: of the shared arguments.
      types: of their nodes.
    """

    def __init__(self, core: Core, shared: tuple, instances: list[tuple], room: int):
        self._core, self._room = core, room
        _, self.leaves = core.session(shared)
        recorded = _recorded(core, shared, instances)
        self.session, self._records = recorded.session, recorded.records
        self._minibatches = cut_evenly(self._records, room)
        for records in self.session.records.padding.shorter(self._records):
            self._minibatches += cut_evenly(records, room)
        present = [graph_of(records).present_types for records in self._minibatches]
        self._ids = sorted(set().union(*present))
        with core.planning:
            self.types = described_types(self.session, self._ids)
            for minibatch in self._minibatches:  # a policy may learn from each
                schedule(graph_of(minibatch), core.policy)

    @staticmethod
    def of(
        core: Core, target: Target, shared: tuple, instances: list[tuple], room: int
    ) -> "Sample":
        """Returns a sample recorded for a target."""
        session, _ = core.session(shared)
        if session.programs.target != target:  # by the same function, elsewhere
            core = core.twin(options=replace(core.options, target=target))
        return Sample(core, shared, instances, room)

    def numbers_of(self, types: Sequence[NodeType]) -> list[int]:
        """Returns the ids here of types that may have been described for another target."""
        if types is self.types:
            return list(self._ids)
        pairs = list(zip(self.types, self._ids, strict=True))
        by_identity = {t.identity: i for t, i in pairs if t.identity}
        by_label = {t.label: i for t, i in pairs}
        return [by_identity.get(t.identity, by_label[t.label]) for t in types]

    def result_form(self) -> dict[str, Any]:
        """Returns the structure and the types of results, if those of all instances agree."""
        forms = {(r.structure, tuple((s, d) for s, d, *_ in r.types)) for r in self._records}
        if len(forms) > 1:
            return {"structure": None, "results": None}
        ((structure, kinds),) = forms
        tree = jax.tree.unflatten(structure, [0] * structure.num_leaves)
        return {"structure": structure_to_json(tree), "results": to_json(kinds)}

    def programs(
        self, keeps: bool, sizes: Mapping[str, int], used: set[str]
    ) -> tuple[Signature, ReverseSignature | None]:
        """Returns programs with room for the sample, and for some sizes; notes which are `used`."""
        with self._core.planning:
            placed, forms = self._placed(keeps, self._core.options.reuse)
            if len({x.reuse for x in placed}) > 1:  # as large as makes no difference
                placed, forms = self._placed(keeps, True)
            signature = enlarged(make_ample_signature(placed, None, ()), sizes, used)
            if not keeps:
                return signature, None
            pairs = list(zip(placed, forms, strict=True))
            tells = any(told_apart(x, form) for x, form in pairs)
            leaves = {id(x): results_of_rows(x, form) if tells else None for x, form in pairs}

            def readers_of(placed: Placement, shares: bool | None) -> Any:
                own = leaves[id(placed)]
                return find_readers(narrowed(placed, signature), signature, own, None, shares)

            reverse = make_ample_reverse(placed, readers_of, signature, None)
            # A loss may read some instances of a list, which a plan under `jit` cannot know.
            marks = forms[0].batch is None
            return signature, replace(enlarged_reverse(reverse, sizes, used), marks=marks)

    def _placed(self, keeps: bool, reuse: bool | None) -> tuple[list[Placement], list[OutputSpec]]:
        core, placed, forms = self._core, [], []
        for records in self._minibatches:
            graph = graph_of(records)
            returned = core.results(records, np.arange(len(graph.outputs)))
            returned = with_room(graph, returned, self._room)
            batches = schedule(graph, core.policy)
            forms.append(returned[1])
            placed.append(
                self.session.programs.place(graph, batches, returned, keeps=keeps, reuse=reuse)
            )
        return placed, forms


def enlarged(signature: Signature, sizes: Mapping[str, int], used: set[str]) -> Signature:
    """Returns a program with room for some sizes, too; notes those that it has."""
    at_least = functools.partial(_at_least, sizes, used)
    kernels, kinds = signature.kernels, signature.arenas
    names = list(map(input_name, kinds))
    shared_rows = signature.shared_rows
    if shared_rows is not None:
        pairs = zip(names, shared_rows, strict=True)
        shared_rows = tuple(at_least(n, f"shared_rows {name}") for name, n in pairs)
    lanes = zip(kernels, signature.lanes, strict=True)
    outputs = zip(names, signature.outputs, strict=True)
    return replace(
        signature,
        lanes=tuple(at_least(n, k.node_type.label, k.node_type.name) for k, n in lanes),
        inputs=tuple(at_least(n, x) for x, n in zip(names, signature.inputs, strict=True)),
        outputs=tuple(at_least(n, f"outputs {x}") for x, n in outputs),
        shared_rows=shared_rows,
        num_instructions=max(
            at_least(signature.num_instructions, "instructions"),
            min(MANY_INSTRUCTIONS, sum(signature.lanes)),
        ),
    )


def enlarged_reverse(
    reverse: ReverseSignature, sizes: Mapping[str, int], used: set[str]
) -> ReverseSignature:
    """Returns the reverse with room for some sizes, too."""
    at_least = functools.partial(_at_least, sizes, used)
    forward = reverse.forward
    names = list(map(input_name, forward.arenas))
    most = min(MAX_READERS, at_least(0, "readers"))
    most = 1 << max(0, most - 1).bit_length() if most else 0
    sums = [at_least(n, f"sums {x}") for x, n in zip(names, reverse.sums, strict=True)]
    moving = [reverse.has_cotangents(a) for a in range(len(names))]
    if sizes.get("readers", 0) > MAX_READERS:  # which are summed up, four at a time
        edges = forward.cotangent_rows[1]
        sums = [
            max(n, edges[a] // 3 + forward.target.sums.widths[-1]) if moving[a] else n
            for a, n in enumerate(sums)
        ]
    sent = reverse.sent
    if sent is not None:
        pairs = zip(names, sent, strict=True)
        sent = tuple(at_least(n, f"sent {x}") for x, n in pairs)
    return replace(
        reverse,
        readers=tuple(tuple(max(n, most) for n in counts) for counts in reverse.readers),
        input_readers=tuple(
            max(n, most) if moves else n
            for n, moves in zip(reverse.input_readers, moving, strict=True)
        ),
        sums=tuple(sums),
        sent=sent,
        num_instructions=max(reverse.num_instructions, 2 * forward.num_instructions),
    )


def _at_least(sizes: Mapping[str, int], used: set[str], own: int, *names: str) -> int:
    """Returns a size, or what is asked for under one of its names if that is more."""
    found = [name for name in names if name in sizes]
    used.update(found)
    return max([own, *(checks.whole("export", f"sizes[{n!r}]", sizes[n]) for n in found)])


def _check_sizes(sizes: Mapping[str, int], used: set[str]) -> None:
    unknown = sorted(sizes.keys() - used)
    if unknown:
        raise ValueError(
            f"`export` got sizes of {checks.brief(unknown)}, of which there are none in these "
            "programs; `print(exported.sizes)` lists what there is, by label."
        )


def _exported_variant(
    sample: Sample, signature: Signature, reverse: ReverseSignature | None, platforms: Sequence[str]
) -> tuple[Variant, list[Any]]:
    """Returns the programs of a signature, and the arrays that they close over."""
    programs = sample.session.programs
    shared_ids = [kernel.node_type.shared for kernel in signature.kernels]
    compute, closed_over = sample.session.registry.prologue(shared_ids)

    def prepare(shared: Sequence[Any]) -> list[list[Any]]:
        own, closed = shared[: len(sample.leaves)], shared[len(sample.leaves) :]
        closed = [from_stored(x, t) for x, t in zip(closed, types, strict=True)]
        values = compute([*own, *closed])
        return [k.prologue(v) for k, v in zip(signature.kernels, values, strict=True)]

    arrays = programs.outside.read(closed_over, [], ())
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        sample._core.refuse_tracers(True)
    types = [ValueType(x.shape, x.dtype) for x in arrays]
    arrays = [np.asarray(to_stored(x, t)) for x, t in zip(arrays, types, strict=True)]
    avals = [sample.session.registry.shared[i].aval for i in range(len(sample.leaves))]
    shared = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*avals, *arrays)]
    executor = Executor(prepare, signature, lambda _: None)
    with without_mesh():
        return programs_of_variant(executor, reverse, shared, platforms), arrays


def _written_array(
    array: np.ndarray, constants: dict[tuple, int], members: dict[str, bytes]
) -> int:
    """Returns the number of an array among the constants, to which it is added if it is new."""
    data = array.tobytes()
    key = hashlib.blake2b(data).hexdigest(), array.shape, str(array.dtype)
    if key not in constants:
        members[f"constants/{len(constants)}"] = data
        constants[key] = len(constants)
    return constants[key]


def _targets(
    core: Core, shared: tuple, platforms: Sequence[str] | None
) -> list[tuple[Target, list[str]]]:
    """Returns the targets of platforms, that of here first if it is among them."""
    session, _ = core.session(shared)
    here = session.programs.target
    if platforms is None:
        return [(here, [default_platform()])]
    names = checks.names("export", "platforms", platforms)
    for name in names:
        checks.one_of("export", "platforms", name, PLATFORMS)
    if not names:
        raise ValueError("`export` got no platforms; expected at least one, such as 'cpu'.")
    found: dict[Target, list[str]] = {}
    for name in dict.fromkeys(names):
        target = core.options.target or target_of_platform(name)
        found.setdefault(target, []).append(name)
    return sorted(found.items(), key=lambda item: item[0] != here)


def policy_to_json(core: Core) -> Any:
    """Returns the policy of a batched function as JSON; None where schedules by rank do."""
    policy = core.policy
    if isinstance(policy, Adaptive):
        return None if policy.learned is None else ["machine", policy.learned.to_json()]
    if isinstance(policy, FSM):
        return ["machine", policy.to_json()]
    names = [name for name, known in HEURISTICS.items() if known is policy]
    if not names:
        raise TypeError(
            f"`export` got the batched `{core.name}` with policy={checks.brief(policy)}, which "
            f"is Python; expected an `FSM`, or one of the heuristics {sorted(HEURISTICS)} of "
            "`jedbatch.policies`. `batched.learn(params, instances)` learns an `FSM`."
        )
    return ["heuristic", names[0]]
