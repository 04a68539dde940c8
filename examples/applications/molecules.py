"""Molecules: energies, forces and a training step of a force field, for molecules of any size.

A molecule is positions [n, 3] in angstrom, species [n], and edges [e, 2] between atoms that are
near each other, with the energy and the forces [n, 3] to learn. The network passes messages along
edges with filters made of distances (SchNet, Schütt et al., 2017). Forces are the negative gradient
of the energy with respect to positions, so that the gradient of the loss is one of a gradient.

    python examples/applications/molecules.py [--quick] [--write]
"""

import functools

import jax
import jax.numpy as jnp
import measuring
import numpy as np
from measuring import Application, Side

import jedbatch

CUTOFF = 4.0  # angstrom

# --- network ---


def energies(params, positions, species, edges):
    """The energy of each atom, [n]."""
    source, target = edges[:, 0], edges[:, 1]
    between = positions[source] - positions[target]
    distance = jnp.sqrt(jnp.square(between).sum(1))
    fade = 0.5 * jnp.cos(jnp.pi * jnp.minimum(distance / CUTOFF, 1.0)) + 0.5
    centers = jnp.linspace(0.0, CUTOFF, len(params["layers"][0]["basis"]))
    basis = jnp.exp(-4.0 * jnp.square(distance[:, None] - centers))
    state = params["embedding"][species]
    for layer in params["layers"]:
        filters = jax.nn.softplus(basis @ layer["basis"]) @ layer["filter"] * fade[:, None]
        messages = (state @ layer["send"])[source] * filters
        received = jax.ops.segment_sum(messages, target, state.shape[0])
        state = state + jax.nn.softplus(received @ layer["receive"]) @ layer["update"]
    return jax.nn.softplus(state @ params["hidden"]) @ params["read"]


# --- one molecule ---


def energy(params, positions, species, edges):
    return energies(params, positions, species, edges).sum()


def loss(params, molecule):
    """Squared errors of the energy, for each atom, and of the forces."""
    positions, species, edges, true_energy, true_forces = molecule
    n = positions.shape[0]
    found, slope = jax.value_and_grad(energy, argnums=1)(params, positions, species, edges)
    of_energy = jnp.square((found - true_energy) / n)
    return of_energy + jnp.square(slope + true_forces).sum() / (3 * n)


# --- training step ---


def step(losses_of):
    """(losses of all molecules, parameters after a step), a function of (params, molecules)."""

    def mean(params, molecules):
        losses = losses_of(params, molecules)
        return losses.mean(), losses

    @functools.partial(jax.jit, compiler_options=jedbatch.compiler_options())
    def run(params, molecules):
        gradient, losses = jax.grad(mean, has_aux=True)(params, molecules)
        return losses, jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)

    return run


# --- padding of a molecule ---


def pad_to(atoms, edges, molecule):
    """A molecule, or several as one, of so many atoms and edges, at least two atoms more.

    Edges that are added lead between two atoms that are added, farther apart than the cutoff.
    """
    positions, species, ends, forces = molecule
    more, more_edges = atoms - len(species), edges - len(ends)
    far = 10 * CUTOFF * np.arange(1, more + 1, dtype=np.float32)[:, None]
    ends_of_padding = np.array([[atoms - 1, atoms - 2]], np.int32)
    return (
        np.concatenate([positions, np.broadcast_to(far, (more, 3))]),
        np.pad(species, (0, more)),
        np.concatenate([ends, np.broadcast_to(ends_of_padding, (more_edges, 2))]),
        np.pad(forces, ((0, more), (0, 0))),
    )


# --- one large graph ---


def power_of_two(number):
    return 1 << (number - 1).bit_length()


def as_one(_, molecules):
    """All molecules as one graph; atoms of padding belong to a molecule that is not there."""
    counts = np.array([len(species) for _, species, *_ in molecules])
    first = np.cumsum(counts) - counts
    positions, species, edges, energy, forces = zip(*molecules, strict=True)
    edges = [ends + start for ends, start in zip(edges, first, strict=True)]
    joined = [np.concatenate(parts) for parts in (positions, species, edges, forces)]
    atoms = power_of_two(int(counts.sum()) + 2)
    of_atom = np.full(atoms, len(molecules), np.int32)
    of_atom[: counts.sum()] = np.repeat(np.arange(len(molecules)), counts)
    padded = pad_to(atoms, power_of_two(len(joined[2])), joined)
    return *padded, of_atom, counts.astype(np.float32), np.array(energy)


