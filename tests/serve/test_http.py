"""Requests over HTTP, in this process: results are those of the loop, and what is wrong is said."""

import asyncio
import contextlib
import json
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close
from cases.totals import W, total

import jedbatch
from jedbatch.serve import Server, application
from jedbatch.serve.forms import NoJsonError, TooDeepError, as_instance, as_json, parsed

httpx = pytest.importorskip("httpx")
pytest.importorskip("starlette")


@contextlib.asynccontextmanager
async def client_of(app):
    """A client of an application, which is started and closed."""
    transport = httpx.ASGITransport(app)
    client = httpx.AsyncClient(transport=transport, base_url="http://here")
    async with app.router.lifespan_context(app), client:
        yield client


def asked(app, *bodies, **headers):
    """The responses to some bodies, posted all at once."""

    async def scenario():
        async with client_of(app) as client:
            posts = [client.post("/predict", content=body, headers=headers) for body in bodies]
            return await asyncio.gather(*posts)

    return asyncio.run(scenario())


def test_results_are_those_of_the_loop():
    given = [1.0, [1.0, 2.0], [[0.5, 1.5], [1.0, [2.0, 0.25]]]]
    app = application(Server(jedbatch.batch(total), W))
    for tree, response in zip(given, asked(app, *map(json.dumps, given)), strict=True):
        assert response.status_code == 200
        expected = np.asarray(total(W, as_instance(tree)))
        assert_close(np.float32(response.json()), expected, 1e-6)


MALFORMED = {
    b"": 400,
    b"[1.0": 400,
    b"\xff\xfe": 400,
    b"[1.0, NaN]": 400,
    b"9" * 5000: 400,
    b'{"a": 1}': 500,
    b'["word", 1.0]': 500,
    b"[1.0, 2.0, 3.0": 400,
    b"[" * 300: 422,
    b"[" * 100_000: 413,
    b'"' + b"[" * 2000 + b'"': 500,  # a string, no nesting
    b"null": 500,
}


def test_what_is_wrong_is_said_and_harms_nobody():
    app = application(Server(jedbatch.batch(total), W), max_bytes=6000, max_depth=50)
    bodies = [b"[1.0, 2.0]", *MALFORMED, b"[1.0, 2.0]"]
    first, *responses, last = asked(app, *bodies)
    assert first.json() == last.json() == as_json(total(W, (1.0, 2.0)))
    for (body, status), response in zip(MALFORMED.items(), responses, strict=True):
        assert (response.status_code, body[:9]) == (status, body[:9])
        assert response.json()["error"]
    assert "more than 50 deep" in responses[8].json()["error"]
    assert "more than 6,000 bytes" in responses[9].json()["error"]


def test_bodies_that_come_in_parts_are_bounded():
    read = []

    async def parts():
        for _ in range(100):
            read.append(1000)
            yield b" " * 1000

    app = application(Server(jedbatch.batch(total), W), max_bytes=4500)
    (response,) = asked(app, parts())
    assert response.status_code == 413


def test_forms_of_the_user():
    def decode(value):
        if set(value) != {"left", "right"}:
            raise ValueError("expected left and right")
        return value["left"], value["right"]

    server = Server(jedbatch.batch(total), W)
    app = application(server, decode=decode, encode=lambda x: {"sum": float(x.sum())})
    good, bad = asked(app, b'{"left": 1.0, "right": 2.0}', b'{"left": 1.0}')
    assert np.isclose(good.json()["sum"], total(W, (1.0, 2.0)).sum())
    assert (bad.status_code, bad.json()) == (422, {"error": "expected left and right"})


def test_several_arguments():
    fn = jedbatch.batch(lambda w, tree, x: x * total(w, tree), in_axes=(None, 0, 0))
    good, bad, few = asked(application(Server(fn, W)), b"[[1.0, 2.0], 3.0]", b"4.0", b"[1.0]")
    assert_close(np.float32(good.json()), np.asarray(3 * total(W, (1.0, 2.0))), 1e-6)
    assert "a list of the mapped arguments" in bad.json()["error"]
    assert "got 1 mapped arguments" in few.json()["error"]
    assert (bad.status_code, few.status_code) == (422, 422)


