"""A file is saved completely or not at all."""

import errno
import os
import stat

import numpy as np
import pytest

from jedbatch import Calibration, Graph, viz
from jedbatch._batch.calibrate import TypeCost
from jedbatch.policies import FSM

GRAPH = Graph.from_dag([0, 1], [[-1], [0]], inputs=[np.arange(3.0)])
OTHER = Graph.from_dag([0], [[]])
KINDS = {
    "graph.npz": (GRAPH, OTHER),
    "policy.json": (FSM("base", ("a",), ()), FSM("max", ("b",), ())),
    "costs.json": (Calibration({"a": TypeCost(1.0, 1.0, 4)}, 1.0, "here"),) * 2,
    "picture.svg": (viz.graph(GRAPH), viz.graph(OTHER)),
}
every_kind = pytest.mark.parametrize("name", KINDS)


def fail(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupt(*_):
    raise KeyboardInterrupt


@every_kind
@pytest.mark.parametrize(("step", "how"), [("fsync", fail), ("replace", interrupt)])
def test_a_save_that_fails_leaves_what_was_there(name, step, how, tmp_path, monkeypatch):
    first, second = KINDS[name]
    path = tmp_path / name
    first.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, step, how)
    for place in (path, tmp_path / f"new_{name}"):
        with pytest.raises((OSError, KeyboardInterrupt)):
            second.save(place)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [name]


@every_kind
def test_a_save_follows_links_and_keeps_permissions(name, tmp_path):
    first, second = KINDS[name]
    path, link = tmp_path / name, tmp_path / f"link_{name}"
    first.save(path)
    path.chmod(0o640)
    link.symlink_to(path)
    second.save(str(link))
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    second.save(tmp_path / f"again_{name}")
    if name != "graph.npz":  # whose members have the time on them
        assert path.read_bytes() == (tmp_path / f"again_{name}").read_bytes()
    assert len(os.listdir(tmp_path)) == 3


@every_kind
@pytest.mark.parametrize(
    ("place", "error"), [("none", FileNotFoundError), ("folder", IsADirectoryError)]
)
def test_an_error_names_the_file_that_was_asked_for(name, place, error, tmp_path):
    (tmp_path / f"folder_{name}").mkdir()
    path = tmp_path / f"folder_{name}" if place == "folder" else tmp_path / "none" / name
    with pytest.raises(error, match=str(path)):
        KINDS[name][0].save(path)
    for what in (1, None, {"a": 1}):
        with pytest.raises(TypeError, match="expected the name of a file"):
            KINDS[name][0].save(what)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_what_is_no_regular_file_is_written_to(tmp_path):
    KINDS["policy.json"][0].save("/dev/null")
    assert not os.path.isfile("/dev/null")
    with pytest.raises(OSError, match="No space left"):
        KINDS["policy.json"][0].save("/dev/full")
