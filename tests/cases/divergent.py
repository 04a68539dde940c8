"""Functions of one lane, run over many lanes without lock step and one lane after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jedbatch
from jedbatch._jaxpr.divergent import without_lock_step
from jedbatch._jaxpr.lane_steps import counting
from jedbatch._jaxpr.program_counters import LaneRule
from jedbatch.errors import UnfinishedLoopError

CHEAP = LaneRule(step_work=3e3)  # so that loops of some hundred lanes do not stay in lock step


def close(ours, theirs, rtol=1e-5):
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6)


def run_counted(fn, *args, rule=CHEAP, mode="auto"):
    """Returns the results of lanes, and the counts of the steps that ran."""
    with counting() as counter:
        run = over_lanes(fn, *args, mode=mode, rule=rule)
        found = jax.block_until_ready(jax.jit(lambda *xs: run(*xs))(*args))
        return found, counter.result()


def over_lanes(fn, *args, mode="lanes", axes=0, rule=None):
    """Returns the function of lanes, without lock step."""
    one = [
        jax.tree.map(lambda x: x[0], arg) if axis == 0 else arg
        for arg, axis in zip(args, axes if axes else [0] * len(args), strict=True)
    ]
    program = without_lock_step(jax.make_jaxpr(fn)(*one), mode, rule=rule)
    structure = jax.tree.structure(jax.eval_shape(fn, *one))

    def run(*xs):
        out = jax.core.eval_jaxpr(program.jaxpr, program.consts, *jax.tree.leaves(xs))
        return jax.tree.unflatten(structure, out)

    return jax.vmap(run, axes or 0)


def loop(fn, *args):
    """Returns the results of one lane after the other."""
    fn = jax.jit(fn)
    return jax.tree.map(
        lambda *xs: jnp.stack(xs),
        *[fn(*[jax.tree.map(lambda x, i=i: x[i], a) for a in args]) for i in range(len(args[0]))],
    )


def walk(key, n):
    """A random walk of n steps; its random numbers are those of a key."""

    def body(carry):
        key, i, x = carry
        key, now = jax.random.split(key)
        return key, i + 1, x + jax.random.normal(now)

    return lax.while_loop(lambda c: c[1] < n, body, (key, 0, jnp.float32(0)))[2]


def check_counts_and_bounds(fn, kind):
    """Other counts of steps compile nothing, and a bound names the instance that takes more.

    Args:
      fn: of (int32[] steps, f32[]).
      kind: "rows" of arrays, or "cells".
    """
    cell = jedbatch.cell(fn)
    options = {"control_flow": "auto", "max_steps": 150}
    if kind == "rows":
        batched = jedbatch.batch(fn, in_axes=(0, 0), **options)
    else:
        batched = jedbatch.batch(lambda x: cell(*x), in_axes=0, **options)

    def given(seed):
        rng = np.random.default_rng(seed)
        n = np.minimum(rng.geometric(1 / 12, 512), 140).astype(np.int32)
        return n, np.geomspace(1, 20, 512).astype(np.float32)

    def call(n, x):
        if kind == "rows":
            return batched(jnp.asarray(n), jnp.asarray(x))
        return batched(list(zip(n, x, strict=True)))

    def check(seed):
        close(call(*given(seed)), loop(fn, *map(jnp.asarray, given(seed))))

    check(0)
    compiled = batched.compilations
    check(1)
    assert batched.compilations == compiled
    n, x = given(2)
    n[77] = 151
    with pytest.raises(UnfinishedLoopError, match="77"):
        call(n, x)
