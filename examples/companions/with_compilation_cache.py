"""Programs that JAX's persistent compilation cache keeps for the next process.

Run it twice with the name of a folder: the second time nothing is compiled. By default the cache
keeps what took longer than a second to compile; programs of small models take less, so that limit
is set to zero. `JAX_COMPILATION_CACHE_DIR` and `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS` in the
environment do the same as the two lines of configuration here.
"""

import collections
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch


@jedbatch.cell
def phrase(params, left, right):
    return jnp.tanh(params["compose"] @ jnp.concatenate([left, right]))


def encode(params, tree):
    if isinstance(tree, int):
        return params["embed"][tree]
    return phrase(params, encode(params, tree[0]), encode(params, tree[1]))


def main(folder):
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    events = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))

    rng = np.random.default_rng(0)
    shapes = {"embed": (9, 4), "compose": (4, 8)}
    params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
    trees = [((1, 2), 3), (4, (5, (6, 7))), 8]
    jax.block_until_ready(jedbatch.batch(encode)(params, trees))
    found, missing = (events[f"/jax/compilation_cache/cache_{x}"] for x in ("hits", "misses"))
    print(f"{missing} programs compiled, {found} found in {folder}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "xla-programs")
