"""`Exported`: a batched function without Python, which computes graphs."""

import functools
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jedbatch import checks
from jedbatch._export import archive
from jedbatch._export.binding import NodeTypes, called, labelled
from jedbatch._export.encoding import dtype_named, from_json
from jedbatch._export.planning import (
    ExportedStatic,
    InstanceForm,
    lowered,
    lowered_reverse,
    result_kinds,
)
from jedbatch._export.programs import Portable, Variant, default_platform
from jedbatch._export.trees import ParameterType, filled, leaves_of
from jedbatch._graph.graph import Graph
from jedbatch._graph.operations import Operation
from jedbatch._graph.record import Record
from jedbatch._graph.types import NodeType, ValueType
from jedbatch._jaxpr.derivatives import reverse_mode_only
from jedbatch._jaxpr.storage import stored
from jedbatch._jaxpr.transfers import handed_over
from jedbatch._kernel.kernel_spec import KernelSpec
from jedbatch._program.differentiable import Differentiable
from jedbatch._program.host_arrays import assemble, results_from
from jedbatch._program.plan import Host, Plan, input_name
from jedbatch._program.pullback import Pullback
from jedbatch._schedule.fsm import FSM
from jedbatch._schedule.heuristics import FALLBACKS, depth
from jedbatch._schedule.policy import Policy, schedule
from jedbatch._session.plans.indices import check_rows
from jedbatch._session.plans.outputs import form_of_results, with_room
from jedbatch._session.plans.pipeline import checked_inputs
from jedbatch._session.programs.program_cache import place
from jedbatch._support.files import replacing
from jedbatch._support.types import Leaf, PyTree

NO_EXECUTABLES = (
    "Exported models have no executables; leave it out, and set `jax_compilation_cache_dir` to a "
    "folder, and `jax_persistent_cache_min_compile_time_secs` to 0, so that JAX keeps what it has "
    "compiled for the next process."
)
HEURISTICS: dict[str, Policy] = {**FALLBACKS, "depth": depth}
ONCE = (
    "it was exported with the programs for values and gradients alone. Differentiate the batched "
    "function where the model is"
)


