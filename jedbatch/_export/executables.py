"""Executables: programs of an exported model as XLA compiled them, for machines of one kind.

An exported program is StableHLO, which takes XLA seconds to compile, in every process. The result,
machine code that loads in milliseconds, can be in the file, too. It runs where XLA would compile
the same: by the same version of XLA, on as many devices of the same kind, with the same
instructions of the processor (see `Machine`). Elsewhere the StableHLO is compiled as if there were
no executables, and so it is inside of a `jax.jit` of the user's, which XLA compiles as a whole.

An executable takes and returns arrays one after the other:

    pack      shared values                                   -> consts of kernels
    forward   consts, input rows, table, arenas if large      -> rows returned, arenas if large
    save      shared values, input rows, table                -> rows returned, state
    reverse   shared values, tables, state, cotangents        -> cotangents

`forward` takes shared values in place of consts where nothing is packed. Arenas are donated.

XLA writes and reads executables itself (`jax.stages.Compiled.runtime_executable`, and
`serialize_executable` and `deserialize_executable` of the client of a device); no pickle is part of
it. `jax.experimental.serialize_executable` does the same with pickle around it.
"""

import dataclasses
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxlib import xla_client

from jedbatch import checks
from jedbatch._export.encoding import version_of
from jedbatch._export.programs import Portable, Variant
from jedbatch._jaxpr.configuration import finds_faults, is_staging, without_mesh
from jedbatch._jaxpr.storage import Kind
from jedbatch._support import native
from jedbatch._support.types import Array

NAMES = {
    "platform": "the platform",
    "device_kind": "the kind of device",
    "num_devices": "the number of devices",
    "jaxlib": "the version of jaxlib",
    "jedbatch": "the version of jedbatch",
    "runtime": "the version of the runtime",
    "topology": "what XLA knows of processor and devices",
}


def default_device() -> Any:
    """Returns the device on which JAX computes by default."""
    device = getattr(jax.config, "jax_default_device", None)
    if device is None or isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device


@dataclass(frozen=True)
class Machine:
    """All that an executable depends on.

    Attributes:
      platform: of the device, as JAX names it.
      device_kind: such as "NVIDIA H100 80GB HBM3"; "cpu" for all processors.
      num_devices: of the process, or of all that are connected.
      jaxlib: the version of jaxlib, and with it that of XLA.
      jedbatch: the version of this package, which decides what an executable takes.
      runtime: the version of the platform, such as that of CUDA.
      topology: XLA's fingerprint of the devices, and of the instructions that a processor has.
    """

    platform: str
    device_kind: str
    num_devices: int
    jaxlib: str
    jedbatch: str
    runtime: str
    topology: str

    @staticmethod
    def here() -> "Machine":
        """Returns that of this process.

        Raises:
          NotImplementedError: XLA does not say here what it compiles for.
        """
        device = default_device()
        try:
            topology = xla_client.get_topology_for_devices([device]).fingerprint()
        except (AttributeError, jax.errors.JaxRuntimeError) as error:
            raise NotImplementedError(
                f"jaxlib {jax.lib.__version__} does not say what it compiles for on "
                f"{device.platform!r}: {checks.cut(error)}"
            ) from error
        client = device.client
        version = checks.cut(client.platform_version)
        return Machine(
            client.platform,
            device.device_kind,
            client.device_count(),
            jax.lib.__version__,
            version_of("jedbatch"),
            version,
            f"{topology:016x}",
        )

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def of(written: Mapping[str, Any]) -> "Machine":
        """Returns what `to_json` wrote."""
        return Machine(**{name: written[name] for name in NAMES})

    def differences(self, here: "Machine") -> str:
        """Returns in words what is different here; empty if nothing is."""
        pairs = [
            f"{NAMES[name]} was {checks.brief(getattr(self, name))} and is "
            f"{checks.brief(getattr(here, name))}"
            for name in NAMES
            if getattr(self, name) != getattr(here, name)
        ]
        return ", ".join(pairs)

    def __str__(self) -> str:
        return f"{self.num_devices} {self.device_kind}, jaxlib {self.jaxlib}, {self.topology}"


