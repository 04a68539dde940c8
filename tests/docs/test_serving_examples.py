"""Examples of serving on many machines: the manifest and the class say what the package does."""

import asyncio
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from jedbatch.__main__ import command_line

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
from jedbatch._commands.serving import application_of  # noqa: E402

FOLDER = Path(__file__).parents[2] / "examples" / "serving"
if not FOLDER.exists():
    pytest.skip("examples are not installed", allow_module_level=True)
BODIES = [b"[[1, 2], 3]", b"4", b'"word"']


@pytest.fixture
def model(monkeypatch):
    """The module that the examples serve."""
    monkeypatch.syspath_prepend(FOLDER)
    import model

    yield model
    for name in ("model", "ray_serve"):
        sys.modules.pop(name, None)


def expected(model):
    found = [model.encode(model.params, model.checked(json.loads(x))) for x in BODIES[:2]]
    return np.asarray(found)


def test_pods_of_kubernetes(model):
    yaml = pytest.importorskip("yaml")
    deployment, service = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    assert pod["metadata"]["labels"] == service["spec"]["selector"]
    (container,) = pod["spec"]["containers"]
    assert container["command"][:3] == ["python", "-m", "jedbatch"]
    argv = [*container["command"][3:], *container["args"]]
    args = command_line().parse_args([x.replace("/app", str(FOLDER)) for x in argv])
    assert args.port == container["ports"][0]["containerPort"]
    waits = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] >= waits + args.deadline_ms / 1e3
    app = application_of(args)

    async def scenario():
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")
        async with app.router.lifespan_context(app), client:
            answers = [await client.post("/predict", content=body) for body in BODIES]
            for probe in ("livenessProbe", "readinessProbe"):
                answers.append(await client.get(container[probe]["httpGet"]["path"]))
            return answers

    *answers, refused, live, ready = asyncio.run(scenario())
    np.testing.assert_allclose([x.json() for x in answers], expected(model), rtol=1e-5)
    assert [x.status_code for x in (refused, live, ready)] == [422, 200, 200]
    assert "expected a word" in refused.json()["error"]


def test_processes_of_ray(model, monkeypatch):
    """The class as Ray calls it, whether Ray is there or not."""
    serve = types.ModuleType("ray.serve")
    serve.deployment = lambda **options: lambda cls: type("D", (), {"bind": lambda: cls})
    ray = types.ModuleType("ray")
    ray.serve = serve
    monkeypatch.setitem(sys.modules, "ray", ray)
    import ray_serve

    cls = ray_serve.encoder

    class Request:
        def __init__(self, body):
            self.body = body

        async def json(self):
            return json.loads(self.body)

    async def scenario():
        replica = cls.__new__(cls)
        await replica.__init__()
        replica.check_health()
        answers = [await replica(Request(body)) for body in BODIES]
        await replica.__del__()
        with pytest.raises(RuntimeError, match="closed"):
            replica.check_health()
        cls.__del__ = lambda self: None  # Ray's, not Python's
        return answers

    *answers, refused = asyncio.run(scenario())
    np.testing.assert_allclose(answers, expected(model), rtol=1e-5)
    assert refused.status_code == 422
