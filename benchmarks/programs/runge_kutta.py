"""A differential equation, solved with steps that adapt: Dormand and Prince's method.

dy/dt = f(params, y), a network, from time 0 to a time that differs from instance to instance. JAX
cannot differentiate `lax.while_loop` in reverse, so there are values alone.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks.programs import Program

TOLERANCE = 1e-5
A = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


def field(params, y):
    return jnp.tanh(y @ params["w1"] + params["b1"]) @ params["w2"] - 0.1 * y


def solve(params, start, end):
    def unfinished(state):
        t, _, _ = state
        return t < end

    def attempt(state):
        t, y, step = state
        step = jnp.minimum(step, end - t)
        slopes = [field(params, y)]
        for row in A:
            new = y + step * sum(a * k for a, k in zip(row, slopes, strict=True))
            slopes.append(field(params, new))
        error = step * sum(e * k for e, k in zip(ERROR, slopes, strict=True))
        ratio = jnp.sqrt(jnp.mean(jnp.square(error / (TOLERANCE * (1 + jnp.abs(y))))))
        accepted = ratio <= 1
        factor = jnp.clip(0.9 * jnp.maximum(ratio, 1e-8) ** -0.2, 0.2, 5.0)
        return (
            jnp.where(accepted, t + step, t),
            jnp.where(accepted, new, y),
            step * factor,
        )

    start_of_loop = (jnp.zeros(()), start, jnp.full((), 0.1))
    _, y, _ = jax.lax.while_loop(unfinished, attempt, start_of_loop)
    return y


solve_cell = jedbatch.cell(solve)


def model(params, problem):
    start, end = problem
    return jnp.tanh(solve(params, start, end) @ params["read"])


def model_cell(params, problem):
    start, end = problem
    return jnp.tanh(solve_cell(params, start, end) @ params["read"])


def instances(rng, count, tiny):
    return [
        (rng.normal(size=4).astype(np.float32), float(rng.uniform(0.5, 2 if tiny else 10)))
        for _ in range(count)
    ]


def parameters(key, tiny):
    size = 4 if tiny else 64
    first, second, third = jax.random.split(key, 3)
    return {
        "w1": jax.random.normal(first, (4, size)),
        "b1": jnp.zeros(size),
        "w2": jax.random.normal(second, (size, 4)) * 2 * size**-0.5,
        "read": jax.random.normal(third, (4, 4)),
    }


def prepare(minibatches):
    return [
        (np.stack([start for start, _ in problems]), np.float32([end for _, end in problems]))
        for problems in minibatches
    ]


def by_hand(params, problems):
    return jax.vmap(lambda *problem: model(params, problem))(*problems)


PROGRAMS = {
    name: Program(instances, parameters, fn, prepare, by_hand, differentiable=False)
    for name, fn in (("runge_kutta", model), ("runge_kutta_cell", model_cell))
}
