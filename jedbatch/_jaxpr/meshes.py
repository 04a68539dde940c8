"""Types of arrays where a mesh is set: how they are cut over it, and along which axes they vary.

A program of ours runs as a whole, on arrays as they are. Within `jax.shard_map` these are the parts
of one device, and JAX notes of each along which axes of the mesh parts differ; on meshes with
explicit axes it notes how each is cut, and checks all operations. Nothing within a program is
about a mesh. So it is traced without one, for types that say nothing of it; its results vary as
its arguments do, and are whole along explicit axes.

Where arguments vary along other axes, those that do not vary are made to, as JAX does with
operands: the derivative of that adds up the cotangents of all parts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jedbatch._jaxpr.configuration import without_mesh
from jedbatch._support.types import Array


def on_no_mesh(aval: Any) -> Any:
    """Returns the type of an array without what it says of a mesh."""
    if not isinstance(aval, ShapedArray) or aval.sharding.mesh.empty:
        return aval
    return ShapedArray(aval.shape, aval.dtype, aval.weak_type)


def run_on_no_mesh(run: Callable, args: Sequence[Array]) -> list[Array]:
    """Runs what returns a list of arrays on arrays that are there, where a mesh may be set."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return run(*args)
    mesh = jax.sharding.get_mesh()
    with without_mesh():
        automatic = Mesh(mesh.devices, mesh.axis_names)
        results = run(*(_moved(x, mesh, automatic) for x in args))
        return [_moved(x, automatic, mesh) for x in results]


def _moved(x: Any, old: Mesh, new: Mesh) -> Any:
    """Returns an array that is on a mesh as one on another mesh of the same devices."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh != old:
        return x
    return jax.device_put(x, NamedSharding(new, sharding.spec))


def on_mesh_of(avals: Sequence[Any], result: Any) -> Any:
    """Returns the type of a result of a program whose arguments have some types."""
    meant = [x for x in avals if isinstance(x, ShapedArray) and not x.sharding.mesh.empty]
    if not meant:
        return result
    like = max(meant, key=lambda x: len(varying(x)))
    whole = NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * result.ndim))
    shape, dtype, weak = result.shape, result.dtype, result.weak_type
    return like.update(shape=shape, dtype=dtype, weak_type=weak, sharding=whole)


def varying(aval: Any) -> frozenset[Any]:
    """Returns the axes of a mesh along which an array of some type varies."""
    axes: frozenset[Any] = aval.mat.varying
    return axes


def varies(args: Any) -> bool:
    """Returns whether an array among some is the part of one device, as JAX notes of tracers.

    JAX takes no operation then that other operands do not vary in, such as constants: those of a
    traced program are to be made to, or the program to be one operation for JAX.
    """
    tracers = (x for x in jax.tree.leaves(args) if isinstance(x, Tracer))
    return any(varying(jax.typeof(x)) for x in tracers)


def varying_alike(args: Sequence[Array]) -> Sequence[Array]:
    """Returns arguments of a program, all of them varying along the same axes of a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return args
    axes = [varying(jax.typeof(x)) for x in args]
    every = frozenset().union(*axes)
    pairs = zip(args, axes, strict=True)
    return [
        lax.pcast(x, tuple(sorted(every - own)), to="varying") if own != every else x
        for x, own in pairs
    ]


def cut_as(aval: Any, x: Array) -> Array:
    """Returns an array cut along explicit axes of a mesh as a type says, if there are any."""
    if aval.sharding.mesh.empty or jax.typeof(x).sharding == aval.sharding:
        return x
    return jax.sharding.reshard(x, aval.sharding)
