"""Judges for batched functions, ours and yours.

- `check_against_loop`: values and gradients are those of the plain loop over instances.
- `assert_no_recompile`: what runs inside of it compiles nothing.
- `assert_merged`: a plan in which nothing is grouped by shapes, baked in or left to a fallback.
- `check_plan`: the tables of a plan compute its graph, and its gradients, whatever made them.
- `strategies`: Hypothesis strategies for programs, instances and ways to run them.
- `fuzz`: many random programs; also `python -m jedbatch fuzz`.

With `JEDBATCH_CHECK=1` in the environment `check_plan` looks at every plan that is made.
"""

from jedbatch.testing.judges import (
    assert_close,
    assert_merged,
    assert_no_recompile,
    check_against_loop,
    check_plan,
    compilations,
    loop,
    weighted_sum,
)

__all__ = [
    "assert_close",
    "assert_merged",
    "assert_no_recompile",
    "check_against_loop",
    "check_plan",
    "compilations",
    "loop",
    "weighted_sum",
]
