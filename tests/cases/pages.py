"""Code in pages of Markdown: run as it stands, and by the plain loop over instances."""

import contextlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from jedbatch.testing import assert_close


def blocks(text):
    """The Python code of a page, one string for each block."""
    return re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def sections(path):
    """(the code before the first heading of second level, a dict from heading to its code)."""
    first, *rest = re.split(r"^## ", path.read_text(), flags=re.MULTILINE)
    parts = {text.split("\n")[0]: "\n".join(blocks(text)) for text in rest}
    return "\n".join(blocks(first)), parts


def run(code, where):
    """Runs code and returns its names; lines that it prints are in the list `printed`."""
    printed = []
    names = {"__name__": "page", "printed": printed}
    names["print"] = lambda *x: printed.append(" ".join(map(str, x)))
    with jax.numpy_rank_promotion("allow"):  # as JAX has it, unlike other tests
        exec(compile(code, where, "exec"), names)
    return names


class Loop:
    """`jedbatch.batch` as a loop over the instances; what the judge of every page runs."""

    def __init__(self, fn, in_axes=(None, 0), out_axes=0, **options):
        self.fn, self.in_axes, self.out_axes = fn, in_axes, out_axes

    def __call__(self, *args):
        axes = self.in_axes
        axes = (axes,) * len(args) if isinstance(axes, int) else axes
        count = next(len(x) for x, axis in zip(args, axes, strict=True) if axis == 0)
        results = []
        for n in range(count):
            chosen = [x if a is None else x[n] for x, a in zip(args, axes, strict=True)]
            results.append(self.fn(*chosen))
        if self.out_axes is None:
            return results
        return jax.tree.map(lambda *rows: jnp.stack([jnp.asarray(r) for r in rows]), *results)


def cell(fn=None, *, name=None):
    """`jedbatch.cell` that leaves a function as it is."""
    return fn if fn is not None else lambda fn: fn


def run_by_loop(code, where):
    """Runs code in which `import jedbatch` finds the loop; returns its names."""
    plain = types.ModuleType("jedbatch")
    plain.batch, plain.cell, plain.lazy = Loop, cell, contextlib.nullcontext
    sys.modules["jedbatch"] = plain
    try:
        return run(code, where)
    finally:
        sys.modules["jedbatch"] = jedbatch


def arrays(names):
    """The names whose values are pytrees with arrays, and nothing but arrays and numbers."""

    def is_data(value):
        leaves = jax.tree.leaves(value)
        kinds = (jax.Array, np.ndarray, int, float)
        has_array = any(isinstance(x, kinds[:2]) for x in leaves)
        return has_array and all(isinstance(x, kinds) for x in leaves)

    return {name: value for name, value in names.items() if is_data(value)}


def check_by_loop(code, where, *needed, rtol=1e-5):
    """Runs code in both ways and compares all arrays that it gives names; returns the names.

    `needed` are names that must be among those compared.
    """
    names = run(code, where)
    expected, got = arrays(run_by_loop(code, where)), arrays(names)
    assert got.keys() == expected.keys()
    assert got.keys() >= set(needed), where
    for name in got:  # by leaves: classes that the code defines are others in each run
        both = jax.tree.leaves(got[name]), jax.tree.leaves(expected[name])
        assert_close(*both, rtol, what=f"{where}: {name}")
    return names
