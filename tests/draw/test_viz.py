"""Pictures: well-formed, counted against the plan, and small whatever they show."""

import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.chains import encode, make_params, sentences
from cases.helpers import random_dag
from cases.models import random_params

import jedbatch
from jedbatch import viz
from jedbatch._draw.graph import rows_of, spread_apart
from jedbatch._draw.memory import arenas_of
from jedbatch._layout.access import GATHER
from jedbatch._support.canvas import colours, fitted, text_width
from jedbatch.data import synthetic_treebank
from jedbatch.models import tree

SVG = "{http://www.w3.org/2000/svg}"
MOST_ELEMENTS, MOST_BYTES = 3000, 300_000


def elements(picture):
    """All elements of a picture, which must be no larger than a notebook shows."""
    root = ET.fromstring(picture.svg)
    assert root.tag == SVG + "svg"
    assert float(root.get("width")) <= 960
    assert float(root.get("height")) <= 720
    found = list(root.iter())
    assert len(found) <= MOST_ELEMENTS
    assert len(picture.svg) <= MOST_BYTES
    return found


def marks(picture, kind):
    return [x for x in elements(picture) if x.get("data-kind") == kind]


def counts(picture, kind):
    return [int(x.get("data-count")) for x in marks(picture, kind)]


def words(picture):
    return [x.text for x in elements(picture) if x.tag == SVG + "text"]


def num_edges(graph):
    """Pairs of a node and a reader of it, by hand."""
    pairs = set()
    for n in range(len(graph.node_type)):
        for value in graph.operand[graph.operand_ptr[n] : graph.operand_ptr[n + 1]].tolist():
            if value >= 0:
                pairs.add((int(graph.value_node[value]), n))
    return len(pairs)


@pytest.fixture(scope="module")
def trees():
    """A function that plans so many trees."""
    cells = tree.plain_cells(num_words=500, num_labels=5, hidden=4)
    params = random_params(cells)
    classify = jedbatch.batch(tree.classifier(cells))

    def plan(number, mean_length=6, **options):
        bank = synthetic_treebank(number, mean_length=mean_length)
        return classify.plan(params, bank, **options)

    return plan


@pytest.fixture(scope="module")
def small(trees):
    return trees(3)


@pytest.fixture(scope="module")
def large(trees):
    plan = trees(120, 25)
    assert len(plan.graph.node_type) > 5000
    return plan


@pytest.fixture(scope="module")
def chains():
    """A plan for inference that reads slices, rows used again."""
    batched = jedbatch.batch(encode, reuse=True)
    return batched.plan(make_params(), sentences(4, 64), gradient=False)


def dag(seed, num_nodes, num_types, **options):
    graph = jedbatch.Graph.from_dag(*random_dag(np.random.default_rng(seed), num_nodes, num_types))
    return graph, jedbatch.schedule(graph, jedbatch.policies.agenda)


# --- graphs ---


def test_small_graphs_are_drawn_node_by_node(small):
    picture = viz.graph(small)
    graph = small.graph
    assert len(marks(picture, "node")) == len(graph.node_type)
    (edges,) = marks(picture, "edges")
    assert edges.get("d").count("M") == num_edges(graph)
    names = words(picture)
    for t, number in enumerate(np.bincount(graph.node_type)):
        if number:
            assert f"{graph.types[t].name} × {number}" in names  # the legend
    assert [f"instance {i}" in names for i in range(4)] == [True, True, True, False]


def test_one_instance_is_drawn(trees):
    plan = trees(30, 25)
    sizes = np.diff(plan.graph.node_ptr)
    for i in (0, 7, -1):
        picture = viz.graph(plan, i)
        assert len(marks(picture, "node")) == sizes[i]
        hint = marks(picture, "node")[0].find(SVG + "title").text
        assert hint.startswith(f"node 0 of instance {i % 30}: leaf(")


def test_large_graphs_are_counted(large):
    picture = viz.graph(large)
    graph = large.graph
    assert not marks(picture, "node")
    assert sum(counts(picture, "nodes")) == len(graph.node_type)
    pairs = set(zip(graph.depth.tolist(), graph.node_type.tolist(), strict=True))
    assert len(counts(picture, "nodes")) == len(pairs)


