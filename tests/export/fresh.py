"""Loads an exported model where there is no model; `test_export.py` runs it in a process.

Arguments: the file of the model, of graphs, of parameters, and where to write what came of it.
"""

import collections
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
model, graphs, parameters, results = sys.argv[1:]
assert not any(name.startswith(("flax", "jedbatch.models")) for name in sys.modules)
exported = jedbatch.Exported.load(model)
with np.load(parameters) as file:
    params = {name: jnp.asarray(x) for name, x in file.items()}
stored = jedbatch.Graph.load(graphs)
values = exported(params, stored)
plan = exported.plan(stored, gradient=True)
slope = jax.jit(jax.grad(lambda p, plan: jnp.square(exported.apply(p, plan)).sum()))(params, plan)
by_hand = exported.graph(["leaf", "leaf", "add"], [[-1], [-2], [0, 1]], inputs=[np.array([1, 2])])
np.savez(results, values=values, by_hand=exported(params, [by_hand]), **slope)
print(exported)
print(*(f"{events[f'/jax/compilation_cache/cache_{x}']} {x}" for x in ("misses", "hits")))
