"""Minibatches planned in the processes of other packages' loaders of data."""

import jax.numpy as jnp
import numpy as np
import pytest
from cases import planned

import jedbatch

rng = np.random.default_rng(0)
PARAMS = {
    "table": jnp.asarray(rng.normal(size=(9, 4)), jnp.float32),
    "left": jnp.asarray(rng.normal(size=(4, 4)), jnp.float32),
}
TREES = [(i % 9, (i % 7, i % 5)) if i % 3 else ((i % 4, 8), (i % 2, 3)) for i in range(32)]


def check(batched, planner, prepared):
    """Compares the results of minibatches of four with the loop; all came from elsewhere."""
    prepared = list(prepared)
    assert len(prepared) == 8
    assert [x.reason for x in prepared] == [None] * 8
    assert all(x.instances is None for x in prepared)
    results = jnp.concatenate([batched.apply(PARAMS, planner.attach(x)) for x in prepared])
    loop = jnp.stack([planned.encode(PARAMS, tree) for tree in TREES])
    np.testing.assert_allclose(results, loop, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_dataloader_of_pytorch_plans_in_its_processes():
    data = pytest.importorskip("torch.utils.data")
    batched = jedbatch.batch(planned.encode)
    planner = batched.planner(PARAMS, TREES[:4])
    loader = data.DataLoader(
        TREES, batch_size=4, collate_fn=planner, num_workers=1, multiprocessing_context="spawn"
    )
    check(batched, planner, loader)
    forked = data.DataLoader(
        TREES, batch_size=4, collate_fn=planner, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(RuntimeError, match="fork of the process"):
        next(iter(forked))
    here = [planner.attach(x) for x in data.DataLoader(TREES, batch_size=4, collate_fn=planner)]
    assert [plan.graph.num_instances for plan in here] == [4] * 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_dataset_of_grain_plans_in_its_processes():
    grain = pytest.importorskip("grain")
    pytest.importorskip("absl.flags").FLAGS.mark_as_parsed()  # Grain reads some of them
    batched = jedbatch.batch(planned.encode)
    planner = batched.planner(PARAMS, TREES[:4])
    dataset = grain.MapDataset.source(TREES).batch(4, batch_fn=planner).to_iter_dataset()
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=1)
    check(batched, planner, dataset.mp_prefetch(options))
