"""Functions of one lane, run over many lanes without lock step and one lane after the other."""

import jax
import jax.numpy as jnp
from jax import lax

from jedbatch._jaxpr.divergent import without_lock_step


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
