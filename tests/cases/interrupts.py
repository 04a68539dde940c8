"""Interrupts at source lines of the package that a program comes to, and what is wrong after each.

A program is called, interrupted where it comes to a line for the first or for the last time, and
called again. Nothing global may have changed, the interrupt may neither be lost nor turn into
another error, and the second call gives what it gives without an interrupt.

    python tests/cases/interrupts.py decides --seconds 300
"""

import argparse
import collections
import random
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import take_current_trace

import jedbatch
from jedbatch._record.cell import recording

PACKAGE = str(Path(jedbatch.__file__).parent)
LIMIT = sys.getrecursionlimit()
P = {"w": jnp.ones(2), "table": jnp.ones((5, 2))}
CONSTANT = jnp.full(2, 3.0)
TREES = [(1.0, np.ones(2, np.float32)), 2.0]
ROWS = [np.ones((n, 2), np.float32) for n in (3, 1)]
step = jedbatch.cell(lambda w, h, x: (h * w + x, h), name="step")


def tree(p, t):
    """A cell, an operation, a constant and something that is computed once per minibatch."""
    if not isinstance(t, tuple):
        return p["w"] * t
    state = step(p["w"], tree(p, t[0]), tree(p, t[1]))
    return state[0] * CONSTANT + (p["w"] + 1)


def rows(p, x):
    """Operations on arrays of several lengths."""
    return jnp.tanh(jax.nn.softmax(x @ x.T) @ x).sum(0) * p["w"]


def decides(p, t):
    """A loop that ends by a value, and a row of a table."""
    h = tree(p, t)
    while h[0] < 40:
        h = h * 2 + p["table"][1]
    return h


def planned(fn, instances, **options):
    """Returns a program that plans from nothing: types, operands and outputs of the graph."""

    def make():
        def call():
            graph = jedbatch.batch(fn, **options).plan(P, instances, gradient=False).graph
            names = [str(graph.types[t]) for t in graph.node_type.tolist()]
            return names, graph.operand.tolist(), graph.outputs.tolist()

        return call

    return make


def running():
    """Returns a program that decides on values, with nothing to compile after its first call."""
    batched = jedbatch.batch(decides)
    return lambda: batched(P, TREES).tolist()


def lazily():
    """Returns a program of one lazy scope, with nothing to compile after its first call."""
    lazy = jedbatch.Lazy()

    def call():
        with lazy():
            results = [tree(P, t) for t in TREES]
            first = float(results[0][0])
        return first, [np.asarray(h).tolist() for h in results]

    return call


PROGRAMS = {
    "cell": planned(tree, TREES),
    "ragged": planned(rows, ROWS),
    "auto": planned(tree, TREES, granularity="auto"),
    "decides": running,
    "lazy": lazily,
}


class Interrupted:
    """A call that is interrupted where it comes to a line for the `hit`-th time.

    Attributes:
      hits: how often it came to each line.
      met: whether it was interrupted.
    """

    def __init__(self, line=None, hit=0):
        self.line, self.hit = line, hit
        self.hits = collections.Counter()
        self.met = False

    def __call__(self, call):
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _enter(self, frame, *_):
        return self._step if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _step(self, frame, event, _):
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.hits[line] += 1
            if line == self.line and self.hits[line] == self.hit:
                self.met = True
                raise KeyboardInterrupt
        return self._step


def changed():
    """Returns descriptions of global state that is wrong between two calls."""
    with take_current_trace() as trace:
        pass
    state = {
        "there is a recorder": recording.recorder is not None,
        "operations are recorded": "Eval" not in type(trace).__name__,
        "stacks are large": threading.stack_size() != 0,
        "there is another limit": sys.getrecursionlimit() != LIMIT,
    }
    return [text for text, holds in state.items() if holds]


def points_of(name):
    """Returns (line, hit) of the first and of the last time a program comes to each line."""
    call = PROGRAMS[name]()
    call()
    call()
    traced = Interrupted()
    traced(call)
    return sorted({(line, hit) for line, n in traced.hits.items() for hit in (1, n)})


def wrong_after(call, expected, point):
    """Interrupts a call at a point; returns descriptions of what is wrong then."""
    interrupted = Interrupted(*point)
    found = []
    try:
        interrupted(call)
        if interrupted.met:
            found.append("the interrupt is lost")
    except KeyboardInterrupt:
        pass
    except Exception as error:
        found.append(f"it becomes {error!r}")
    found += changed()
    try:
        if call() != expected:
            found.append("the next call gives something else")
    except Exception as error:
        found.append(f"the next call fails: {error!r}")
    return found


def main():
    """Interrupts one program after the other, and prints what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS), help="all by default")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each program")
    parser.add_argument("--skip", type=int, default=0, help="points that an earlier run has tried")
    options = parser.parse_args()
    for name in options.programs:
        points = points_of(name)
        random.Random(0).shuffle(points)
        call = PROGRAMS[name]()
        expected = call()
        tried, bad, end = 0, [], time.monotonic() + options.seconds
        for line, hit in points[options.skip :]:
            if time.monotonic() > end:
                break
            tried += 1
            point = line, hit
            if found := wrong_after(call, expected, point):
                bad.append((point, found))
                call = PROGRAMS[name]()
                call()
        print(f"{name}: {tried} of {len(points)} points tried, {len(bad)} bad", flush=True)
        for (line, hit), found in bad:
            print(f"  {Path(line[0]).name}:{line[1]}, hit {hit}: {'; '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
