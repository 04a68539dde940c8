"""How much of the package a call passes: modules may become fewer, not more."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch
from jedbatch._batch import calling
from jedbatch._support import native

PACKAGE = str(Path(jedbatch.__file__).parent) + "/"
PARAMS = {"E": jnp.ones((10, 4)), "w": jnp.eye(4) * 0.1}
# Modules that a call enters once its programs are compiled. Lower these where there are fewer.
MOST = {
    "call of known instances": 44,
    "call": 81,
    "gradient of known instances": 63,
    "gradient": 91,
    "plan": 77,
    "apply": 25,
}


@jedbatch.cell
def leaf(params, word):
    return jnp.tanh(params["E"][word])


@jedbatch.cell
def node(params, left, right):
    return jnp.tanh((left + right) @ params["w"])


def encode(params, tree):
    if isinstance(tree, int):
        return leaf(params, tree)
    return node(params, *[encode(params, child) for child in tree])


def minibatches(seed):
    """Yields minibatches of eight trees of two to eight leaves."""
    rng = np.random.default_rng(seed)

    def tree(leaves):
        if leaves == 1:
            return int(rng.integers(10))
        left = int(rng.integers(1, leaves))
        return tree(left), tree(leaves - left)

    while True:
        yield [tree(int(rng.integers(2, 9))) for _ in range(8)]


def entered(run, *args):
    """The modules in which a call runs a function."""
    found = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    sys.setprofile(note)
    try:
        run(*args)
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture(scope="module")
def modules():
    """By what is called, the modules that it enters after some minibatches."""
    if native.core() is None:
        pytest.skip("no compiled core")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JEDBATCH_CHECK", raising=False)
        return entered_by_each()


def entered_by_each():
    batched = jedbatch.batch(encode)
    gradient = jax.grad(lambda params, trees: batched(params, trees).sum())
    new = minibatches(0)
    known = next(new)
    for trees in (known, *(next(new) for _ in range(5)), known):
        batched(PARAMS, trees)
        gradient(PARAMS, trees)
        plan = batched.plan(PARAMS, trees)
        batched.apply(PARAMS, plan)
    before = batched.compilations
    found = {
        "call of known instances": entered(batched, PARAMS, known),
        "call": entered(batched, PARAMS, next(new)),
        "gradient of known instances": entered(gradient, PARAMS, known),
        "gradient": entered(gradient, PARAMS, next(new)),
        "plan": entered(batched.plan, PARAMS, next(new)),
        "apply": entered(batched.apply, PARAMS, batched.plan(PARAMS, next(new))),
    }
    assert batched.compilations == before
    return found


@pytest.mark.parametrize("name", MOST)
def test_a_call_enters_few_modules(modules, name):
    assert len(modules[name]) <= MOST[name], (len(modules[name]), sorted(modules[name]))


def test_a_plain_call_enters_no_feature(modules):
    """What exports, serves, streams, cuts over devices or decides on values is not passed."""
    features = "_export", "serve", "_control_flow", "_lazy", "_draw", "_commands"
    for name, found in modules.items():
        assert not {path for path in found if path.startswith(features)}, name


def test_the_tree_of_decisions_names_what_there_is():
    """At most eight decisions, and what follows on each is a function of the package."""
    lines = [line for line in calling.__doc__.splitlines() if line.startswith(" " * 8)]
    assert 0 < sum("?" in line for line in lines) <= 8
    text = "\n".join(path.read_text() for path in Path(PACKAGE).rglob("*.py"))
    for line in lines:
        _, name, _ = re.split(" {2,}", line.strip())
        assert f"def {name.rpartition('.')[2]}(" in text, line