class Exported:
    """A batched function without Python: what `Batched.export` returns and `load` reads.

    It computes instances that are given as graphs: a `Graph` says which node reads what, and each
    node type is one of `node_types`, by number or by name.

    Attributes:
      name: of the function.
      node_types: the types that nodes may have; print it, or this object, to see what they read.
      parameters: a description of each array among the shared arguments, in order.
      platforms: for which there are programs, such as "cpu" and "cuda".
      batch_size: the most instances in a minibatch.
    """

    def __init__(self, header: Mapping[str, Any], members: Mapping[str, bytes]):
        self._header, self._members = header, members
        self.name: str = str(header["name"])
        self.node_types: tuple[NodeType, ...] = tuple(map(_known, from_json(header["types"])))
        self._types = NodeTypes(self.node_types)
        self.parameters: tuple[ParameterType, ...] = from_json(header["parameters"])
        self.batch_size: int = int(header["batch_size"])
        self._stacked, self._structure = bool(header["stacked"]), header["structure"]
        self._results = from_json(header["results"])
        self._policy, self._order = _policy_of(header["policy"]), str(header["order"])
        platforms = (p for x in header["targets"] for p in x["platforms"])
        self.platforms: tuple[str, ...] = tuple(platforms)
        self._compiled: dict[str, int] = {}
        self._variants: dict[tuple[int, str], tuple[Variant, Portable]] = {}
        self._of_signature: dict[int, tuple[Variant, Portable]] = {}
        self._constants = [self._constant(*x) for x in header["constants"]]
        self._check_precision()
        if not header["targets"]:
            raise KeyError("targets")

    def _check_precision(self) -> None:
        dtypes = {t.dtype for t in self.parameters}
        dtypes |= {t.dtype for x in self.node_types for t in (*x.operands, *x.results)}
        kept = {stored(ValueType((), x))[1] for x in dtypes}
        wide = sorted(str(x) for x in kept if jax.dtypes.canonicalize_dtype(x) != x)
        if wide:
            raise ValueError(
                f"it computes in {', '.join(wide)}, and 64 bits are off in this process; write "
                "`jax.config.update('jax_enable_x64', True)` first"
            )

    def _constant(self, member: str, shape: Sequence[int], dtype: str) -> np.ndarray:
        rows = np.frombuffer(self._members[member], dtype_named(dtype))
        return rows.reshape(tuple(shape))

    @property
    def has_gradient(self) -> bool:
        """Whether there are programs for gradients."""
        return "training" in self._header["targets"][0]["variants"]

    @property
    def compilations(self) -> Mapping[str, int]:
        """XLA programs compiled so far, counted by kind."""
        return dict(self._compiled)

    @property
    def policy(self) -> Policy | None:
        """The policy that chooses the batches; None where schedules by rank do."""
        return self._policy

    # --- the programs of a platform ---

    def _variant(self, number: int, kind: str) -> tuple[Variant, Portable]:
        """Returns the programs of a target, for "inference" or "training", and what runs them."""
        if (number, kind) not in self._variants:
            target = self._header["targets"][number]
            pairs = zip(self.node_types, from_json(target["kernels"]), strict=True)
            kernels = [replace(kernel, node_type=t) for t, kernel in pairs]
            written = target["variants"][kind]
            data = {
                name: self._members[member_name(number, kind, name)] for name in written["programs"]
            }
            variant = Variant.of(written, kernels, data)
            found = variant, Portable(variant, self._count)
            self._variants[number, kind] = self._of_signature[id(variant.signature)] = found
        return self._variants[number, kind]

    def _target(self, platform: str) -> int:
        """Returns the number of the target of a platform."""
        for number, target in enumerate(self._header["targets"]):
            if platform in target["platforms"]:
                return number
        raise ValueError(
            f"`{self.name}` was exported for {', '.join(self.platforms)}, and this process "
            f"computes on {platform!r}; export it with `platforms=(..., {platform!r})`."
        )

    def _check(self) -> None:
        """Raises an error unless all programs fit this version, and those of here can be read."""
        for number, target in enumerate(self._header["targets"]):
            for kind in target["variants"]:
                variant, _ = self._variant(number, kind)
                if default_platform() in target["platforms"]:
                    variant.read()

    def _count(self, kind: str) -> None:
        self._compiled[kind] = self._compiled.get(kind, 0) + 1

    # --- graphs ---

    def graph(
        self,
        node_type: Sequence[int | str] | np.ndarray,
        preds: Any,
        *,
        inputs: Sequence[np.ndarray] = (),
        outputs: Sequence[int | tuple[int, int]] | None = None,
    ) -> Graph:
        """Returns the graph of an instance from arrays.

        Args:
          node_type: [N], of each node the number of its type in `node_types`, its name, or its
            label where several types have the same name.
          preds: what each node reads, in order: a list of lists, or a CSR pair
            `(ptr int[N + 1], index int[E])`. An entry `k >= 0` is node `k`, which comes before its
            reader, and stands for all that it returns, one operand after the other; `-1 - i` is
            input `i`. In lists, a pair `(k, s)` is the result `s` of node `k`.
          inputs: arrays whose rows are the inputs, numbered through.
          outputs: what the instance returns, in the order in which JAX flattens the result of the
            function; entries as in `preds`. By default all results that are not read.

        Returns:
          The graph.

        Raises:
          TypeError: something is no array of numbers.
          ValueError: there is no such type, or an operand is missing, of another type, or does not
            come before its reader.
        """
        return self._types.graph(node_type, preds, inputs, outputs)

    def plan(
        self,
        graphs: Graph | Sequence[Graph],
        *,
        gradient: bool = False,
        platform: str | None = None,
    ) -> Plan:
        """Plans instances that are given as graphs; host work only.

        Args:
          graphs: of one instance each, or of several: made by `graph`, by `Batched.graph` and
            `Graph.load`, or by `Graph.from_dag` with the names of types.
          gradient: whether `apply` will be differentiated.
          platform: where the plan will run; by default where JAX computes.

        Returns:
          A plan for `apply`; print it. It is a pytree, and compiles once in a `jax.jit` of yours
          for every number of instances.

        Raises:
          TypeError: something is no graph.
          ValueError: there are nodes of other types, more of something than there is room for, or
            no programs for the platform or for gradients.
          IndexError: an input names a row of a table that is not there.
        """
        checks.flag("Exported.plan", "gradient", gradient)
        several = [graphs] if isinstance(graphs, Graph) else list(graphs)
        for x in several:
            checks.of_type("Exported.plan", x, Graph, "a graph, or a list of graphs")
        if not several:
            raise ValueError("`Exported.plan` got no graphs; expected at least one.")
        bound = [self._types.bound("Exported.plan", x) for x in several]
        graph = Graph.select([(g, i) for g in bound for i in range(g.num_instances)])
        count = graph.num_instances
        if count > self.batch_size:
            raise ValueError(
                f"`Exported.plan` got {count} instances; expected at most {self.batch_size}. Take "
                f"smaller minibatches, or export the model with `batch_size={count}`."
            )
        if gradient and not self.has_gradient:
            raise ValueError(
                f"`Exported.plan` got gradient=True, and `{self.name}` was exported without "
                "gradients; export it with `gradient=True`."
            )
        number = self._target(default_platform() if platform is None else platform)
        variant, _ = self._variant(number, "training" if gradient else "inference")
        kinds = result_kinds(graph)
        records = [InstanceForm(jax.tree.structure((0,) * len(x)), x) for x in kinds]
        outputs = np.arange(len(graph.outputs))
        returned = form_of_results(self.name, records, outputs, (), self._stacked)
        returned = with_room(graph, returned, self.batch_size)
        signature, form = variant.signature, returned[1]
        placed = place(
            variant.kernels.__getitem__,
            graph,
            schedule(graph, self._policy),
            returned,
            order=self._order,
            keeps=gradient,
            reuse=signature.shared_rows is not None,
            target=signature.target,
        )
        found = lowered(placed, variant)
        reverse, table = variant.reverse, None
        if reverse is not None:
            table, refused = lowered_reverse(found.placed, form, variant)
            reverse = reverse if reverse.refused == refused else replace(reverse, refused=refused)
        wholes = [Record(graph, i, None, ()) for i in range(count)]
        inputs = assemble(found.signature.input_rooms, wholes, [()] * count)
        check_rows(_looked_up(variant.kernels), placed.type_ids, inputs, lambda: placed)
        static = ExportedStatic(self, signature, reverse, form, gradient, (), None, count)
        return Plan(static, found.table, table, inputs, host=Host(found, {}, count))

    def apply(self, *args: PyTree, inputs: dict[str, Any] | None = None) -> Any:
        """Device work only: runs a plan. Can be compiled with `jax.jit`, and differentiated once.

        Args:
          *args: the shared arguments, with arrays at the same paths as those of the function that
            was exported, and then the plan.
          inputs: values in place of `plan.inputs`, for instance to differentiate them.

        Returns:
          The results of the batched function for these instances: stacked, or a list. Containers
          other than dicts, lists and tuples are dicts or tuples here. If a graph returns other
          values than the function does, tuples of these.

        Raises:
          TypeError: the last argument is no plan of this model.
          ValueError: arrays among the shared arguments are missing, or of other shapes or dtypes;
            or the plan is made without gradients, and is differentiated.
        """
        if not args or not isinstance(args[-1], Plan) or args[-1].static.programs is not self:
            came = checks.shown(args[-1]) if args else "nothing"
            raise TypeError(
                f"`Exported.apply` got {came} as its last argument; expected a plan of this "
                "exported model, as in `exported.apply(params, exported.plan(graphs))`."
            )
        *shared, plan = args
        leaves = leaves_of("Exported.apply", self.parameters, shared)
        rows = checked_inputs(plan, plan.inputs if inputs is None else inputs)
        outputs = self._run(plan, leaves, rows)
        static = plan.static
        assert isinstance(static, ExportedStatic)
        results = results_from(static.results, static.signature, outputs)
        if not self._stacked:
            return [self._filled(x) for x in results]
        return self._filled(jax.tree.map(lambda x: x[: static.num_instances], results))

    def __call__(self, *args: Any) -> Any:
        """Computes instances that are given as graphs.

        Args:
          *args: the shared arguments, as for `apply`, and then the graphs, as for `plan`.

        Returns:
          The results, as `apply` does.

        Raises:
          TypeError, ValueError, IndexError: as `plan` and `apply` do.
        """
        *shared, graphs = args
        return self.apply(*shared, self.plan(graphs))

    def _filled(self, leaves: Sequence[Any]) -> PyTree:
        kinds = tuple((x.shape[1:] if self._stacked else x.shape, x.dtype) for x in leaves)
        if self._results is None or kinds != self._results:
            return tuple(leaves)
        return filled(self._structure, iter(leaves))

    def _run(self, plan: Plan, leaves: Sequence[Leaf], inputs: Mapping[str, Any]) -> Any:
        static = plan.static
        signature = static.signature
        variant, executor = self._of_signature[id(signature)]
        shared = [*leaves, *(self._constants[i] for i in variant.constants)]
        rows = tuple(inputs[input_name(kind)] for kind in signature.arenas)
        arguments = shared, *handed_over((rows, plan.table))
        if not any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments)):
            return executor.infer(*arguments)

        pullback = Pullback(signature, static.results, self._refuse, static.reverse, is_fixed=True)
        permit = functools.partial(self._permit, static.keeps)
        run = Differentiable(lambda: executor, pullback, permit, self._refuse_twice)
        with reverse_mode_only(f"the exported `{self.name}`", ONCE):
            return run(*arguments, handed_over(plan.reverse_table))

    def _permit(self, keeps: bool) -> None:
        if not keeps:
            raise ValueError(
                f"the exported `{self.name}` is differentiated with a plan made for inference, "
                "which does not keep what the reverse reads; make it with "
                "`exported.plan(graphs, gradient=True)`, and `apply` it."
            )

    def _refuse_twice(self) -> None:
        raise TypeError(f"the exported `{self.name}` is differentiated twice, and {ONCE}.")

    def _refuse(self, kernel: KernelSpec, result: int) -> None:
        raise TypeError(
            f"result {result} of `{kernel.node_type}` of the exported `{self.name}` cannot be "
            "differentiated, and a gradient is wanted through it. Write `jax.lax.stop_gradient` "
            "around it in the model."
        )

    # --- files ---

    def serialize(self) -> bytes:
        """Returns the model as bytes, which `deserialize` reads in any process.

        Returns:
          The bytes; they hold no pickle.
        """
        return archive.pack(self._header, self._members)

    @staticmethod
    @checks.without(compiled=NO_EXECUTABLES)
    def deserialize(data: bytes) -> "Exported":
        """Reads what `serialize` returned.

        Args:
          data: the bytes.

        Returns:
          The exported model.

        Raises:
          ValueError: it is damaged, something else, or of a version that this one does not read.
        """
        return _read(bytes(data), "the bytes")

    def save(self, path: str | Path) -> None:
        """Writes the model to a file, whole or not at all.

        Args:
          path: the file.
        """
        with replacing("Exported.save", path) as file:
            file.write(self.serialize())

    @staticmethod
    @checks.without(compiled=NO_EXECUTABLES)
    def load(path: str | Path) -> "Exported":
        """Reads what `save` wrote.

        Nothing of the model's Python is needed, and nothing of it is run. Files are read as long as
        `jax.export` reads the programs in them: those of the last six months at least, and of three
        weeks to come.

        Args:
          path: the file.

        Returns:
          The exported model.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is damaged, something else, or of a version that this one does not read.
        """
        with open(checks.path("Exported.load", path), "rb") as file:
            return _read(file.read(), repr(os.fspath(path)))

    @property
    def sizes(self) -> dict[str, int]:
        """How much there is room for in a minibatch, to be read and passed to `Batched.export`.

        Lanes of each node type (its nodes, and the padding of its batches), inputs of each kind,
        and instructions (runs of batches).
        """
        variant, _ = self._variant(0, "training" if self.has_gradient else "inference")
        signature = variant.signature
        pairs = zip(signature.kernels, signature.lanes, strict=True)
        found = {called(kernel.node_type, self.node_types): n for kernel, n in pairs}
        for kind, n in zip(signature.arenas, signature.inputs, strict=True):
            found |= {input_name(kind): n} if n else {}
        if variant.reverse is not None:
            found["readers"] = max((n for x in variant.reverse.readers for n in x), default=1)
        return {**found, "instructions": signature.num_instructions}

    def __str__(self) -> str:
        sizes = self.sizes
        size = sum(map(len, self._members.values()))
        more = ", with gradients" if self.has_gradient else ""
        lines = [
            f"Exported `{self.name}` for {', '.join(self.platforms)}{more}: "
            f"{len(self.parameters)} arrays of parameters, up to {self.batch_size} instances, "
            f"{size / 1e3:,.0f} kB",
            "",
            "  number   lanes  type",
        ]
        for label, t in labelled(self.node_types).items():
            node_type = self.node_types[t]
            called_here = called(node_type, self.node_types)
            named = "" if called_here == node_type.name else f" as {label!r}"
            lines.append(f"  {t:6}  {sizes[called_here]:6}  {node_type}{named}")
        return "\n".join(lines)

    __repr__ = __str__


def _looked_up(kernels: Sequence[KernelSpec]) -> Any:
    """Returns the tables whose rows operands name, as `check_rows` asks a `Registry` for them."""
    return types.SimpleNamespace(
        node_types=[kernel.node_type for kernel in kernels],
        table_rows={
            t: tuple((k, n, stored(x.node_type.operands[k])) for k, n in x.table_rows)
            for t, x in enumerate(kernels)
        },
    )


def member_name(number: int, kind: str, name: str) -> str:
    """Returns where a program of a target is in the file."""
    return f"programs/{number}/{kind}/{name}"


def _known(node_type: NodeType) -> NodeType:
    """Returns a type with an operation, by which it is told apart from others."""
    key = "exported", node_type.label, node_type.identity
    return replace(node_type, operation=Operation(key, None))


def _policy_of(written: Any) -> Policy | None:
    if written is None:
        return None
    kind, content = written
    return HEURISTICS[content] if kind == "heuristic" else FSM.from_json(content)


def _read(data: bytes, source: str) -> Exported:
    header, members = archive.unpack(data, source)
    try:
        exported = Exported(header, members)
        exported._check()
    except Exception as error:
        raise archive.unreadable(source, error) from error
    return exported