def refusal(target: Mapping[str, Any]) -> str:
    """Returns why the executables of a target are not run here; empty if they can be.

    Args:
      target: as JSON, with its machine and its variants.
    """
    try:
        found = Machine.of(target["machine"]).differences(Machine.here())
    except NotImplementedError as error:
        return str(error)
    for written in target["variants"].values():
        calls_core, revision = written["executables"]["calls_core"], written["revision"]
        if calls_core and (native.core() is None or revision != native.REVISION):
            found = found or f"they call the compiled core, revision {revision}, which is not here"
    return found


@dataclass(frozen=True, eq=False)
class Executable:
    """A program as XLA compiled it.

    Attributes:
      data: as XLA serialized it.
      arguments: the shapes and dtypes of its arguments.
    """

    data: bytes
    arguments: tuple[Kind, ...]

    @functools.cached_property
    def _loaded(self) -> dict[Any, Any]:
        return {}

    def on(self, device: Any) -> Any:
        """Returns it as loaded for a device, whichever it was compiled for.

        Raises:
          ValueError: it cannot be loaded.
        """
        if device in self._loaded:
            return self._loaded[device]
        options = xla_client.CompileOptions()
        options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]]))
        try:
            found = device.client.deserialize_executable(self.data, [device], options)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"an executable of an exported model cannot be loaded: {checks.cut(error)}. Read "
                "the file with `Exported.load(path, compiled=False)`, or export the model again."
            ) from error
        return self._loaded.setdefault(device, found)

    def fits(self, given: Sequence[Any]) -> bool:
        """Returns whether arguments are values of its types, on the default device if on any."""
        if len(given) != len(self.arguments) or is_staging() or finds_faults():
            return False
        devices = {default_device()}
        for x, (shape, dtype) in zip(given, self.arguments, strict=True):
            if isinstance(x, Tracer) or x.shape != shape or x.dtype != dtype:
                return False
            if isinstance(x, jax.Array) and x.devices() != devices:
                return False
        return True

    def __call__(self, given: Sequence[Any]) -> list[Array]:
        """Runs it on arguments that fit, on the default device."""
        device = default_device()
        loaded = self.on(device)
        arrays = [x if isinstance(x, jax.Array) else jax.device_put(x, device) for x in given]
        found = loaded.execute_sharded(arrays)
        return [shards[0] for shards in found.disassemble_into_single_device_arrays()]


class Precompiled(Portable):
    """Runs executables of a variant where they fit, or else compiles its programs."""

    def __init__(
        self, variant: Variant, compiled: Callable[[str], None], data: Mapping[str, bytes]
    ):
        """Prepares them.

        Args:
          variant: its programs.
          compiled: is told what is compiled.
          data: the executables by name, as XLA serialized them.
        """
        super().__init__(variant, compiled)
        self.executables = {
            name: Executable(data[name], tuple(map(_kind, arguments)))
            for name, (_, arguments, _) in calls_of(self).items()
        }
        reverse = self.reverse
        self.pack = self._either("pack", self.pack, self.as_consts)
        self.once = self._either("forward", self.once, tuple)
        self.again = self._either("forward", self.again, self._rows_and_state)
        self.save = self._either("save", self.save, self._rows_and_state)
        self.reverse = lambda signature, *args: self._either(
            "reverse", functools.partial(reverse, signature), self.as_cotangents
        )(*args)

    def _either(self, name: str, otherwise: Callable, structured: Callable) -> Callable:
        """Returns what calls an executable, or else compiles the program."""
        executable = self.executables.get(name)
        if executable is None:
            return otherwise

        def call(*args: Any) -> Any:
            leaves = jax.tree.leaves(args)
            if not executable.fits(leaves):
                return otherwise(*args)
            return structured(executable(leaves))

        return call

    def _weights(self, shared: Sequence[Array]) -> dict[str, Any]:
        weights = super()._weights(shared)
        packs = "shared" in weights and "pack" in self.executables  # arrays that do not last
        if packs and self.executables["pack"].fits(shared):
            return {"consts": self.pack(shared)}
        return weights

    def _new_arenas(self) -> tuple[Array, ...]:
        pairs = zip(self.signature.rows, self.signature.arenas, strict=True)
        return tuple(  # without a program that makes zeros
            jax.device_put(np.zeros((n, *shape), dtype), default_device())
            for n, (shape, dtype) in pairs
        )

    def _rows_and_state(self, found: Sequence[Array]) -> tuple[tuple[Array, ...], Any]:
        count = len(self.signature.arenas)
        return tuple(found[:count]), list(found[count:])