def losses_of_one(params, graph):
    positions, species, edges, true_forces, of_atom, counts, true_energy = graph
    total = functools.partial(jax.ops.segment_sum, segment_ids=of_atom, num_segments=len(counts))

    def energy(positions):
        found = total(energies(params, positions, species, edges))
        return found.sum(), found

    slope, found = jax.grad(energy, has_aux=True)(positions)
    of_forces = total(jnp.square(slope + true_forces).sum(1))
    return jnp.square((found - true_energy) / counts) + of_forces / (3 * counts)


# --- padded to the largest ---


def padded(_, molecules, atoms, edges):
    """Arrays of all molecules, [molecules, ...], and the number of atoms of each."""
    counts = np.array([len(species) for _, species, *_ in molecules], np.float32)
    energy = np.array([molecule[3] for molecule in molecules])
    parts = [pad_to(atoms + 2, edges, (p, s, e, f)) for p, s, e, _, f in molecules]
    return *map(np.stack, zip(*parts, strict=True)), counts, energy


def padded_loss(params, positions, species, edges, true_forces, count, true_energy):
    there = jnp.arange(len(species)) < count

    def energy(positions):
        return jnp.where(there, energies(params, positions, species, edges), 0).sum()

    found, slope = jax.value_and_grad(energy)(positions)
    of_forces = jnp.where(there[:, None], jnp.square(slope + true_forces), 0).sum()
    return jnp.square((found - true_energy) / count) + of_forces / (3 * count)


def losses_of_padded(params, arrays):
    return jax.vmap(padded_loss, (None, *[0] * 6))(params, *arrays)


# --- loop ---


def by_loop():
    """One molecule after another, in a program for each pair of sizes."""
    one = jax.jit(jax.value_and_grad(loss))

    def run(params, molecules):
        found = [one(params, molecule) for molecule in molecules]
        losses, gradients = zip(*found, strict=True)
        mean = jax.tree.map(lambda *g: sum(g) / len(g), *gradients)
        return jnp.stack(losses), jax.tree.map(lambda p, g: p - 0.01 * g, params, mean)

    return run


# --- random molecules ---

SPECIES = "HCNO"
VALENCES = (1, 4, 3, 2)
RADII = np.array([0.31, 0.76, 0.71, 0.66])  # angstrom; a bond is as long as the sum of two


def direction(rng, away):
    """A random unit vector, at most a right angle from `away`."""
    vector = rng.normal(size=3)
    vector /= np.linalg.norm(vector)
    return -vector if vector @ away < 0 else vector


def polygon(rng, size, side, start, heading):
    """Corners of a regular polygon whose first one is `start`, [size, 3]."""
    across = np.cross(heading, rng.normal(size=3))
    across /= np.linalg.norm(across)
    angle = 2 * np.pi * np.arange(size) / size
    radius = side / (2 * np.sin(np.pi / size))
    plane = np.stack([1 - np.cos(angle), np.sin(angle)], 1) * radius
    return start + plane @ np.stack([heading, across])


def grow(rng, size):
    """Positions and species of a molecule: a random tree of atoms and of rings of five or six.

    An atom, or a ring of carbon, is bound to one that has a valence left, at the length of a bond,
    in that of some random directions in which others are farthest. The last atoms are hydrogen.
    """
    positions, species, open_ends = [np.zeros(3)], [1], [0] * 4
    while len(species) < size:
        parent = open_ends.pop(int(rng.integers(len(open_ends))))
        room = size - len(species)
        ring = int(rng.integers(5, 7)) if room > 6 and rng.random() < 0.2 else 1
        kind = 1 if ring > 1 else int(rng.choice(4, p=[0.5, 0.35, 0.07, 0.08]))
        if kind == 0 and not open_ends and room > 1:
            kind = 1
        length = RADII[species[parent]] + RADII[kind]
        center = np.mean(positions, 0)
        places = []
        for _ in range(8):
            heading = direction(rng, positions[parent] - center)
            start = positions[parent] + length * heading
            corners = polygon(rng, ring, 2 * RADII[1], start, heading) if ring > 1 else start[None]
            gaps = np.linalg.norm(corners[:, None] - np.array(positions), axis=2)
            gaps[:, parent] = np.inf
            places.append((gaps.min(), corners))
        corners = max(places, key=lambda place: place[0])[1]
        for number, corner in enumerate(corners):
            taken = 1 if ring == 1 else 2 + (number == 0)
            open_ends += [len(species)] * (VALENCES[kind] - taken)
            positions.append(corner)
            species.append(kind)
    return np.array(positions), np.array(species, np.int32)


