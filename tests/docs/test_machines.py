"""Training by several processes: the losses of the loop, also when others go on."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cases.helpers import loop
from cases.pages import run
from cases.processes import environment

SCRIPT = Path(__file__).parents[2] / "examples" / "machines" / "train.py"
if not SCRIPT.exists():
    pytest.skip("examples are not installed", allow_module_level=True)
for library in ("grain", "optax", "orbax.checkpoint"):
    pytest.importorskip(library)
SECONDS = 120  # after which processes hang


def losses_of_processes(count, folder, steps):
    """The losses that each of so many processes prints, by the number of the step."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = f"--steps {steps} --save-every 2 --processes {count} --coordinator localhost:{port}"
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *options.split()]
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen(
            [*command, "--process", str(number)],
            env=environment("--xla_force_host_platform_device_count=1"),
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for number in range(count)
    ]
    found = []
    try:
        for process in started:
            output, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors
            found.append(dict(re.findall(r"^step (\d+) loss (.*)$", output, re.MULTILINE)))
    finally:
        for process in started:
            process.kill()
    return [{int(step): float(loss) for step, loss in x.items()} for x in found]


def losses_by_loop(names, steps):
    """Those of the loop over the instances of each minibatch, without an interruption."""
    import optax

    def loss(params, examples):
        return loop(names["loss_of"], params, examples).mean()

    params, optimizer = names["initial"](), names["optimizer"]
    state, losses = optimizer.init(params), {}
    for step, examples in enumerate(names["minibatches"](0, 1)[:steps], start=1):
        losses[step], gradient = jax.value_and_grad(loss)(params, examples)
        updates, state = optimizer.update(gradient, state)
        params = optax.apply_updates(params, updates)
    return losses


def assert_same(found, expected, steps):
    assert list(found) == list(steps)
    np.testing.assert_allclose([*found.values()], [expected[x] for x in steps], rtol=1e-5)


@pytest.mark.slow
def test_training_goes_on_by_another_number_of_processes(tmp_path):
    expected = losses_by_loop(run(SCRIPT.read_text(), str(SCRIPT)), 6)
    for found in losses_of_processes(2, tmp_path, 4):
        assert_same(found, expected, range(1, 5))
    (resumed,) = losses_of_processes(1, tmp_path, 6)
    assert_same(resumed, expected, (5, 6))


@pytest.mark.filterwarnings("ignore")  # of other libraries
def test_a_minibatch_is_the_same_by_any_number_of_processes():
    minibatches = run(SCRIPT.read_text(), str(SCRIPT))["minibatches"]
    for step in (0, 4, 5, 12):  # there are five in an epoch
        whole = sorted(map(str, minibatches(0, 1)[step]))
        for count in (2, 4, 8):
            parts = [minibatches(index, count)[step] for index in range(count)]
            assert sorted(str(x) for part in parts for x in part) == whole
