"""`application`: a server behind HTTP, as an ASGI application of Starlette.

    POST /predict   an instance as JSON → its result as JSON
    GET  /metrics   counts and latencies, as text for Prometheus
    GET  /healthz   200 while requests are taken, also before programs are compiled; or else 503
    GET  /readyz    200 once they are compiled, too; 503 before

Requests that come before that wait for it. If compiling fails, the log says why, and the server is
closed.

The status says why a request failed, and `{"error": ...}` in words:

    400  no JSON                            422  too deep, or no instance: `decode` refuses it
    413  too many bytes                     500  the function fails, or `encode`
    503  overloaded, or about to end        504  not done by the deadline

With status 500 the answer has the type of the exception, too, and the log has the traceback:
`{"error": ..., "type": "IndexError"}`.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from jedbatch import checks
from jedbatch.serve import tracing
from jedbatch.serve.errors import DeadlineExceeded, Overloaded, ServerClosed, WrongNumberError
from jedbatch.serve.forms import NoJsonError, TooDeepError, as_instance, as_json, parsed
from jedbatch.serve.server import Server

try:
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as _error:  # the rest of `jedbatch.serve` works without
    MISSING: str | None = _error.name
else:
    MISSING = None

MAX_BYTES, MAX_DEPTH = 1 << 20, 256
RETRY_SECONDS = "1"
logger = logging.getLogger("jedbatch")


class _TooLargeError(Exception):
    """A body has more bytes than are allowed."""


def application(
    server: Server,
    *,
    decode: Callable[[Any], Any] = as_instance,
    encode: Callable[[Any], Any] = as_json,
    path: str = "/predict",
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
    sample: list[Any] | None = None,
    when_ready: Callable[[], object] | None = None,
) -> Any:
    """An ASGI application that answers requests by a server, which it starts and closes.

    It needs Starlette: `pip install "jedbatch[serve]"`. Any ASGI server runs it, such as
    `uvicorn.run(application(server))`, in one process.

    Args:
      server: that has not been entered.
      decode: from JSON to an instance; it checks what comes, and what it raises is said with
        status 422, where what the function raises is an error of the server, 500. By default
        lists are tuples, and everything else is what it is. Where the function takes several
        mapped arguments, it returns a tuple of them.
      encode: from a result to JSON. By default arrays are lists.
      path: where instances are posted.
      max_bytes: of a body.
      max_depth: of arrays and objects in one another.
      sample: instances for `Server.warm`, which begins once the application is started and comes
        before the first request; None does not warm.
      when_ready: called once, after warming, in the event loop.

    Raises:
      ModuleNotFoundError: Starlette is not installed.
      TypeError, ValueError: an argument is not what is expected.
    """
    if MISSING is not None:
        raise ModuleNotFoundError(
            f"`application` needs {MISSING}, which is not installed; write "
            "`pip install 'jedbatch[serve]'`. `Server` works without."
        )
    checks.of_type("application", server, Server, "a `jedbatch.serve.Server`")
    for name, function in (("decode", decode), ("encode", encode)):
        checks.function("application", name, function, "a function of one argument")
    if when_ready is not None:
        checks.function("application", "when_ready", when_ready, "a function of no argument")
    checks.whole("application", "max_bytes", max_bytes, least=1)
    checks.whole("application", "max_depth", max_depth, least=1)
    endpoint = _Endpoint(server, decode, encode, max_bytes, max_depth)

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with server:
            app.state.server = server
            app.state.getting_ready = asyncio.ensure_future(_get_ready(server, sample, when_ready))
            yield
            app.state.getting_ready.cancel()

    async def metrics(_: Any) -> Any:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return PlainTextResponse(server.metrics.prometheus(), headers={"content-type": kind})

    async def health(_: Any) -> Any:
        if server.is_serving:
            return JSONResponse({"status": "serving"})
        return JSONResponse({"status": "closed"}, 503)

    async def ready(request: Any) -> Any:
        if server.is_serving and not request.app.state.getting_ready.done():
            return JSONResponse({"status": "compiling"}, 503)
        return await health(request)

    routes = [
        Route(path, endpoint.predict, methods=["POST"]),
        Route("/metrics", metrics),
        Route("/healthz", health),
        Route("/readyz", ready),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


async def _get_ready(
    server: Server, sample: list[Any] | None, when_ready: Callable[[], object] | None
) -> None:
    """Compiles programs; closes the server if that fails."""
    try:
        if sample is not None:
            await server.warm(sample)
        if when_ready is not None:
            when_ready()
    except Exception:
        logger.exception("programs could not be compiled for the sample, so nothing is served")
        await server.close(drain=False)


@dataclass(frozen=True)
class _Endpoint:
    """Answers what is posted; see `application`."""

    server: Server
    decode: Callable[[Any], Any]
    encode: Callable[[Any], Any]
    max_bytes: int
    max_depth: int

    async def predict(self, request: "HttpRequest") -> "Response":
        """The result of the instance in the body of a request, or what is wrong with it."""
        try:
            body = await self._body(request)
            instance = self._instance(parsed(body, self.max_depth))
        except NoJsonError as error:
            return _failure(400, error)
        except _TooLargeError as error:
            return _failure(413, error)
        except TooDeepError as error:
            return _failure(422, error)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except Exception as error:  # of `decode`
            return _failure(422, error)
        with tracing.caller(request.headers):
            answer = asyncio.ensure_future(self.server(*instance))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Response(status_code=499)  # nobody reads it
            return self._response(answer)
        finally:
            answer.cancel()
            gone.cancel()

    def _response(self, answer: "asyncio.Future[Any]") -> "Response":
        try:
            text = json.dumps(self.encode(answer.result()), allow_nan=False)
        except (Overloaded, ServerClosed) as error:
            return _failure(503, error, {"retry-after": RETRY_SECONDS})
        except DeadlineExceeded as error:
            return _failure(504, error)
        except WrongNumberError as error:
            return _failure(422, error)
        except Exception as error:
            is_of_function = answer.exception() is not None
            logger.exception(
                "an instance failed" if is_of_function else "a result could not be written as JSON"
            )
            return _failure(500, error)
        return Response(text, media_type="application/json")

    def _instance(self, value: Any) -> tuple:
        """The mapped arguments of an instance."""
        found = self.decode(value)
        if not self.server.takes_several:
            return (found,)
        if not isinstance(found, tuple | list):
            raise TypeError(f"got {checks.shown(found)}; expected a list of the mapped arguments.")
        return tuple(found)

    async def _body(self, request: "HttpRequest") -> bytes:
        """The body of a request, of which no more is read than is allowed."""
        message = f"the body has more than {self.max_bytes:,} bytes; expected less than that."
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > self.max_bytes:
            raise _TooLargeError(message)
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > self.max_bytes:
                raise _TooLargeError(message)
        return b"".join(parts)


async def _disconnected(request: "HttpRequest") -> None:
    """Returns once nobody waits for the response."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _failure(status: int, error: Exception, headers: dict[str, str] | None = None) -> "Response":
    """A response that says what is wrong."""
    said = {"error": checks.cut(error) or type(error).__name__}
    if status == 500:
        said["type"] = type(error).__name__
    return JSONResponse(said, status, headers=headers)
