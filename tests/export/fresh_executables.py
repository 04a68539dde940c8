"""Runs the executables of an exported model where there is no model; `test_executables.py` does so.

Arguments: the file of the model, of graphs, of parameters, and where to write what came of it. It
prints why executables are refused, what the model compiled, and the names of all that XLA compiled.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from jedbatch.testing import compilations

model, graphs, parameters, results = sys.argv[1:]
with compilations() as names:
    exported = jedbatch.Exported.load(model)
    with np.load(parameters) as file:
        params = {name: jnp.asarray(x) for name, x in file.items()}
    stored = jedbatch.Graph.load(graphs)
    values = exported(params, stored)
    plan = exported.plan(stored, gradient=True)
    slope = jax.grad(lambda p: jnp.square(exported.apply(p, plan)).sum())(params)
np.savez(results, values=values, **slope)
print(json.dumps([exported.executables_refused, exported.compilations, names]))
