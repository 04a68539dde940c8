"""Shapes and dtypes that nouns are annotated with are those of planned workloads."""

import dataclasses
import functools
import types
import typing

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from cases.models import random_params

import jedbatch
from jedbatch._graph.graph import Graph
from jedbatch._layout.bucketing import NUM_WIDTHS
from jedbatch._layout.layout import Layout
from jedbatch._program.lower import Lowered
from jedbatch._program.placement import Chunks, Placement
from jedbatch._program.plan import Plan
from jedbatch._program.signature import Signature
from jedbatch._schedule.schedule import Schedule
from jedbatch.models import WORKLOADS

NOUNS = (Graph, Schedule, Layout, Placement, Chunks, Signature, Lowered, Plan)
PROPERTIES = (property, functools.cached_property)


def evaluated(annotated):
    """Returns the annotations of a class or function, those of arrays as types of jaxtyping."""
    names = {name: getattr(jaxtyping, name) for name in ("Bool", "Int32", "Int64")}
    return typing.get_type_hints(annotated, localns=names)


def annotations(noun):
    """Returns a dict from attribute to annotation: those of fields, and of properties."""
    found = evaluated(noun)
    for name, x in vars(noun).items():
        if isinstance(x, PROPERTIES):
            getter = x.fget if isinstance(x, property) else x.func
            found[name] = evaluated(getter)["return"]
    return {name: hint for name, hint in found.items() if "jaxtyping" in str(hint)}


def agrees(value, hint):
    """Returns whether a value, or each part of a tuple, is as annotated."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(agrees(value, part) for part in parts)
    if origin is tuple:
        parts = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return len(parts) == len(value) and all(map(agrees, value, parts))
    return isinstance(value, hint)


def check(*nouns, **dimensions):
    """Checks annotated attributes; a letter stands for one number in all of them."""
    with jaxtyping.jaxtyped("context"):
        for letter, size in dimensions.items():
            assert isinstance(np.zeros(size, np.int32), jaxtyping.Int32[np.ndarray, f" {letter}"])
        for noun in nouns:
            for name, hint in annotations(type(noun)).items():
                value = getattr(noun, name)
                shown = getattr(value, "dtype", type(value)), getattr(value, "shape", "")
                assert agrees(value, hint), f"{type(noun).__name__}.{name} is {shown}, not {hint}"


def nouns_of(plan):
    """Returns all nouns of a plan, and sizes of the dimensions that begin as sums."""
    placement, lowered = plan.host.placed, plan.host.lowered
    dimensions = {
        "N": len(plan.graph.node_type),
        "B": plan.graph.num_instances,
        "T": len(plan.graph.types),
        "S": len(plan.schedule),
        "K": len(placement.kernels),
        "W": NUM_WIDTHS,
        "kernels": len(plan.static.signature.kernels),
    }
    nouns = plan.graph, plan.schedule, plan.layout, placement, placement.chunks
    return (*nouns, lowered.signature, lowered, plan), dimensions


def tree(params, node):
    """A tree of numbers, with two results a node."""

    @jedbatch.cell
    def join(left, right):
        return jnp.tanh(params * left + right), left * right

    if not isinstance(node, tuple):
        return params * node
    return sum(join(tree(params, node[0]), tree(params, node[1])))


def model_of(name):
    workload = WORKLOADS[name]
    instances, sizes = workload.synthetic(4, 0)
    cells = workload.cells(hidden=4, **sizes)
    return workload.scorer(cells), random_params(cells), instances


@pytest.fixture(scope="module")
def plan():
    return jedbatch.batch(tree).plan(
        jnp.ones(3), [((1.0, 2.0), 3.0), 4.0, ((1.0, 2.0), (3.0, 4.0))]
    )


def test_all_nouns_are_annotated():
    assert {noun.__name__ for noun in NOUNS if not annotations(noun)} == set()
    for noun in NOUNS:
        for name, hint in noun.__annotations__.items():
            assert hint != "np.ndarray", f"{noun.__name__}.{name} has no shape"


def test_nouns_of_a_tree(plan):
    nouns, dimensions = nouns_of(plan)
    assert set(map(type, nouns)) == set(NOUNS)
    check(*nouns, **dimensions)


@pytest.mark.parametrize("name", ["treelstm", "tagger"])
@pytest.mark.parametrize("gradient", [False, True])
def test_nouns_of_models(name, gradient):
    fn, params, instances = model_of(name)
    nouns, dimensions = nouns_of(jedbatch.batch(fn).plan(params, instances, gradient=gradient))
    check(*nouns, **dimensions)


def test_nouns_without_nodes():
    graph = Graph.from_dag([], [])
    batches = jedbatch.schedule(graph)
    check(graph, batches, N=0, B=1, T=0, S=0)


@pytest.mark.parametrize(
    ("noun", "name", "wrong"),
    [
        ("graph", "node_type", lambda x: x.astype(np.int64)),
        ("graph", "operand_ptr", lambda x: x[:-1]),
        ("schedule", "node", lambda x: x[1:]),
        ("layout", "trips", lambda x: x[:, 1:]),
        ("layout", "lane", lambda x: x.astype(np.int32)),
        ("layout", "space", lambda x: x.T),
    ],
)
def test_wrong_arrays_are_found(plan, noun, name, wrong):
    nouns, dimensions = nouns_of(plan)
    noun = getattr(plan, noun)
    planted = dataclasses.replace(noun, **{name: wrong(getattr(noun, name))})
    others = [x for x in nouns if x is not noun]
    with pytest.raises(AssertionError, match=rf"\.{name} is"):
        check(*others[:3], planted, **dimensions)
