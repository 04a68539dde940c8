"""Plans of all models of this package, small, at fixed seeds."""

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

import jedbatch
from jedbatch import data
from jedbatch.models import WORKLOADS, deepsets, transformer, tree

HIDDEN = 4
GPU_MODELS = ("treelstm", "mvrnn", "childsum", "lattice_lstm")
SIZES = (6, 6, 9, 2, 24)  # instances of the minibatches, one after the other
TIMES = re.compile(r"[\d.]+ ms: .*(?= \()|, [\d.]+ ms|\n +planned in Python.*")
HASHED_TYPES = re.compile(r" at 0x\w+")


def digest(*arrays: Any) -> str:
    """Tells arrays apart by dtype, shape and every bit."""
    found = hashlib.sha256()
    for x in map(np.asarray, arrays):
        found.update(f"{x.dtype}{x.shape}".encode() + np.ascontiguousarray(x).tobytes())
    return found.hexdigest()[:12]


def printed(x: Any) -> str:
    """Returns the printed form of something, without times and whether it was compiled."""
    return HASHED_TYPES.sub("", TIMES.sub("", str(x)))


def planned(fn: Callable, params: Any, minibatches: Sequence[Sequence[Any]], **options: Any) -> str:
    """The plans of several minibatches for one batched function, with and without gradients.

    The first is shown as it prints, and what differs without gradients.
    """
    batched = jedbatch.batch(fn, **options)
    programs: dict[Any, int] = {}
    lines: list[str] = []
    for gradient in (True, False):
        for k, instances in enumerate(minibatches):
            plan = batched.plan(params, instances, gradient=gradient)
            if not k:
                lines += [x for x in printed(plan).splitlines() if gradient or x not in lines]
            leaves, program = jax.tree.flatten(plan)
            number = programs.setdefault(program, len(programs))
            inputs = [plan.inputs[name] for name in sorted(plan.inputs)]
            tables = [x for x in leaves if not any(x is y for y in inputs)]
            lines.append(
                f"  {len(instances)} instances: {len(plan.graph.node_type)} nodes in "
                f"{len(plan.schedule)} batches; program {number}; "
                f"tables {' '.join(map(digest, tables))}; inputs {digest(*inputs)}"
            )
    return "\n".join(lines) + "\n"


def cut(instances: Sequence[Any]) -> list[Sequence[Any]]:
    """Minibatches of `SIZES`."""
    ends = np.cumsum(SIZES)
    return [instances[end - n : end] for n, end in zip(SIZES, ends.tolist(), strict=True)]


def model(name: str, **options: Any) -> str:
    """The plans of a workload, with its trained policy unless there is another."""
    workload = WORKLOADS[name]
    instances, sizes = workload.load(limit=sum(SIZES), seed=3)
    cells = workload.cells(hidden=HIDDEN, **sizes)
    params = jax.eval_shape(cells.init, jax.random.key(0))
    options = {"policy": workload.policy()} | options
    return planned(workload.scorer(cells), params, cut(instances), **options)


def models(names: Iterable[str] = WORKLOADS, **options: Any) -> str:
    """The plans of workloads."""
    return "\n".join(f"# {name}\n\n{model(name, **options)}" for name in names)


def encoder() -> Any:
    """A Transformer of one layer."""
    return transformer.flax_encoder(20, 3, hidden=8, heads=2, layers=1, max_length=64)


def ragged(**options: Any) -> str:
    """The plans of models of arrays of any length."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 12, sum(SIZES)).tolist()
    words = [rng.integers(0, 20, n).astype(np.int32) for n in lengths]
    labels = [np.int32(n % 3) for n in lengths]
    points = [rng.normal(size=(n, 2)).astype(np.float32) for n in lengths]
    pairs = data.as_arrays(
        [
            (tuple(w.tolist()), (*v[:4].tolist(), 21))
            for w, v in zip(words, words[::-1], strict=True)
        ]
    )
    encode, translate = (
        encoder(),
        transformer.flax_encoder_decoder(22, 22, hidden=8, heads=2, layers=1, max_length=64),
    )
    sets = deepsets.flax_model(2, 3, 4, layers=1)
    cases = {
        "classifier": (encode, transformer.classifier(encode), words),
        "scorer": (encode, transformer.scorer(encode), list(zip(words, labels, strict=True))),
        "translator": (translate, transformer.translator(translate), pairs),
        "sets": (sets, deepsets.scorer(sets), list(zip(points, labels, strict=True))),
    }
    return "\n".join(
        f"# {name}\n\n"
        + planned(fn, jax.eval_shape(model.init, jax.random.key(0)), cut(instances), **options)
        for name, (model, fn, instances) in cases.items()
    )


def raw(**options: Any) -> str:
    """The plans of a TreeLSTM without cells."""
    cells = tree.plain_cells(20, 5, HIDDEN)
    plain = {name: getattr(cells, name).cell.fn for name in ("leaf", "node", "score")}
    trees = data.synthetic_treebank(sum(SIZES), num_words=20, seed=3, mean_length=6)
    params = jax.eval_shape(cells.init, jax.random.key(0))
    return planned(tree.scorer(cells._replace(**plain)), params, cut(trees), **options)


def granularities() -> str:
    """The plans of programs without cells, and of some with, by what a node is."""
    return "\n".join(
        [
            "# treelstm without cells, cell\n",
            raw(granularity="cell", policy=jedbatch.policies.depth),
            "# treelstm without cells, auto\n",
            raw(granularity="auto", policy=jedbatch.policies.depth),
            "# treelstm, auto\n",
            model("treelstm", granularity="auto"),
            "# treegru, auto\n",
            model("treegru", granularity="auto"),
            "# translation, auto\n",
            model("translation", granularity="auto"),
        ]
    )


def options() -> str:
    """The plans of a workload with other policies, layouts and memory."""
    cases: dict[str, dict[str, Any]] = {
        **{name: {"policy": getattr(jedbatch.policies, name)} for name in ("depth", "agenda")},
        "no policy": {"policy": None},
        **{f"layout {name}": {"layout": name} for name in ("append", "longest", "reader", "pq")},
        **{f"reuse {reuse}": {"reuse": reuse} for reuse in (True, False)},
        "a list": {"out_axes": None},
    }
    return "\n".join(f"# {name}\n\n{model('treelstm', **given)}" for name, given in cases.items())


PLANS = {
    "models": models,
    "models_gpu": functools.partial(models, GPU_MODELS, target="gpu"),
    "ragged": ragged,
    "ragged_gpu": functools.partial(ragged, target="gpu"),
    "granularity": granularities,
    "options": options,
}
