"""What should be a unit of batching: an operation, a cell, or what the batching finds by itself?

Two models: the TreeLSTM of `jedbatch.models.tree` on binary trees, the loss at its root's state,
and the child-sum TreeLSTM of `jedbatch.models.childsum` on pairs of dependency trees, scored for
relatedness, as in just-in-time dynamic batching (Zha et al., 2019). Each is written twice: with
`@jedbatch.cell`, and as raw `jax.numpy` without any cell.

cell        annotated: one node for each call of a cell.
op          raw, `granularity="cell"`: one node for each operation.
auto        raw, `granularity="auto"`: units found in the recorded operations.

Table 1, after theirs: nodes, batches, milliseconds of planning (`unseen`: minibatches never seen
before, median; `cached`: seen before) and of running a plan made before, inference. Planned and run
in turns in one process, each warmed up.

Table 2, after theirs: samples per second. `per instance` calls jit-compiled cells from Python for
every node of every tree; in training it takes `jax.value_and_grad` of the loss of one instance
after the other. Its embeddings are looked up beforehand and get no gradient, in its favour: one
gradient of the whole table for every word would take most of the time, and nobody would train like
that. `batched` plans (trees seen before) and runs, training by `value_and_grad` of everything.
`lazy` is the per-instance loop itself under `with jedbatch.lazy():`. The gain is batched / per
instance; Zha et al. published 5.96 for training and 6.25 for inference, on another machine, with
sizes of their own: quoted, not measured here.

Losses of all sides are compared with the plain loop before anything is timed. The per-instance side
is timed on a few instances and scaled up by numbers of nodes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks import common
from jedbatch.data import (
    Vocabulary,
    index_pairs,
    num_nodes,
    num_words,
    read_pairs,
    synthetic_pairs,
)
from jedbatch.models import childsum, tree

PUBLISHED = {"training": 5.96, "inference": 6.25}  # Zha et al., 2019
UNSEEN = 5  # minibatches


class Model(NamedTuple):
    """A model, its instances and both ways to write it.

    Attributes:
      annotated, raw: functions of (params, instance), with cells and without: one loss each.
      looped: the same with jit-compiled parts; its embeddings are those of `prepare`.
      prepare: maps (params, instance) to the instance with vectors in place of words.
      size: nodes of the trees of an instance.
    """

    params: Any
    instances: list[Any]
    annotated: Callable
    raw: Callable
    looped: Callable
    prepare: Callable
    size: Callable[[Any], int]


def load_pairs(path: str | None, count: int) -> tuple[list[Any], int]:
    """(pairs without repetitions, words)."""
    if path is None:
        return list(dict.fromkeys(synthetic_pairs(count + count // 20 + 10)))[:count], 500
    words = Vocabulary()
    pairs = list(dict.fromkeys(index_pairs(read_pairs(path), words)))
    if len(pairs) < count:
        raise SystemExit(f"{path} holds {len(pairs)} different pairs; these options need {count}")
    return pairs[:count], len(words)


def child_sum(path: str | None, hidden: int, count: int) -> Model:
    pairs, words = load_pairs(path, count)
    cells = childsum.plain_cells(words, hidden)
    plain = childsum.plain_functions(words, hidden)

    def first(score: Callable) -> Callable:
        return lambda params, pair: score(params, pair)[0]

    @jax.jit
    def node(params: Any, x: jax.Array, *children: Any) -> Any:
        return plain.node(params, x @ params["word_w"] + params["word_b"], *children)

    jitted = plain._replace(word=lambda _, x: x, node=node, relate=jax.jit(plain.relate))

    def vectors(params: Any, root: Any) -> Any:
        return (params["embedding"][root[0]], *(vectors(params, child) for child in root[1:]))

    return Model(
        params=cells.init(jax.random.key(0)),
        instances=pairs,
        annotated=first(childsum.scorer(cells)),
        raw=first(childsum.scorer(plain)),
        looped=first(childsum.scorer(jitted)),
        prepare=lambda params, p: (vectors(params, p[0]), vectors(params, p[1]), p[2]),
        size=lambda pair: num_words(pair[0]) + num_words(pair[1]),
    )


def binary(path: str | None, hidden: int, count: int) -> Model:
    bank = common.load_trees(path, count)
    cells, params = common.model(bank.num_words, hidden)
    parts = {name: getattr(cells, name).__wrapped__ for name in ("leaf", "node", "score")}
    plain = cells._replace(**parts)

    def rooted(parts: tree.Cells) -> Callable:
        """The cross-entropy of the label at the root."""

        def visit(params: Any, root: Any) -> Any:
            if len(root) == 2:
                return parts.leaf(params, root[1])
            return parts.node(params, visit(params, root[1]), visit(params, root[2]))

        return lambda params, root: parts.score(params, visit(params, root)[0], root[0])[0]

    @jax.jit
    def leaf(params: Any, x: jax.Array) -> Any:
        """The leaf of a word whose vector is known: a table of one row, and its only row."""
        return plain.leaf(params | {"embedding": x[None]}, jnp.int32(0))

    jitted = plain._replace(leaf=leaf, node=jax.jit(plain.node), score=jax.jit(plain.score))

    def vectors(params: Any, root: Any) -> Any:
        if len(root) == 2:
            return root[0], params["embedding"][root[1]]
        return root[0], vectors(params, root[1]), vectors(params, root[2])

    return Model(
        params=params,
        instances=bank.trees,
        annotated=rooted(cells),
        raw=rooted(plain),
        looped=rooted(jitted),
        prepare=vectors,
        size=num_nodes,
    )


# --- the comparison ---


def typical(model: Model, size: int) -> list[Any]:
    """The minibatch with the median number of nodes."""
    minibatches = common.chunks(model.instances, size)
    by_size = sorted(minibatches, key=lambda batch: sum(map(model.size, batch)))
    return by_size[len(by_size) // 2]


def without_embedding(model: Model) -> Any:
    return {k: v for k, v in model.params.items() if k != "embedding"}


def expected(model: Model, few: list[Any]) -> np.ndarray:
    """Losses of the plain loop."""
    return np.array([model.raw(model.params, instance) for instance in few])


def check(losses: Any, correct: np.ndarray, name: str) -> None:
    """Raises unless the first losses are the plain loop's."""
    got = np.asarray(losses)[: len(correct)]
    np.testing.assert_allclose(got, correct, rtol=1e-3, atol=1e-5, err_msg=name)


