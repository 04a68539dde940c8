"""Training by several processes, resumed by any number: data by Grain, checkpoints by Orbax.

On one machine, for a try, in two terminals or with `&`:

    python train.py --folder /tmp/run --processes 2 --process 0
    python train.py --folder /tmp/run --processes 2 --process 1

Started again, with as many processes or others, it goes on from the last checkpoint in the folder,
which all of them see. Each step is on the same examples, however many processes there are.
"""

import argparse
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import jedbatch

SIZE = 8  # examples of a minibatch, of all processes together


@jedbatch.cell
def join(params, left, right):
    return jnp.tanh(params["join"] @ jnp.concatenate([left, right]))


@jedbatch.cell
def loss_at_root(params, state, label):
    return optax.softmax_cross_entropy_with_integer_labels(params["read"] @ state, label)


def loss_of(params, example):
    tree, label = example

    def encode(t):
        return params["embed"][t] if isinstance(t, int) else join(params, *map(encode, t))

    return loss_at_root(params, encode(tree), label)


def initial():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"embed": (9, 8), "join": (8, 16), "read": (2, 8)}
    return {
        name: 0.3 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def random_example(rng):
    def tree(size):
        if size == 1:
            return int(rng.integers(9))
        left = int(rng.integers(1, size))
        return tree(left), tree(size - left)

    return tree(int(rng.integers(1, 9))), int(rng.integers(2))


rng = np.random.default_rng(0)
examples = [random_example(rng) for _ in range(40)]  # or a file that all processes see
losses_of = jedbatch.batch(loss_of)
optimizer = optax.adam(0.02)

# --- a part of each minibatch ---


def minibatches(index, count):
    """The part of each minibatch of one of several processes, without end; it reads no other."""
    shuffled = grain.MapDataset.source(examples).seed(0).shuffle().repeat()
    return shuffled[index::count].batch(SIZE // count, batch_fn=list)


# --- the steps ---


@jax.jit
def step(state, plan):
    loss = lambda params: losses_of.apply(params, plan).mean()
    value, gradient = jax.value_and_grad(loss)(state["params"])
    updates, optimizer_state = optimizer.update(gradient, state["optimizer"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer_state}, value


def train(folder, steps, save_every):
    """Trains from the last checkpoint in a folder on; yields each step, from 1, and its loss."""
    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())  # parameters are on all devices
    params = jax.jit(initial, out_shardings=everywhere)()
    moments = jax.jit(optimizer.init, out_shardings=everywhere)(params)
    state = {"params": params, "optimizer": moments}
    options = ocp.CheckpointManagerOptions(save_interval_steps=save_every, max_to_keep=2)
    with ocp.CheckpointManager(folder, options=options) as checkpoints:
        done = checkpoints.latest_step() or 0  # steps
        if done:
            state = checkpoints.restore(done, args=ocp.args.StandardRestore(state))
        count = jax.process_count()
        sample = examples[: 2 * SIZE]  # the same in all processes
        losses_of.warm(
            params, sample, batch_size=SIZE // count, gradient=True, calls=False, mesh=mesh
        )
        own = minibatches(jax.process_index(), count)[done:steps]
        for plan in losses_of.plans(params, own, mesh=mesh, axis="data"):
            state, loss = step(state, plan)
            done += 1
            checkpoints.save(done, args=ocp.args.StandardSave(state))  # while training goes on
            yield done, loss


# --- a process ---


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--coordinator", default="localhost:9911")
    args = parser.parse_args()
    if args.processes > 1:  # before JAX computes anything
        jax.distributed.initialize(
            args.coordinator, args.processes, args.process, heartbeat_timeout_seconds=20
        )
    for number, loss in train(args.folder.absolute(), args.steps, args.save_every):
        print("step", number, "loss", float(loss), flush=True)


if __name__ == "__main__":
    main()
