"""Machines: what they see, what they store, what they do when they do not know."""

import json

import numpy as np
import pytest
from cases.helpers import random_dag

from jedbatch import Graph, policies, schedule
from jedbatch._schedule.encodings import CODES, ENCODINGS, WORDS, encode
from jedbatch._schedule.fsm import match_labels
from jedbatch.policies import FSM, Frontier


def machine(encoding="sort", **options):
    """Runs the first of two types if it has more ready nodes, and the second otherwise."""
    table = {(0, CODES + 1): 0, (1, CODES): 1, (0, CODES): 1, (0,): 0, (CODES,): 1}
    moves = {((0,), (0, CODES + 1)): 3, ((0, CODES + 1), (0,)): 2}
    return FSM.of(encoding, ["cell(f32[4])", "word(f32[4])"], table, moves, **options)


def circle(seed, num_nodes=60, names=("cell(f32[4])", "word(f32[4])")):
    """A random graph whose types read each other."""
    rng = np.random.default_rng(seed)
    return Graph.from_dag(*random_dag(rng, num_nodes, len(names), most=2), names=names)


def test_what_encodings_say():
    # Two chains of type 0 with readers of type 1, which the end of each chain reads.
    types = [0, 0, 1, 1, 0, 0, 1, 0]
    graph = Graph.from_dag(types, [[], [], [0], [1], [0], [2, 3, 4], [5], [6]])
    frontier = Frontier(graph)
    assert frontier.ready_types == [0]
    frontier.run(0)  # nodes 0 and 1; ready are 4 of type 0, and 2 and 3 of type 1
    said = {name: ENCODINGS[name](frontier, [0, 1]) for name in ENCODINGS}
    words = {name: [WORDS[name][c] for c in codes] for name, codes in said.items()}
    assert words["base"] == ["", ""]
    assert words["max"] == ["", "most"]
    assert words["sort"] == ["2nd", "1st"]
    # All three lead to node 5, then 6, then 7: a longest path of three edges for each. Only
    # those of type 1 turn. The longest chain of type 0 is 4, 5, 7; it begins in a ready node.
    assert words["phase"] == ["tallest steady sure", "tallest many turning sure"]
    assert encode("sort", frontier, [0, 1], [5, 2]) == (2 * CODES, 5 * CODES + 1)


def test_every_code_has_a_word_of_its_own():
    for name, words in WORDS.items():
        assert len(set(words.values())) == len(words), name
        assert all(0 <= code < CODES for code in words)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("seed", range(6))
def test_valid_and_deterministic(encoding, seed):
    graph = circle(seed)
    empty = FSM(encoding, (), ())
    found = schedule(graph, empty)
    found.check(graph)
    assert found.policy == f"FSM {encoding}"
    np.testing.assert_array_equal(found.node, schedule(graph, empty).node)


@pytest.mark.parametrize("fallback", ["critical", "sufficient", "height", "agenda"])
def test_unknown_states_are_left_to_the_fallback_and_counted(fallback):
    graph = circle(1)
    choices = 0

    def counted(frontier):
        nonlocal choices
        choices += len(frontier.ready_types) > 1
        return getattr(policies, fallback)(frontier)

    alone = schedule(graph, counted)
    assert graph.components == [[0, 1]]
    found = schedule(graph, FSM("phase", (), (), fallback))
    np.testing.assert_array_equal(found.batch_type, alone.batch_type)
    assert found.unseen == choices > 0


def test_a_known_state_decides():
    graph = Graph.from_dag(
        [0, 0, 0, 1, 0, 1],
        [[], [], [], [0], [3], [4]],
        names=["cell(f32[4])", "word(f32[4])"],
    )
    found = schedule(graph, machine())
    assert found.batch_type.tolist() == [0, 1, 0, 1]
    assert found.unseen == 0


def test_equal_decisions_are_one_state():
    fsm = machine()
    assert len(fsm) == 4
    assert [len(state.when) for state in fsm.states] == [1, 2, 1, 1]
    assert fsm.states[0].next == ((2, 2),)
    assert fsm.table == {(0, 65): 0, (1, 64): 1, (0, 64): 1, (0,): 0, (64,): 1}


def test_machines_are_values():
    assert machine() == machine()
    assert hash(machine()) == hash(machine())
    assert machine() != machine(fallback="height")
    assert machine().fallback == "critical"
    with pytest.raises(AttributeError):
        machine().fallback = "height"


def test_printing_and_drawing():
    text = str(machine())
    assert "FSM over sort: 4 states, 5 encodings, otherwise critical" in text
    assert "cell 1st, word 2nd" in text
    picture = machine()._repr_svg_()
    assert picture.startswith("<svg")
    assert picture.count("<rect") == 1 + 4
    assert picture.count("<path") == 2 * 2  # two moves, each a line and a head
    assert "run word" in picture
    assert "FSM over base: 0 states" in str(FSM("base", (), ()))
    assert "<svg" in FSM("base", (), ())._repr_svg_()


