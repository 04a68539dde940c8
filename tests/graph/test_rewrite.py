"""Rewriting graphs."""

import numpy as np
import pytest

import jedbatch
from jedbatch._graph.rewrite import Rewrite, rewrite


def test_what_is_removed_is_not_read():
    """Node 0 goes without anything in its place, and node 1 reads it."""
    double = jedbatch.cell(lambda x: 2 * x)
    twice = jedbatch.batch(lambda x: double(double(x)), in_axes=(0,))
    graph = twice.plan([1.0]).graph
    none = np.zeros(0, np.int64)
    kept, value = np.array([False, True]), np.arange(2)
    change = Rewrite(kept, none, none, np.zeros(1, np.int64), none, value)
    with pytest.raises(AssertionError, match="a value is read that is gone"):
        rewrite(graph, change)
    for_input = change._replace(value=np.array([-1, 1]))
    assert rewrite(graph, for_input).operand.tolist() == [-1]
