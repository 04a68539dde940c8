"""Inputs that `apply` is given in place of those of a plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch

P = jnp.ones(3)
X = np.ones(3, np.float32)
double = jedbatch.cell(lambda p, x: p * x)


def other_inputs(plan):
    """Replacements for the inputs of a plan that do not fit, and what is said about them."""
    (name, rows), *_ = plan.inputs.items()
    return {
        "no rows": ({name: rows[:0]}, ValueError, r"\(0, 3\) of float32"),
        "one row": ({name: rows[:1]}, ValueError, r"\(1, 3\) of float32"),
        "more rows": ({name: np.concatenate([rows, rows])}, ValueError, r"expected \(\d+, 3\)"),
        "whole numbers": ({name: rows.astype(int)}, ValueError, "of int64"),
        "truth values": ({name: rows.astype(bool)}, ValueError, "of bool"),
        "a list": ({name: rows.tolist()}, TypeError, "of type list"),
        "none": ({}, ValueError, r"inputs named \[\]"),
        "more": (plan.inputs | {"more": rows}, ValueError, "'more'"),
        "no dict": ([rows], TypeError, "a dict of arrays"),
    }


def test_inputs_that_do_not_fit():
    batched = jedbatch.batch(double)
    plan = batched.plan(P, [X, 2 * X])
    for inputs, error, match in other_inputs(plan).values():
        with pytest.raises(error, match=match):
            batched.apply(P, plan, inputs=inputs)
        with pytest.raises(error, match=match):
            jax.eval_shape(lambda p, inputs=inputs: batched.apply(P, p, inputs=inputs), plan)
    twice = jax.tree.map(lambda x: np.stack([x, x]), plan)
    with pytest.raises(ValueError, match="which the plan was made for"):
        batched.apply(P, twice)
    doubled = {name: jnp.asarray(2 * rows) for name, rows in plan.inputs.items()}
    assert batched.apply(P, plan, inputs=doubled).tolist() == [[2] * 3, [4] * 3]
    with pytest.raises(TypeError, match="got no arguments"):
        batched.apply()
