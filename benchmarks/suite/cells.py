"""Cells as they are written, packed by hand and packed by jedbatch, for `bench_cells.py`.

The cells are those of ED-Batch (Chen et al., ICML 2023, table 2) with a matrix for each gate and
operand, as a cell of single operations has them. One call computes a batch of instances.

as written   `jax.vmap` of the cell. XLA fuses elementwise operations and computes equal terms once,
             but leaves products as they are.
by hand      weights and biases concatenated beforehand as an expert would do it, then `jax.vmap`.
jedbatch     the kernel of the cell, made from the cell as written. Weights are packed once per
             program, which is not part of the time of a call. A program of a single call takes
             both.

Latency is the time of a call in a compiled loop of 32 calls, each working on what the last ones
computed, so that it does not contain the time to pass arguments. The three run in turns in one
process, after their results were compared.

`products`, `moves` and `kB moved` describe what XLA made of one call: matrix products, kernels that
only move elements (copies, transposes, slices, concatenations and fusions of nothing else), and
what these write. Each has three numbers, for the three ways. `planning` is what jedbatch needs to
find out what to put together, once per cell.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jedbatch._graph.operations import Operation
from jedbatch._graph.types import NodeType, ValueType
from jedbatch._jaxpr.interpret import inlined
from jedbatch._kernel.kernel import Kernel
from jedbatch._kernel.pack import fused

CALLS = 32
sigmoid = jax.nn.sigmoid


class Cell(NamedTuple):
    """A cell in two forms.

    Attributes:
      written: a function of (parameters, operands...) of one instance, gate by gate.
      by_hand: the same of packed parameters.
      pack: from parameters to packed ones.
      shapes: of the operands, in units of the hidden size: 1 for vectors, 2 for matrices.
      names: of the parameters; those with b are vectors, with B matrices.
    """

    written: Callable
    by_hand: Callable
    pack: Callable
    shapes: tuple[int, ...]
    names: str


def beside(p: Any, *names: str) -> jax.Array:
    """Some parameters concatenated along their last axis."""
    return jnp.concatenate([p[n] for n in names], axis=-1)


# --- the cells ---


def gru(p, h, x):
    r, z = (sigmoid(x @ p["W" + k] + h @ p["U" + k] + p["b" + k]) for k in "rz")
    n = jnp.tanh(x @ p["Wn"] + (r * h) @ p["Un"] + p["bn"])
    return (1 - z) * n + z * h


def gru_by_hand(p, h, x):
    r, z = jnp.split(sigmoid(jnp.concatenate([x, h]) @ p["rz"] + p["brz"]), 2)
    n = jnp.tanh(jnp.concatenate([x, r * h]) @ p["n"] + p["bn"])
    return (1 - z) * n + z * h


def pack_gru(p):
    return {
        "rz": jnp.concatenate([beside(p, "Wr", "Wz"), beside(p, "Ur", "Uz")]),
        "n": jnp.concatenate([p["Wn"], p["Un"]]),
        "brz": beside(p, "br", "bz"),
        "bn": p["bn"],
    }


def lstm(p, h, c, x):
    i, f, o, u = (x @ p["W" + k] + h @ p["U" + k] + p["b" + k] for k in "ifou")
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(u)
    return sigmoid(o) * jnp.tanh(c), c


def lstm_by_hand(p, h, c, x):
    i, f, o, u = jnp.split(jnp.concatenate([x, h]) @ p["W"] + p["b"], 4)
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(u)
    return sigmoid(o) * jnp.tanh(c), c


def pack_lstm(p):
    rows = [beside(p, *(a + k for k in "ifou")) for a in "WU"]
    return {"W": jnp.concatenate(rows), "b": beside(p, "bi", "bf", "bo", "bu")}


def mv(p, v1, v2, m1, m2):
    v = jnp.tanh((m1 @ v2) @ p["V1"] + (m2 @ v1) @ p["V2"] + p["b"])
    return v, m1 @ p["M1"] + m2 @ p["M2"] + p["B"]


def mv_by_hand(p, v1, v2, m1, m2):
    v = jnp.tanh(jnp.concatenate([m1 @ v2, m2 @ v1]) @ p["V"] + p["b"])
    return v, m1 @ p["M1"] + m2 @ p["M2"] + p["B"]  # to concatenate matrices takes longer


def pack_mv(p):
    rest = {k: p[k] for k in ("M1", "M2", "b", "B")}
    return rest | {"V": jnp.concatenate([p["V1"], p["V2"]])}


def tree_gru_leaf(p, e, k=""):
    r, z = (sigmoid(e @ p[g + k] + p["b" + g + k]) for g in "rz")
    return z * e + (1 - z) * jnp.tanh((r * e) @ p["n" + k] + p["bn" + k])


def tree_gru_leaf_by_hand(p, e, k=""):
    r, z = jnp.split(sigmoid(e @ p["rz" + k] + p["brz" + k]), 2)
    return z * e + (1 - z) * jnp.tanh((r * e) @ p["n" + k] + p["bn" + k])


def pack_tree_gru_leaf(p, k=""):
    packed = {"rz" + k: beside(p, "r" + k, "z" + k), "brz" + k: beside(p, "br" + k, "bz" + k)}
    return packed | {"n" + k: p["n" + k], "bn" + k: p["bn" + k]}


def tree_gru_node(p, h1, h2):
    return (tree_gru_leaf(p, h1, "1") + tree_gru_leaf(p, h2, "2")) / 2


def tree_gru_node_by_hand(p, h1, h2):
    return (tree_gru_leaf_by_hand(p, h1, "1") + tree_gru_leaf_by_hand(p, h2, "2")) / 2


def pack_tree_gru_node(p):
    return pack_tree_gru_leaf(p, "1") | pack_tree_gru_leaf(p, "2")


def tree_lstm_leaf(p, e):
    i, o, u = (e @ p[k] + p["b" + k] for k in "iou")
    c = sigmoid(i) * jnp.tanh(u)
    return sigmoid(o) * jnp.tanh(c), c


def tree_lstm_leaf_by_hand(p, e):
    i, o, u = jnp.split(e @ p["W"] + p["b"], 3)
    c = sigmoid(i) * jnp.tanh(u)
    return sigmoid(o) * jnp.tanh(c), c


def pack_tree_lstm_leaf(p):
    return {"W": beside(p, *"iou"), "b": beside(p, "bi", "bo", "bu")}


def tree_lstm_node(p, h1, h2, c1, c2):
    i, o, u = (h1 @ p[k + "1"] + h2 @ p[k + "2"] + p["b" + k] for k in "iou")
    f1, f2 = (h @ p["f" + k] + p["bf"] for h, k in ((h1, "1"), (h2, "2")))
    c = sigmoid(i) * jnp.tanh(u) + sigmoid(f1) * c1 + sigmoid(f2) * c2
    return sigmoid(o) * jnp.tanh(c), c


def tree_lstm_node_by_hand(p, h1, h2, c1, c2):
    gates1, f1 = jnp.split(h1 @ p["W1"] + p["b"], [3 * len(h1)])
    gates2, f2 = jnp.split(h2 @ p["W2"], [3 * len(h1)])
    i, o, u = jnp.split(gates1 + gates2, 3)
    c = sigmoid(i) * jnp.tanh(u) + sigmoid(f1) * c1 + sigmoid(f2 + p["bf"]) * c2
    return sigmoid(o) * jnp.tanh(c), c


def pack_tree_lstm_node(p):
    packed = {"W" + k: beside(p, *(g + k for g in "iouf")) for k in "12"}
    return packed | {"b": beside(p, "bi", "bo", "bu", "bf"), "bf": p["bf"]}


CELLS = {
    "GRU": Cell(gru, gru_by_hand, pack_gru, (1, 1), "Wr Wz Wn Ur Uz Un br bz bn"),
    "LSTM": Cell(lstm, lstm_by_hand, pack_lstm, (1, 1, 1), "Wi Wf Wo Wu Ui Uf Uo Uu bi bf bo bu"),
    "MV": Cell(mv, mv_by_hand, pack_mv, (1, 1, 2, 2), "V1 V2 M1 M2 b B"),
    "TreeGRU node": Cell(
        tree_gru_node,
        tree_gru_node_by_hand,
        pack_tree_gru_node,
        (1, 1),
        "r1 z1 n1 r2 z2 n2 br1 bz1 bn1 br2 bz2 bn2",
    ),
    "TreeGRU leaf": Cell(
        tree_gru_leaf, tree_gru_leaf_by_hand, pack_tree_gru_leaf, (1,), "r z n br bz bn"
    ),
    "TreeLSTM node": Cell(
        tree_lstm_node,
        tree_lstm_node_by_hand,
        pack_tree_lstm_node,
        (1, 1, 1, 1),
        "i1 i2 o1 o2 u1 u2 f1 f2 bi bo bu bf",
    ),
    "TreeLSTM leaf": Cell(
        tree_lstm_leaf, tree_lstm_leaf_by_hand, pack_tree_lstm_leaf, (1,), "i o u bi bo bu"
    ),
}


# --- the three ways ---


class Way(NamedTuple):
    """A function of (packed parameters, operands of a batch) and these parameters."""

    run: Callable[[Any, Sequence[Any]], Sequence[Any]]
    params: Any


def as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def batched(fn: Callable) -> Callable[[Any, Sequence[Any]], Sequence[Any]]:
    return jax.vmap(lambda p, operands: as_list(fn(p, *operands)), in_axes=(None, 0))


def kernel_of(cell: Cell, params: dict[str, Any], lane: Sequence[Any]) -> tuple[Kernel, float]:
    """The kernel of the cell as written, and the seconds in which its products were planned."""
    names = list(params)

    def flat(*args: Any) -> list[Any]:
        p = dict(zip(names, args, strict=False))
        return as_list(cell.written(p, *args[len(names) :]))

    closed = jax.make_jaxpr(flat)(*params.values(), *lane)
    program = inlined(closed)
    spent = []
    for _ in range(5):
        start = time.perf_counter()
        fused(program, len(names))
        spent.append(time.perf_counter() - start)
    operands, results = (
        tuple(ValueType(a.shape, a.dtype) for a in avals)
        for avals in (closed.in_avals[len(names) :], closed.out_avals)
    )
    operation = Operation(("cell",), closed)
    node_type = NodeType("cell", operation, operands, tuple(range(len(names))), results)
    return Kernel(node_type), float(np.median(spent))


def inputs(cell: Cell, hidden: int, batch: int) -> tuple[dict[str, Any], list[Any]]:
    """Random parameters and operands."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / math.sqrt(hidden), jnp.float32)

    params = {n: draw(hidden) if n[0] == "b" else draw(hidden, hidden) for n in cell.names.split()}
    return params, [draw(batch, *([hidden] * rank)) for rank in cell.shapes]


