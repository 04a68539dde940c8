"""Spans of OpenTelemetry, where `opentelemetry-api` is installed; without it nothing is done.

- `jedbatch.request`: from a request to its result. Its parent is the span around it, or the one
  that a request over HTTP names in its headers (`traceparent`).
- `jedbatch.minibatch`: from planning to results, in a trace of its own, since its requests come
  from several; linked to each of them.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

try:
    from opentelemetry import context, propagate, trace
except ModuleNotFoundError:
    HAS_SPANS = False
else:
    HAS_SPANS = True

NAME = "jedbatch"


@contextlib.contextmanager
def caller(headers: Mapping[str, str]) -> Iterator[None]:
    """Spans that begin inside are children of the one that the headers of a request name."""
    token = context.attach(propagate.extract(headers)) if HAS_SPANS else None
    try:
        yield
    finally:
        if token is not None:
            context.detach(token)


def request() -> contextlib.AbstractContextManager[Any]:
    """A span around a request, which notes its error; gives what links to it (see `minibatch`)."""
    if not HAS_SPANS:
        return contextlib.nullcontext()
    return trace.get_tracer(NAME).start_as_current_span("jedbatch.request")


def minibatch(requests: Iterable[Any]) -> Callable[[], object]:
    """Begins a span around a minibatch; returns what ends it, once all results are there.

    Args:
      requests: what `request` gave for each.
    """
    if not HAS_SPANS:
        return lambda: None
    links = [trace.Link(span.get_span_context()) for span in requests]
    span = trace.get_tracer(NAME).start_span(
        "jedbatch.minibatch",
        context.Context(),
        attributes={"jedbatch.requests": len(links)},
        links=links,
    )
    return span.end