def granularities(model: Model) -> dict[str, jedbatch.Batched]:
    return {
        "cell": jedbatch.batch(model.annotated),
        "op": jedbatch.batch(model.raw, granularity="cell"),
        "auto": jedbatch.batch(model.raw, granularity="auto"),
    }


def first_table(table: common.Table, name: str, model: Model, args: Any) -> None:
    """Three rows: cell, op, auto."""
    minibatch = typical(model, args.batch)
    others = [b for b in common.chunks(model.instances, args.batch) if b != minibatch]
    correct = expected(model, minibatch[: args.few])
    ways = granularities(model)
    plans, unseen = {}, {}
    apply = {way: jax.jit(batched.apply) for way, batched in ways.items()}
    for way, batched in ways.items():
        batched.plan(model.params, others[0], gradient=False)  # types and policy become known
        fresh = [
            common.seconds(lambda b=b, f=batched: f.plan(model.params, b, gradient=False).table)
            for b in others[1 : 1 + UNSEEN]
        ]
        unseen[way] = float(np.median(fresh))
        plans[way] = batched.plan(model.params, minibatch, gradient=False)
        check(apply[way](model.params, plans[way]), correct, way)

    runs = []
    for way, batched in ways.items():
        runs.append(lambda f=batched: f.plan(model.params, minibatch, gradient=False).table)
        runs.append(lambda way=way: apply[way](model.params, plans[way]))
    times = common.interleaved(runs, args.seconds, least=5)
    for i, way in enumerate(ways):
        graph, schedule = plans[way].graph, plans[way].schedule
        table.row(
            name,
            way,
            len(graph.node_type),
            len(schedule),
            f"{1e3 * unseen[way]:.1f}",
            f"{1e3 * times.median(2 * i):.1f}",
            f"{1e3 * times.median(2 * i + 1):.1f}",
        )


