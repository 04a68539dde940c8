"""Message passing over adjacency lists of small graphs, such as molecules.

An instance is `(kinds of atoms, neighbours of each atom)`. In each of three rounds an atom sums the
states of its neighbours and updates its own by a GRU; scores are read from all atoms at the end.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks.programs import Program, normal

KINDS = 12
ROUNDS = 3
SCORES = 8


@jedbatch.cell
def embed(params, kind):
    return params["embedding"][kind]


@jedbatch.cell
def update(params, state, neighbours):
    return gru(params, state, sum(neighbours) @ params["message"])


@jedbatch.cell
def readout(params, states):
    return jnp.tanh(sum(states)) @ params["score"]


def gru(params, state, x):
    r, z = jnp.split(jax.nn.sigmoid(x @ params["x_gates"] + state @ params["h_gates"]), 2, axis=-1)
    new = jnp.tanh(x @ params["x_new"] + (r * state) @ params["h_new"])
    return z * state + (1 - z) * new


def model(params, graph):
    kinds, neighbours = graph
    states = [embed(params, kind) for kind in kinds]
    for _ in range(ROUNDS):
        states = [
            update(params, state, [states[j] for j in near])
            for state, near in zip(states, neighbours, strict=True)
        ]
    return readout(params, states)


def instances(rng, count, tiny):
    """Connected graphs: a tree, and some edges more."""

    def graph():
        size = int(rng.integers(*((4, 9) if tiny else (8, 25))))
        near = [set() for _ in range(size)]
        pairs = [(i, int(rng.integers(max(0, i - 4), i))) for i in range(1, size)]
        for a, b in pairs + [tuple(rng.integers(size, size=2)) for _ in range(size // 4)]:
            if a != b:
                near[a].add(int(b))
                near[b].add(int(a))
        kinds = rng.integers(KINDS, size=size).tolist()
        return tuple(kinds), tuple(tuple(sorted(n)) for n in near)

    return [graph() for _ in range(count)]


def parameters(key, tiny):
    size = 4 if tiny else 64
    shapes = {
        "embedding": (KINDS, size),
        "message": (size, size),
        "x_gates": (size, 2 * size),
        "h_gates": (size, 2 * size),
        "x_new": (size, size),
        "h_new": (size, size),
        "score": (size, SCORES),
    }
    return jax.tree.map(lambda x: x * len(x) ** -0.5, normal(key, shapes))


class Graphs(NamedTuple):
    """All graphs as one: kinds [atoms], edges [edges] each, the graph of each atom, and how many.

    Padding belongs to a graph, and to an atom, that is not there.
    """

    kinds: np.ndarray
    sender: np.ndarray
    receiver: np.ndarray
    graph: np.ndarray
    counts: np.ndarray


def prepare(minibatches):
    atoms = max(sum(len(kinds) for kinds, _ in graphs) for graphs in minibatches)
    edges = max(sum(sum(map(len, near)) for _, near in graphs) for graphs in minibatches)

    def padded(values, size, fill):
        values = np.asarray(values, np.int32)
        return np.pad(values, (0, size - len(values)), constant_values=fill)

    made = []
    for graphs in minibatches:
        kinds, sender, receiver, graph = [], [], [], []
        for g, (of_atoms, near) in enumerate(graphs):
            first = len(kinds)
            kinds += of_atoms
            graph += [g] * len(of_atoms)
            receiver += [first + i for i, n in enumerate(near) for _ in n]
            sender += [first + j for n in near for j in n]
        made.append(
            Graphs(
                padded(kinds, atoms, 0),
                padded(sender, edges, 0),
                padded(receiver, edges, atoms),
                padded(graph, atoms, len(graphs)),
                np.zeros(len(graphs)),
            )
        )
    return made


def by_hand(params, graphs):
    states = params["embedding"][graphs.kinds]
    for _ in range(ROUNDS):
        near = jax.ops.segment_sum(states[graphs.sender], graphs.receiver, len(states))
        states = gru(params, states, near @ params["message"])
    pooled = jax.ops.segment_sum(states, graphs.graph, len(graphs.counts))
    return jnp.tanh(pooled) @ params["score"]


PROGRAMS = {"messages": Program(instances, parameters, model, prepare, by_hand)}
