"""Exported programs: StableHLO with the sizes that it was made for, and what runs it.

There is one `Variant` for inference and one for training. A variant is made of several programs,
each a call of XLA, which share their arguments:

    pack      shared values                                -> consts of kernels
    forward   consts, input rows, table, arenas            -> rows returned, arenas
    save      shared values, input rows, table             -> rows returned, state
    reverse   shared values, tables, state, cotangents     -> cotangents of shared values, of inputs

Programs are read when they are first needed. Those for a CPU come in a second form, too, if the
compiled core is there where they are exported: it moves rows by calls of the core, compiles faster
and runs faster, and is used where the core is of the same revision.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.export

from jedbatch._export.encoding import from_json, to_json
from jedbatch._jaxpr.interpret import has_gradient
from jedbatch._jaxpr.native_calls import calls_in_exports
from jedbatch._kernel.kernel_spec import KernelSpec
from jedbatch._program.arenas import zeros
from jedbatch._program.executors import Executor
from jedbatch._program.lower_vjp import ReverseSignature
from jedbatch._program.signature import Signature
from jedbatch._program.tables import TableLayout
from jedbatch._support import native
from jedbatch._support.announce import announced
from jedbatch._support.types import Array, PyTree

NEEDS_FLATBUFFERS = (
    "JAX writes and reads exported programs with the package flatbuffers, which is not installed; "
    "write `pip install 'jedbatch[export]'`."
)
CORE = "-core"  # after the name of a program that calls the compiled core


def default_platform() -> str:
    """Returns where JAX computes by default, as `jax.export` names it."""
    device = getattr(jax.config, "jax_default_device", None)
    platform = getattr(device, "platform", device)
    return "cpu" if platform == "cpu" else jax.export.default_export_platform()


def deserialized(data: bytes) -> Any:
    """Returns what `jax.export` serialized."""
    try:
        return jax.export.deserialize(bytearray(data))
    except ImportError as error:
        raise ImportError(NEEDS_FLATBUFFERS) from error


def serialized(exported: Any) -> bytes:
    """Returns an exported program of JAX as bytes."""
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise ImportError(NEEDS_FLATBUFFERS) from error
    except KeyError as error:  # a dtype
        raise TypeError(
            f"`export` got values of dtype {error.args[0]}, which files of JAX do not have; "
            "expected others. Write `x.astype(jnp.int8)` where they go from one cell to the next."
        ) from None


def digest_of_layout(form: TableLayout) -> str:
    """Returns a digest of where things are in a table."""
    return hashlib.blake2b(repr(sorted(form.places.items(), key=repr)).encode()).hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class Variant:
    """Programs for inference, or for training.

    Attributes:
      signature: the sizes, with `KernelSpec`s in place of kernels.
      reverse: None if there are no gradients.
      constants: numbers of the constants among its shared values, after the leaves.
      has_prologue: whether `pack` does anything.
      gradients: which of the shared values, and of the arenas of inputs, get cotangents.
      data: of each program by name, as `jax.export` serialized it; "NAME-core" calls the core.
      revision: of that core.
      kernels: by the number of their type; none where it was exported.
    """

    signature: Signature
    reverse: ReverseSignature | None
    constants: tuple[int, ...]
    has_prologue: bool
    gradients: tuple[tuple[bool, ...], tuple[bool, ...]]
    data: Mapping[str, bytes]
    revision: int = native.REVISION
    kernels: tuple[KernelSpec, ...] = ()

    @functools.cached_property
    def _programs(self) -> dict[str, Any]:
        return {}

    def read(self) -> None:
        """Reads all programs now, or raises the error of `jax.export`."""
        for name in self.data:
            self._program(name)

    def call(self, name: str, *args: Any) -> Any:
        """Calls one of the programs, in the form that is fastest here."""
        name = f"{name}{CORE}" if self.calls_core and f"{name}{CORE}" in self.data else name
        return self._program(name).call(*args)

    def _program(self, name: str) -> Any:
        if name not in self._programs:
            self._programs[name] = deserialized(self.data[name])
        return self._programs[name]

    @property
    def calls_core(self) -> bool:
        """Whether the programs that call the core are those to run here."""
        here = native.core() is not None and default_platform() == "cpu"
        return here and f"forward{CORE}" in self.data and self.revision == native.REVISION

    @property
    def tables(self) -> list[str]:
        """Digests of the layouts of its tables."""
        reverse = [] if self.reverse is None else [self.reverse.form]
        return list(map(digest_of_layout, [self.signature.form, *reverse]))

    def to_json(self, kernels: Sequence[Any]) -> dict[str, Any]:
        """Returns all but the programs, with kernels by their place among some."""
        order: Any = tuple(map(kernels.index, self.signature.kernels))
        nothing: Any = None
        parts = {
            "signature": replace(self.signature, kernels=order),
            "reverse": self.reverse and replace(self.reverse, forward=nothing),
            "constants": self.constants,
            "has_prologue": self.has_prologue,
            "gradients": self.gradients,
            "revision": self.revision,
        }
        written = {name: to_json(x) for name, x in parts.items()}
        return {**written, "tables": self.tables, "programs": list(self.data)}

    @staticmethod
    def of(
        written: Mapping[str, Any], kernels: Sequence[KernelSpec], data: Mapping[str, bytes]
    ) -> "Variant":
        """Returns what `to_json` wrote.

        Raises:
          ValueError: tables are made in another way by this version of the package.
        """
        names = "signature", "reverse", "constants", "has_prologue", "gradients", "revision"
        parts = {name: from_json(written[name]) for name in names}
        numbers = parts["signature"].kernels
        forward = replace(parts["signature"], kernels=tuple(kernels[t] for t in numbers))
        reverse = parts["reverse"] and replace(parts["reverse"], forward=forward)
        own = {"signature": forward, "reverse": reverse, "data": data, "kernels": tuple(kernels)}
        variant = Variant(**{**parts, **own})
        if variant.tables != written["tables"]:
            raise ValueError(
                "its programs read tables that this version of jedbatch makes in another way; "
                "export the model again with it"
            )
        return variant


class Portable(Executor):
    """Runs the programs of a variant, as `Executor` does those of a function."""

    def __init__(self, variant: Variant, compiled: Callable[[str], None]):
        super().__init__(self._prepare, variant.signature, compiled)
        self.variant = variant

    def _prepare(self, shared: Sequence[Array]) -> PyTree:
        return self.variant.call("pack", list(shared))

    def _has_prologue(self, shared: Sequence[Array]) -> bool:
        return self.variant.has_prologue

    def _once(self, weights: PyTree, inputs: PyTree, table: Array) -> PyTree:
        arenas = map(zeros, self.signature.rows, self.signature.arenas)
        return self._again(weights, inputs, table, tuple(arenas))[0]

    def _again(self, weights: PyTree, inputs: PyTree, table: Array, arenas: PyTree) -> PyTree:
        self._announce("inference")
        packed = weights["consts"] if "consts" in weights else self._prepare(weights["shared"])
        return self.variant.call("forward", packed, list(inputs), table, list(arenas))

    def _save(self, shared: Sequence[Array], inputs: PyTree, table: Array) -> PyTree:
        self._announce("training")
        return self.variant.call("save", list(shared), list(inputs), table)

    def _reverse(
        self, signature: Any, shared: PyTree, tables: PyTree, values: PyTree, outputs: PyTree
    ) -> PyTree:
        self._announce("reverse")
        given = [x for x in tables if x is not None]
        cotangents = [x for x in outputs if x is not None]
        back = iter(self.variant.call("reverse", list(shared), given, values, cotangents))
        of_shared, of_inputs = self.variant.gradients
        return (
            [next(back) if there else None for there in of_shared],
            tuple([next(back) if there else None for there in of_inputs]),
        )


@announced  # whatever is traced in here is over with it
def programs_of_variant(
    executor: Executor,
    reverse: ReverseSignature | None,
    shared: Sequence[Any],
    platforms: Sequence[str],
) -> Variant:
    """Exports the programs of a signature, whose constants are not numbered yet.

    Args:
      executor: what runs them here.
      reverse: if there are to be gradients.
      shared: types of the shared values.
      platforms: to export for, as `jax.export` names them.
    """
    signature = executor.signature
    i32, kinds = jax.numpy.int32, signature.arenas

    def rows(counts: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        pairs = zip(counts, kinds, strict=True)
        return [jax.ShapeDtypeStruct((n, *shape), dtype) for n, (shape, dtype) in pairs]

    def pack(shared: Any) -> Any:
        return [list(consts) for consts in executor.prepare(shared)]

    def forward(consts: Any, inputs: Any, table: Any, arenas: Any) -> Any:
        outputs, arenas = executor._again({"consts": consts}, inputs, table, arenas)
        return list(outputs), list(arenas)

    def save(shared: Any, inputs: Any, table: Any) -> Any:
        outputs, state = executor._save(shared, inputs, table)
        return list(outputs), jax.tree.leaves(state)

    data: dict[str, bytes] = {}

    def export(name: str, function: Callable, *args: Any) -> Any:
        made = jax.export.export(jax.jit(function), platforms=tuple(platforms))(*args)
        data[name] = serialized(made)
        if "cpu" in platforms and name != "pack":
            with calls_in_exports() as calls:
                anew = jax.jit(lambda *args: function(*args))  # JAX would take it for the same
                permitted = list(map(jax.export.DisabledSafetyCheck.custom_call, calls))
                made = jax.export.export(anew, platforms=["cpu"], disabled_checks=permitted)(*args)
            if calls:
                data[f"{name}{CORE}"] = serialized(made)
        return jax.eval_shape(function, *args)

    shared, inputs = list(shared), rows(signature.inputs)
    table = jax.ShapeDtypeStruct((signature.form.size,), i32)
    has_prologue = bool(jax.make_jaxpr(pack)(shared).eqns)
    packed = export("pack", pack, shared)
    export("forward", forward, packed, inputs, table, rows(signature.rows))
    if reverse is None:
        return Variant(signature, None, (), has_prologue, ((), ()), data)
    export("save", save, shared, inputs, table)
    state = jax.eval_shape(lambda *args: executor._save(*args)[1], shared, inputs, table)
    leaves, structure = jax.tree.flatten(state)
    moving = [has_gradient(dtype) for _, dtype in kinds]
    tables: list[Any] = [table, jax.ShapeDtypeStruct((reverse.form.size,), i32)]
    if reverse.marks:
        tables.append([jax.ShapeDtypeStruct((n,), jax.numpy.bool_) for n in signature.outputs])
    elif reverse.tells:
        tables.append(jax.ShapeDtypeStruct((1,), i32))
    given = [x for x, moves in zip(rows(signature.outputs), moving, strict=True) if moves]
    there: list[Any] = []

    def back(shared: Any, tables: Any, values: Any, cotangents: Any) -> Any:
        each = iter(cotangents)
        outputs = [next(each) if moves else None for moves in moving]
        own = (*tables, *([] if reverse.tells or reverse.marks else [None]))
        state = jax.tree.unflatten(structure, values)
        of_shared, of_inputs = executor._reverse(reverse, shared, own, state, outputs)
        there[:] = [tuple(x is not None for x in part) for part in (of_shared, of_inputs)]
        return [x for x in (*of_shared, *of_inputs) if x is not None]

    export("reverse", back, shared, tables, leaves, given)
    return Variant(signature, reverse, (), has_prologue, (there[0], there[1]), data)
