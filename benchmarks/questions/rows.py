"""How much do instances that are rows of one array cost, against `jax.vmap`?

`tanh(x @ w).sum()` of each row of an array [n, 16], in a call of the batched function and under
`jax.jit(jax.vmap(...))`; value and gradient in `w` too, both under `jax.jit`. Calls are timed as a
user makes them, from the arguments to results that are there. All is compiled before.

call, vmap    milliseconds, medians; `ratio` is of medians of pairs of calls that follow each other.
as a list     milliseconds for a list of the rows, which is planned instance by instance.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks import common

SIZES = [10, 100, 1_000, 10_000, 100_000]
WIDTH = 16


def model(w: Any, x: Any) -> Any:
    """The function of one row."""
    return jnp.tanh(x @ w).sum()


def seconds(run: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def measure(size: int, gradient: bool, repeats: int) -> list[Any]:
    """Returns the row of a size."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(WIDTH, 8)) / 4, jnp.float32)
    x = jnp.asarray(rng.normal(size=(size, WIDTH)), jnp.float32)
    batched, vmapped = jedbatch.batch(model), jax.vmap(model, (None, 0))
    if gradient:
        ours, theirs = (jax.jit(common.with_gradient(fn)) for fn in (batched, vmapped))
    else:
        ours, theirs = batched, jax.jit(vmapped)
    values = (jax.tree.leaves(f(w, x))[0] for f in (ours, theirs))
    np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-6)
    pairs = [(seconds(lambda: ours(w, x)), seconds(lambda: theirs(w, x))) for _ in range(repeats)]
    call, vmap = 1e3 * np.median(pairs, axis=0)
    row = [size, "gradient" if gradient else "value", f"{call:.2f}", f"{vmap:.2f}"]
    row.append(f"{np.median([a / b for a, b in pairs]):.2f}")
    if gradient or size > 10_000:
        return [*row, "–"]
    rows = list(x)
    jax.block_until_ready(ours(w, rows))
    return [*row, f"{1e3 * np.median([seconds(lambda: ours(w, rows)) for _ in range(3)]):.1f}"]


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--repeats", type=int, default=200, help="calls (%(default)s)")
    options = parser.parse_args()
    sizes, repeats = (SIZES[:2], 2) if options.quick else (SIZES, options.repeats)
    print(common.machine())
    table = common.Table("rows", "of", "call ms", "vmap ms", "ratio", "as a list ms")
    for gradient in (False, True):
        for size in sizes:
            table.row(*measure(size, gradient, repeats))


if __name__ == "__main__":
    main()
