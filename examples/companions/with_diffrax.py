"""Differential equations solved by Diffrax, each with steps of its own.

The stiffness of an oscillator says how many steps its solver takes. Instances are the rows of an
array, so this is one program, and its loop has the derivatives that Diffrax gives it. Where a step
has much work, instances that are done make room for others; a step of one oscillator has little.
"""

import diffrax
import jax
import jax.numpy as jnp

import jedbatch


def van_der_pol(t, state, stiffness):
    x, v = state
    return jnp.stack([v, stiffness * (1 - x**2) * v - x])


def solve(params, stiffness):
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(van_der_pol),
        diffrax.Tsit5(),
        t0=0.0,
        t1=1.0,
        dt0=0.01,
        y0=params["start"],
        args=params["scale"] * stiffness,
        stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-5),
        max_steps=64,
    )
    return solution.ys[-1], solution.stats["num_steps"]


params = {"start": jnp.array([2.0, 0.0]), "scale": jnp.float32(1.0)}
stiffness = jnp.geomspace(1, 20, 8)
solve_all = jedbatch.batch(solve, in_axes=(None, 0))
result, steps = solve_all(params, stiffness)  # [8, 2], and how many steps each took
gradient = jax.grad(lambda params: solve_all(params, stiffness)[0].sum())(params)
print(result, steps)
