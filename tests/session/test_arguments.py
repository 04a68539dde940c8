"""Arguments of a wrong type or value, one at a time, for every public function.

Each gets a `TypeError` or `ValueError` that says what came and what was expected.
"""

import inspect
import re

import numpy as np
import pytest

import jedbatch
from jedbatch import Calibration, Graph, data, models, policies, ragged, testing, viz
from jedbatch.__main__ import main
from jedbatch._batch.calibrate import TypeCost
from jedbatch.data import Vocabulary


class Strange:
    """Something whose `repr` fails."""

    def __repr__(self):
        raise RuntimeError("no repr")


STRANGE = Strange()
NUMBERS = (None, "3", b"3", [1], {}, {1}, STRANGE, np.ones(2), len, True)
TEXTS = (3, 2.5, [1], {}, {1}, STRANGE, np.ones(2), len, True)
COUNTS = (*NUMBERS, 2.5, float("nan"), -1)
POSITIVE = (*COUNTS, 0)
MEANS = (*NUMBERS, float("nan"), float("inf"), 0, -1.0, 2**70)
FLAGS = (None, 3, 0, "yes", [], np.ones(2), STRANGE)
THINGS = (3, 2.5, "x", [1], {}, STRANGE, np.ones(2), True)
FUNCTIONS = (3, "x", [], {}, STRANGE, np.ones(2))

GRAPH = Graph.from_dag([0, 1, 1, 0], [[], [0], [], [2]])
BATCHES = jedbatch.schedule(GRAPH)
X = np.ones(3, np.float32)
double = jedbatch.batch(lambda p, x: p * x)
MACHINE = policies.FSM("base", ("a",), ())
COSTS = Calibration({"a": TypeCost(1.0, 1.0, 4)}, 1.0, "here")
PREPARED = Graph.from_dag([0], [[-1]], names=["f"], inputs=[X])
frontier = lambda: policies.Frontier(GRAPH)  # noqa: E731
q = np.ones((2, 3), np.float32)

