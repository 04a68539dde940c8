"""Neurons: the voltage along the branches of cells of many shapes, simulated in one batch.

A branch is `(index, children)` and has a few compartments in a row. The membrane is that of Hodgkin
and Huxley (1952). A time step is implicit in the voltages: a linear system with an equation for
each compartment, which knows its neighbours. Since the cell is a tree, elimination goes from the
tips to the soma and substitution back (Hines, 1984), without fill-in. Voltages and gates of all
cells are one array `[cells, branches, 4, compartments]`, which a step maps to the next one, so that
time is a `lax.scan`.

    python examples/applications/neurons.py [--quick] [--write]
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import measuring
import numpy as np
from measuring import Application, Side

import jedbatch

STEP = 0.025  # milliseconds

# --- membrane ---


def relax(gate, alpha, beta):
    """A gate after a step at constant voltage."""
    rate = alpha + beta
    return alpha / rate + (gate - alpha / rate) * jnp.exp(-STEP * rate)


def ratio(x):
    """Returns x / (1 - exp(-x)), also at 0."""
    near = jnp.abs(x) < 1e-4
    return jnp.where(near, 1 + x / 2, x / -jnp.expm1(-jnp.where(near, 1.0, x)))


def membrane(state, current):
    """(diagonal, right side) of the equations without neighbours, and the gates."""
    v, m, h, n = state
    m = relax(m, ratio((v + 40) / 10), 4 * jnp.exp(-(v + 65) / 18))
    h = relax(h, 0.07 * jnp.exp(-(v + 65) / 20), 1 / (1 + jnp.exp(-(v + 35) / 10)))
    n = relax(n, 0.1 * ratio((v + 55) / 10), 0.125 * jnp.exp(-(v + 65) / 80))
    sodium, potassium, leak = 120 * m**3 * h, 36 * n**4, 0.3
    diagonal = 1 / STEP + sodium + potassium + leak
    right = v / STEP + 50 * sodium - 77 * potassium - 54.4 * leak + current
    return diagonal, right, jnp.stack([m, h, n])


# --- one branch ---


def eliminate(diagonal, right, axial, below):
    """From the last compartment to the first; `below` is what the children add to the last.

    Returns the diagonal and right side after elimination, and what the branch adds to its parent.
    """
    inner, outer = axial[1], axial[0]  # conductances between compartments, and to the parent
    count = len(diagonal)
    neighbours = jnp.full(count, 2 * inner).at[0].set(outer + inner).at[-1].add(-inner)
    diagonal = diagonal + neighbours
    d, r = [diagonal[-1] + below[0]], [right[-1] + below[1]]
    for i in range(count - 2, -1, -1):
        d.insert(0, diagonal[i] - inner**2 / d[0])
        r.insert(0, right[i] + inner * r[0] / d[1])
    above = jnp.stack([outer - outer**2 / d[0], outer * r[0] / d[0]])
    return jnp.stack(d), jnp.stack(r), above


def substitute(d, r, axial, parent):
    """Voltages of a branch from that of its parent's last compartment."""
    v = [(r[0] + axial[0] * parent) / d[0]]
    for i in range(1, len(d)):
        v.append((r[i] + axial[1] * v[-1]) / d[i])
    return jnp.stack(v)


# --- one cell ---


@jedbatch.cell
def begin(params, cell, index):
    state, current = params["state"][cell, index], params["current"][cell, index]
    return *membrane(state, current), params["axial"][cell, index]


@jedbatch.cell
def tip(diagonal, right, axial):
    return eliminate(diagonal, right, axial, jnp.zeros(2))


@jedbatch.cell
def fork(diagonal, right, axial, children):
    return eliminate(diagonal, right, axial, sum(children))


@jedbatch.cell
def back(d, r, axial, gates, parent):
    v = substitute(d, r, axial, parent)
    return v[-1], jnp.concatenate([v[None], gates])


