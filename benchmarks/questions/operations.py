"""What does it cost to record an operation outside of cells, beside what `jax.numpy` takes itself?

tree        the node of a TreeLSTM in plain `jax.numpy`: concatenate, a product, a sum, split,
            `tanh` and operators.
rows        `table[word]` and a sum for each word of a sequence.
reductions  softmax, a mean and a maximum of a vector, and a weighted sum.

jax_us      an operation under a trace that does nothing: it gives what it gave the first time, so
            this is what `jax.numpy` takes to come to an operation.
recorded_us an operation that is recorded, of instances that were not met before.
more_us     what recording takes beside.

Both run in turns, and everything that is traced or compiled once was before.
"""

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Trace, Tracer
from jax.extend.core import set_current_trace

import jedbatch
from benchmarks import common

HIDDEN, WORDS, STEPS = 128, 500, 20
INSTANCES, REPEATS, WARM = 8, 20, 4


class Given(Tracer):
    """A value of `Nothing`, of which there is a type."""

    __slots__ = ("kind",)

    def __init__(self, trace: Trace, kind: Any):
        self._trace = trace
        self.kind = kind

    @property
    def aval(self) -> Any:  # type: ignore[override]
        """The type."""
        return self.kind

    def full_lower(self) -> "Given":
        """The value itself."""
        return self


class Nothing(Trace):
    """A trace that gives for the n-th operation of a run what it gave in the first run.

    Attributes:
      given: what that is.
      place: the number of the next operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []
        self.place = 0

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        """Returns the results of the operation in the first run."""
        if self.place == len(self.given):
            self.given.append(self._results(primitive, tracers, params))
        self.place += 1
        return self.given[self.place - 1]

    def _results(self, primitive: Any, tracers: Any, params: Any) -> Any:
        kinds = [jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)) for x in tracers]
        with jax.ensure_compile_time_eval():
            out = jax.eval_shape(lambda *xs: primitive.bind(*xs, **params), *kinds)
        return jax.tree.map(self.value, out)

    def value(self, x: Any) -> Given:
        """A value like an array."""
        return Given(self, jax.core.ShapedArray(x.shape, x.dtype))

    def run(self, fn: Callable, *args: Any) -> int:
        """Runs a function of arrays; returns how many operations it has."""
        self.place = 0
        with set_current_trace(self):
            fn(*args)
        return self.place


def tree(p: Any, x: Any) -> Any:
    h, c = x, x
    for _ in range(STEPS):
        z = jnp.concatenate([h, h]) @ p["W"] + p["b"]
        i, left, right, o, g = jnp.split(z, 5)
        c = jnp.tanh(i) * jnp.tanh(g) + jnp.tanh(left) * c + jnp.tanh(right) * c
        h = jnp.tanh(o) * jnp.tanh(c)
    return h


def rows(p: Any, x: Any) -> Any:
    for word in range(STEPS):
        x = x + p["E"][word]
    return x


def reductions(p: Any, x: Any) -> Any:
    for _ in range(STEPS):
        weights = jax.nn.softmax(x)
        x = weights * x + jnp.mean(x) - jnp.max(x)
    return x + p["b"][:HIDDEN]


def main() -> None:
    common.options(__doc__).parse_args()
    warnings.simplefilter("ignore", jedbatch.errors.NoCellsWarning)
    p = {
        "E": jnp.ones((WORDS, HIDDEN)),
        "W": jnp.full((2 * HIDDEN, 5 * HIDDEN), 0.01),
        "b": jnp.zeros(5 * HIDDEN),
    }
    x = jnp.ones(HIDDEN)
    print(common.machine())
    table = common.Table("program", "operations", "jax_us", "recorded_us", "more_us")
    for fn in (tree, rows, reductions):
        nothing, recorded, count = measured(fn, p, x)
        jax_us, ours = (float(np.median(s)) * 1e6 / count for s in (nothing, recorded))
        cells = f"{jax_us:.1f}", f"{ours:.1f}", f"{ours - jax_us:+.1f}"
        table.row(fn.__name__, count, *cells)


def measured(fn: Callable, p: Any, x: Any) -> tuple[list[float], list[float], int]:
    """(seconds of an instance under a trace that does nothing, recorded, its operations)."""
    trace = Nothing()
    values = jax.tree.map(trace.value, (p, x))
    labels = itertools.count()  # with a new one an instance is another one
    recorded: list[float] = []

    def timed(p: Any, instance: Any) -> Any:
        begin = time.perf_counter()
        out = fn(p, instance["x"])
        recorded.append(time.perf_counter() - begin)
        return out

    batched = jedbatch.batch(timed, granularity="cell")
    nothing = []
    for _ in range(REPEATS):
        for _ in range(INSTANCES):
            nothing.append(common.seconds(lambda: trace.run(fn, *values)))
        given = np.asarray(x)
        batched.plan(p, [{"x": given, "label": str(next(labels))} for _ in range(INSTANCES)])
    skipped = WARM * INSTANCES
    return nothing[skipped:], recorded[skipped:], trace.place


if __name__ == "__main__":
    main()
