"""Calibration: a sum that can be checked, files, and its use as an objective."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch
from jedbatch import Calibration, calibrate, learn
from jedbatch._batch.calibrate import TypeCost


@jedbatch.cell
def double(p, x):
    return 2 * p * x


@jedbatch.cell
def total(p, x, y):
    return p * x + y


def run(p, n):
    x = np.full(4, n, np.float32)
    for i in range(n):
        x = total(p, double(p, x), x) if i % 2 else double(p, total(p, x, x))
    return x


@pytest.fixture(scope="module")
def measured():
    batched = jedbatch.batch(run)
    return batched, calibrate(batched, jnp.ones(4), [1, 2, 3], repeat=2)


def test_every_type_is_measured(measured):
    batched, found = measured
    plan = batched.plan(jnp.ones(4), [1, 2, 3])
    assert sorted(found.types) == sorted(plan.graph.labels)
    assert all(cost.per_batch > 0 and cost.per_node >= 0 for cost in found.types.values())
    sizes = {label.split("(")[0]: cost.bytes for label, cost in found.types.items()}
    assert sizes == {"double": 16, "total": 32}
    assert batched.compilations == 0  # it has programs of its own
    assert "Calibration of" in str(found)


def test_what_a_schedule_costs(measured):
    batched, _ = measured
    plan = batched.plan(jnp.ones(4), [1, 2, 3])
    labels = plan.graph.labels
    costs = Calibration({labels[0]: TypeCost(5, 1, 10), labels[1]: TypeCost(7, 2, 20)}, 0.5)
    np.testing.assert_array_equal(costs(plan.graph), [5, 7])
    batches = np.bincount(plan.schedule.batch_type, minlength=2) @ [5, 7]
    nodes = np.bincount(plan.graph.node_type, minlength=2) @ [1 + 5, 2 + 10]
    assert costs.microseconds(plan.graph, plan.schedule) == pytest.approx(batches + nodes)


def test_an_unknown_type_costs_what_the_median_does():
    costs = Calibration({"a": TypeCost(1, 1, 1), "b": TypeCost(2, 1, 1), "c": TypeCost(9, 1, 1)}, 0)
    graph = jedbatch.Graph.from_dag([0, 1], [[], [0]], names=["c", "new"])
    np.testing.assert_array_equal(costs(graph), [9, 2])


def test_it_is_an_objective(measured):
    batched, found = measured
    graph = batched.plan(jnp.ones(4), [1, 2, 3, 5]).graph
    fsm = learn(graph, objective=found, episodes=0)
    assert fsm.report.bound[0] == pytest.approx(jedbatch.lower_bound(graph, found(graph)))


def test_files(measured, tmp_path):
    _, found = measured
    found.save(tmp_path / "costs.json")
    assert Calibration.load(tmp_path / "costs.json") == found
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"cannot read .*its format is None"):
        Calibration.load(tmp_path / "other.json")
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "none.json")


def test_what_is_no_batched_function():
    with pytest.raises(TypeError, match=r"expected what `jedbatch\.batch` returned"):
        calibrate(run, 1.0, [1])


COSTS = {"per_batch": 1.0, "per_node": 1.0, "bytes": 4}
FILE = {"format": "jedbatch calibration, version 1", "machine": "", "per_byte": 1.0}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 100_000, "recursion"),
        ("[1]", r"its format is \[1\]"),
        ("null", "its format is None"),
        (json.dumps("x" * 10**6), "its format is 'xxx"),
        (json.dumps(FILE), "types"),
        (json.dumps(FILE | {"types": {}}), "no types"),
        (json.dumps(FILE | {"types": [COSTS]}), "no attribute"),
        (json.dumps(FILE | {"types": {"a": COSTS}, "machine": 3}), "its machine is 3"),
        (json.dumps(FILE | {"types": {"a": COSTS}, "per_byte": -1}), "per_byte=-1"),
        (json.dumps(FILE | {"types": {"a": COSTS | {"per_node": "1"}}}), "per_node='1'"),
        (json.dumps(FILE | {"types": {"a": COSTS | {"per_node": np.nan}}}), "per_node=nan"),
        (json.dumps(FILE | {"types": {"a": COSTS | {"bytes": 0.5}}}), "bytes=0.5"),
    ],
)
def test_malformed_files(text, match, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match) as caught:
        Calibration.load(path)
    assert "`Calibration.load` cannot read" in str(caught.value)
    assert len(str(caught.value)) < 1000