def per_instance(model: Model, few: list[Any]) -> dict[str, Callable[[], Any]]:
    """The loop: inference and training."""
    prepared = [model.prepare(model.params, instance) for instance in few]
    params = without_embedding(model)
    slope = jax.value_and_grad(model.looped)
    return {
        "inference": lambda: [model.looped(params, instance) for instance in prepared],
        "training": lambda: [slope(params, instance) for instance in prepared],
    }


def lazily(model: Model, minibatch: list[Any]) -> Any:
    """The per-instance loop as it stands, in one line more."""
    with jedbatch.lazy():
        losses = [model.annotated(model.params, instance) for instance in minibatch]
    return jnp.stack([jnp.asarray(loss) for loss in losses])


def second_table(table: common.Table, name: str, model: Model, args: Any) -> None:
    """Two rows: inference and training."""
    minibatch = typical(model, args.batch)
    few = minibatch[: args.few]
    correct = expected(model, few)
    loop = per_instance(model, few)
    check(loop["inference"](), correct, "per instance")
    batched = jedbatch.batch(model.annotated)
    run = common.compiled(lambda params, plan: batched.apply(params, plan).sum())
    share = sum(map(model.size, minibatch)) / sum(map(model.size, few))
    for kind in ("inference", "training"):
        gradient = kind == "training"
        runs = [loop[kind]]
        if not args.baselines:
            check(batched(model.params, minibatch), correct, "jedbatch")
            function = run.train if gradient else run.infer
            runs.append(
                lambda f=function, g=gradient: f(
                    model.params, batched.plan(model.params, minibatch, gradient=g)
                )
            )
            if not gradient:
                check(lazily(model, minibatch), correct, "lazy")
                runs.append(lambda: lazily(model, minibatch))
        times = common.interleaved(runs, args.seconds, least=5)
        times.seconds[0] *= share
        row = [name, kind, f"{args.batch / times.median(0):.0f}"]
        if not args.baselines:
            row.append(f"{args.batch / times.median(1):.0f}")
            row.append("–" if gradient else f"{args.batch / times.median(2):.0f}")
            row.append(common.spread(times.seconds[0] / times.seconds[1], digits=1))
        table.row(*row, PUBLISHED[kind])


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--pairs", metavar="FILE", help="pairs of dependency trees, as SICK's")
    parser.add_argument("--hidden", type=int, default=150, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="instances (%(default)s)")
    parser.add_argument("--few", type=int, default=16, help="the loop runs (%(default)s)")
    parser.add_argument("--seconds", type=float, default=15, help="per measurement (%(default)s)")
    parser.add_argument("--baselines", action="store_true", help="time the other sides only")
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.batch, args.few, args.seconds = 8, 4, 2, 0.2
    print(common.machine())
    count = args.batch * (2 + UNSEEN)
    models = {
        "child-sum": child_sum(args.pairs, args.hidden, count),
        "binary": binary(args.data, args.hidden, count),
    }
    for name, model in models.items():
        nodes = sum(map(model.size, model.instances)) / len(model.instances)
        print(f"{name}: {nodes:.1f} nodes an instance, hidden {args.hidden}, batch {args.batch}")
    if not args.baselines:
        table = common.Table(
            "model", "unit", "nodes", "batches", "plan ms: unseen", "cached", "run ms"
        )
        for name, model in models.items():
            first_table(table, name, model, args)
            jax.clear_caches()
    header = ["model", "samples per second", "per instance"]
    header += [] if args.baselines else ["batched", "lazy", "batched × per instance"]
    table = common.Table(*header, "published gain")
    for name, model in models.items():
        second_table(table, name, model, args)
        jax.clear_caches()


if __name__ == "__main__":
    main()
