"""Serving a batched function: requests that come one by one run many at a time.

- `Server`: for `asyncio`: `async with Server(batched, params) as server: await server(instance)`.
- `Metrics`: what it has done, as numbers and as text for Prometheus.
- `Overloaded`, `DeadlineExceeded`, `ServerClosed`: why a request has no result.
- `application`: a server behind HTTP, as an ASGI application; also `python -m jedbatch serve`.
- `save_params`, `load_params`: parameters in npz files.

Modules in reading order: `errors`, `metrics`, `tracing`, `requests`, `worker`, `parameters`,
`server`, `forms`, `http`.
"""

from jedbatch.serve.errors import DeadlineExceeded, Overloaded, ServerClosed
from jedbatch.serve.http import application
from jedbatch.serve.metrics import Metrics
from jedbatch.serve.parameters import load_params, save_params
from jedbatch.serve.server import Server

__all__ = [
    "DeadlineExceeded",
    "Metrics",
    "Overloaded",
    "Server",
    "ServerClosed",
    "application",
    "load_params",
    "save_params",
]
