"""Checkpoints by Orbax: parameters are arrays, and a learned policy is JSON beside them.

A policy says in which order node types run. It changes no result; saved with the parameters, it
need not be learned again.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import jedbatch


@jedbatch.cell
def phrase(params, left, right):
    return jnp.tanh(params["compose"] @ jnp.concatenate([left, right]))


def encode(params, tree):
    if isinstance(tree, int):
        return params["embed"][tree]
    return phrase(params, encode(params, tree[0]), encode(params, tree[1]))


rng = np.random.default_rng(0)
shapes = {"embed": (9, 4), "compose": (4, 8)}
params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
trees = [((1, 2), 3), (4, (5, (6, 7))), 8]
encode_all = jedbatch.batch(encode)
policy = encode_all.learn(params, trees)
before = encode_all(params, trees)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "params", params)
        policy.save(path / "policy.json")
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(path / "params", jax.eval_shape(lambda: params))
    again = jedbatch.batch(encode, policy=jedbatch.policies.FSM.load(path / "policy.json"))
after = again(restored, trees)  # the same bits
print(after)