def molecule(rng, size):
    """A molecule with the energy and forces of Morse potentials between atoms within the cutoff."""
    positions, species = grow(rng, size)
    between = positions[:, None] - positions
    distances = np.linalg.norm(between, axis=2)
    edges = np.argwhere((distances < CUTOFF) & (distances > 0))
    source, target = edges.T
    far, vector = distances[source, target], between[source, target]
    best = RADII[species[source]] + RADII[species[target]]
    stretched = np.exp(-(far - best))
    energy = 0.5 * (stretched * (stretched - 2)).sum()
    pull = (2 * stretched * (1 - stretched) / far)[:, None] * vector  # slope of each pair
    forces = np.zeros_like(positions)
    np.add.at(forces, source, -pull)
    as_float = lambda x: np.asarray(x, np.float32)
    return (
        as_float(positions),
        species,
        edges.astype(np.int32),
        as_float(energy),
        as_float(forces),
    )


def sizes(rng, count, least, most):
    """Numbers of atoms, as many below 10 as between 10 and 20, or 20 and 40."""
    return np.exp(rng.uniform(np.log(least), np.log(most + 1), size=count)).astype(int)


def parameters(rng, hidden, basis, layers):
    square = ("filter", "send", "receive", "update")
    shapes = {"basis": (basis, hidden), **dict.fromkeys(square, (hidden, hidden))}
    draw = lambda shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)
    draw_all = lambda shapes: {name: draw(shape) for name, shape in shapes.items()}
    return {
        "embedding": draw((len(SPECIES), hidden)),
        "layers": [draw_all(shapes) for _ in range(layers)],
        "hidden": draw((hidden, hidden)),
        "read": draw((hidden,)),
    }


def make(quick):
    rng = np.random.default_rng(0)
    count, atoms, hidden, layers = (3, (2, 4), 4, 1) if quick else (64, (5, 115), 64, 2)
    many = measuring.WARM + (1 if quick else 10)
    sample, *minibatches = [
        [molecule(rng, n) for n in sizes(rng, size, *atoms)]
        for size in [4 * count] + [count] * many
    ]
    most_edges = max(len(m[2]) for molecules in minibatches for m in molecules)
    params = parameters(rng, hidden, 16, layers)

    def sides():
        batched = jedbatch.batch(loss)
        batched.warm(params, sample, batch_size=count, gradient=True, calls=False)
        few, in_turn = max(1, count // 16), by_loop()
        of_few = lambda params, molecules: (in_turn(params, molecules)[0], None)
        return {
            "jedbatch": Side(batched.plan, step(batched.apply)),
            "one large graph, padded": Side(as_one, step(losses_of_one)),
            "padded to the largest, `vmap`": Side(
                functools.partial(padded, atoms=atoms[1], edges=most_edges),
                step(losses_of_padded),
                few=2,
            ),
            "loop": Side(
                lambda _, molecules: molecules[:few],
                of_few,
                1,
                count / few,
                lambda results: (results[0][:few], None),
            ),
        }

    return Application(params, minibatches, by_loop(), sides, rtol=1e-3)


def illustrate(axis):
    """Atoms and edges of the molecules."""
    rng = np.random.default_rng(0)
    molecules = [molecule(rng, n) for n in sizes(rng, 500, 5, 115)]
    axis.plot([len(m[1]) for m in molecules], [len(m[2]) for m in molecules], ".", alpha=0.4)
    axis.set(xlabel="atoms of a molecule", ylabel="edges")


SHARES = {
    "jedbatch": ["network", "one molecule", "training step"],
    "one large graph, padded": [
        "network",
        "training step",
        "padding of a molecule",
        "one large graph",
    ],
    "padded to the largest, `vmap`": [
        "network",
        "training step",
        "padding of a molecule",
        "padded to the largest",
    ],
    "loop": ["network", "one molecule", "loop"],
}

if __name__ == "__main__":
    measuring.main(__file__, __doc__, make, illustrate, SHARES)
