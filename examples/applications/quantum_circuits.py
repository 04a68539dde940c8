"""Quantum circuits: the expectations of many random circuits, no two of the same structure.

A circuit is a number and its gates on ten qubits, `(name, *qubits)`: rotations about an axis or of
a pair, whose angles are those of the circuit in turn, Hadamard, controlled not and controlled Z.
The result is the expectation of Z on the first qubit, after it was applied to |0…0⟩. The gradient
with respect to all angles is what a variational algorithm descends.

    python examples/applications/quantum_circuits.py [--quick] [--write]
"""

import functools

import jax
import jax.numpy as jnp
import measuring
import numpy as np
from measuring import Application, Side

import jedbatch

# --- gates ---


@jax.custom_vjp
def flipped(state, index):
    """`state[index]` for a permutation that is its own inverse: so is its gradient, no scatter."""
    return state[index]


flipped.defvjp(lambda state, index: (state[index], index), lambda index, g: (g[index], None))


def one_qubit(state, qubit, a, b, c, d):
    """Mixes amplitude i with that whose bit is flipped, by the matrix [[a, b], [c, d]]."""
    index = jnp.arange(len(state))
    bit = (index >> qubit & 1).astype(bool)
    other = flipped(state, index ^ (1 << qubit))
    return jnp.where(bit, d, a) * state + jnp.where(bit, c, b) * other


def rx(state, qubit, angle):
    c, s = jnp.cos(angle / 2), -1j * jnp.sin(angle / 2)
    return one_qubit(state, qubit, c, s, s, c)


def ry(state, qubit, angle):
    c, s = jnp.cos(angle / 2), jnp.sin(angle / 2)
    return one_qubit(state, qubit, c, -s, s, c)


def rz(state, qubit, angle):
    sign = 2 * (jnp.arange(len(state)) >> qubit & 1) - 1
    return jnp.exp(0.5j * angle * sign) * state


def hadamard(state, qubit):
    return one_qubit(state, qubit, 1.0, 1.0, 1.0, -1.0) / np.sqrt(2)


def cx(state, control, target):
    index = jnp.arange(len(state))
    return flipped(state, index ^ ((index >> control & 1) << target))


def cz(state, first, second):
    index = jnp.arange(len(state))
    return (1 - 2 * (index >> first & index >> second & 1)) * state


def rzz(state, first, second, angle):
    index = jnp.arange(len(state))
    sign = 2 * ((index >> first ^ index >> second) & 1) - 1
    return jnp.exp(0.5j * angle * sign) * state


def expectation(state):
    sign = 1 - 2 * (jnp.arange(len(state)) & 1)
    return (sign * (state.real**2 + state.imag**2)).sum()


GATES = {gate.__name__: gate for gate in (rx, ry, rz, hadamard, cx, cz, rzz)}
WITH_ANGLE = ("rx", "ry", "rz", "rzz")

# --- one circuit ---

CELLS = {name: jedbatch.cell(gate) for name, gate in GATES.items()}
measure = jedbatch.cell(expectation)


@jedbatch.cell
def begin(params):
    return params["zero"]


def run(params, circuit, gates=CELLS, measure=measure):
    number, instructions = circuit
    state, angles = begin(params), iter(range(params["angles"].shape[1]))
    for name, *qubits in instructions:
        angle = [params["angles"][number, next(angles)]] if name in WITH_ANGLE else []
        state = gates[name](state, *qubits, *angle)
    return measure(state)


# --- value and gradient ---


def with_gradient(of_circuits):
    """(all expectations, gradient of their sum), a function of (params, circuits)."""

    def total(angles, params, circuits):
        each = of_circuits({**params, "angles": angles}, circuits)
        return each.sum(), each

    def both(params, circuits):
        gradient, each = jax.grad(total, has_aux=True)(params["angles"], params, circuits)
        return each, gradient

    return both


# --- compiled for each circuit ---


def for_each(params, circuits):
    """A program for each circuit, whose gates are constants."""

    def program(circuit):
        one = functools.partial(run, circuit=circuit, gates=GATES, measure=expectation)
        return jax.jit(with_gradient(lambda params, _: one(params)[None]))

    return [program(circuit) for circuit in circuits]


def run_each(params, programs):
    values, gradients = zip(*[program(params, ()) for program in programs], strict=True)
    return np.concatenate(values), sum(gradients)


# --- switch ---

