"""Q-learning on frontiers, in `jax.numpy`.

Scheduling is a Markov decision process: the state is what has run, an action is a type, and an
episode ends when everything has run. Following ED-Batch, an action's reward is

    -1 + alpha * |Frontier_a(G)| / |Frontier(G^a)|,

a batch's cost, less the more of what type a could run next is ready now (in G^a, the graph of the
nodes of type a, one after another if a path of G leads from one to the other). The learner sees an
encoding of the state, not the state (see `_schedule.encodings`), and updates a table by N-step
returns

    Q(s, a) <- Q(s, a) + rate * (r_1 + ... + d^(N-1) r_N + d^N max Q(s', .) - Q(s, a)).

Where we depart from the paper: rewards are discounted by d < 1. The same encoding is met early
and late in an episode; a discounted return is about what happens next and hardly depends on how
much is left, an undiscounted one mixes all of it. Each episode sees a random part of the training
instances, or the table would learn one minibatch by heart. And the table is hashed: encodings
need no enumeration, so any number of types will do.

Many episodes run at once under `vmap`, their steps in a `lax.while_loop`. The frontier of this
module and `Frontier` obey one rule: a node is ready if it has not run and all it reads has; a
batch is all ready nodes of a type. Nodes that always run together and have as much ahead of them
count as one, so many times.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jedbatch._graph.graph import Graph
from jedbatch._graph.paths import padded
from jedbatch._schedule.encodings import CODES, ENCODINGS, GAPS, packed
from jedbatch._schedule.search import quotient
from jedbatch._support.progress import progress_bar
from jedbatch._support.types import Array

NUM_SLOTS = 1 << 13  # rows of the table
MANY_ANCESTORS = 16  # nearest nodes of the same type looked at to find what could run next
MULTIPLIER = 2654435769  # 2^32 over the golden ratio: products spread over the upper bits
NAMES = tuple(ENCODINGS)

# Of the equations above, and how learning goes: episodes at once, and the share of random actions
# in the first round and in the last fifth, which falls evenly.
RATE, ALPHA, DISCOUNT, STEPS = 0.1, 1.0, 0.9, 8
AT_ONCE, EPSILON = 16, (0.4, 0.02)


class Problem(NamedTuple):
    """A graph to learn on, as arrays. N classes of nodes, T types, B instances.

    Attributes:
      node_type: int32[N].
      reads: int32[N, ...], the nodes each node reads, filled up with N.
      ancestors: int32[N, ...], the nearest nodes of the same type before each, filled up with N.
      height: int32[N], edges on the longest path from each node.
      changes_type: bool[N], whether that path goes on with another type.
      chain: int32[N], nodes of the same type on the longest chain from each node.
      count: float32[N, B], how many nodes of each instance are in the class.
      weights: float32[T], cost of a batch of each type.
    """

    node_type: Array
    reads: Array
    ancestors: Array
    height: Array
    changes_type: Array
    chain: Array
    count: Array
    weights: Array

    @staticmethod
    def of(
        graph: Graph, instance: np.ndarray, num_instances: int, weights: np.ndarray
    ) -> "Problem":
        """The problem of a bare graph whose nodes belong to these of so many instances.

        Sizes are rounded up by classes that never occur, so that programs can be used again.
        """
        height, changes_type = graph.height, graph.changes_type
        ahead = np.stack([height, changes_type, graph.chain])
        small, of = quotient(graph, np.unique(ahead, axis=1, return_inverse=True)[1])
        _, first = np.unique(of, return_index=True)
        num_classes = len(small.node_type)
        count = np.zeros((num_classes, num_instances), np.float32)
        np.add.at(count, (of, instance), 1)
        size = max(64, 1 << (num_classes - 1).bit_length())
        if num_classes <= size * 3 // 4:
            size = size * 3 // 4

        def grown(x: np.ndarray, fill: int = 0) -> np.ndarray:
            shape = (size - num_classes, *x.shape[1:])
            return np.concatenate([x, np.full(shape, fill, x.dtype)])

        def table(rows: np.ndarray) -> np.ndarray:
            rows = np.where(rows == num_classes, size, rows)
            width = 1 << (rows.shape[1] - 1).bit_length()
            return grown(
                np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=size), size
            ).astype(np.int32)

        return Problem(
            grown(small.node_type),
            table(padded(*small.preds)),
            table(nearest_ancestors(small)),
            grown(height[first]),
            grown(changes_type[first]),
            grown(graph.chain[first]),
            grown(count),
            (weights / weights.mean()).astype(np.float32),
        )


def nearest_ancestors(graph: Graph) -> np.ndarray:
    """int64[N, at most MANY_ANCESTORS], nodes of its type before each node, none in between."""
    ptr, makers = (x.tolist() for x in graph.preds)
    types = graph.node_type.tolist()
    near: list[dict[int, set[int]]] = []
    for node in range(len(types)):
        ancestors: dict[int, set[int]] = {}
        for m in makers[ptr[node] : ptr[node + 1]]:
            for t, ids in (near[m] | {types[m]: {m}}).items():
                ancestors.setdefault(t, set()).update(ids)
        near.append({t: set(sorted(ids)[-MANY_ANCESTORS:]) for t, ids in ancestors.items()})
    rows = [sorted(ancestors.get(t, ())) for t, ancestors in zip(types, near, strict=True)]
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    index = np.fromiter((m for row in rows for m in row), np.int64, int(counts.sum()))
    return padded(np.append(0, counts.cumsum()), index)


class Seen(NamedTuple):
    """The facts about a frontier; everything but `ready` and `left` is by type."""

    ready: Array  # bool[N]
    left: Array  # bool[N]
    num_ready: Array
    num_next: Array
    top: Array  # longest path from a ready node, -1 if there is none
    many: Array  # ready nodes that begin such a path
    turning: Array  # those of them whose path goes on with another type
    shortens: Array  # whether all longest chains begin in ready nodes


def look(problem: Problem, count: Array, done: Array) -> Seen:
    """The frontier of the nodes that occur (`count` > 0) when some are done (bool[N + 1])."""
    is_type = problem.node_type[:, None] == jnp.arange(len(problem.weights))
    per_type = is_type.astype(jnp.float32)
    left = ~done[:-1]
    ready = left & done[problem.reads].all(1)
    first = left & done[problem.ancestors].all(1)
    top = jnp.where(ready[:, None] & is_type, problem.height[:, None], -1).max(0)
    tallest = jnp.where(ready & (problem.height == top[problem.node_type]), count, 0.0)
    chain = jnp.where(left[:, None] & is_type, problem.chain[:, None], 0).max(0)
    longest = left & (problem.chain == chain[problem.node_type])
    return Seen(
        ready,
        left,
        jnp.where(ready, count, 0.0) @ per_type,
        jnp.where(first, count, 0.0) @ per_type,
        top,
        tallest @ per_type,
        (tallest * problem.changes_type) @ per_type,
        ~(is_type & (longest & ~ready)[:, None]).any(0),
    )


def codes(looks: Seen) -> Array:
    """int32[encodings, T], what each encoding says about each type; -1 if it is not ready."""
    n, on = looks.num_ready, looks.num_ready > 0
    more = (n > n[:, None]).sum(1)
    gap = looks.top.max() - looks.top
    low = sum((gap >= edges).astype(int) for edges in GAPS)
    turn = (looks.turning > 0).astype(int) + (looks.turning == looks.many)
    many = looks.many == looks.many.max()
    words = {
        "base": jnp.zeros_like(more),
        "max": (more == 0).astype(int),
        "sort": jnp.minimum(more, CODES - 1),
        "phase": packed(low, many, turn, looks.shortens),
    }
    return jnp.where(on, jnp.stack([words[name] for name in NAMES]), -1)


def salts(num_types: int) -> np.ndarray:
    """uint32[T], fixed odd numbers to hash with."""
    return np.random.default_rng(0).integers(1, 1 << 31, num_types).astype(np.uint32) * 2 + 1


def slot(code: Array, salt: Array) -> Array:
    """The row, uint32, of the table for what is said about each type, int32[..., T], hashed."""
    number = ((code + 1).astype(np.uint32) * salt).sum(-1, dtype=np.uint32, keepdims=True)
    bits = NUM_SLOTS.bit_length() - 1
    return ((number * np.uint32(MULTIPLIER)) >> np.uint32(32 - bits))[..., 0]


class QTable(NamedTuple):
    """The learned table: value and number of updates of every action, [SLOTS, T]."""

    value: Array
    tries: Array


def preferred(table: QTable, row: Array, on: Array, untried: Array, xp: Any = jnp) -> Array:
    """The ready type of greatest value, the first of equals; `untried` is the value of others."""
    value = xp.where(table.tries[row] > 0, table.value[row], untried)
    return xp.where(on, value, -xp.inf).argmax(-1)


@functools.partial(jax.jit, static_argnames="max_steps")
def learning_round(problem, table, encoding, chosen, key, epsilon, untried, *, max_steps):
    """Runs episodes at once and updates the table: (table, cost of the first episodes).

    The first episodes are greedy, each on a row of `chosen` (float[E, B], 1 for the instances that
    take part); the others explore, each on a random part of the instances.
    """
    num_types, num_instances = len(problem.weights), problem.count.shape[1]
    salt = jnp.asarray(salts(num_types))
    drawn = jax.random.uniform(key, (AT_ONCE, 1 + num_instances + 2 * max_steps))
    ends = [1, 1 + num_instances, 1 + num_instances + max_steps]
    share, tickets, coins, dice = jnp.split(drawn, ends, axis=1)
    part = tickets < 0.25 + 0.75 * share
    part = part.astype(jnp.float32).at[: len(chosen)].set(chosen)
    explores = jnp.where(jnp.arange(AT_ONCE) < len(chosen), 0.0, epsilon)

    def episode(part, explore, coins, dice):
        count = problem.count @ part

        def step(carry):
            i, done, cost, rows, actions, rewards = carry
            looks = look(problem, count, done)
            on = looks.num_ready > 0
            row = slot(codes(looks)[encoding], salt)
            explored = (jnp.cumsum(on) > dice[i] * on.sum()).argmax()
            greedy = preferred(table, row, on, jnp.where(explore > 0, untried, -1e6))
            a = jnp.where(coins[i] < explore, explored, greedy)
            ratio = looks.num_ready[a] / jnp.maximum(looks.num_next[a], 1)
            reward = problem.weights[a] * (-1 + ALPHA * jnp.minimum(ratio, 1))
            run = looks.ready & (problem.node_type == a)
            return (
                i + 1,
                done.at[:-1].set(done[:-1] | run),
                cost + problem.weights[a],
                rows.at[i].set(row.astype(jnp.int32)),
                actions.at[i].set(a.astype(jnp.int32)),
                rewards.at[i].set(reward),
            )

        start = (
            0,
            jnp.append(count == 0, True),
            0.0,
            jnp.full(max_steps + STEPS, NUM_SLOTS),
            jnp.zeros(max_steps, jnp.int32),
            jnp.zeros(max_steps + STEPS),
        )
        more = lambda carry: ~carry[1].all() & (carry[0] < max_steps)  # noqa: E731
        _, done, cost, rows, actions, rewards = jax.lax.while_loop(more, step, start)
        tried = jnp.where(table.tries > 0, table.value, -jnp.inf).max(1)
        ahead = jnp.append(jnp.where(jnp.isfinite(tried), tried, 0.0), 0.0)
        window = rewards[np.arange(max_steps)[:, None] + np.arange(STEPS)]
        returns = DISCOUNT**STEPS * ahead[rows[STEPS:]]
        returns += window @ DISCOUNT ** np.arange(STEPS)
        return jnp.where(done.all(), cost, jnp.inf), rows[:max_steps], actions, returns

    cost, rows, actions, returns = jax.vmap(episode)(part, explores, coins, dice)
    sums = jnp.zeros((NUM_SLOTS + 1, num_types)).at[rows, actions].add(returns)[:-1]
    times = jnp.zeros((NUM_SLOTS + 1, num_types)).at[rows, actions].add(1.0)[:-1]
    pull = jnp.where(table.tries > 0, 1 - (1 - RATE) ** times, 1.0)
    value = jnp.where(
        times > 0, table.value + pull * (sums / jnp.maximum(times, 1) - table.value), table.value
    )
    return QTable(value, table.tries + times), cost[: len(chosen)]


PATIENCE_ROUNDS = 10  # rounds without improvement after which learning stops


def q_learn(
    problem: Problem,
    encoding: str,
    takes_part: np.ndarray,
    known: Sequence[tuple[np.ndarray, int]],
    key: jax.Array,
    *,
    episodes: int,
    progress: bool = False,
) -> tuple[QTable, list[tuple[int, float]]]:
    """Learns a table by Q-learning.

    Args:
      problem: what to learn on.
      encoding: what the learner sees.
      takes_part: float[E, B], sets of instances on which the table is judged after every round.
      known: pairs of what an encoding says about each type and the action to begin with; if there
        are any, actions that are not among them have to be found by exploration, and otherwise
        every action is worth trying.
      key: for random numbers.
      episodes: how many in all.
      progress: whether to show a progress bar.

    Returns:
      The table with the least cost, as NumPy arrays, and (episodes, cost of the first set) after
      every round.
    """
    num_types = len(problem.weights)
    value, tries = np.zeros((2, NUM_SLOTS, num_types), np.float32)
    for words, action in known:
        tries[slot(words, salts(num_types)), action] = 1
    table = best = QTable(value, tries)
    chain = problem.chain[:, None] * (problem.node_type[:, None] == np.arange(num_types))
    occurs = (problem.count @ takes_part.T > 0).T
    bound = sum((chain * is_here[:, None]).max(0) @ problem.weights for is_here in occurs)
    longest = 2 * int(chain.max(0).sum()) + 64
    max_steps = 1 << (longest - 1).bit_length()
    num_rounds = 1 + max(1, episodes // AT_ONCE)  # in the last, what was learned is judged only
    least, best_round, curve = np.inf, 0, []
    for i in progress_bar(range(num_rounds), f"Q-learning {encoding}", progress):
        key, round_key = jax.random.split(key)
        done = min(1.0, i / (0.8 * num_rounds))
        share = EPSILON[0] + (EPSILON[1] - EPSILON[0]) * done
        judged = table
        table, cost = learning_round(
            problem,
            table,
            NAMES.index(encoding),
            takes_part,
            round_key,
            share,
            -1e6 if known else 0.0,
            max_steps=max_steps,
        )
        cost = np.asarray(cost)
        curve.append((i * AT_ONCE, float(cost[0])))
        if cost.sum() < least:
            least, best_round, best = cost.sum(), i, judged
        if least <= bound + 1e-4 or i - best_round >= PATIENCE_ROUNDS:
            break
    return QTable(*map(np.asarray, best)), curve
