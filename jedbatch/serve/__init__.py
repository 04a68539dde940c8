"""Serving a batched function: requests that come one by one run many at a time.

- `Server`: for `asyncio`: `async with Server(batched, params) as server: await server(instance)`.
- `Metrics`: what it has done, as numbers and as text for Prometheus.
- `Overloaded`, `DeadlineExceeded`, `ServerClosed`: why a request has no result.

Modules in reading order: `errors`, `metrics`, `requests`, `worker`, `server`.
"""

from jedbatch.serve.errors import DeadlineExceeded, Overloaded, ServerClosed
from jedbatch.serve.metrics import Metrics
from jedbatch.serve.server import Server

__all__ = [
    "DeadlineExceeded",
    "Metrics",
    "Overloaded",
    "Server",
    "ServerClosed",
]
