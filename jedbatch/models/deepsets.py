"""Networks of sets of points, whose order means nothing (Zaheer et al., 2017).

With rows x_i, of which a set has any number, and `pool` the mean or the maximum over all rows:

    points   h_i = gelu(E x_i + b_E)
    layers   h_i = gelu(Γ h_i + Λ pool_j(h_j) + b)           every row hears of all the others
    output   logits = W pool_i(h_i) + b_W

Another order of the rows gives rows in another order up to the last line, and the same logits.

Shapes: x [n, features], h [n, hidden]; E [features, hidden], Γ, Λ [hidden, hidden], W [hidden,
labels]. The model is written for one set as an array, with n rows and nothing for those that other
sets may have besides.

References:
  Zaheer et al., Deep sets, NeurIPS 2017, sections 3 and A.

Examples:
  >>> import jax, jedbatch
  >>> from jedbatch.data import as_arrays, synthetic_points
  >>> from jedbatch.models import deepsets
  >>> model = deepsets.flax_model(features=2, num_labels=4, hidden=8)
  >>> params = model.init(jax.random.key(0))
  >>> score = jedbatch.batch(deepsets.scorer(model))
  >>> score(params, as_arrays(synthetic_points(2, mean_size=4))).shape  # loss and right labels
  (2, 2)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jedbatch import checks
from jedbatch.models.parts import Instance, Params, Pure, pure, scored

Pool = Callable[..., jax.Array]  # maps (rows, axis=, keepdims=) to one row, such as `jnp.mean`


class Layer(nnx.Module):
    """A layer of a row by itself and of all rows."""

    def __init__(self, hidden: int, pool: Pool, rngs: nnx.Rngs):
        self.own = nnx.Linear(hidden, hidden, rngs=rngs)
        self.others = nnx.Linear(hidden, hidden, use_bias=False, rngs=rngs)
        self.pool = pool

    def __call__(self, h: jax.Array) -> jax.Array:
        """Rows [n, hidden] after the layer."""
        return jax.nn.gelu(self.own(h) + self.others(self.pool(h, axis=0, keepdims=True)))


class Sets(nnx.Module):
    """The logits of a set."""

    def __init__(
        self, features: int, num_labels: int, hidden: int, layers: int, pool: Pool, rngs: nnx.Rngs
    ):
        self.points = nnx.Linear(features, hidden, rngs=rngs)
        self.layers = nnx.List([Layer(hidden, pool, rngs) for _ in range(layers)])
        self.output = nnx.Linear(hidden, num_labels, rngs=rngs)
        self.pool = pool

    def __call__(self, points: jax.Array) -> jax.Array:
        """The logits [labels] of points [n, features]."""
        h = jax.nn.gelu(self.points(points))
        for layer in self.layers:
            h = layer(h)
        return self.output(self.pool(h, axis=0))


@checks.sizes
def flax_model(
    features: int, num_labels: int, hidden: int, *, layers: int = 2, pool: Pool = jnp.mean
) -> Pure:
    """The parameters of a network of sets, and the logits [labels] of points [n, features].

    Args:
      features: how many numbers a point has.
      num_labels: how many labels there are.
      hidden: size of what is known of a point.
      layers: how many.
      pool: `jnp.mean` or `jnp.max`.
    """
    return pure(lambda rngs: Sets(features, num_labels, hidden, layers, pool, rngs))


@checks.fields(Pure)
def classifier(model: Pure) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, points [n, features]): the logits [labels] of one set."""
    return model.apply


@checks.fields(Pure)
def scorer(model: Pure) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, (points [n, features], label)): [loss, 1 if the label is right]."""
    return lambda params, example: scored(model.apply(params, example[0]), example[1])
