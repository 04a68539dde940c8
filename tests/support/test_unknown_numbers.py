"""Numbers that XLA does not know, in place of where the pieces of arrays begin."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from cases.models import random_params

import jedbatch
from jedbatch._jaxpr.unknown_numbers import run_with_starts, unknown, unknown_starts
from jedbatch._kernel import vjp
from jedbatch.data import synthetic_treebank
from jedbatch.models import tree


def pieces(x):
    """Splits into pieces of one size, and others."""
    a, b, c = jnp.split(x, 3)
    first, rest = jax.lax.split(b, (1, 3))
    return a * c, first, jnp.cumsum(rest)


def test_pieces_are_those_of_a_split():
    x = jnp.arange(12.0) ** 2
    closed = jax.make_jaxpr(pieces)(x)
    starts = unknown_starts(closed.jaxpr)
    assert sorted(starts) == [0, 4, 8]  # none of the pieces whose sizes differ
    for given in (starts, {}):
        for run in (run_with_starts, jax.jit(run_with_starts, static_argnums=0)):
            found = run(closed.jaxpr, closed.consts, [x], given)
            for got, expected in zip(found, pieces(x), strict=True):
                np.testing.assert_array_equal(got, expected)


def test_unknown_numbers_are_numbers():
    assert unknown(7).dtype == np.int32
    assert int(unknown(7)) == int(jax.jit(lambda: unknown(7))()) == 7


def gradient_of_trees():
    """The gradient of a TreeLSTM for a minibatch, and how many fusions XLA compiles for it."""
    cells = tree.plain_cells(500, 5, 8)
    params = random_params(cells)
    score = jedbatch.batch(tree.scorer(cells), target="cpu")
    plan = score.plan(params, synthetic_treebank(8, seed=0))
    step = jax.jit(jax.grad(lambda params, plan: score.apply(params, plan)[:, 0].sum()))
    text = step.lower(params, plan).compile().as_text()
    fusions = set()
    for computation in text.split("\n\n"):
        head, _, body = computation.partition("{\n")
        if "fused_computation" in head:
            body = re.sub(r", metadata=\{[^}]*\}", "", body)
            names: dict[str, str] = {}
            name_of = lambda m, names=names: names.setdefault(m[0], f"%{len(names)}")  # noqa: E731
            fusions.add(re.sub(r"%[\w.\-]+", name_of, body))
    return step(params, plan), len(fusions)


def test_gates_are_compiled_once(monkeypatch):
    """Those of one activation differ in nothing but where their pre-activations begin."""
    gradients, num_fusions = gradient_of_trees()
    monkeypatch.setattr(vjp, "unknown_starts", lambda jaxpr: {})
    expected, more = gradient_of_trees()
    assert num_fusions + 3 <= more
    jax.tree.map(np.testing.assert_array_equal, gradients, expected)
