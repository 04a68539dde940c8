"""Programs with loops in loops, one after the other, and branches in loops.

Each is of one instance: a number, which decides how often, and a vector.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)) / 2, jnp.float32)


def spin(n, x):
    """A loop whose trips the number says, on a vector."""
    return lax.while_loop(
        lambda c: c[0] > 0, lambda c: (c[0] - 1, jnp.tanh(c[1] @ W) + 0.1), (n, x)
    )


def loop_in_loop(n, x):
    def body(c):
        i, x = c
        return i + 1, spin((i * n) % 5, x)[1] * 1.1

    return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))


def loop_in_loop_in_loop(n, x):
    def body(c):
        i, x = c
        return i + 2, loop_in_loop((i + n) % 3, x)[1]

    return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))


def loop_after_loop(n, x):
    x = loop_in_loop(n, x)[1] * 2
    count, y = spin((n * 3) % 7, x)
    return count, y + spin(n, x + 1)[1]


def branch_in_loop(n, x):
    """Branches with a loop in one of them."""

    def body(c):
        i, x = c
        x = lax.cond(i % 2 == 0, lambda x: spin(i, x)[1], jnp.sin, x)
        return i + 1, x

    return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))


def switch_in_loop_in_loop(n, x):
    def heavy(scale, x):
        m = jnp.outer(x, x) * scale
        for _ in range(30):
            m = jnp.tanh(m @ W @ W.T)
        return m.sum(0)

    def inner(c):
        j, x = c
        branches = [functools.partial(heavy, s) for s in (0.1, 0.5)] + [jnp.cos]
        return j - 1, lax.switch(j + n - 1, branches, x)  # clamped at both ends

    def body(c):
        i, x = c
        return i + 1, lax.while_loop(lambda c: c[0] > 0, inner, (i, x))[1]

    return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))


def loop_in_scan(n, x):
    """A scan backwards over rows of the instance; returns stacked results and old carries."""

    def step(x, row):
        i, y = spin((n + row[0].astype(jnp.int32)) % 4, x)
        return y + row, (i, x, row * 2)

    return lax.scan(step, x, jnp.stack([x, x + 1, x + 2]), reverse=True)


def scan_in_scan_in_loop(n, x):
    """Loops innermost; stacked results of both scans, and rows that all instances share."""

    def inner(x, row):
        x = spin(n % 3, x)[1]
        return x, x + row

    def step(x, row):
        x, rows = lax.scan(inner, x, W[:2])
        return x + row, rows.sum(0)

    def body(c):
        i, x, _ = c
        x, rows = lax.scan(step, x, jnp.stack([x, x * 2, x * 3]))
        return i + 1, x, rows

    return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x, jnp.zeros((3, 4))))


def scan_in_loop(n, x):
    """A scan of a fixed length in a loop in a loop: it stays inside of a block."""

    def inner(c):
        i, x = c
        return i - 1, lax.scan(lambda x, _: (jnp.sin(x @ W), None), x, length=3)[0]

    def body(c):
        i, x = c
        return i + 1, lax.while_loop(lambda c: c[0] > 0, inner, (i % 3, x))[1]

    return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))


def bounds_from_values(n, x):
    return lax.fori_loop(
        n // 2, n, lambda i, x: lax.fori_loop(0, i, lambda j, x: x @ W + j / 5, x), x
    )


def swapped(n, x):
    """The carry is a pytree whose parts change places, one of which nobody changes."""

    def inner(c):
        return {"left": c["right"], "right": c["left"] + c["fixed"], "fixed": c["fixed"]} | {
            "count": c["count"] - 1
        }

    def body(c):
        i, (a, b) = c
        start = {"left": a, "right": b, "fixed": x, "count": i % 4}
        done = lax.while_loop(lambda c: c["count"] > 0, inner, start)
        return i + 1, (done["right"], done["left"])

    return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), (x, x * 2)))


def through_calls(n, x):
    """Loops in `jit`, `checkpoint`, and functions with derivatives of their own."""

    @jax.custom_jvp
    def root(x):
        return spin(n % 3, x)[1]

    root.defjvp(lambda xs, ts: (root(*xs), 3 * ts[0]))

    @jax.custom_vjp
    def other(x):
        return spin(n % 4, x)[1]

    other.defvjp(lambda x: (other(x), None), lambda _, g: (g,))

    def body(c):
        i, x = c
        x = jax.jit(lambda x: spin(i, x)[1])(x)
        return i + 1, root(jax.checkpoint(other)(x))

    return lax.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), x))


def until_converged(n, x):
    """Both loops end by what they compute."""

    def newton(c):
        guess, i = c
        return (guess + (jnp.abs(x[0]) + n) / guess) / 2, i + 1

    def more(c):
        guess, i = c
        return (jnp.abs(guess * guess - jnp.abs(x[0]) - n) > 1e-3) & (i < 50)

    def body(c):
        total, steps = c
        guess, i = lax.while_loop(more, newton, (total * 3 + 1, jnp.int32(0)))
        return total + guess, steps + i

    return lax.while_loop(lambda c: c[0] < 20 + 10.0 * n, body, (jnp.float32(0), jnp.int32(0)))


PROGRAMS = (
    loop_in_loop,
    loop_in_loop_in_loop,
    loop_after_loop,
    branch_in_loop,
    switch_in_loop_in_loop,
    loop_in_scan,
    scan_in_scan_in_loop,
    scan_in_loop,
    bounds_from_values,
    swapped,
    through_calls,
    until_converged,
)
