"""`python -m jedbatch serve`, as a user runs it."""

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import jax.numpy as jnp
import numpy as np
import pytest
from cases.processes import environment

from jedbatch.__main__ import command_line, main
from jedbatch.serve import Server, save_params

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
from jedbatch._commands.serving import application_of  # noqa: E402

MODEL = """
import jax.numpy as jnp
import jedbatch

@jedbatch.cell
def join(params, left, right):
    return jnp.tanh(params["w"] * left + right)

def encode(params, tree):
    if isinstance(tree, float):
        return params["w"] * tree
    return join(params, encode(params, tree[0]), encode(params, tree[1]))

def shown(state):
    return {"sum": float(state.sum())}

params = {"w": jnp.ones(2)}
instances = [(0.5, (i / 10, 0.25)) for i in range(5)]
number = 3
"""


def expected(w):
    return float((np.tanh(w * (w * 0.5) + w * 0.25)).sum())


@pytest.fixture
def model(tmp_path, monkeypatch):
    path = tmp_path / "served.py"
    path.write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("served", None)


def answer_of(*argv):
    app = application_of(command_line().parse_args(["serve", *argv]))

    async def scenario():
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")
        async with app.router.lifespan_context(app), client:
            return await client.post("/predict", content=b"[0.5, 0.25]")

    return asyncio.run(scenario()).json()


def test_a_function_with_params_of_a_file(model):
    assert np.isclose(sum(answer_of(f"{model}:encode")), expected(np.ones(2)))
    file = str(model.parent / "trained.npz")
    save_params({"w": jnp.full(2, 0.5)}, file)
    got = answer_of(f"{model}:encode", "--params", file, "--encode", "shown", "--max-batch", "4")
    assert np.isclose(got["sum"], expected(np.full(2, 0.5)))


def test_objects_are_frozen_once_programs_are_compiled(model, monkeypatch):
    """Full collections of garbage would take longer than most requests."""
    called = []
    monkeypatch.setattr(gc, "collect", lambda: called.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: called.append("freeze"))
    monkeypatch.setattr(Server, "warm", noting(Server.warm, called))
    answer_of(f"{model}:encode")
    assert called == ["warm", "collect", "freeze"]


def noting(warm, called):
    async def noted(*args):
        await warm(*args)
        called.append("warm")

    return noted


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["number"], "expected a function of one instance"),
        (["other"], "has no 'other'"),
        (["encode", "--encode", "other"], "has no `other`, which --encode names"),
        (["encode", "--decode", "number"], "expected a function"),
        (["encode", "--instances", "others"], "has no `others`"),
        (["encode", "--params", "none.npz"], "No such file"),
    ],
)
def test_what_cannot_be_served(model, capsys, argv, match):
    name, *options = argv
    assert main(["serve", f"{model}:{name}", *options]) == 1
    assert match in capsys.readouterr().err


@contextlib.contextmanager
def served(model):
    """(the process of a server, its address)."""
    command = [sys.executable, "-m", "jedbatch", "serve", f"{model}:encode", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(), text=True) as process:
        try:
            for line in process.stderr:
                if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                    break
            yield process, found.group(1)
        finally:
            process.kill()


WAITING = """
import pathlib
import time

def wait(name):
    pathlib.Path(__file__).with_name(name + "_begun").touch()
    while not pathlib.Path(__file__).with_name(name).exists():
        time.sleep(0.01)

def encode(w, x):
    if isinstance(x, str):
        wait(x)
        x = 1.0
    return w * x

params = 2.0
instances = ["compiled"]
"""


def status_of(url):
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError as error:
        return type(error.reason)
    except ConnectionError:  # it was accepted by the system alone, as the socket was closed
        return ConnectionRefusedError


def until(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("30 seconds have passed")


def test_it_listens_at_once_and_answers_all_before_it_ends(tmp_path):
    """The model waits for files that this test makes."""
    model = tmp_path / "waiting.py"
    model.write_text(WAITING)
    with served(model) as (process, url), concurrent.futures.ThreadPoolExecutor() as pool:
        until((tmp_path / "compiled_begun").exists)
        assert (status_of(f"{url}/healthz"), status_of(f"{url}/readyz")) == (200, 503)
        (tmp_path / "compiled").touch()
        until(lambda: status_of(f"{url}/readyz") == 200)
        answer = pool.submit(urllib.request.urlopen, f"{url}/predict", b'"answered"', 30)
        until((tmp_path / "answered_begun").exists)
        process.send_signal(signal.SIGTERM)
        until(lambda: status_of(f"{url}/healthz") is ConnectionRefusedError)
        (tmp_path / "answered").touch()
        with answer.result() as response:
            assert json.load(response) == 2
        assert process.wait(30) == 0


@pytest.mark.slow
def test_a_sample_that_fails_ends_the_process(tmp_path):
    model = tmp_path / "waiting.py"
    model.write_text(WAITING + "instances = [None]")
    with served(model) as (process, _):
        assert "could not be compiled" in process.communicate(timeout=30)[1]
        assert process.returncode == 1


@pytest.mark.slow
def test_it_serves_until_it_is_interrupted(model):
    with served(model) as (process, url):
        with urllib.request.urlopen(f"{url}/predict", b"[0.5, 0.25]", timeout=30) as response:
            assert np.isclose(sum(json.load(response)), expected(np.ones(2)))
        with pytest.raises(urllib.error.HTTPError, match="500"):
            urllib.request.urlopen(f"{url}/predict", b'"word"', timeout=30)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 0
