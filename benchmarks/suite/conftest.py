"""Options of the suite: which cases run, on what data, for how long."""

from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.suite import harness


def pytest_addoption(parser):
    """The options of the suite."""
    group = parser.getgroup("jedbatch")
    add = group.addoption
    add("--full", action="store_true", help="the whole grid of sizes; hours")
    add("--data", type=Path, metavar="DIRECTORY", help="files as named in `edbatch.py`")
    add("--workloads", metavar="NAMES", help="such as treelstm,bilstm; all by default")
    add("--batch", type=common.numbers, metavar="SIZES", help="instead of the grid's, such as 8,64")
    add("--hidden", type=common.numbers, metavar="SIZES", help="instead of the grid's")
    add("--modes", metavar="NAMES", help="inference, training or both; both by default")
    add("--rivals", metavar="NAMES", help=f"some of {', '.join(harness.RIVALS)}; all by default")
    add("--threads", type=int, choices=[1, 2], help="keep to one core, as most peers did")
    add("--seconds", type=float, help="per case; 0.5 by default, 3 with --full")


def pytest_configure(config):
    """Before JAX computes anything, or its threads are there."""
    if config.option.threads:
        common.limit_threads(config.option.threads)
        if harness.in_torch is not None:
            harness.in_torch.torch.set_num_threads(config.option.threads)


def pytest_generate_tests(metafunc):
    """The cases of a benchmark."""
    if "case" in metafunc.fixturenames:
        cases = harness.cases(metafunc.config.option, metafunc.module.GRID)
        metafunc.parametrize("case", cases, ids=str)


def pytest_benchmark_update_machine_info(config, machine_info):
    """The line that every table starts from."""
    threads = config.option.threads
    torch = f", PyTorch {harness.in_torch.torch.__version__}" if harness.in_torch else ""
    machine_info["line"] = common.machine() + (f"; {threads} thread(s)" if threads else "") + torch


@pytest.fixture
def options(request):
    """The command line."""
    return request.config.option


@pytest.fixture(autouse=True)
def _forget():
    """Programs of one case are of no use to the next."""
    yield
    harness.forget()
