"""Arenas that nobody fills with zeros: no row is read before it is written."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, loop, number, random_tree

import jedbatch
from jedbatch._jaxpr.native_calls import target_of
from jedbatch._jaxpr.uninitialized import NAME, uninitialized
from jedbatch._program import execute
from jedbatch._support import native

SIZE = 4
TARGET = target_of(NAME)
compiled = pytest.mark.skipif(native.core() is None, reason="no compiled core")


@jedbatch.cell
def leaf(params, x):
    return jnp.tanh(params["w"] * x), params["table"][jnp.int32(jnp.abs(4 * x)) % 3]


@jedbatch.cell
def node(params, *children):
    h = sum(h for h, _ in children) + params["w"]
    return jnp.tanh(h @ params["u"]), jnp.stack([c for _, c in children]).max(axis=0)


def encode(params, tree):
    if isinstance(tree, float):
        return leaf(params, tree)
    return node(params, *(encode(params, child) for child in tree))


def root(params, tree):
    """With a value that many nodes read."""
    h, c = encode(params, tree)
    for i in range(9):
        h = h + node(params, (c, h), (h * i, c))[0]
    return h


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    shapes = {"w": (SIZE,), "u": (SIZE, SIZE), "table": (3, SIZE)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def trees(seed, count):
    rng = np.random.default_rng(seed)
    return [random_tree(rng, n, lambda: float(rng.normal())) for n in rng.integers(1, 9, count)]


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_no_row_is_read_before_it_is_written(monkeypatch, params, target):
    """Results and gradients are the loop's where arenas begin as not-a-number."""

    def poisoned(rows, kind, *name):
        shape, dtype = kind
        fill = jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else np.ones((), dtype)
        return jnp.full((rows, *shape), fill, dtype)

    monkeypatch.setattr(execute, "empty", poisoned)
    check(root, params, trees(0, 5), target=target, inference=True)


def lowered(params, plan, batched):
    step = jax.jit(jax.value_and_grad(lambda p, plan: number(batched.apply(p, plan))))
    return step, step.lower(params, plan).as_text()


@compiled
def test_arenas_are_not_filled(monkeypatch, params):
    def text():
        batched = jedbatch.batch(root)
        return lowered(params, batched.plan(params, trees(0, 3)), batched)[1]

    assert TARGET in text()
    with jax.debug_nans(True):
        assert TARGET not in text()
    with monkeypatch.context() as patch:
        patch.setenv(native.SWITCH, "0")
        assert TARGET not in text()


@compiled
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages"
)
def test_memory_of_large_arenas_is_asked_for_in_huge_pages():
    """The kernel says so of the memory in which the array lies."""
    large, small = (
        jax.jit(lambda n=n: uninitialized((n,), np.float32, "rows"))() for n in (1 << 23, 1 << 10)
    )
    areas = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = {}
    for area, after in itertools.pairwise(areas):
        bounds = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", area, re.MULTILINE)[-1]
        flags[tuple(int(x, 16) for x in bounds)] = after.split("\n")[0].split()
    for array, asked in ((large, True), (small, False)):
        middle = array.unsafe_buffer_pointer() + array.nbytes // 2
        (found,) = (x for (start, end), x in flags.items() if start <= middle < end)
        assert ("hg" in found) == asked


def test_programs_are_exported_without_it(params):
    """Another process may run them without this package, nor its core, which adds otherwise."""
    batched = jedbatch.batch(root)
    plan = batched.plan(params, trees(0, 3))
    step, _ = lowered(params, plan, batched)
    exported = jax.export.export(step)(params, plan)
    assert TARGET not in exported.mlir_module()
    assert_close(exported.call(params, plan), step(params, plan), 1e-4)


def test_no_fault_is_found_in_rows_that_nobody_reads(params):
    """Also where the program was compiled before anybody looked."""
    batched = jedbatch.batch(root)
    instances = trees(0, 3)
    total = lambda p: number(batched(p, instances))  # noqa: E731
    expected = jax.grad(lambda p: number(loop(root, p, instances)))(params)
    assert_close(jax.grad(total)(params), expected, 1e-4)
    with jax.debug_nans(True):
        assert_close(jax.grad(total)(params), expected, 1e-4)


def test_transforms():
    """Its rows are any values, and those written are as they were written."""

    def fn(x):
        rows = uninitialized((5, 3), np.float32, "rows")
        return jax.lax.fori_loop(0, 4, lambda i, rows: rows.at[i].set(x * i), rows)[:4]

    x = jnp.arange(3.0)
    expected = jnp.outer(jnp.arange(4.0), x)
    for run in (fn, jax.jit(fn)):
        assert_close(run(x), expected, 0)
        assert_close(jax.jvp(run, (x,), (x,))[1], expected, 0)
        assert_close(jax.vmap(run)(jnp.stack([x, 2 * x])), jnp.stack([expected, 2 * expected]), 0)