# What to call, good arguments, and by name of an argument the bad ones.
CASES = [
    (
        jedbatch.batch,
        {"fn": len},
        {
            "fn": THINGS,
            "in_axes": (1, 2.5, "x", {}, {0}, STRANGE, np.ones(2), len, True, (None, [0])),
            "out_axes": (1, False, 0.0, "x", [], {}, STRANGE, np.ones(2), len),
            "policy": (*THINGS, policies.FSM),
            "key": FUNCTIONS,
            "cache_size": COUNTS,
            "cache_bytes": COUNTS,
            "layout": (None, *THINGS),
            "reuse": THINGS[:-1],
            "granularity": THINGS,
            "target": THINGS,
        },
    ),
    (
        jedbatch.Lazy,
        {},
        {"policy": THINGS, "layout": THINGS, "reuse": THINGS[:-1]},
    ),
    (jedbatch.compiler_options, {}, {"target": THINGS}),
    (jedbatch.cores, {}, {"count": POSITIVE[1:]}),
    (
        testing.check_against_loop,
        {"fn": len, "params": X, "instances": [1]},
        {
            "instances": (None, 3, "x", {}, STRANGE, len, True),
            "gradients": FLAGS,
            "thorough": FLAGS,
            "plans": FLAGS,
            "rtol": (*NUMBERS, float("nan"), -1.0),
            "alone": FUNCTIONS,
        },
    ),
    (testing.check_plan, {}, {"plan": (None, *THINGS)}),
    (testing.assert_merged, {}, {"plan": (None, *THINGS)}),
    (jedbatch.cell, {"fn": len}, {"fn": THINGS, "name": TEXTS}),
    (
        jedbatch.learn,
        {"graphs": GRAPH, "episodes": 0},
        {
            "graphs": THINGS,
            "encoding": THINGS,
            "episodes": COUNTS,
            "teachers": FLAGS,
            "progress": FLAGS,
            "key": (*NUMBERS, 2.5, 2**70),
            "objective": FUNCTIONS,
        },
    ),
    (jedbatch.schedule, {"graph": GRAPH}, {"graph": (None, *THINGS), "policy": THINGS}),
    (
        jedbatch.lower_bound,
        {"graph": GRAPH},
        {
            "graph": (None, *THINGS),
            "weights": (3, "x", [1], {}, STRANGE, np.ones(3), [1, -1], [1, np.nan]),
        },
    ),
    (
        jedbatch.layout,
        {"graph": GRAPH, "schedule": BATCHES},
        {"graph": THINGS, "schedule": (None, *THINGS), "order": THINGS, "reuse": FLAGS},
    ),
    (
        jedbatch.evaluate,
        {"graph": PREPARED, "cells": {"f": len}},
        {"graph": (None, *THINGS), "cells": (None, *THINGS, {"f": 3})},
    ),
    (jedbatch.calibrate, {"batched": double}, {"batched": (None, *THINGS), "repeat": POSITIVE}),
    (lambda **o: double.plan(X, [X], **o), {}, {"gradient": FLAGS}),
    (lambda **o: double.profile(X, [X], **o), {}, {"repeat": POSITIVE}),
    (
        Calibration,
        {"types": {"a": TypeCost(1.0, 1.0, 4)}, "per_byte": 1.0},
        {
            "types": (None, *THINGS, {"a": 3}),
            "per_byte": (*NUMBERS, -1, np.inf),
            "machine": (None, *TEXTS),
        },
    ),
    (COSTS, {"graph": GRAPH}, {"graph": (None, *THINGS)}),
    (
        COSTS.microseconds,
        {"graph": GRAPH, "schedule": BATCHES},
        {"graph": THINGS, "schedule": (None, *THINGS)},
    ),
    (BATCHES.check, {}, {"graph": (None, *THINGS)}),
    (
        policies.FSM,
        {"encoding": "base", "types": ("a",), "states": ()},
        {
            "encoding": (None, *THINGS),
            "types": (None, *THINGS, ("a", 3)),
            "states": (None, *THINGS, ("a",)),
            "fallback": (None, *THINGS),
        },
    ),
    (MACHINE.schedule, {}, {"graph": (None, *THINGS)}),
    (policies.FSM.from_json, {}, {"text": (None, *TEXTS, b"{}")}),
    (policies.Frontier, {}, {"graph": (None, *THINGS)}),
    *(
        (getattr(policies, name), {}, {"frontier": (None, GRAPH, *THINGS)})
        for name in ("agenda", "height", "critical", "sufficient")
    ),
    *(
        (getattr(policies, name).schedule, {}, {"graph": (None, *THINGS)})
        for name in ("depth", "beam", "optimal")
    ),
    (lambda t: frontier().run(t), {}, {"t": (None, 3, -1, 2.5, "x", [1], {}, np.ones(2), STRANGE)}),
    (policies.beam, {}, {"width": POSITIVE, "objective": FUNCTIONS}),
    (
        policies.optimal,
        {},
        {"max_nodes": COUNTS, "seconds": (*NUMBERS[1:], np.nan, -1), "objective": FUNCTIONS},
    ),
    (
        ragged.attention,
        {"q": q, "k": q, "v": q},
        {
            **{name: (None, 3, "x", [1], STRANGE, np.ones(2)) for name in "qkv"},
            "causal": FLAGS,
            "scale": (*NUMBERS[1:], np.nan, np.inf),
        },
    ),
    (viz.graph, {"source": GRAPH}, {"source": (None, *THINGS), "instance": (*NUMBERS[1:], 2.5)}),
    (viz.batches, {"source": GRAPH, "schedule": BATCHES}, {"source": THINGS, "schedule": THINGS}),
    (viz.timeline, {"source": GRAPH, "schedule": BATCHES}, {"source": THINGS, "schedule": THINGS}),
    (viz.memory, {"plan": double.plan(X, [X])}, {"plan": (None, *THINGS), "arena": THINGS}),
    (viz.time_split, {}, {"source": (None, *THINGS[:3], [1], STRANGE)}),
    (viz.state_machine, {}, {"fsm": (None, *THINGS)}),
    (
        lambda records=(1,), **o: list(data.minibatches(records, **({"size": 1} | o))),
        {},
        {
            "records": (None, 3, 2.5, STRANGE, len, True),
            "size": POSITIVE,
            "buffer": POSITIVE,
            "drop_last": FLAGS,
            "seed": COUNTS[1:],
        },
    ),
    (data.parse_tree, {}, {"text": (None, *TEXTS, b"(A a)")}),
    (data.num_nodes, {}, {"root": (None, 3, "x", {}, STRANGE)}),
    (data.num_words, {}, {"root": (None, 3, "x", {}, [], STRANGE)}),
    (
        data.dependency_tree,
        {"words": ["a"], "heads": [0]},
        {"words": (None, 3, "a", {}, STRANGE), "heads": (None, 3, "0", ["0"], [True], [0.0], [1])},
    ),
    (
        data.build_lattice,
        {"characters": "ab", "lexicon": {"ab"}},
        {"characters": (None, 3, {}, [1], STRANGE), "lexicon": (None, 3, "ab", [1], STRANGE)},
    ),
    (data.Lexicon, {}, {"words": (None, 3, "ab", [1], STRANGE)}),
    (Vocabulary, {}, {"words": (None, 3, "ab", STRANGE)}),
    (Vocabulary(["a"]).words, {}, {"numbers": (None, 3, "0", ["0"], [1], [-1], [0.0])}),
]
INDEXED = {
    "trees": ("words", "labels"),
    "code": ("kinds",),
    "dependencies": ("words",),
    "pairs": ("words",),
    "lattices": ("characters", "words", "tags"),
    "molecules": ("atoms", "bonds"),
    "tagged": ("words", "tags"),
    "translations": ("source", "target"),
}
for name, own in INDEXED.items():
    fn = getattr(data, f"index_{name}")
    records = next(iter(inspect.signature(fn).parameters))
    bad = dict.fromkeys(own, (None, *THINGS)) | ({"rare": COUNTS} if name == "tagged" else {})
    bad[records] = (None, 3, "x", {}, STRANGE, len, [3], [None], [2.5])
    CASES.append((fn, {records: [], **{name: Vocabulary() for name in own}}, bad))

