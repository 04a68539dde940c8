"""Functions that other processes import."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

import jedbatch

SCALE = 1.0


@jedbatch.cell
def leaf(params, number):
    return jnp.tanh(params["table"][number])


@jedbatch.cell
def add(params, x, y):
    return jnp.tanh(x @ params["left"] + y)


@jedbatch.cell
def double(params, x):
    return 2 * x @ params["left"]


def encode(params, tree):
    """Of a number, a pair, or a list of one."""
    if isinstance(tree, int):
        return leaf(params, tree)
    children = [encode(params, child) for child in tree]
    return double(params, *children) if len(tree) == 1 else add(params, *children)


@jedbatch.cell
def recur(params, x, state):
    return jnp.tanh(x @ params["left"] + state @ params["left"].T)


def chain(params, words):
    """The state after words, one after the other."""
    state = params["table"][0]
    for word in words:
        state = recur(params, leaf(params, word), state)
    return state


@jedbatch.cell
def spin(params, number):
    """Loops in a loop."""

    def body(carry):
        i, x = carry
        return i + 1, lax.fori_loop(0, i, lambda _, x: jnp.tanh(x @ params["left"]), x)

    return lax.while_loop(lambda c: c[0] < number, body, (0, params["table"][0]))[1]


@dataclass(frozen=True)
class Pair:
    left: Any
    right: Any


def of_pair(params, pair):
    assert isinstance(pair, Pair)
    return add(params, encode(params, pair.left), encode(params, pair.right))


def weighed(params, tree, weight):
    return {"value": weight * encode(params, tree), "weight": weight}


def scaled(params, tree):
    return encode(params, tree if SCALE < 2 else (tree, tree))


@jedbatch.batch
def decorated(params, tree):
    return encode(params, tree)


def total(params, rows):
    return jnp.tanh(rows * params["table"][:1]).sum(0)


class Scaled:
    """An instance whose class has what its function reads."""

    scale = 1.0

    def __init__(self, tree):
        self.tree = tree


def scaled_by_class(params, instance):
    return instance.scale * encode(params, instance.tree)