BRANCHES = [
    lambda state, a, b, angle: state,
    *(
        (lambda state, a, b, angle, g=g: g(state, a, b, angle))
        if g is rzz
        else (lambda state, a, b, angle, g=g: g(state, a, angle))
        if name in WITH_ANGLE
        else (lambda state, a, b, angle, g=g: g(state, a))
        if g is hadamard
        else (lambda state, a, b, angle, g=g: g(state, a, b))
        for name, g in GATES.items()
    ),
]


def as_arrays(params, circuits, length):
    """Codes, qubits and places of angles, [circuits, length]; padding does nothing."""
    code, a, b, place = (np.zeros((len(circuits), length), np.int32) for _ in range(4))
    for i, (_, instructions) in enumerate(circuits):
        used = 0
        for j, (name, *qubits) in enumerate(instructions):
            code[i, j] = 1 + list(GATES).index(name)
            a[i, j], b[i, j], place[i, j] = qubits[0], qubits[-1], used
            used += name in WITH_ANGLE
    return code, a, b, place


def by_switch(params, arrays):
    def one(angles, code, a, b, place):
        def step(state, gate):
            code, a, b, place = gate
            return jax.lax.switch(code, BRANCHES, state, a, b, angles[place]), None

        return expectation(jax.lax.scan(step, params["zero"], (code, a, b, place))[0])

    return jax.vmap(one)(params["angles"], *arrays)


# --- circuits ---


def circuits_of(rng, count, qubits, least, most):
    def gate():
        name = list(GATES)[rng.integers(len(GATES))]
        width = 2 if name in ("cx", "cz", "rzz") else 1
        return (name, *map(int, rng.permutation(qubits)[:width]))

    lengths = rng.integers(least, most + 1, size=count)
    return [(i, tuple(gate() for _ in range(n))) for i, n in enumerate(lengths)]


def make(quick):
    rng = np.random.default_rng(0)
    count, qubits, sizes, many = (3, 3, (8, 12), 1) if quick else (64, 10, (20, 60), 8)
    minibatches = [circuits_of(rng, count, qubits, *sizes) for _ in range(measuring.WARM + many)]
    params = {
        "zero": jnp.zeros(2**qubits, jnp.complex64).at[0].set(1.0),
        "angles": jnp.asarray(rng.uniform(0, 2 * np.pi, (count, sizes[1])), jnp.float32),
    }

    def sides():
        batched = jedbatch.batch(run)
        sample = circuits_of(np.random.default_rng(1), 4 * count, qubits, *sizes)
        sample = [(i % count, instructions) for i, instructions in sample]
        batched.warm(params, sample, batch_size=count, gradient=True, calls=False)
        few = 2 if quick else 4
        part = lambda found: (found[0][:few], found[1][:few])
        run_few = lambda params, programs: part(run_each(params, programs))
        return {
            "jedbatch": Side(batched.plan, jax.jit(with_gradient(batched.apply))),
            "compiled for each circuit": Side(
                lambda params, circuits: for_each(params, circuits[:few]),
                run_few,
                few=1,
                scale=count / few,
                part=part,
            ),
            "`lax.switch` in a scan": Side(
                functools.partial(as_arrays, length=sizes[1]), jax.jit(with_gradient(by_switch))
            ),
        }

    def loop(params, circuits):
        return jnp.stack([run(params, circuit) for circuit in circuits])

    return Application(params, minibatches, with_gradient(loop), sides, rtol=1e-3)


def illustrate(axis):
    """The gates of a circuit: lines are qubits."""
    ((_, instructions),) = circuits_of(np.random.default_rng(3), 1, 10, 30, 30)
    colors = {name: f"C{i}" for i, name in enumerate(GATES)}
    for i, (name, *qubits) in enumerate(instructions):
        axis.plot([i] * len(qubits), qubits, "-", color="0.5", zorder=1)
        axis.plot([i] * len(qubits), qubits, "s", color=colors[name], zorder=2)
    for name, color in colors.items():
        axis.plot([], [], "s", color=color, label=name)
    axis.hlines(range(10), -1, len(instructions), color="0.85", zorder=0)
    axis.set(xlabel="gates", ylabel="qubits", yticks=range(10))
    axis.legend(fontsize="x-small", ncols=7, loc="upper center", bbox_to_anchor=(0.5, 1.14),
                columnspacing=0.5, handletextpad=0.0, frameon=False)  # fmt: skip


SHARES = {
    "jedbatch": ["gates", "one circuit", "value and gradient"],
    "compiled for each circuit": [
        "gates",
        "one circuit",
        "value and gradient",
        "compiled for each circuit",
    ],
    "`lax.switch` in a scan": ["gates", "value and gradient", "switch"],
}

if __name__ == "__main__":
    measuring.main(__file__, __doc__, make, illustrate, SHARES)
