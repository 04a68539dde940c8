"""Spans of requests and minibatches, as an exporter of OpenTelemetry gets them."""

import asyncio

import pytest
from cases.totals import W, total

import jedbatch
from jedbatch.serve import Server, application, tracing


@pytest.fixture(scope="module")
def exporter():
    """Of the one provider that a process may have."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace.set_tracer_provider(provider)
    return found


async def two_answers(given=(1.0, 2.0)):
    async with Server(jedbatch.batch(total), W, max_wait_ms=1e4, max_batch=2) as server:
        return await asyncio.gather(*map(server, given), return_exceptions=True)


def spans_of(exporter, scenario):
    """(spans of requests, spans of minibatches)."""
    exporter.clear()
    asyncio.run(scenario)
    spans = exporter.get_finished_spans()
    named = [
        [x for x in spans if x.name == f"jedbatch.{kind}"] for kind in ("request", "minibatch")
    ]
    assert sum(map(len, named)) == len(spans)
    return named


def test_minibatches_are_linked_to_their_requests(exporter):
    requests, (minibatch,) = spans_of(exporter, two_answers())
    ids = {x.context.span_id for x in requests}
    assert len(ids) == 2
    assert {x.context.span_id for x in minibatch.links} == ids
    assert minibatch.attributes["jedbatch.requests"] == 2
    assert minibatch.parent is None
    for request in requests:
        assert request.start_time <= minibatch.start_time < minibatch.end_time <= request.end_time


def test_errors_are_noted(exporter):
    requests, minibatches = spans_of(exporter, two_answers((1.0, "word")))
    assert sorted(x.status.is_ok for x in requests) == [False, True]
    assert len(minibatches) == 1


def test_requests_over_http_join_the_trace_of_the_caller(exporter):
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("starlette")
    app = application(Server(jedbatch.batch(total), W))

    async def scenario():
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")
        async with app.router.lifespan_context(app), client:
            headers = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
            await client.post("/predict", content=b"1.0", headers=headers)

    (request,), _ = spans_of(exporter, scenario())
    assert (request.context.trace_id, request.parent.span_id) == (7, 9)


def test_without_the_package_nothing_is_done(monkeypatch):
    monkeypatch.setattr(tracing, "HAS_SPANS", False)
    assert len(asyncio.run(two_answers())) == 2
    with tracing.caller({}), tracing.request() as span:
        assert span is None
