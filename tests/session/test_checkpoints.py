"""Training that stops in the middle of an epoch and goes on: the same losses, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases.helpers import assert_close, random_tree

import jedbatch
from jedbatch.policies import FSM

H, WORDS = 4, 9
LEAF = jedbatch.cell(lambda p, i: p["e"][i], name="leaf")
ADD = jedbatch.cell(lambda p, x, y: jnp.tanh(jnp.concatenate([x, y]) @ p["w"]), name="add")
MUL = jedbatch.cell(lambda p, x, y: jnp.tanh((x * y) @ p["m"]), name="mul")
OPTIMIZER = optax.adam(0.01)


def encode(p, tree):
    if isinstance(tree, int):
        return LEAF(p, tree)
    cell = MUL if len(str(tree)) % 3 == 0 else ADD
    return cell(p, encode(p, tree[0]), encode(p, tree[1]))


def params():
    rng = np.random.default_rng(0)
    shapes = {"e": (WORDS, H), "w": (2 * H, H), "m": (H, H)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def trees(count, seed=0):
    rng = np.random.default_rng(seed)
    word = lambda: int(rng.integers(WORDS))  # noqa: E731
    return [random_tree(rng, int(rng.integers(1, 8)), word) for _ in range(count)]


TREES = trees(48)


def dataset():
    """Minibatches of four, in another order than they are in."""
    grain = pytest.importorskip("grain")
    pytest.importorskip("absl.flags").FLAGS.mark_as_parsed()  # Grain reads some of them
    return grain.MapDataset.source(TREES).shuffle(seed=3).batch(4, batch_fn=list).to_iter_dataset()


class Run:
    """A training as a process has it: a batched function, warmed on a sample, and its plans."""

    def __init__(self, policy, minibatches, ahead):
        self.batched = jedbatch.batch(encode, policy=policy)
        self.params = params()
        self.opt_state = OPTIMIZER.init(self.params)
        if policy is None:
            self.batched.learn(self.params, TREES[:16])
        sample = (self.params, TREES[:16])
        self.batched.warm(*sample, batch_size=4, gradient=True, calls=False)
        self.plans = self.batched.plans(self.params, minibatches, ahead=ahead)
        self.step = jax.jit(self._step)

    def _step(self, params, opt_state, plan):
        loss, slope = jax.value_and_grad(self._loss)(params, plan)
        updates, opt_state = OPTIMIZER.update(slope, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def _loss(self, params, plan):
        return jnp.square(self.batched.apply(params, plan)).sum()

    def train(self, steps=None):
        """Returns the losses of so many minibatches, or of those that are left."""
        losses = []
        while steps is None or len(losses) < steps:
            plan = next(self.plans, None)
            if plan is None:
                break
            state = self.params, self.opt_state
            self.params, self.opt_state, loss = self.step(*state, plan)
            losses.append(float(loss))
        return losses


@pytest.mark.filterwarnings("ignore")  # of Orbax
def test_resumed_in_the_middle_of_an_epoch(tmp_path):
    """Parameters, the state of the optimizer and of the plans, the policy, the exported program."""
    ocp = pytest.importorskip("orbax.checkpoint")
    whole = Run(None, dataset(), ahead=2)
    policy = whole.batched.policy
    want = whole.train()
    assert len(want) == 12

    first = Run(policy, dataset(), ahead=2)
    before = first.train(5)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(first.params),
            opt_state=ocp.args.StandardSave(first.opt_state),
            plans=ocp.args.JsonSave(first.plans.get_state()),
        )
        manager.save(5, args=items)
        manager.wait_until_finished()
    policy.save(tmp_path / "policy.json")
    first.batched.export(first.params, TREES[:16], batch_size=4).save(tmp_path / "model")

    then = Run(FSM.load(tmp_path / "policy.json"), dataset(), ahead=3)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        items = ocp.args.Composite(
            params=ocp.args.StandardRestore(then.params),
            opt_state=ocp.args.StandardRestore(then.opt_state),
            plans=ocp.args.JsonRestore(),
        )
        restored = manager.restore(manager.latest_step(), args=items)
    exported = jedbatch.Exported.load(tmp_path / "model")
    graph = then.batched.graph(params(), TREES[:4])
    results = jnp.stack([encode(restored["params"], t) for t in TREES[:4]])
    assert_close(exported(restored["params"], graph), results, rtol=1e-5)
    then.params, then.opt_state = restored["params"], restored["opt_state"]
    then.plans.set_state(restored["plans"])
    after = then.train()
    assert before + after == want
    assert [x.tobytes() for x in jax.tree.leaves(then.params)] == [
        x.tobytes() for x in jax.tree.leaves(whole.params)
    ]


# --- positions ---

TOTAL = jedbatch.batch(lambda w, x: w * x)
MINIBATCHES = [[float(i)] for i in range(6)]


def results(plans):
    return [float(TOTAL.apply(1.0, plan)[0]) for plan in plans]


@pytest.mark.parametrize("ahead", [0, 2])
def test_positions_of_what_was_handed_out(ahead):
    """Not of what was planned ahead; they may be set again and again."""
    plans = TOTAL.plans(1.0, MINIBATCHES, ahead=ahead)
    assert plans.get_state() == {"position": 0, "sources": None}
    results([next(plans), next(plans)])
    state = plans.get_state()
    assert state == {"position": 2, "sources": None}
    assert results(plans) == [2, 3, 4, 5]
    assert plans.get_state()["position"] == 6
    plans.set_state(state)
    assert results([next(plans)]) == [2]
    plans.set_state({**state, "position": 5})
    assert results(plans) == [5]
    plans.close()
    assert list(plans) == []


@pytest.mark.slow
def test_positions_with_processes():
    plans = TOTAL.plans(1.0, MINIBATCHES, workers=1)
    results([next(plans), next(plans), next(plans)])
    state = plans.get_state()
    plans.close()
    again = TOTAL.plans(1.0, MINIBATCHES, workers=1)
    again.set_state(state)
    assert results(again) == [3, 4, 5]


def test_iterators_that_begin_once():
    state = {"position": 2, "sources": None}
    fresh = TOTAL.plans(1.0, iter(MINIBATCHES))
    fresh.set_state(state)
    assert results(fresh) == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="6 minibatches were read already"):
        fresh.set_state(state)


def test_errors_after_a_position():
    wrong = [*MINIBATCHES[:3], [1.0, None]]
    plans = TOTAL.plans(1.0, wrong)
    plans.set_state({"position": 3, "sources": None})
    with pytest.raises(TypeError) as error:
        next(plans)
    assert "minibatch 3 was planned" in str(error.value.__notes__)


def test_states_that_are_none():
    plans = TOTAL.plans(1.0, MINIBATCHES)
    for state in (3, {}, {"position": 1}):
        with pytest.raises(TypeError, match="what `get_state` returned"):
            plans.set_state(state)
    with pytest.raises(ValueError, match="there are 6 minibatches"):
        plans.set_state({"position": 7, "sources": None})
    with pytest.raises(ValueError, match="a kind that are counted"):
        plans.set_state({"position": 1, "sources": [{"next_index": 1}]})
    state = TOTAL.plans(1.0, dataset()).get_state()
    with pytest.raises(ValueError, match="a kind that are counted"):
        plans.set_state(state)
