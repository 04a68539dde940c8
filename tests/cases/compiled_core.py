"""The results of a function by the compiled core, and by the Python that it stands for."""

import numpy as np
import pytest

from jedbatch._support import native

compiled = pytest.mark.skipif(native.core() is None, reason="no compiled core")


def both(monkeypatch, make):
    """Returns the results of a function by the compiled core and by the Python."""
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.core() is None
    in_python = make()
    monkeypatch.delenv(native.SWITCH)
    assert native.core() is not None
    return make(), in_python


def assert_equal(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)
        assert getattr(x, "dtype", None) == getattr(y, "dtype", None)


def columns(plan):
    """All that a plan is made of."""
    graph, schedule = plan.graph, plan.schedule
    lowered = (plan.table, *plan.inputs.values())
    recorded = graph.node_type, graph.operand_ptr, graph.operand, graph.outputs, graph.node_ptr
    return (*recorded, schedule.batch_type, schedule.node_ptr, schedule.node, *lowered)
