"""Programs of other people: what a new user would write, and what an expert would instead.

Each module has one program, or a few that differ in how they are spelled: synthetic instances,
parameters, the model of one instance, and the whole minibatch by hand. The models are written
without regard to jedbatch but for `@jedbatch.cell`: plain recursion, lists, dicts, closures. The
hand-written side gets arrays padded to the same shapes for all minibatches, which an expert would
look up in the data beforehand, so that it compiles once. `questions/programs.py` compares them.

childsum_*         child-sum TreeLSTMs with cells of Equinox, Flax NNX and Haiku, 0 to 23 children.
messages           message passing over adjacency lists of small graphs.
felsenstein        the likelihood of sequences at the leaves of a tree, 512 sites.
cky                the inside algorithm for sentences of up to 40 words, its chart a dict.
expressions        arithmetic expressions of 8 operators, with cells and without.
runge_kutta        adaptive Dormand–Prince in `lax.while_loop`, in a cell and outside of one.
attention          attention over the words of sentences and over the sentences of documents, the
                   latter in a cell or not.
modules            neural module networks: a program of modules for each question.
circuits           sum–product networks of random structure.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np


class Program(NamedTuple):
    """A model of one instance, and of minibatches by hand.

    Attributes:
      instances: maps (generator, count, tiny) to instances, small ones if `tiny`.
      parameters: maps (random key, tiny) to parameters, a pytree of arrays.
      model: maps (params, instance) to an array.
      prepare: maps minibatches to arrays for each, of the same shapes.
      by_hand: maps (params, arrays) to the model's results of all instances.
      batch: instances of a minibatch.
      differentiable: False if JAX has no reverse mode for the program.
    """

    instances: Callable[[np.random.Generator, int, bool], list[Any]]
    parameters: Callable[[Any, bool], Any]
    model: Callable[[Any, Any], Any]
    prepare: Callable[[Sequence[Sequence[Any]]], list[Any]]
    by_hand: Callable[[Any, Any], Any]
    batch: int = 64
    differentiable: bool = True


MODULES = {
    "childsum_equinox": "childsum_equinox",
    "childsum_nnx": "childsum_nnx",
    "childsum_haiku": "childsum_haiku",
    "messages": "messages",
    "felsenstein": "felsenstein",
    "cky": "cky",
    "cky20": "cky",
    "expressions": "expressions",
    "expressions_plain": "expressions",
    "runge_kutta": "runge_kutta",
    "runge_kutta_cell": "runge_kutta",
    "attention": "attention",
    "attention_cell": "attention",
    "modules": "modules",
    "circuits": "circuits",
}


def load(name: str) -> Program:
    """A program by name; raises `ImportError` where its framework is not installed."""
    return importlib.import_module(f"benchmarks.programs.{MODULES[name]}").PROGRAMS[name]


def normal(key: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Arrays of these shapes, by name, of standard normal numbers."""
    keys = jax.random.split(key, len(shapes))
    pairs = zip(shapes.items(), keys, strict=True)
    return {name: jax.random.normal(k, shape) for (name, shape), k in pairs}
