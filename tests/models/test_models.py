"""All models: values and gradients of the loop, and as few batches as there can be."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import pytest
from cases.helpers import check, mostly_slow
from cases.models import MODELS, random_params, treebank

import jedbatch
from jedbatch import models, policies
from jedbatch.data import (
    synthetic_lattices,
    synthetic_pairs,
    synthetic_tagged,
    synthetic_translations,
    synthetic_treebank,
)
from jedbatch.models import childsum, lattice, mvrnn, tagger, translation, tree, treegru, twotypes


@pytest.mark.parametrize("name", mostly_slow(MODELS, "deepsets maximum"))
def test_values_and_gradients(name):
    model = MODELS[name]
    cells = model.cells()
    fn = model.loss(cells)
    check(fn, random_params(cells), model.instances, rtol=model.rtol, alone=model.alone(fn))


def test_every_model_is_compared():
    modules = {name for name in models.__all__ if inspect.ismodule(getattr(models, name))}
    assert {name.split()[0].strip(",") for name in MODELS} == modules


def depth(root):
    return 0 if len(root) == 2 else 1 + max(depth(root[1]), depth(root[2]))


def longest(position):
    return lambda instances: max(len(x[position]) for x in instances)


@dataclass(frozen=True)
class Batches:
    """The batches of many synthetic instances.

    Attributes:
      cells: of the model.
      loss: from the cells to a function of parameters and an instance.
      instances: to plan.
      counts: batches of a type, by its name: a number, a function of the instances, or None for
        any number but zero.
      over_bound: most batches, as a multiple of the lower bound; None if there is no such limit.
      of_agenda: most batches, as a multiple of those of the agenda.
      num_types: types of nodes.
    """

    cells: Callable
    loss: Callable
    instances: Callable[[], list]
    counts: Mapping[str, int | Callable] = field(default_factory=dict)
    over_bound: float | None = 1.0
    of_agenda: float | None = None
    num_types: int | None = None


ONCE = {"leaf": 1, "score": 1}
PER_LEVEL = {**ONCE, "node": lambda trees: max(map(depth, trees))}
OF_LATTICES = {"embed_character": 1, "embed_word": 1, "score": 1}
PER_WORD = {name: longest(0) for name in ("forward1", "backward1", "forward2", "backward2")}
BATCHES = {
    "childsum": Batches(
        lambda: childsum.plain_cells(500, 4),
        childsum.scorer,
        lambda: synthetic_pairs(32, seed=4),
        {"word": 1, "relate": 1},
        over_bound=1.5,
    ),
    "lattice lstm": Batches(
        lambda: lattice.lstm_cells(300, 500, 9, 4),
        lattice.scorer,
        lambda: synthetic_lattices(16, seed=4),
        OF_LATTICES,
        over_bound=None,
        of_agenda=1.0,
    ),
    "lattice gru": Batches(
        lambda: lattice.gru_cells(300, 500, 9, 4),
        lattice.scorer,
        lambda: synthetic_lattices(16, seed=4),
        OF_LATTICES,
        over_bound=None,
        of_agenda=1.0,
    ),
    "mvrnn": Batches(
        lambda: mvrnn.flax_cells(60, 5, 4),
        mvrnn.scorer,
        lambda: treebank(mvrnn, 16, seed=4),
        PER_LEVEL,
        num_types=5,
    ),
    "tagger": Batches(
        lambda: tagger.flax_cells(500, 9, 4),
        tagger.scorer,
        lambda: synthetic_tagged(16, seed=4, spelled=False),
        {"embed": 1, "score": 1, **PER_WORD},
    ),
    "tagger of spelled words": Batches(
        lambda: tagger.flax_cells(500, 9, 4, num_characters=40),
        tagger.scorer,
        lambda: synthetic_tagged(16, seed=4, spelled=True),
        {"embed": 1, "score": 1, **PER_WORD},
    ),
    "translation": Batches(
        lambda: translation.flax_cells(500, 512, 4),
        translation.scorer,
        lambda: synthetic_translations(16, seed=4),
        {"source": 1, "target": 1, "score": 1, "encode": longest(0), "decode": longest(1)},
    ),
    "tree": Batches(
        lambda: tree.plain_cells(500, 5, 4),
        tree.scorer,
        lambda: synthetic_treebank(16, seed=4),
        PER_LEVEL,
    ),
    "treegru": Batches(
        lambda: treegru.flax_cells(60, 5, 4),
        treegru.scorer,
        lambda: treebank(treegru, 16, seed=4),
        PER_LEVEL,
        num_types=5,
    ),
    "twotypes": Batches(
        lambda: twotypes.flax_cells(60, 5, 4),
        twotypes.scorer,
        lambda: treebank(twotypes, 16, seed=4),
        {**ONCE, "node 0": None, "node 1": None},
        over_bound=1.15,
        of_agenda=0.8,
        num_types=6,
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name):
    case = BATCHES[name]
    cells, instances = case.cells(), case.instances()
    params = jax.eval_shape(cells.init, jax.random.key(0))
    plan = jedbatch.batch(case.loss(cells)).plan(params, instances)
    counts = Counter(plan.graph.types[t].name for t, _ in plan.schedule.batches)
    for type_name, count in case.counts.items():
        expected = count(instances) if callable(count) else count
        assert counts[type_name] == expected if expected else type_name in counts, type_name
    bound = jedbatch.lower_bound(plan.graph)
    assert bound <= len(plan.schedule)
    if case.over_bound is not None:
        assert len(plan.schedule) <= case.over_bound * bound
    if case.of_agenda is not None:
        agenda = jedbatch.schedule(plan.graph, policies.agenda)
        assert len(plan.schedule) <= case.of_agenda * len(agenda)
    if case.num_types is not None:
        assert len(plan.graph.present_types) == case.num_types
