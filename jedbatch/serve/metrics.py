"""Metrics of a server: counts since it was made, and latencies of late, as numbers and as text."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 8192  # requests whose latencies are kept
OUTCOMES = ("done", "failed", "cancelled", "expired", "refused")  # of requests
PERCENTILES = (50, 90, 99)
MOST_SIZES = 32  # bounds of the histogram of batch sizes: powers of two, up to 2**31


@dataclass(frozen=True)
class Metrics:
    """Counts and latencies of a server so far. Requests are counted once they have ended.

    Attributes:
      queued: requests that wait now.
      running: requests that are computed now.
      done: with a result.
      failed: with an error of their own.
      cancelled: given up by whoever asked.
      expired: not done by their deadline.
      refused: since too many were waiting, or the server was closed.
      batch_sizes: how many minibatches had so many requests.
      latency_ms: milliseconds from request to result, by percentile (50, 90, 99), of the last 8192
        requests with a result; NaN before there is one.
      latency_seconds: of all requests with a result, added up.
      compilations: XLA programs built for the function, by the server or others.
      swaps: how often the shared arguments were replaced.
    """

    queued: int
    running: int
    done: int
    failed: int
    cancelled: int
    expired: int
    refused: int
    batch_sizes: Mapping[int, int]
    latency_ms: Mapping[int, float]
    latency_seconds: float
    compilations: int
    swaps: int

    @property
    def minibatches(self) -> int:
        """How many minibatches ran."""
        return sum(self.batch_sizes.values())

    @property
    def mean_batch_size(self) -> float:
        """Requests in a minibatch; NaN before there is one."""
        count = self.minibatches
        requests = sum(size * times for size, times in self.batch_sizes.items())
        return requests / count if count else float("nan")

    def prometheus(self, prefix: str = "jedbatch") -> str:
        """Returns the metrics in the text format of Prometheus, version 0.0.4.

        Args:
          prefix: what all names begin with.
        """
        return "\n".join(self._lines(prefix)) + "\n"

    def _lines(self, prefix: str) -> Iterator[str]:
        def head(name: str, kind: str, text: str) -> Iterator[str]:
            yield f"# HELP {prefix}_{name} {text}"
            yield f"# TYPE {prefix}_{name} {kind}"

        def number(name: str, kind: str, text: str, value: int) -> Iterator[str]:
            yield from head(name, kind, text)
            yield f"{prefix}_{name} {value}"

        yield from number("queue_length", "gauge", "Requests that wait.", self.queued)
        yield from number("running", "gauge", "Requests that are computed.", self.running)
        yield from head("requests_total", "counter", "Requests that have ended, by how they did.")
        for outcome in OUTCOMES:
            yield f'{prefix}_requests_total{{outcome="{outcome}"}} {getattr(self, outcome)}'
        yield from head("batch_size", "histogram", "Requests in a minibatch.")
        largest = max(self.batch_sizes, default=1)
        for bound in (1 << k for k in range(MOST_SIZES)):
            within = sum(n for size, n in self.batch_sizes.items() if size <= bound)
            yield f'{prefix}_batch_size_bucket{{le="{bound}"}} {within}'
            if bound >= largest:
                break
        yield f'{prefix}_batch_size_bucket{{le="+Inf"}} {self.minibatches}'
        yield f"{prefix}_batch_size_sum {sum(s * n for s, n in self.batch_sizes.items())}"
        yield f"{prefix}_batch_size_count {self.minibatches}"
        yield from head("latency_seconds", "summary", "Seconds from a request to its result.")
        for percentile, milliseconds in self.latency_ms.items():
            value = f"{milliseconds / 1e3:.6g}".replace("nan", "NaN")
            yield f'{prefix}_latency_seconds{{quantile="{percentile / 100:g}"}} {value}'
        yield f"{prefix}_latency_seconds_sum {self.latency_seconds:.6g}"
        yield f"{prefix}_latency_seconds_count {self.done}"
        text = "XLA programs built."
        yield from number("compilations_total", "counter", text, self.compilations)
        text = "Replacements of the shared arguments."
        yield from number("swaps_total", "counter", text, self.swaps)

    def __str__(self) -> str:
        shown = ", ".join(f"p{p} {ms:.1f} ms" for p, ms in self.latency_ms.items())
        return (
            f"{self.done:,} done, {self.failed:,} failed, {self.cancelled:,} cancelled, "
            f"{self.expired:,} expired, {self.refused:,} refused; {self.queued:,} queued, "
            f"{self.running:,} running\n"
            f"{self.minibatches:,} minibatches of {self.mean_batch_size:.1f} requests; {shown}\n"
            f"{self.compilations} compilations, {self.swaps} swaps"
        )


class Meter:
    """Counts what happens, in the event loop of a server."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._sizes: collections.Counter[int] = collections.Counter()
        self._recent: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._sum = 0.0

    def count(self, what: str, number: int = 1) -> None:
        """Counts requests that ended in some way, or swaps."""
        self._counts[what] += number

    def minibatch(self, size: int) -> None:
        """Counts a minibatch."""
        self._sizes[size] += 1

    def done(self, seconds: Sequence[float]) -> None:
        """Counts requests with a result, and the time that each took."""
        self._sum += sum(seconds)
        self._recent.extend(seconds)
        self._counts["done"] += len(seconds)

    def metrics(self, queued: int, running: int, compilations: int) -> Metrics:
        """Returns all counts, with some that others know."""
        recent = list(self._recent)
        latencies = np.percentile(recent, PERCENTILES) if recent else [np.nan] * 3
        return Metrics(
            queued=queued,
            running=running,
            **{name: self._counts[name] for name in (*OUTCOMES, "swaps")},
            batch_sizes=dict(sorted(self._sizes.items())),
            latency_ms={p: 1e3 * float(x) for p, x in zip(PERCENTILES, latencies, strict=True)},
            latency_seconds=self._sum,
            compilations=compilations,
        )
