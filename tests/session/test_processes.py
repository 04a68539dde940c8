"""Processes that train together, each with its part of every minibatch, against one process."""

import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import together
from cases.helpers import assert_close, loop
from cases.processes import environment
from jax.sharding import Mesh

from jedbatch._program.sharded import DeviceAxis

SECONDS = 90  # after which processes hang


class Process:
    """The output of one of several processes, and its exit status."""

    def __init__(self, output, errors, status):
        self.said = {}
        for line in output.splitlines():
            if line.startswith("{"):
                self.said |= json.loads(line)
        self.errors, self.status = errors, status


def start(what, count, devices=1):
    """Runs so many processes, each with some devices; ends them if one hangs."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parent / "processes.py"
    env = environment(f"--xla_force_host_platform_device_count={devices}")
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(
            [sys.executable, str(script), what, str(i), str(count), str(port)],
            env=env,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for i in range(count)
    ]
    end, found = time.monotonic() + SECONDS, []
    try:
        for process in started:
            texts = process.communicate(timeout=max(1, end - time.monotonic()))
            found.append(Process(*texts, process.returncode))
    finally:
        for process in started:
            process.kill()
    return found


def losses_of_one(minibatches):
    """Of gradient descent by the loop, in this process."""

    def loss(p, trees):
        return jnp.square(loop(together.by_calls, p, trees)).mean()

    params, losses = jax.tree.map(jnp.asarray, together.PARAMS), []
    for trees in minibatches:
        value, slope = jax.value_and_grad(loss)(params, trees)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, slope)
        losses.append(float(value))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (4, 1)])
def test_the_losses_of_one_process(count, devices):
    """Also where a process has trees much larger than all before."""
    processes = start("train", count, devices)
    minibatches = [together.trees(8, seed=s) for s in range(3)]
    results = loop(together.by_calls, together.PARAMS, minibatches[0])
    size = 8 // count
    large = []
    for i in range(count):
        large += together.trees(size, seed=i, size=60 if i == count - 1 else 3)
    want, more = losses_of_one(minibatches), losses_of_one([large] * 2)
    for process in processes:
        assert not process.status, process.errors
        got = np.array(process.said["results"], np.float32)
        assert_close(got, np.asarray(results), rtol=1e-5)
        np.testing.assert_allclose(process.said["losses"], want, rtol=1e-5)
        np.testing.assert_allclose(process.said["more"], more, rtol=1e-5)
    compiled = [process.said["compiled"] for process in processes]
    assert compiled == [compiled[0]] * count
    assert compiled[0][1] > compiled[0][0]  # they grew, together


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others():
    first, dead = start("dies", 2)
    assert dead.status == 3
    assert first.status
    text = first.said.get("error", "") + first.errors
    clear = "has ended or cannot be reached", "another task died", "Connection closed by peer"
    assert any(x in text for x in clear), text


DISAGREEMENTS = {
    "fails": r"process 1 could not plan its minibatch.*row 99 of a table",
    "model": r"no node type `project.*computes the same as in another process",
    "types": r"process 0 has no node type `project.*Call `warm` with the same sample",
    "instances": r"disagree in the number of instances.*0 has 3.*process 1 has 2",
    "minibatches": r"processes \[0\] have no more minibatches",
}


@pytest.mark.slow
def test_disagreement_is_an_error_in_all():
    """And what they plan next is as if it had not been."""
    first, second = start("disagree", 2)
    assert not first.status, first.errors
    assert not second.status, second.errors
    assert second.said.pop("fails").startswith("IndexError")
    for process in (first, second):
        for about, error in process.said.items():
            assert re.search(DISAGREEMENTS[about], error), error
    assert {*first.said} == {*second.said, "fails"} == {*DISAGREEMENTS}


def test_meshes_of_several_processes():
    """Processes follow one another along an axis, with whole places."""

    class Device:
        def __init__(self, process_index):
            self.process_index = process_index

    def axis(owners, names=("data",), of=("data",)):
        devices = np.vectorize(Device, otypes=[object])(np.array(owners))
        mesh = type("FakeMesh", (), {"devices": devices, "axis_names": names})()
        mesh.shape = dict(zip(names, devices.shape, strict=True))
        return DeviceAxis(mesh, of)

    both = axis([[0, 0], [0, 0], [1, 1], [1, 1]], ("data", "model"))
    assert (both.owners, both.num_processes, both.num_own) == ((0, 0, 1, 1), 2, 2)
    turned = axis([[0, 1], [0, 1]], ("model", "data"))
    assert turned.owners == (0, 1)
    with pytest.raises(ValueError, match="several processes in one place along data"):
        assert axis([[0, 1], [0, 1]], ("data", "model")).owners
    for wrong in ([0, 1, 0, 1], [1, 1, 0, 0], [0, 1, 1, 1]):
        with pytest.raises(ValueError, match="one after the other, with equally many"):
            assert axis(wrong).owners
    one = DeviceAxis(Mesh(np.array(jax.devices()[:1]), ("data",)), ("data",))
    assert (one.num_processes, one.num_own) == (1, 1)