@pytest.mark.parametrize("num_types", [1, 5, 60])
@pytest.mark.parametrize("num_nodes", [0, 1, 55, 380, 6000])
def test_any_graph_is_drawn(num_nodes, num_types):
    graph, schedule = dag(num_nodes, num_nodes, num_types)
    picture = viz.graph(graph)
    drawn = len(marks(picture, "node")) or sum(counts(picture, "nodes"))
    assert drawn == num_nodes
    for draw in (viz.batches, viz.timeline):
        assert sum(counts(draw(graph, schedule), "batch")) == num_nodes


def test_a_long_chain_stays_small():
    num_nodes = 5000
    graph = jedbatch.Graph.from_dag([0] * num_nodes, [[n - 1][:n] for n in range(num_nodes)])
    schedule = jedbatch.schedule(graph)
    assert sum(counts(viz.graph(graph), "nodes")) == num_nodes
    assert sum(counts(viz.batches(graph, schedule), "batch")) == num_nodes
    assert sum(counts(viz.timeline(graph, schedule), "batch")) == num_nodes


def test_rows_of_one_level_are_apart():
    graph, _ = dag(3, 200, 4)
    row = rows_of(graph, slice(0, 200))
    assert row.min() == 0
    for level in range(graph.depth.max() + 1):
        mine = np.sort(row[graph.depth == level])
        assert (np.diff(mine) >= 1 - 1e-9).all()