def test_results_that_json_has_not(caplog):
    app = application(Server(jedbatch.batch(lambda w, x: jnp.log(w * x)), W))
    (response,) = asked(app, b"0.0")
    assert response.json() == [None] * 3
    app = application(Server(jedbatch.batch(lambda w, x: w * x), W), encode=lambda x: x)
    (response,) = asked(app, b"1.0")
    assert response.status_code == 500
    assert "could not be written as JSON" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, ValueError, IndexError])
def test_errors_of_the_function(error, caplog):
    def broken(w, x):
        raise error("of ours")

    (response,) = asked(application(Server(jedbatch.batch(broken), W)), b"1.0")
    assert response.status_code == 500
    assert response.json() == {"error": "of ours", "type": error.__name__}
    assert "an instance failed" in caplog.text
    assert "in broken" in caplog.text  # the traceback


def test_load_and_deadlines():
    """The computation waits for this test: one request misses its deadline, one is too many."""
    may_go, begun = threading.Event(), threading.Event()

    def fn(w, x):
        begun.set()
        assert may_go.wait(30)
        return w * x

    app = application(Server(jedbatch.batch(fn), W, max_queue=1, deadline_ms=300))

    async def scenario():
        async with client_of(app) as client:
            first = asyncio.ensure_future(client.post("/predict", content=b"1.0"))
            await asyncio.to_thread(begun.wait, 30)
            second = asyncio.ensure_future(client.post("/predict", content=b"2.0"))
            await asyncio.sleep(0.1)
            third = await client.post("/predict", content=b"3.0")
            late = [await first, await second]
            may_go.set()
            return third, *late

    refused, *late = asyncio.run(scenario())
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert [x.status_code for x in late] == [504, 504]
    assert "not done in 300 ms" in late[0].json()["error"]


def test_clients_that_go_away():
    """Their requests leave the queue."""
    may_go, begun = threading.Event(), threading.Event()

    def fn(w, x):
        begun.set()
        assert may_go.wait(30)
        return w * x

    server = Server(jedbatch.batch(fn), W)
    app = application(server)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/predict",
        "query_string": b"",
        "headers": [],
    }

    async def scenario():
        async with client_of(app) as client:
            first = asyncio.ensure_future(client.post("/predict", content=b"1.0"))
            await asyncio.to_thread(begun.wait, 30)
            messages = [
                {"type": "http.request", "body": b"2.0", "more_body": False},
                {"type": "http.disconnect"},
            ]

            async def receive():
                if len(messages) == 1:
                    await asyncio.sleep(0.05)
                    assert server.metrics.queued == 1
                return messages.pop(0)

            sent = []

            async def send(message):
                sent.append(message)

            await app(scope, receive, send)
            await asyncio.sleep(0)
            assert server.metrics.queued == 0
            may_go.set()
            return await first, sent, server.metrics.cancelled

    first, sent, cancelled = asyncio.run(scenario())
    assert first.status_code == 200
    assert sent[0]["status"] == 499
    assert cancelled == 1