def step(params, cell):
    number, soma = cell
    states = {}

    def up(branch):
        index, children = branch
        diagonal, right, gates, axial = begin(params, number, index)
        below = [up(child) for child in children]
        if below:
            *solved, above = fork(diagonal, right, axial, [x[-1] for x in below])
        else:
            *solved, above = tip(diagonal, right, axial)
        return (*solved, axial, gates), index, below, above

    def down(solved, parent):
        of_branch, index, below, _ = solved
        last, states[index] = back(*of_branch, parent)
        for child in below:
            down(child, last)

    down(up(soma), 0.0)
    room = params["state"].shape[1]  # branches that are not there repeat the soma
    return jnp.stack([states.get(index, states[0]) for index in range(room)])


# --- over time ---


def simulate(batched, steps):
    """A function of (params, plan): the voltages of all somata over time, [steps, cells]."""

    @jax.jit
    def run(params, plan):
        def body(state, _):
            state = batched.apply({**params, "state": state}, plan)
            return state, state[:, 0, 0, 0]

        return jax.lax.scan(body, params["state"], length=steps)[1]

    return run


# --- by levels ---


def levels_of(cells, room):
    """For each level (rows of its branches, rows of their parents) in `[cells * room]`."""
    levels = []

    def visit(branch, cell, parent, depth):
        if depth == len(levels):
            levels.append(([], []))
        index, children = branch
        row = cell * room + index
        for rows, value in zip(levels[depth], (row, parent), strict=True):
            rows.append(value)
        for child in children:
            visit(child, cell, row, depth + 1)

    for number, (_, soma) in enumerate(cells):
        visit(soma, number, len(cells) * room, 0)
    return [tuple(np.array(rows, np.int32) for rows in level) for level in levels]


def advance(params, levels, state):
    """All cells after a step; row -1 of the buffers is that of padding and of no parent."""
    pad = lambda x: jnp.pad(x, [(0, 1)] + [(0, 0)] * (x.ndim - 1))
    state = state.reshape(-1, *state.shape[2:])
    current, axial = (params[name].reshape(len(state), -1) for name in ("current", "axial"))
    diagonal, right, gates = jax.vmap(membrane)(state, current)
    diagonal, right, axial = map(pad, (diagonal, right, axial))
    diagonal = diagonal.at[-1].set(1.0)
    below = jnp.zeros((len(axial), 2))
    for rows, parents in reversed(levels):
        d, r, above = jax.vmap(eliminate)(diagonal[rows], right[rows], axial[rows], below[rows])
        diagonal, right = diagonal.at[rows].set(d), right.at[rows].set(r)
        below = below.at[parents].add(above)
    v = pad(state[:, 0])
    for rows, parents in levels:
        x = jax.vmap(substitute)(diagonal[rows], right[rows], axial[rows], v[parents, -1])
        v = v.at[rows].set(x)
    return jnp.concatenate([v[:-1, None], gates], 1).reshape(params["state"].shape)


def through_time(params, levels, steps):
    def body(state, _):
        state = advance(params, levels, state)
        return state, state[:, 0, 0, 0]

    return jax.lax.scan(body, params["state"], length=steps)[1]


# --- compiled for each shape ---


def for_each_shape(params, cells, steps):
    """A compiled program for each cell, whose levels are constants, and its parameters."""
    room = params["state"].shape[1]
    found = []
    for cell in cells:
        levels = levels_of([cell], room)
        mine = jax.tree.map(lambda x, n=cell[0]: x[n : n + 1], params)
        found.append((jax.jit(functools.partial(through_time, levels=levels, steps=steps)), mine))
    return found


def run_each(_, programs):
    return np.concatenate([run(mine) for run, mine in programs], axis=1)


# --- padded to the widest ---


def padded(params, cells, widths):
    """Levels of all cells together, as wide as in the widest minibatch."""
    count, room = params["state"].shape[:2]
    levels = levels_of(cells, room)
    levels += [(np.zeros(0, np.int32),) * 2] * (len(widths) - len(levels))
    fill = lambda rows, width: np.pad(rows, (0, width - len(rows)), constant_values=count * room)
    return [tuple(fill(x, n) for x in level) for level, n in zip(levels, widths, strict=True)]