def test_a_large_machine_is_drawn_in_part():
    names = [f"<{i}>" for i in range(50)]
    fsm = FSM.of("base", names, {(CODES * i,): i for i in range(50)})
    assert "and 14 more" in fsm._repr_svg_()
    assert "<0>" not in fsm._repr_svg_().replace("&lt;", "")


def test_names_are_short_and_different():
    fsm = FSM("base", ("lstm(f32[4]) @ [0]", "lstm(f32[4]) @ [1]", "out(f32[4])"), ())
    assert fsm.names == ("lstm.1", "lstm.2", "out")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_files(tmp_path, encoding):
    words = WORDS[encoding]
    codes = [(a, CODES + b) for a in words for b in words]
    fsm = FSM.of(encoding, ["a", "b"], {code: i % 2 for i, code in enumerate(codes)} | {(0,): 0})
    fsm.save(tmp_path / "policy.json")
    assert FSM.load(tmp_path / "policy.json") == fsm
    content = json.loads((tmp_path / "policy.json").read_text())
    assert content["format"] == "jedbatch policy, version 1"
    assert content["types"] == ["a", "b"]


def edited(change):
    content = json.loads(machine().to_json())
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[1, 2]", "its format is"),
        ("null", "its format is None"),
        (edited(lambda c: c.update(format="jedbatch policy, version 99")), "version 99"),
        (edited(lambda c: c.update(encoding="colour")), "'colour', not one of"),
        (edited(lambda c: c.update(fallback="guess")), "'guess', not one of"),
        (edited(lambda c: c.pop("states")), "'states' is missing"),
        (edited(lambda c: c["states"][0].update(run="nobody")), "'nobody' is missing or unknown"),
        (edited(lambda c: c["states"][2].update(run="word(f32[4])")), "ready are only"),
        (edited(lambda c: c["states"][0].update(next={"9": 1})), "leads nowhere"),
        (edited(lambda c: c["states"].append(c["states"][0])), "is in two states"),
        (edited(lambda c: c["states"][0].update(when=[])), "has no encodings"),
        (edited(lambda c: c["states"][0]["when"].append({"cell(f32[4])": "1th"})), "'1th'"),
        (edited(lambda c: c.update(types=["a", "a"])), "missing or unknown"),
        (edited(lambda c: c.update(types="ab")), "its types are 'ab', not a list"),
        (edited(lambda c: c.update(states={})), "its states are {}, not a list"),
        (edited(lambda c: c["states"][0].update(next={"0": 1.5})), "integer"),
        (edited(lambda c: c["states"][1]["when"].append({"cell(f32[4])": ""})), "differ in which"),
        (edited(lambda c: c["states"][0]["when"].append({})), "differ in which"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_malformed_files(tmp_path, text, message):
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as found:
        FSM.load(path)
    assert "`FSM.load` cannot read" in str(found.value)
    assert "policy.json" in str(found.value)


def test_a_missing_file():
    with pytest.raises(FileNotFoundError):
        FSM.load("no such file")


def test_types_are_found_by_label():
    known = ["cell(f32[64])", "word(f32[64])", "add(f32[])"]
    assert match_labels(known, known[::-1]) == [2, 1, 0]
    assert match_labels(known, ["cell(f32[256])", "word(f32[256])"]) == [0, 1]
    assert match_labels(known, ["cell(f32[2])", "cell(f32[3])"]) == [-1, -2]  # which is it?
    sizes = ["sum(f32[3,64])", "sum(f32[10,64])"]
    assert match_labels(sizes, ["sum(f32[10,8])", "sum(f32[3,8])"]) == [1, 0]
    assert match_labels(known, ["other(f32[])", "add(f32[])"]) == [-1, 2]
    static = ["f[a=0.5](f32[64])", "f[a=0.05](f32[64])"]
    assert match_labels(static, ["f[a=0.05](f32[8])", "f[a=0.5](f32[8])"]) == [1, 0]
    layers = ["f(f32[64]) @ [0][0]", "f(f32[64]) @ [0][1]"]
    assert match_labels(layers, ["f(f32[8]) @ [0][1]"]) == [1]


def test_labels_of_a_graph_are_different():
    graph = Graph.from_dag([0, 1, 2], [[], [], []], names=["a", "b", "a"])
    assert graph.labels == ["a", "b", "a #2"]
    graph = Graph.from_dag([0, 1, 2], [[], [], []], names=["a", "a", "a #2"])
    assert len(set(graph.labels)) == 3
