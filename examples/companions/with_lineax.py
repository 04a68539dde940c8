"""Linear systems solved by conjugate gradients of Lineax, each with as many steps as it needs.

Derivatives are those that Lineax defines: of the solution, not of the steps. A list of results
(`out_axes=None`) is computed by the same program for any number of systems.
"""

import jax
import jax.numpy as jnp
import lineax
import numpy as np

import jedbatch


def solve(params, system):
    matrix, vector = system
    damped = matrix + params["damping"] * jnp.eye(6)
    operator = lineax.MatrixLinearOperator(damped, lineax.positive_semidefinite_tag)
    solution = lineax.linear_solve(operator, vector, lineax.CG(rtol=1e-5, atol=1e-5))
    return solution.value


rng = np.random.default_rng(0)
systems = []
for condition in np.geomspace(1, 100, 8):
    basis, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    matrix = (basis * np.geomspace(1, condition, 6)) @ basis.T
    systems.append((matrix.astype(np.float32), rng.normal(size=6).astype(np.float32)))
params = {"damping": jnp.float32(0.1)}
solve_all = jedbatch.batch(solve, out_axes=None)
result = jnp.stack(solve_all(params, systems))  # [8, 6]
gradient = jax.grad(lambda params: jnp.stack(solve_all(params, systems)).sum())(params)
print(result)
