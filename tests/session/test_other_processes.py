"""JAX's persistent compilation cache: what one process has compiled, the next one only reads."""

import json
import os
import subprocess
import sys

PROGRAM = """
import collections, json, sys
import jax, jax.numpy as jnp
import jedbatch

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.split("/")[-1]]))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

leaf = jedbatch.cell(lambda p, i: jnp.cos(p * i), name="leaf")
join = jedbatch.cell(lambda p, x, y: jnp.tanh(p * x + y), name="join")

def of_tree(p, t):
    return leaf(p, t) if isinstance(t, int) else join(p, of_tree(p, t[0]), of_tree(p, t[1]))

total = jedbatch.batch(of_tree)
p, trees = jnp.arange(3.0), json.loads(sys.argv[2])
value, gradient = jax.value_and_grad(lambda p: total(p, trees).sum())(p)
plan = total.plan(p, trees)
inside = jax.jit(lambda p, plan: total.apply(p, plan).sum())(p, plan)
numbers = [float(value), float(total(p, trees).sum()), float(inside), *map(float, gradient)]
print(json.dumps([events["cache_misses"], events["cache_hits"], total.compilations, numbers]))
"""


def run(directory, trees, seed):
    """(programs that were compiled, programs that were read, our own among both, numbers)."""
    env = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", PROGRAM, str(directory), json.dumps(trees)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return json.loads(done.stdout)


def test_another_process_compiles_nothing(tmp_path):
    trees = [[1, [2, 3]], 4, [[5, 6], [7, 8]]]
    compiled, read, ours, numbers = run(tmp_path, trees, "1")
    assert compiled > 0
    assert ours >= 3  # training, its reverse, inference
    again = run(tmp_path, trees, "2")
    assert again == [0, compiled + read, ours, numbers]
    # Of another topology programs are the same, too.
    others = run(tmp_path, [[[1, 2], 3], 4, [[5, 6], [7, 8]]], "3")
    assert others[:3] == again[:3]
