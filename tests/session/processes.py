"""A process of several that train together; `test_processes.py` starts them.

Arguments: what to do, the number of this process, how many there are, and the port of the first.
"""

import json
import os
import sys

what, index, count, port = sys.argv[1], *map(int, sys.argv[2:])
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from cases import together  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import jedbatch  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"localhost:{port}", count, index, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10
)
mesh = jax.make_mesh((len(jax.devices()),), ("data",))
replicated = NamedSharding(mesh, PartitionSpec())
params = {
    name: jax.make_array_from_process_local_data(replicated, x)
    for name, x in together.PARAMS.items()
}
batched = jedbatch.batch(together.encode)


def say(**facts):
    print(json.dumps(facts), flush=True)


def train(batched, minibatches, ahead=2):
    """Returns the losses, which all processes have."""

    @jax.jit
    def step(params, plan):
        loss = lambda p: jnp.square(batched.apply(p, plan)).mean()  # noqa: E731
        value, slope = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, slope), value

    own, losses = params, []
    for plan in batched.plans(own, minibatches, mesh=mesh, axis="data", ahead=ahead):
        own, loss = step(own, plan)
        losses.append(float(loss))
        yield losses


def mine(number, num_minibatches=3):
    """The part of a minibatch that this process has, of each minibatch."""
    every = [together.trees(8, seed=s) for s in range(num_minibatches)]
    size = 8 // count
    return [trees[number * size : (number + 1) * size] for trees in every]


def losses_of(minibatches, batched=batched, **options):
    losses = []
    for losses in train(batched, minibatches, **options):  # noqa: B007
        pass
    return losses


def run():
    if what == "train":
        sample = together.trees(16, seed=9)
        batched.warm(params, sample, batch_size=8 // count, gradient=True, calls=False, mesh=mesh)
        plan = batched.plan(params, mine(index)[0], mesh=mesh)
        results = np.asarray(batched.apply(params, plan))
        losses = losses_of(mine(index))
        # of which one process has much larger trees than all before
        large = [together.trees(8 // count, seed=index, size=60 if index == count - 1 else 3)] * 2
        compiled = [batched.compilations]
        more = losses_of(large, ahead=0)
        compiled.append(batched.compilations)
        say(results=results.tolist(), losses=losses, more=more, compiled=compiled)
    elif what == "dies":
        for number, _ in enumerate(train(batched, mine(index))):
            say(step=number)
            if number == 1 and index == count - 1:
                os._exit(3)
    elif what == "disagree":
        for about in (fails, model, types, instances, minibatches):
            try:
                about(jedbatch.batch(together.encode))
            except Exception as error:
                say(**{about.__name__: f"{type(error).__name__}: {error}"})
    else:
        raise AssertionError(what)


def fails(batched):
    bad = mine(index)
    if index == count - 1:
        bad[2] = [*bad[2][:-1], (1, 99)]
    losses_of(bad, batched=batched)


def model(_):
    other = jedbatch.batch(together.encode_with(0.5 if index == count - 1 else 1.0))
    losses_of(mine(index), batched=other)


def types(batched):
    known = [[together.without(t) for t in x] for x in mine(index)]
    losses_of(mine(index) if index == count - 1 else known, batched=batched)


def instances(batched):
    losses_of([x[: 2 if index else 3] for x in mine(index)], batched=batched)


def minibatches(batched):
    losses_of(mine(index, 2 + index % 2), batched=batched)


try:
    run()
except Exception as error:
    say(error=f"{type(error).__name__}: {error}")
    os._exit(1)  # without waiting for the others