MADE_UP = ("treebank", "code", "pairs", "lattices", "molecules", "points", "tagged", "translations")
MODELS = ("tree", "treegru", "mvrnn", "twotypes", "childsum", "tagger", "translation", "lattice")
SIZED = [getattr(data, f"synthetic_{name}") for name in MADE_UP]
SIZED += [
    fn
    for name in (*MODELS, "transformer", "deepsets")
    for fn in vars(getattr(models, name)).values()
    if getattr(fn, "__name__", "").startswith(("flax_", "plain_", "lstm_", "gru_"))
]
BY_NAME = {"seed": COUNTS, "spelled": FLAGS, "density": (*NUMBERS, float("nan"), -1.0, 0.8)}
for fn in SIZED:
    parameters = inspect.signature(fn).parameters
    bad = {
        name: BY_NAME.get(name, POSITIVE) for name in parameters if name not in ("attend", "pool")
    }
    bad |= {name: MEANS for name in parameters if name.startswith("mean_")}
    if fn.__name__.startswith("synthetic_"):
        bad[next(iter(bad))] = COUNTS
    elif "num_characters" in bad and fn.__module__.endswith("tagger"):
        bad["num_characters"] = POSITIVE[1:]
    required = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty]
    CASES.append((fn, dict.fromkeys(required, 3), bad))
for name in MODELS:
    fn = getattr(models, name).scorer
    CASES.append((fn, {}, {next(iter(inspect.signature(fn).parameters)): (None, *THINGS)}))


def label(case):
    fn = case[0]
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__name__', type(fn).__name__)}"


@pytest.mark.parametrize("case", CASES, ids=label)
def test_wrong_arguments(case):
    fn, good, bad = case
    for name, values in bad.items():
        for value in values:
            with pytest.raises((TypeError, ValueError)) as caught:
                fn(**(good | {name: value}))
            text = str(caught.value)
            assert re.search("expected|give|cut it|has no|there is no|plan has", text), (name, text)
            assert len(text) < 1500
            assert "jedbatch" in str(caught.traceback[-1].path), (name, text)


@pytest.mark.parametrize(
    ("option", "match"),
    [
        (["--hidden", str(2**70)], "expected a positive number, at most"),
        (["--seed", "-1"], "--seed is -1; expected a number from 0"),
        (["--seed", str(2**70)], "expected a number from 0"),
    ],
)
def test_wrong_options_on_the_command_line(option, match, capsys):
    with pytest.raises(SystemExit):
        main(["learn", "treelstm", *option])
    assert match in capsys.readouterr().err