def test_spreading_is_the_closest_there_is():
    """Against every other way of moving along a direction: the sum of squares is at its least."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        wanted, weight = np.sort(rng.normal(size=6) * 2), rng.uniform(0.5, 3, size=6)
        found = spread_apart(wanted, weight)
        assert (np.diff(found) >= 1 - 1e-9).all()
        least = (weight * (found - wanted) ** 2).sum()
        for _ in range(200):
            other = np.sort(found + 0.1 * rng.normal(size=6))
            if (np.diff(other) >= 1).all():
                assert (weight * (other - wanted) ** 2).sum() >= least - 1e-9


# --- batches ---


def test_batches_have_a_box_each(small, large):
    for plan in (small, large):
        sizes = np.diff(plan.schedule.node_ptr).tolist()
        assert sorted(counts(viz.batches(plan), "batch")) == sorted(sizes)
    assert len(marks(viz.batches(small), "node")) == len(small.graph.node_type)
    (edges,) = marks(viz.batches(small), "edges")
    assert edges.get("d").count("M") == num_edges(small.graph)


def test_nodes_are_in_the_box_of_their_batch(small):
    picture = viz.batches(small)
    boxes = [
        [float(x.get(key)) for key in ("x", "y", "width", "height")]
        for x in marks(picture, "batch")
    ]
    for n, node in enumerate(marks(picture, "node")):
        x, y = float(node.get("cx")), float(node.get("cy"))
        inside = [a < x < a + w and b < y < b + h for a, b, w, h in boxes]
        assert np.flatnonzero(inside).tolist() == [small.schedule.batch[n]]


def test_a_timeline_adds_up(small, large):
    for plan in (small, large):
        picture = viz.timeline(plan)
        assert counts(picture, "batch") == np.diff(plan.schedule.node_ptr).tolist()
        bound = int(jedbatch.lower_bound(plan.graph))
        assert f"Certified lower bound: {bound} batches, so none has fewer" in picture.svg
    graph, schedule = dag(1, 60, 4)
    assert len(schedule) > jedbatch.lower_bound(graph)
    assert "so none has fewer" not in viz.timeline(graph, schedule).svg


def test_a_plan_is_its_graph_and_schedule(small):
    again = viz.timeline(small.graph, small.schedule)
    assert again.svg == viz.timeline(small).svg


# --- memory ---


def test_rectangles_are_the_lanes(small, large):
    """Without reuse every result of every lane has a row."""
    for plan in (small, large):
        layout = plan.layout
        for arena in arenas_of(plan):
            picture = viz.memory(plan, arena)
            rows = sum(
                int(layout.lanes[t])
                for t, node_type in enumerate(plan.graph.types)
                for result in node_type.results
                if f"{result.dtype}{list(result.shape)}".replace(" ", "") == arena
            )
            assert sum(counts(picture, "rows")) == rows
            assert sum(counts(picture, "inputs")) == sum(
                len(x) for x in plan.graph.inputs if f"{x.type.dtype}{list(x.type.shape)}" == arena
            )


def test_blocks_that_share_rows_do_not_overlap(chains):
    arenas = arenas_of(chains)
    assert chains.host.placed.reuse
    shared = 0
    for arena in arenas.values():
        held = np.full((len(chains.schedule) + 1, arena.rows), -1)
        for k, (*_, batch, first, rows, live, last) in enumerate(zip(*arena.blocks, strict=True)):
            assert first >= arena.inputs
            assert live <= rows
            mine = held[batch : last + 1, first : first + rows]
            assert (mine == -1).all()
            mine[:] = k
        shared += int(arena.blocks.rows.sum() + arena.inputs > arena.rows)
    assert shared


def test_reads_are_those_of_the_plan(small, large, chains):
    for plan in (small, large, chains):
        total = np.zeros(2, int)
        for name, arena in arenas_of(plan).items():
            picture = viz.memory(plan, name)
            found = [sum(counts(picture, kind)) for kind in ("gathers", "slices")]
            assert found == [arena.gathered.sum(), (~arena.gathered).sum()]
            total += np.array(found) * arena.row_bytes
        expected = plan.host.lowered.read_bytes
        assert total.tolist() == [expected[GATHER], expected.sum() - expected[GATHER]]
    assert total[1] > 3 * total[0]


def test_rows_are_alive_when_they_are_read(chains):
    for arena in arenas_of(chains).values():
        for step, row in zip(arena.step.tolist(), arena.row.tolist(), strict=True):
            if row < arena.inputs:
                assert step <= arena.last_input
                continue
            blocks = arena.blocks
            alive = (blocks.batch < step) & (step <= blocks.last)
            here = (blocks.begin <= row) & (row < blocks.begin + blocks.live)
            assert (alive & here).sum() == 1


def test_the_largest_arena_is_the_default(small):
    assert "float32[4]" in viz.memory(small).title
    assert viz.memory(small).svg == viz.memory(small, "float32[4]").svg


@jedbatch.cell
def halve(weights, x):
    return x * weights


def test_many_blocks_are_merged():
    def deep(weights, x):
        for _ in range(1800):
            x = halve(weights, x)
        return x

    for options in ({}, {"gradient": False}):
        plan = jedbatch.batch(deep).plan(jnp.ones(2), [jnp.ones(2)], **options)
        picture = viz.memory(plan)
        assert len(counts(picture, "rows")) <= 700
        assert sum(counts(picture, "rows")) == plan.layout.lanes.sum()
        assert "neighbours as one" in picture.svg


# --- time and policies ---


def test_stages_add_up(small):
    picture = viz.time_split(small)
    seconds = [float(x.get("data-count")) for x in marks(picture, "stage")]
    np.testing.assert_allclose(seconds, list(small.host.seconds.values()), rtol=1e-6)
    assert {*small.host.seconds} <= {*words(picture)}
    both = viz.time_split({"mine": small, "by hand": {"trace": 0.25, "device": 1.5}})
    assert {"mine", "by hand", "device", "250", "1,500", "1,750"} <= {*words(both)}
    assert len(marks(viz.time_split([small, small]), "stage")) == 2 * len(seconds)
    assert len(marks(viz.time_split({"trace": 0.0}), "stage")) == 1
    assert len(marks(viz.time_split({"a": 1, "b": np.float32(0.5)}), "stage")) == 2


def test_the_device_is_a_stage_once_it_is_measured():
    double = jedbatch.batch(lambda weights, x: (x * weights).sum())
    plan = double.profile(jnp.ones(2), [jnp.ones(2)] * 2, repeat=1)
    assert "device" in words(viz.time_split(plan))


def test_state_machines():
    graph, _ = dag(2, 40, 3)
    fsm = jedbatch.learn([graph])
    picture = viz.state_machine(fsm)
    elements(picture)
    assert picture.svg == fsm._repr_svg_()
    assert f"{len(fsm)} state" in picture.title


# --- pictures ---


def test_names_are_text():
    names = ['<b>&"', "]]>", "null\x00 bell\x07", "中文节点"]
    graph = jedbatch.Graph.from_dag([0, 1, 2, 3], [[], [0], [1], [2]], names=names)
    schedule = jedbatch.schedule(graph)
    for picture in (
        viz.graph(graph),
        viz.batches(graph, schedule),
        viz.timeline(graph, schedule),
        viz.time_split({name: {name: 1.0} for name in names}),
    ):
        assert any("<b>" in (text or "") for text in words(picture))
        assert any("中文" in (text or "") for text in words(picture))


def test_equal_names_are_numbered():
    graph = jedbatch.Graph.from_dag([0, 1, 2], [[], [], []], names=["a", "b", "a"])
    assert {"a.1 × 1", "b × 1", "a.2 × 1"} <= {*words(viz.graph(graph))}


def test_a_kind_keeps_its_colour(trees):
    def swatches(picture):
        titled = [x for x in elements(picture) if x.tag == SVG + "rect" and x.get("rx") == "2"]
        return {x.find(SVG + "title").text: x.get("fill") for x in titled}

    plan = trees(3)
    whole, alone = swatches(viz.graph(plan)), swatches(viz.graph(plan, 1))
    assert alone.items() <= whole.items()
    assert len({*colours(40)}) == 40


def test_text_is_cut_to_fit():
    for text in ("short", "a rather long name of a cell", "WWWW", "中文节点"):
        for room in (0, 8, 30, 200):
            shown = fitted(text, room)
            assert text_width(shown) <= room
            assert shown in ("", text) or shown.endswith("…")


def test_pictures_are_saved(small, tmp_path):
    picture = viz.graph(small)
    picture.save(tmp_path / "graph.svg")
    assert ET.parse(tmp_path / "graph.svg").getroot().tag == SVG + "svg"
    assert picture._repr_svg_() == picture.svg
    assert repr(picture).startswith("<Picture of ")
    assert len(repr(picture)) < 140
    with pytest.raises(ValueError, match=r"writes SVG only; save it as .*graph\.svg'"):
        picture.save(tmp_path / "graph.png")


# --- errors ---


def test_what_cannot_be_drawn(small):
    flat = jax.tree.unflatten(*jax.tree.flatten(small)[::-1])
    for draw in (viz.graph, viz.batches, viz.timeline, viz.memory, viz.time_split):
        with pytest.raises(ValueError, match=r"been through `jax.jit`.*draw the plan that"):
            draw(flat)
        with pytest.raises(TypeError, match=rf"`viz.{draw.__name__}` got int; expected a plan"):
            draw(3)
    graph, schedule = dag(0, 10, 2)
    with pytest.raises(IndexError, match="got instance 3 of 3; expected an index from 0 to 2"):
        viz.graph(small, 3)
    with pytest.raises(TypeError, match="got instance 'a'; expected its index"):
        viz.graph(small, "a")
    with pytest.raises(TypeError, match="without its schedule; cut it into batches first"):
        viz.batches(graph)
    with pytest.raises(TypeError, match=r"a plan has its own.*viz.timeline\(plan.graph"):
        viz.timeline(small, schedule)
    with pytest.raises(ValueError, match="not a valid schedule"):
        viz.batches(small.graph, schedule)
    with pytest.raises(ValueError, match=r"got arena 'f32\[4\]'; this plan has.*'float32\[4\]'"):
        viz.memory(small, "f32[4]")
    with pytest.raises(TypeError, match=r"`viz\.state_machine` got Graph"):
        viz.state_machine(graph)


@pytest.mark.parametrize(
    ("times", "error", "match"),
    [
        ({}, ValueError, "got nothing"),
        ([], ValueError, "got nothing"),
        ({"a": {"trace": -1.0}}, ValueError, "got -1.0 seconds for 'trace' of 'a'"),
        ({"a": {"trace": float("nan")}}, ValueError, "got nan seconds"),
        ({"mine": None}, TypeError, "got None for 'mine'; expected a number of seconds, a plan or"),
        ({"a": "x"}, TypeError, "got 'x' for 'a'; expected a number of seconds, a plan or a dict"),
        ({"a": {"trace": "1"}}, TypeError, "got '1' for 'trace' of 'a'; expected a number of s"),
        ([3], TypeError, "got int for ''; expected a plan or a dict"),
        ("plan", TypeError, "got str; expected a plan, several plans"),
    ],
)
def test_times_that_are_none(times, error, match):
    with pytest.raises(error, match=match):
        viz.time_split(times)
