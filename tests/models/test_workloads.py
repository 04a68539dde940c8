"""The models by name: their data, their policies, and the commands that use them."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET

import jax
import numpy as np
import pytest
from cases.helpers import assert_close, loop, mostly_slow

import jedbatch
from jedbatch import policies
from jedbatch.__main__ import main
from jedbatch.models import WORKLOADS, Workload, tree
from jedbatch.models.parts import jitted

SMALL = ["--batch-size", "4", "--hidden", "4"]


def graph_of(workload, number, seed):
    """A graph of synthetic instances; nothing is compiled."""
    instances, sizes = workload.load(limit=number, seed=seed)
    cells = workload.cells(hidden=2, **sizes)
    params = jax.eval_shape(cells.init, jax.random.key(0))
    batched = jedbatch.batch(workload.scorer(cells), policy=policies.agenda)
    return batched.plan(params, instances, gradient=False).graph


@pytest.mark.parametrize("name", WORKLOADS)
def test_shipped_policies_do_on_new_instances(name):
    """They reach the bound where ranks do, and come near the best heuristic elsewhere."""
    workload = WORKLOADS[name]
    graph = graph_of(workload, 24, seed=7)
    found = jedbatch.schedule(graph, workload.policy())
    found.check(graph)
    bound = jedbatch.lower_bound(graph)
    assert bound <= len(found)
    agenda, depth, *others = (
        len(jedbatch.schedule(graph, getattr(policies, heuristic)))
        for heuristic in ("agenda", "depth", "height", "sufficient")
    )
    assert len(found) < min(agenda, depth)
    assert len(found) <= 1.1 * min(others)
    if name not in ("treelstm2", "childsum", "lattice_lstm", "lattice_gru"):
        assert len(found) == bound


def test_names_are_no_claim_to_policies():
    """Models of this package have theirs; one of the user's that is called the same has none."""
    for name, workload in WORKLOADS.items():
        assert workload.policy() is not None
        assert dataclasses.replace(MINE, name=name).policy() is None


@pytest.mark.parametrize(
    "name", mostly_slow(["treelstm2", "translation", "lattice_gru"], "translation")
)
def test_jitted_cells_are_the_cells(name):
    workload = WORKLOADS[name]
    instances, sizes = workload.load(limit=1)
    cells = workload.cells(hidden=2, **sizes)
    params = cells.init(jax.random.key(0))
    plain, compiled = (workload.scorer(c) for c in (cells, jitted(cells)))
    assert_close(loop(compiled, params, instances), loop(plain, params, instances), 1e-5)


def test_reading_what_a_file_holds(tmp_path):
    """The file's instances, in numbers, and as many sizes as there are words and tags."""
    path = tmp_path / "tagged.jsonl"
    records = [
        {"tokens": ["a", "b", "a"], "tags": ["O", "X", "O"]},
        {"tokens": ["c"], "tags": ["Y"]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    instances, sizes = WORKLOADS["tagger"].load(path, limit=9)
    assert instances == [((0, 1, 0), (0, 1, 0)), ((2,), (2,))]
    assert sizes == {"num_words": 3, "num_tags": 3}
    assert len(WORKLOADS["tagger"].load(path, limit=1)[0]) == 1


def test_files_that_do_not_do(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt holds nothing; expected a treebank"):
        WORKLOADS["treelstm"].load(empty, limit=4)
    with pytest.raises(ValueError, match="TreeLSTM got 2 files; expected at most 1: a treebank"):
        WORKLOADS["treelstm"].load(empty, empty, limit=4)


# --- commands ---


def test_show(capsys, tmp_path):
    assert main(["show", "treelstm", *SMALL, "--pictures", str(tmp_path / "drawn")]) == 0
    text = capsys.readouterr().out
    assert "TreeLSTM, num_words 500, num_labels 5, hidden 4, on synthetic data: a minibatch" in text
    assert "Plan of 4 instances" in text
    assert "how each operand is read" not in text
    drawn = sorted((tmp_path / "drawn").iterdir())
    assert {path.stem for path in drawn} >= {"instance", "batches", "timeline", "memory", "time"}
    for path in drawn:
        ET.parse(path)
        assert str(path) in text


def test_show_explains_the_layout(capsys):
    assert main(["show", "treelstm", *SMALL, "--explain", "--gradient"]) == 0
    text = capsys.readouterr().out
    assert "how each operand is read" in text
    assert "XLA programs built so far: none yet" in text  # it is not run


@pytest.mark.slow
def test_learn_and_use_what_was_learned(capsys, tmp_path):
    path = tmp_path / "policy.json"
    learned = ["learn", "treelstm2", "--hidden", "4", "--batch-size", "8", "--save", str(path)]
    assert main(learned) == 0
    text = capsys.readouterr().out
    assert "certified lower bound" in text
    assert str(path) in text
    graph = graph_of(WORKLOADS["treelstm2"], 8, seed=0)
    chosen = len(jedbatch.schedule(graph, policies.FSM.load(path)))
    assert jedbatch.lower_bound(graph) <= chosen
    bench = ["bench", "treelstm2", *SMALL, "--minibatches", "1", "--policy", str(path)]
    assert main(bench) == 0
    text = capsys.readouterr().out
    for kind in ("value", "value and gradient"):
        times = re.search(rf"^{kind}  +(.*)$", text, re.MULTILINE).group(1).split()
        assert len(times) == 5
        assert all(float(time.replace(",", "")) > 0 for time in times)


MINE = Workload(
    "mine",
    "my trees",
    ("nothing",),
    lambda path, limit: [],
    lambda records: ([], {}),
    lambda number, seed: ([(0, 1), (1, (0, 1), (1, 2))] * number, {"num_words": 3}),
    lambda num_words, hidden: tree.plain_cells(num_words, 2, hidden),
    tree.scorer,
)


def test_a_model_of_my_own(capsys, monkeypatch, tmp_path):
    (tmp_path / "my_models.py").write_text("from models.test_workloads import MINE\n")
    monkeypatch.chdir(tmp_path)
    assert main(["show", "my_models:MINE", *SMALL]) == 0
    assert "my trees, num_words 3, hidden 4, on synthetic data" in capsys.readouterr().out
    assert MINE.policy() is None


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["show", "treelstn"], "there is no model 'treelstn'; expected one of treelstm, "),
        (["show", "treelstm", "--params", "x"], "--params is for functions of yours"),
        (["learn", "json:dumps"], "has no `instances`; write `instances = [...]`"),
        (["show", "json:__name__"], "json:__name__ is of type str; expected a `jedbatch.models.W"),
        (["learn", "treelstm", "--batch-size", "0"], "--batch-size is 0; expected a positive"),
        (["bench", "treelstm", "--data", "nowhere.txt"], "nowhere.txt"),
        (["bench", "treelstm", "--policy", "nowhere.json"], "nowhere.json"),
    ],
)
def test_commands_explain_what_is_wrong(args, match, capsys):
    try:
        status = main(args)
    except SystemExit as stop:
        status = stop.code
    assert status != 0
    assert match in capsys.readouterr().err


def test_the_loss_is_the_loops():
    """What the commands compute: an independent look at one model."""
    workload = WORKLOADS["tagger_chars"]
    instances, sizes = workload.load(limit=2, seed=3)
    cells = workload.cells(hidden=2, **sizes)
    params = cells.init(jax.random.key(0))
    batched = jedbatch.batch(workload.scorer(cells), policy=workload.policy())
    got = np.asarray(batched(params, instances))
    np.testing.assert_allclose(got, loop(workload.scorer(cells), params, instances), rtol=1e-4)
