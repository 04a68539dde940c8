"""Containers of shared arguments: cells get them whole, and know them by a token.

A container is the same one in every recording for one structure of shared arguments.
"""

from collections.abc import Hashable

import jax
from jax.core import Tracer

from jedbatch._jaxpr.identity import typed_or_same
from jedbatch._record.instances.arrays import parts_of
from jedbatch._record.operations.symbols import Shared
from jedbatch._record.types.registry import Registry
from jedbatch._support.types import PyTree


def tokens_of_containers(registry: Registry, shared: PyTree) -> dict[int, tuple[Hashable, None]]:
    """Returns (token, None) by the id of each container in shared arguments, leaves too.

    And of arrays that the function reaches and that cells were given before.

    Args:
      registry: where tokens are kept.
      shared: the arguments, with symbols for leaves.
    """
    if registry.containers is None:
        registry.containers = _find_containers(registry, shared)
    tokens: dict[int, tuple[Hashable, None]] = {}
    stack = [shared]
    for token, has_parts in registry.containers:
        x = stack.pop()
        if token is not None:
            tokens[id(x)] = token, None
        if has_parts:
            stack += _parts(x)
    for way, (aval, token) in registry.tokens_reached.items():
        array = registry.arrays_reached.get(way)
        is_traced = isinstance(array, Tracer)  # which takes the slow path every time
        if array is not None and not is_traced and jax.typeof(array) == aval:
            tokens[id(array)] = token, None
    return tokens


def shared_token(registry: Registry, way: Hashable, shared: Shared) -> tuple[Hashable, None]:
    """Returns (token, None) of an array that the function reaches in some way."""
    token = registry.token(jax.tree.structure(shared), shared.index)
    registry.tokens_reached[way] = shared.aval, token
    registry.shared_in[token] = (shared.index,)
    return token, None


def _find_containers(registry: Registry, shared: PyTree) -> list[tuple[Hashable | None, bool]]:
    """(a token, whether there are parts) of the arguments and all that they hold.

    There is no token for what is part of the structure. Parts are taken from the last on.
    """
    containers: list[tuple[Hashable | None, bool]] = []
    stack = [shared]
    while stack:
        x = stack.pop()
        leaves, structure = jax.tree.flatten(x)
        if leaves and not any(isinstance(leaf, Shared) for leaf in leaves):
            containers.append((None, False))
            continue
        marks = [y.index if isinstance(y, Shared) else typed_or_same(y) for y in leaves]
        has_parts = not isinstance(x, Shared) and bool(leaves)
        token = registry.token(structure, *marks)
        registry.shared_in[token] = tuple([y.index for y in leaves if isinstance(y, Shared)])
        containers.append((token, has_parts))
        if has_parts:
            stack += _parts(x)
    return containers


def _parts(x: PyTree) -> list[PyTree]:
    """Returns the parts of a container that JAX has put together; `parts_of` takes longer."""
    if type(x) is dict:
        return list(x.values())
    return list(x) if type(x) in (list, tuple) else parts_of(x)
