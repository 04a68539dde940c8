"""Cells of recurrent networks, written gate by gate, and how few products each can do with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

H = 4
sigmoid = jax.nn.sigmoid


def array(seed, *shape, dtype=None):
    found = np.random.default_rng(seed).normal(size=shape or (H,)) * 0.7
    return jnp.asarray(found, dtype or jnp.result_type(float))


def params(names, h=H, dtype=None):
    """Matrices, vectors for names that begin with b."""
    return {
        n: array(1 + i, *((h,) if n[0] == "b" else (h, h)), dtype=dtype)
        for i, n in enumerate(names.split())
    }


def lstm(p, c, h, x):
    gate = lambda k: x @ p["W" + k] + h @ p["U" + k] + p["b" + k]  # noqa: E731
    c = sigmoid(gate("f")) * c + sigmoid(gate("i")) * jnp.tanh(gate("u"))
    return c, sigmoid(gate("o")) * jnp.tanh(c)


def gru(p, h, x):
    """The reset gate before the product."""
    gate = lambda k, y: p["W" + k] @ x + p["U" + k] @ y + p["b" + k]  # noqa: E731
    r, z = sigmoid(gate("r", h)), sigmoid(gate("z", h))
    return (1 - z) * jnp.tanh(gate("n", r * h)) + z * h


def gru_after(p, h, x):
    """The reset gate after the product."""
    gate = lambda k: x @ p["W" + k] + h @ p["U" + k] + p["b" + k]  # noqa: E731
    r, z = sigmoid(gate("r")), sigmoid(gate("z"))
    n = jnp.tanh(x @ p["Wn"] + p["bn"] + r * (h @ p["Un"]))
    return (1 - z) * n + z * h


def tree_lstm_leaf(p, e):
    gate = lambda k: e @ p["W" + k] + p["b" + k]  # noqa: E731
    c = sigmoid(gate("i")) * jnp.tanh(gate("u"))
    return sigmoid(gate("o")) * jnp.tanh(c), c


def tree_lstm_node(p, left, right):
    """Every gate reads both children (Tai et al., equations 9 to 14)."""
    (h1, c1), (h2, c2) = left, right
    gate = lambda k: h1 @ p["U" + k] + h2 @ p["V" + k] + p["b" + k]  # noqa: E731
    c = sigmoid(gate("i")) * jnp.tanh(gate("u"))
    c = c + sigmoid(gate("f")) * c1 + sigmoid(gate("g")) * c2
    return sigmoid(gate("o")) * jnp.tanh(c), c


def own_forget_gates(p, left, right):
    """Forget gates that read their own child only; the other gates read concatenated children."""
    (h1, c1), (h2, c2) = left, right
    both = jnp.concatenate([h1, h2])
    gate = lambda k: jnp.concatenate([p["U" + k], p["V" + k]]).T @ both + p["b" + k]  # noqa: E731
    c = sigmoid(gate("i")) * jnp.tanh(gate("u"))
    c = c + sigmoid(h1 @ p["Uf"] + p["bf"]) * c1 + sigmoid(h2 @ p["Vf"] + p["bf"]) * c2
    return sigmoid(gate("o")) * jnp.tanh(c), c


def child_sum(p, left, right):
    """One matrix for all forget gates (Tai et al., equations 2 to 8)."""
    (h1, c1), (h2, c2) = left, right
    gate = lambda k: (h1 + h2) @ p["U" + k] + p["b" + k]  # noqa: E731
    forget = lambda h: sigmoid(p["Uf"].T @ h + p["bf"])  # noqa: E731
    c = sigmoid(gate("i")) * jnp.tanh(gate("u")) + forget(h1) * c1 + forget(h2) * c2
    return sigmoid(gate("o")) * jnp.tanh(c), c


def tree_gru_leaf(p, e):
    r, z = (sigmoid(p["U" + k] @ e + p["b" + k]) for k in "rz")
    return z * e + (1 - z) * jnp.tanh(p["Un"] @ (r * e) + p["bn"])


def tree_gru_node(p, left, right):
    """The mean of two GRU-like updates with a matrix set per child."""
    second = {k: p[k.replace("U", "V")] for k in p}
    return (tree_gru_leaf(p, left) + tree_gru_leaf(second, right)) / 2


def mv_rnn(p, left, right):
    """A vector and a matrix for every word."""
    (v1, m1), (v2, m2) = left, right
    v = jnp.tanh(p["Wi"] @ (m1 @ v2) + p["Wu"] @ (m2 @ v1) + p["bi"])
    return v, p["Wf"] @ m1 + p["Wo"] @ m2 + p["bo"][:, None]


def mv_rnn_right(p, left, right):
    """The same with rows that are multiplied from the left."""
    (v1, m1), (v2, m2) = left, right
    v = jnp.tanh((m1 @ v2) @ p["Wi"] + (m2 @ v1) @ p["Wu"] + p["bi"])
    return v, m1.T @ p["Wf"] + m2 @ p["Wo"], m2 @ p["Wz"]


GATES = " ".join(a + k for a in "WUVb" for k in "ifougrnz")
VECTOR, STATE, WORD = (0,), (0, 0), (0, 1)  # an operand: the rank beyond one of each array
PLAIN = [
    # cell, operands, products of the compiled program
    (lstm, [VECTOR] * 3, 1),
    (gru, [VECTOR] * 2, 2),
    (gru_after, [VECTOR] * 2, 2),
    (tree_lstm_leaf, [VECTOR], 1),
    (tree_lstm_node, [STATE] * 2, 1),
    (own_forget_gates, [STATE] * 2, 3),
    (child_sum, [STATE] * 2, 2),
    (tree_gru_leaf, [VECTOR], 2),
    (tree_gru_node, [VECTOR] * 2, 4),
    (mv_rnn, [WORD] * 2, 5),  # matrices are not concatenated; two are of two values of an instance
    (mv_rnn_right, [WORD] * 2, 5),
]


def operands(kinds, seed=50):
    """Random operands, numbered."""
    found = []
    for i, kind in enumerate(kinds):
        arrays = tuple(array(seed + 10 * i + k, *([H] * (1 + more))) for k, more in enumerate(kind))
        found.append(arrays if len(arrays) > 1 else arrays[0])
    return found


def plain(cell, kinds, dots):
    return cell, params(GATES), operands(kinds), dots


def flax_linen(module, dots):
    cell = module(features=H, param_dtype=jnp.result_type(float))
    state = cell.initialize_carry(jax.random.key(0), (H,))
    state = jax.tree.map(lambda x: array(60, *x.shape), state)
    p = cell.init(jax.random.key(1), state, array(61))
    return cell.apply, p, (state, array(61)), dots


def flax_nnx(module, dots):
    dtype = jnp.result_type(float)
    cell = module(H, H, rngs=nnx.Rngs(0), param_dtype=dtype, dtype=dtype)
    state = jax.tree.map(lambda x: array(60, *x.shape), cell.initialize_carry((H,), nnx.Rngs(0)))
    definition, p = nnx.split(cell)

    def step(p, state, x):
        return nnx.merge(definition, p)(state, x)

    return step, p, (state, array(61)), dots


CELLS = {cell.__name__: functools.partial(plain, cell, *rest) for cell, *rest in PLAIN}
for name, dots in (("LSTMCell", 1), ("OptimizedLSTMCell", 1), ("GRUCell", 2)):
    CELLS["linen " + name] = functools.partial(flax_linen, getattr(linen, name), dots=dots)
    CELLS["nnx " + name] = functools.partial(flax_nnx, getattr(nnx, name), dots)
CELLS["linen OptimizedLSTMCell"].keywords["dots"] = 2  # it puts weights together itself