def test_metrics_and_health():
    server = Server(jedbatch.batch(total), W)
    ready = []
    app = application(
        server,
        sample=[1.0, (1.0, 2.0)],
        when_ready=lambda: ready.append(server.metrics.compilations),
    )

    async def scenario():
        async with client_of(app) as client:
            assert (await client.get("/readyz")).status_code == 503
            while (await client.get("/readyz")).status_code == 503:
                assert (await client.get("/healthz")).status_code == 200
                await asyncio.sleep(0.01)
            before = server.metrics.compilations
            for body in (b"1.0", b"[1.0, 2.0]", b'"word"'):
                await client.post("/predict", content=body)
            text, health = await client.get("/metrics"), await client.get("/healthz")
            assert server.metrics.compilations == before > 0
            assert ready == [before]
            assert (await client.get("/predict")).status_code == 405
        late = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")
        async with late as client:
            return text, health, await client.get("/healthz"), await client.post("/predict")

    text, health, closed, refused = asyncio.run(scenario())
    assert (health.status_code, closed.status_code) == (200, 503)
    assert refused.status_code == 400  # an empty body
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = text.text.splitlines()
    for line in (
        'jedbatch_requests_total{outcome="done"} 2',
        'jedbatch_requests_total{outcome="failed"} 1',
        "jedbatch_queue_length 0",
        'jedbatch_batch_size_bucket{le="1"} 3',
        'jedbatch_batch_size_bucket{le="+Inf"} 3',
        "jedbatch_latency_seconds_count 2",
    ):
        assert line in lines
    names = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    samples = [line for line in lines if not line.startswith("#")]
    assert all(any(line.startswith(name) for name in names) for line in samples)
    assert all(np.isfinite(float(line.rsplit(" ", 1)[1])) for line in samples)


def test_a_sample_that_fails_closes_the_server(caplog):
    app = application(Server(jedbatch.batch(total), W), sample=["word"])

    async def scenario():
        async with client_of(app) as client:
            while (health := await client.get("/healthz")).status_code == 200:
                await asyncio.sleep(0.01)
            refused = await client.post("/predict", content=b"1.0")
            return [health, refused, await client.get("/readyz")]

    assert [x.status_code for x in asyncio.run(scenario())] == [503] * 3
    assert "could not be compiled" in caplog.text
    assert "Traceback" in caplog.text


def test_what_makes_no_application():
    server = Server(jedbatch.batch(total), W)
    with pytest.raises(TypeError, match=r"a `jedbatch\.serve\.Server`"):
        application(total)
    with pytest.raises(TypeError, match="decode=3"):
        application(server, decode=3)
    with pytest.raises(ValueError, match="max_bytes=0"):
        application(server, max_bytes=0)
    with pytest.raises(TypeError, match="when_ready=3"):
        application(server, when_ready=3)


# --- JSON ---


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_depth_is_that_of_the_value(depth):
    rng = np.random.default_rng(depth)

    def random_value(left):
        if left == 0 or rng.random() < 0.2:
            return ['[{"', '\\"]}', 1.5, True, None][int(rng.integers(5))]
        few = [random_value(left - 1) for _ in range(int(rng.integers(0, 4)))]
        return few if rng.random() < 0.5 else dict(zip("abc", few, strict=False))

    def depth_of(value):
        if isinstance(value, dict):
            value = list(value.values())
        return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0

    for _ in range(100):
        value = random_value(4)
        text = json.dumps(value).encode()
        if depth_of(value) <= depth:
            assert parsed(text, depth) == value
        else:
            with pytest.raises(TooDeepError):
                parsed(text, depth)


def test_texts_that_are_no_json():
    for text in (b"", b"{", b'"', b'"\\', b"]]]", b"\x00", b"1 2", b"[1,]", b"-Infinity"):
        with pytest.raises(NoJsonError):
            parsed(text, 9)


def test_results_as_json():
    result = {"a": (jnp.ones(2), np.float32(0.5)), "b": [np.int8(3), True, None], 1: jnp.inf}
    assert as_json(result) == {"a": [[1, 1], 0.5], "b": [3, True, None], "1": None}
    assert as_json(jnp.ones((1, 2), jnp.bfloat16)) == [[1, 1]]
    for wrong in (jnp.ones(2, jnp.complex64), object()):
        with pytest.raises(TypeError, match="expected arrays of real numbers"):
            as_json(wrong)
    assert as_instance([1, [2.5, "a"], {"b": [1]}]) == (1, (2.5, "a"), {"b": (1,)})