def _kind(aval: Any) -> Kind:
    return tuple(aval.shape), aval.dtype


def calls_of(executor: Portable) -> dict[str, tuple[Callable, Sequence[Any], Sequence[int]]]:
    """Returns the executables that a variant has.

    Args:
      executor: of the variant, on whose sizes it depends whether arenas are kept.

    Returns:
      By name: (a function of arrays, their types, the positions of those that are donated).
    """
    variant, num_inputs = executor.variant, len(executor.signature.arenas)
    packs, keeps_arenas = variant.has_prologue, executor.is_large
    shared, of_forward = variant.arguments("pack"), variant.arguments("forward")
    num_rest = 2 * num_inputs + 1  # input rows, the table, arenas
    consts, rest = of_forward[:-num_rest], of_forward[-num_rest:]
    weight_types = consts if packs else shared

    def forward(*values: Any) -> Any:
        given, after = list(values[: len(weight_types)]), values[len(weight_types) :]
        weights = {"consts": executor.as_consts(given)} if packs else {"shared": given}
        inputs, table, arenas = after[:num_inputs], after[num_inputs], after[num_inputs + 1 :]
        if keeps_arenas:
            return executor._again(weights, inputs, table, arenas)
        return executor._once(weights, inputs, table)

    types = [*weight_types, *(rest if keeps_arenas else rest[:-num_inputs])]
    donated = range(len(types) - num_inputs, len(types)) if keeps_arenas else ()
    found: dict[str, tuple[Callable, Sequence[Any], Sequence[int]]] = {
        "forward": (forward, types, tuple(donated))
    }
    for name in variant.names:
        if name != "forward" and (packs or name != "pack"):
            function = functools.partial(variant.call_flat, name)
            found[name] = function, variant.arguments(name), ()
    return found


def compiled_here(variant: Variant) -> dict[str, bytes]:
    """Compiles the programs of a variant for this machine.

    Args:
      variant: exported for its platform.

    Returns:
      Executables by name, as XLA serializes them.

    Raises:
      NotImplementedError: XLA does not serialize them here.
    """
    executor, data = Portable(variant, lambda _: None), {}
    options = variant.signature.target.compiler_options() or None
    for name, (function, types, donated) in calls_of(executor).items():
        specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types]
        jitted = jax.jit(
            _uncached(name, function),
            donate_argnums=donated,
            keep_unused=True,
            compiler_options=options,
        )
        with without_mesh():
            loaded = jitted.lower(*specs).compile().runtime_executable()
        try:
            data[name] = bytes(default_device().client.serialize_executable(loaded))
        except (AttributeError, TypeError, jax.errors.JaxRuntimeError) as error:
            raise NotImplementedError(
                f"jaxlib {jax.lib.__version__} does not serialize executables for "
                f"{default_device().platform!r}: {checks.cut(error)}"
            ) from error
    return data


def _uncached(name: str, function: Callable) -> Callable:
    """Returns a function that JAX does not find in its compilation cache, if there is one.

    What XLA loaded from there it does not write whole a second time.
    """

    def call(*arrays: Any) -> Any:
        return function(*arrays)

    directory: Any = getattr(jax.config, "jax_compilation_cache_dir", None)
    call.__name__ = f"{name}_{uuid.uuid4().hex}" if directory else name
    return call