def widest(minibatches, room):
    lengths = [[len(rows) for rows, _ in levels_of(cells, room)] for cells in minibatches]
    return [max(x) for x in itertools.zip_longest(*lengths, fillvalue=0)]


# --- shapes of cells ---


def cells_of(rng, count, least, most):
    """Cells of random shape: tips grow two children each, until there are enough branches."""

    def build(children, index):
        return index, tuple(build(children, child) for child in children[index])

    cells = []
    for number in range(count):
        size = int(rng.integers(least, most + 1))
        children, tips = [[]], [0]
        while len(children) < size:
            at = tips.pop(int(rng.integers(len(tips)) if rng.random() < 0.7 else -1))
            new = [len(children), len(children) + 1]
            children += [[], []]
            children[at] = new
            tips += new
        cells.append((number, build(children, 0)))
    return cells


def parameters(rng, count, room, compartments):
    """Cells at rest, of which the somata get currents."""
    v = np.full((count, room, 1, compartments), -65.0)
    gates = np.array([0.053, 0.596, 0.318]).reshape(3, 1) * np.ones((count, room, 1, compartments))
    current = np.zeros((count, room, compartments))
    current[:, 0] = rng.uniform(5, 40, size=(count, 1))
    axial = rng.uniform(1, 4, size=(count, room, 2))
    axial[:, 0, 0] = 0.0  # above the soma is nothing
    given = {"state": np.concatenate([v, gates], 2), "current": current, "axial": axial}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), given)


def make(quick):
    rng = np.random.default_rng(0)
    count, sizes, compartments, steps = (3, (1, 7), 2, 3) if quick else (64, (20, 80), 4, 100)
    room = sizes[1] + 1
    minibatches = [cells_of(rng, count, *sizes) for _ in range(measuring.WARM + 4)]
    params = parameters(rng, count, room, compartments)
    widths = widest(minibatches, room)

    def sides():
        batched = jedbatch.batch(step)
        few = min(8, count)  # compiling all takes minutes, and more memory mappings than Linux has

        def one_by_one(params, cells):
            return for_each_shape(params, cells[:few], steps)

        together = jax.jit(functools.partial(through_time, steps=steps))
        return {
            "jedbatch": Side(
                functools.partial(batched.plan, gradient=False), simulate(batched, steps)
            ),
            "levels, compiled for each shape": Side(
                one_by_one, run_each, 1, count / few, lambda voltages: voltages[:, :few]
            ),
            "levels, padded to the widest": Side(
                functools.partial(padded, widths=widths), together
            ),
        }

    def loop(params, cells):
        state, voltages = params["state"], []
        for _ in range(steps):
            state = jnp.stack([step({**params, "state": state}, cell) for cell in cells])
            voltages.append(state[:, 0, 0, 0])
        return jnp.stack(voltages)

    return Application(params, minibatches, loop, sides)


def illustrate(axis):
    """Voltages of a few somata over time."""
    rng = np.random.default_rng(1)
    cells = cells_of(rng, 4, 20, 80)
    batched = jedbatch.batch(step)
    params = parameters(rng, 4, 81, 4)
    plan = batched.plan(params, cells, gradient=False)
    axis.plot(np.arange(1000) * STEP, simulate(batched, 1000)(params, plan))
    axis.set(xlabel="milliseconds", ylabel="millivolts at the soma")


BY_LEVELS = ["membrane", "one branch", "by levels"]
SHARES = {
    "jedbatch": ["membrane", "one branch", "one cell", "over time"],
    "levels, compiled for each shape": [*BY_LEVELS, "compiled for each shape"],
    "levels, padded to the widest": [*BY_LEVELS, "padded to the widest"],
}

if __name__ == "__main__":
    measuring.main(__file__, __doc__, make, illustrate, SHARES)
