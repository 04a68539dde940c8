"""The cores of a CPU as devices; JAX makes them once, so that each case is a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from cases.processes import environment

import jedbatch

HERE = Path(__file__).parent


def run(*command, flags=""):
    """Runs Python, and returns what it printed."""
    command, env = [sys.executable, *command], environment(flags)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout.strip()


def test_two_cores():
    """See `two_cores.py`."""
    run(str(HERE / "two_cores.py"))


def test_as_many_as_there_are():
    many = run("-c", "import jedbatch; print(jedbatch.cores().size)")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert int(many) == usable


@pytest.mark.parametrize("by_flag", [False, True], ids=["config", "flag"])
def test_what_jax_was_told_before_stays(by_flag):
    told = "" if by_flag else 'jax.config.update("jax_num_cpu_devices", 3); '
    flags = "--xla_force_host_platform_device_count=3" if by_flag else ""
    text = f"import jax, jedbatch; {told}print(jedbatch.cores(2).size, jax.device_count())"
    assert run("-c", text, flags=flags) == "2 3"


def test_too_late():
    usable = jax.local_device_count("cpu")
    assert jedbatch.cores(usable).axis_names == ("cores",)
    more = rf'right after `import jedbatch`, .*"jax_num_cpu_devices", {usable + 1}\)'
    with pytest.raises(RuntimeError, match=more):
        jedbatch.cores(usable + 1)
