"""Programs of other people: the loop's results, few node types, and nothing that compiles late."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import helpers

import jedbatch

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("benchmarks are not installed", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import programs  # noqa: E402

# node types of a minibatch, at most
TYPES = {
    "childsum_equinox": 4,
    "childsum_nnx": 4,
    "childsum_haiku": 4,
    "messages": 6,
    "felsenstein": 5,
    "cky20": 7,
    "expressions": 21,  # at first
    "runge_kutta": 3,
    "runge_kutta_cell": 3,
    "modules": 6,
    "attention": 4,
    "attention_cell": 4,
    "circuits": 18,
}
WITHOUT_CELLS = ["expressions_plain"]
STOP_COMPILING = ["messages", "expressions", "circuits"]
COMPARED, COUNT, WARM, UNSEEN = 4, 24, 3, 5


def load(name):
    """(program, parameters, minibatches)."""
    try:
        program = programs.load(name)
    except ImportError as error:
        pytest.skip(str(error))
    rng = np.random.default_rng(0)
    minibatches = [program.instances(rng, COUNT, True) for _ in range(WARM + UNSEEN)]
    return program, program.parameters(jax.random.key(0), True), minibatches


@pytest.fixture(autouse=True)
def _rows_and_biases():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", helpers.mostly_slow([*TYPES, *WITHOUT_CELLS], "runge_kutta_cell"))
def test_programs_are_the_loop(name):
    """Ours and what is written by hand, values and gradients."""
    program, params, minibatches = load(name)
    instances = minibatches[0][:COMPARED]
    (arrays,) = program.prepare([instances])
    slopes = program.differentiable
    helpers.check(program.model, params, instances, slopes, rtol=1e-4)
    run = lambda p: program.by_hand(p, arrays)  # noqa: E731
    expected = helpers.loop(program.model, params, instances)
    helpers.assert_close(run(params), expected, 1e-4)
    if slopes:
        loop = lambda p: helpers.number(helpers.loop(program.model, p, instances))  # noqa: E731
        slope = jax.grad(lambda p: helpers.number(run(p)))(params)
        helpers.assert_close(slope, jax.grad(loop)(params), 1e-3)


def planned(batched, program, params, instances):
    """(a plan, its number of types)."""
    plan = batched.plan(params, instances, gradient=program.differentiable)
    return plan, len(plan.graph.present_types)


# Felsenstein's model begins with the spectrum of the rates, for each instance.
@pytest.mark.filterwarnings("ignore:.*on shared arguments alone:jedbatch.errors.NoCellsWarning")
@pytest.mark.parametrize(
    "name",
    helpers.mostly_slow(
        [name for name in TYPES if name not in STOP_COMPILING[1:]], "runge_kutta_cell", "messages"
    ),
)
def test_there_are_few_types(name):
    program, params, minibatches = load(name)
    batched = jedbatch.batch(program.model)
    types = [planned(batched, program, params, instances)[1] for instances in minibatches]
    assert max(types) <= TYPES[name], types


@pytest.mark.slow
@pytest.mark.parametrize("name", STOP_COMPILING)
def test_programs_stop_compiling(name):
    """Nothing is compiled after three minibatches, which have few types."""
    program, params, minibatches = load(name)
    batched = jedbatch.batch(program.model)
    step = jax.jit(jax.value_and_grad(lambda p, plan: batched.apply(p, plan).sum()))

    def run(instances):
        jax.block_until_ready(batched(params, instances))
        plan, num_types = planned(batched, program, params, instances)
        assert num_types <= TYPES[name]
        jax.block_until_ready(step(params, plan))

    for instances in minibatches[:WARM]:
        run(instances)
    with helpers.assert_no_recompile():
        for instances in minibatches[WARM:]:
            run(instances)