def looped(way: Way) -> Callable[[Any, Sequence[Any]], Sequence[Any]]:
    """Many calls, each of the latest results and operands of the right shapes.

    All operands change from call to call, or XLA would take products out of the loop.
    """

    def step(_: int, params_and_operands: Any) -> Any:
        params, operands = params_and_operands
        latest = [*way.run(params, operands), *operands]
        following = []
        for x in operands:
            k = next(k for k, y in enumerate(latest) if y.shape == x.shape)
            following.append(latest.pop(k))
        return params, following

    return jax.jit(lambda params, xs: jax.lax.fori_loop(0, CALLS, step, (params, list(xs)))[1])


# --- the program of XLA ---

MOVES = {
    "bitcast",
    "broadcast",
    "concatenate",
    "constant",
    "copy",
    "dynamic-slice",
    "dynamic-update-slice",
    "gather",
    "pad",
    "parameter",
    "reshape",
    "slice",
    "transpose",
    "tuple",
}
NO_KERNEL = {"bitcast", "constant", "parameter", "reshape", "tuple"}


class Program(NamedTuple):
    """The program that XLA makes of one call."""

    products: int
    moves: int
    kilobytes: float

    @classmethod
    def of(cls, way: Way, operands: Sequence[Any]) -> "Program":
        """The program of a function; raises if there is a library call it does not know."""
        text = jax.jit(way.run).lower(way.params, operands).compile().as_text()
        computations: dict[str, list[tuple[str, str, str]]] = {}
        instructions: list[tuple[str, str, str]] = []
        entry = instructions
        for line in text.splitlines():
            head = re.match(r"(ENTRY )?%(\S+) \(.*\{$", line)
            if head:
                instructions = computations.setdefault(head[2], [])
                entry = instructions if head[1] else entry
                continue
            found = re.match(r"\s+(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([\w-]+)\(", line)
            if found:
                calls = re.search(r"(?:calls|to_apply)=%([\w.-]+)", line)
                target = re.search(r'custom_call_target="([^"]*)"', line)
                if target and not re.search("matmul|gemm|dot", target[1]):
                    raise SystemExit(f"unknown library call {target[1]}")
                kind = "dot" if target else found[2]
                instructions.append((kind, found[1], calls[1] if calls else ""))

        def kinds(name: str) -> set[str]:
            inner = computations[name]
            return {k for op, _, to in inner for k in (kinds(to) if to else {op})}

        moving = 0
        size = 0
        for kind, shape, to in entry:
            if (kinds(to) <= MOVES) if to else (kind in MOVES - NO_KERNEL):
                moving += 1
                size += sum(
                    math.prod(map(int, filter(None, dims.split(",")))) * int(bits) // 8
                    for bits, dims in re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", shape)
                )
        return cls(len(re.findall(r"= \S+ dot\(", text)), moving, size / 1e3)


class Ways(NamedTuple):
    """A cell as written, packed by hand and by jedbatch.

    Attributes:
      ways: the three, in this order.
      operands: what they are called on.
      pack: packs the weights for jedbatch.
      planning: seconds to find out what to put together.
    """

    ways: list[Way]
    operands: list[Any]
    pack: Callable[[], Any]
    planning: float


def three_ways(cell: Cell, hidden: int, batch: int) -> Ways:
    """The three ways of a cell, which were found to compute the same."""
    params, operands = inputs(cell, hidden, batch)
    kernel, planning = kernel_of(cell, params, [x[0] for x in operands])
    pack = jax.jit(kernel.prologue)
    shared = list(params.values())
    ways = [
        Way(batched(cell.written), params),
        Way(batched(cell.by_hand), cell.pack(params)),
        Way(jax.vmap(kernel.forward, in_axes=(None, 0)), pack(shared)),
    ]
    expected, *others = (jax.jit(way.run)(way.params, operands) for way in ways)
    for got in others:
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    return Ways(ways, operands, lambda: pack(shared), planning)
