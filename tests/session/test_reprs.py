"""Descriptions of public objects."""

import jax.numpy as jnp
import pytest

import jedbatch
from jedbatch import policies
from jedbatch.serve import Server


def encode(params, tree):
    if isinstance(tree, tuple):
        return sum(encode(params, t) for t in tree)
    return params * tree


def test_a_batched_function_counts_programs_and_instances():
    encode_all = jedbatch.batch(encode)
    assert repr(encode_all) == ("batch(encode, in_axes=(None, 0)): 0 programs, 0 instances known")
    encode_all.plan(jnp.ones(2), [1, (2, 3), (4, 5)])
    assert repr(encode_all).endswith(": 0 programs, 3 instances known")


def test_options_are_shown_as_they_are_written():
    def first(xs):
        return xs[0]

    batched = jedbatch.batch(
        first, 0, None, policy=policies.agenda, key=len, target="cpu", count_steps=True
    )
    assert repr(batched).startswith(
        "batch(first, in_axes=0, out_axes=None, policy=agenda, key=len, target='cpu', "
        "count_steps=True): "
    )
    assert repr(jedbatch.Lazy(reuse=True)) == "Lazy(reuse=True): 0 programs"


def test_plans_show_what_is_for_users():
    plan = jedbatch.batch(encode).plan(jnp.ones(2), [1, 2])
    assert [name for name in dir(plan) if name[0] != "_"] == [
        "device_seconds",
        "graph",
        "inputs",
        "layout",
        "ragged_rows",
        "schedule",
        "shards",
    ]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda f, w: Server(f, w), "Server(encode, max_batch=64): not entered, 0 requests"),
        (lambda f, w: f.planner(w, [1, 2]), "Planner(encode): 0 minibatches attached, 0 planned"),
        (lambda f, w: f.plans(w, [[1, 2]], ahead=0), "Plans: 0 handed out, 0 more read ahead"),
        (lambda f, w: policies.Frontier(f.graph(w, [1, 2])), "Frontier: 2 nodes left, ready are"),
        (lambda f, w: jedbatch.lazy, "Lazy(): "),
    ],
)
def test_others(make, expected):
    assert repr(make(jedbatch.batch(encode), jnp.ones(2))).startswith(expected)
