"""Policies: which type of node runs next.

A policy is any callable from a `Frontier` to a type id; pass one of these, or your own, as
`policy=` to `jedbatch.batch` and `jedbatch.schedule`.
"""

from jedbatch._schedule import Frontier, agenda, depth, height, sufficient

__all__ = ["Frontier", "agenda", "depth", "height", "sufficient"]
