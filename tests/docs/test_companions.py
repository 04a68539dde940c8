"""Examples with other libraries compute what the plain loop over instances computes."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, mostly_slow
from cases.pages import check_by_loop, run

import jedbatch

FOLDER = Path(__file__).parents[2] / "examples" / "companions"
if not FOLDER.exists():
    pytest.skip("examples are not installed", allow_module_level=True)
WHERE = {path.stem: str(path) for path in FOLDER.glob("*.py")}
CODE = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.py"))}
COMPARED = {  # results that are compared with the loop's
    "with_blackjax": ("draws", "steps"),
    "with_chex": ("result", "gradient"),
    "with_diffrax": ("result", "steps", "gradient"),
    "with_equinox": ("result", "gradient"),
    "with_flax_linen": ("result", "gradient"),
    "with_flax_nnx": ("before", "losses", "after"),
    "with_haiku": ("result", "gradient"),
    "with_jaxtyping": ("result", "gradient", "pooled"),
    "with_lineax": ("result", "gradient"),
    "with_optax": ("losses", "params"),
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries


def skip_without_its_library(name):
    for library in re.findall(r"^(?:import|from) (\w+)", CODE[name], re.MULTILINE):
        pytest.importorskip(library)


@pytest.mark.parametrize("name", mostly_slow(COMPARED, "with_flax_linen"))
def test_companion_is_the_loop(name):
    skip_without_its_library(name)
    check_by_loop(CODE[name], WHERE[name], *COMPARED[name], rtol=1e-4)


@pytest.mark.slow
def test_restored_parameters_and_policy_give_the_same_bits():
    skip_without_its_library("with_orbax")
    names = run(CODE["with_orbax"], WHERE["with_orbax"])
    expected = jedbatch.testing.loop(names["encode"], names["params"], names["trees"])
    np.testing.assert_allclose(names["before"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(names["before"], names["after"])
    assert names["again"].policy == names["policy"]


@pytest.mark.slow
def test_training_on_plans_of_a_pipeline_is_training_by_the_loop():
    skip_without_its_library("with_grain")
    import grain

    pytest.importorskip("absl.flags").FLAGS.mark_as_parsed()  # Grain reads some of them
    names = run(CODE["with_grain"], WHERE["with_grain"])
    assert len(names["losses"]) == 4
    before = CODE["with_grain"].split("encode_all =")[0]
    params = run(before, WHERE["with_grain"])["params"]
    minibatches = grain.MapDataset.source(names["trees"]).shuffle(seed=0).batch(4, batch_fn=list)
    for trees, found in zip(minibatches, names["losses"], strict=True):

        def loss(params, trees=trees):
            states = [names["encode"](params, tree) for tree in trees]
            return jnp.square(jnp.stack(states)).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        np.testing.assert_allclose(found, value, rtol=1e-4)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)


@pytest.mark.slow
def test_exported_programs_give_the_values_and_gradients_of_the_loop():
    skip_without_its_library("with_jax_export")
    pytest.importorskip("flatbuffers")
    names = run(CODE["with_jax_export"], WHERE["with_jax_export"])
    assert set(names["loaded"].platforms) == {"cpu", "cuda", "tpu"}

    def by_loop(params):
        return jnp.stack([names["encode"](params, tree) for tree in names["trees"]])

    np.testing.assert_allclose(names["result"], by_loop(names["params"]), rtol=1e-5, atol=1e-6)
    expected = jax.grad(lambda params: by_loop(params).sum())(names["params"])
    assert_close(names["gradient"], expected, 1e-5)


@pytest.mark.slow
def test_a_second_process_finds_all_programs(tmp_path):
    command = [sys.executable, FOLDER / "with_compilation_cache.py", tmp_path / "programs"]
    printed = [subprocess.run(command, capture_output=True, text=True).stdout for _ in range(2)]
    first, second = [[int(n) for n in re.findall(r"(\d+) (?:programs|found)", x)] for x in printed]
    assert first[0] > 0
    assert second == [0, first[0] + first[1]]


def test_companions_are_short_and_all_are_tried():
    assert set(CODE) == {
        *COMPARED,
        "with_compilation_cache",
        "with_grain",
        "with_jax_export",
        "with_orbax",
    }
    for name, code in CODE.items():
        assert code.count("\n") <= 60, name
