"""How much faster are the models of `jedbatch.models` than their instances one by one?

Flax modules as they ship, on the data that `jedbatch.models.WORKLOADS` names or its synthetic twin,
against the loop over jit-compiled cells.
"""

import jax
import numpy as np
import pytest

import jedbatch
from benchmarks import common
from benchmarks.suite import harness
from jedbatch.models import WORKLOADS
from jedbatch.models.parts import jitted

FILES = {
    "treelstm": "sst.trees.txt.gz",
    "treelstm2": "sst.trees.txt.gz",
    "treegru": "sst.trees.txt.gz",
    "mvrnn": "sst.trees.txt.gz",
    "childsum": "sick.jsonl.gz",
    "tagger": "wikiner.jsonl.gz",
    "tagger_chars": "wikiner.jsonl.gz",
    "translation": "iwslt15_envi.tsv.gz",
    "lattice_lstm": "weibo_lattice.jsonl.gz weibo_ner.jsonl.gz",
    "lattice_gru": "weibo_lattice.jsonl.gz weibo_ner.jsonl.gz",
}


@pytest.mark.parametrize("mode", harness.MODES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_models(benchmark, name, mode, options):
    if options.workloads and name not in options.workloads.split(","):
        pytest.skip("not among --workloads")
    if not options.full and (mode == "training" or name not in ("childsum", "tagger_chars")):
        pytest.skip("part of --full")
    size, hidden = (64, 32 if name == "mvrnn" else 128) if options.full else (8, 16)
    workload, training = WORKLOADS[name], mode == "training"
    paths = [options.data / file for file in FILES[name].split()] if options.data else []
    instances, sizes = workload.load(*paths, limit=size)
    cells = workload.cells(hidden=hidden, **sizes)
    params = cells.init(jax.random.key(0))
    batched = jedbatch.batch(workload.scorer(cells), policy=workload.policy())
    one = workload.scorer(jitted(cells))

    def loss(params, plan):
        return batched.apply(params, plan)[:, 0].sum()

    def loss_of_one(params, instance):
        return one(params, instance)[0]

    def planned():
        return batched.plan(params, instances, gradient=training)

    if training:
        loss, loss_of_one = jax.value_and_grad(loss), jax.value_and_grad(loss_of_one)
    run, plan = jax.jit(loss), planned()
    few = instances[: 2 if training else harness.SLOW_INSTANCES]
    functions = {
        "planned": lambda: run(params, plan),
        "known": lambda: run(params, planned()),
        "loop": lambda: [loss_of_one(params, x) for x in few],
    }
    for function in functions.values():
        jax.block_until_ready(function())
    times = harness.turns(benchmark, functions, options.seconds or (3 if options.full else 0.5))
    seconds = {name: float(np.median(t)) for name, t in times.items()}
    share = len(batched.plan(params, few).graph.node_type) / len(plan.graph.node_type)
    seconds["loop"] /= share
    benchmark.extra_info |= {
        "workload": name,
        "title": workload.title,
        "batch": size,
        "hidden": hidden,
        "mode": mode,
        "nodes": len(plan.graph.node_type),
        "batches": len(plan.schedule),
        "bound": jedbatch.lower_bound(plan.graph),
        "seconds": seconds,
        "source": common.source(str(paths[0]) if paths else None),
    }
