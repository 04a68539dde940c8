"""Parts of models: Flax modules as functions and cells, scores and sums, visits of trees."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jedbatch

Params = Any  # a pytree of arrays
Instance = Any  # what a loss is of: a tree, a sentence, a pair of either


class Pure(NamedTuple):
    """A module of `flax.nnx` as two pure functions.

    Attributes:
      init: maps a random key to the parameters, a pytree.
      apply: maps (params, *inputs) to what the module returns for the inputs.
    """

    init: Callable[[jax.Array], Params]
    apply: Callable[..., Any]


def pure(make: Callable[[nnx.Rngs], nnx.Module]) -> Pure:
    """A module of `flax.nnx` as two pure functions.

    Args:
      make: makes the module, given random number generators; its parameters are its only state.

    Examples:
      >>> import jax
      >>> from flax import nnx
      >>> from jedbatch.models.parts import pure
      >>> dense = pure(lambda rngs: nnx.Linear(3, 4, rngs=rngs))
      >>> params = dense.init(jax.random.key(0))
      >>> dense.apply(params, jax.numpy.ones(3)).shape
      (4,)
    """
    structure = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return Pure(
        lambda key: nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key)), nnx.Param)),
        lambda params, *inputs: nnx.merge(structure, nnx.State(params))(*inputs),
    )


def initializer(modules: Mapping[str, Pure]) -> Callable[[jax.Array], dict[str, Params]]:
    """A function of a random key: the parameters of modules, by their names."""

    def init(key: jax.Array) -> dict[str, Params]:
        keys = jax.random.split(key, len(modules))
        return {name: modules[name].init(k) for name, k in zip(modules, keys, strict=True)}

    return init


def by_name(name: str, module: Pure) -> Callable[..., Any]:
    """A function that applies a module with the parameters of its name."""
    return lambda params, *inputs: module.apply(params[name], *inputs)


def module_cell(name: str, module: Pure) -> Callable[..., Any]:
    """A cell that applies a module with the parameters of its name."""
    return jedbatch.cell(by_name(name, module), name=name)


def module_cells(modules: Mapping[str, Pure]) -> dict[str, Callable[..., Any]]:
    """`init` of all modules, and a cell for each of them, by name."""
    cells = {name: module_cell(name, module) for name, module in modules.items()}
    return {"init": initializer(modules), **cells}


def jitted(cells: Any) -> Any:
    """The same cells, each compiled by `jax.jit`: what a loop over single instances calls."""
    return jax.tree.map(lambda part: jax.jit(part) if callable(part) else part, cells)


def scored(logits: jax.Array, label: jax.Array) -> jax.Array:
    """[cross-entropy, 1 if the label is right] of logits [labels]."""
    loss = -jax.nn.log_softmax(logits)[label]
    return jnp.stack([loss, (jnp.argmax(logits) == label).astype(loss.dtype)])


def score_cell(name: str, module: Pure) -> Callable[..., jax.Array]:
    """A cell that scores the logits of a module with a label, the last of its inputs."""

    def score(params: Params, *inputs: Any) -> jax.Array:
        *read, label = inputs
        return scored(module.apply(params[name], *read), label)

    return jedbatch.cell(score, name="score")


@jedbatch.cell(name="plus")
def _plus(*terms: jax.Array) -> jax.Array:
    return sum(terms[1:], start=terms[0])


def total(scores: Sequence[jax.Array]) -> jax.Array:
    """The sum of scores: by eights, then by twos. Few nodes, few batches, two types."""
    scores = list(scores)
    while len(scores) > 1:
        width = 8 if len(scores) >= 8 else 2
        in_blocks = len(scores) - len(scores) % width
        sums = [_plus(*scores[i : i + width]) for i in range(0, in_blocks, width)]
        scores = sums + scores[in_blocks:]
    return scores[0]


def of_first(cell: Callable[..., Any]) -> Callable[..., Any]:
    """The cell, given whole states: it reads their first part, such as h of (h, c)."""
    return lambda params, state, *more: cell(params, state[0], *more)


def tree_classifier(
    leaf: Callable[..., Any], node: Callable[..., Any], output: Callable[..., jax.Array]
) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, tree): the output at the root of one binary tree.

    Args:
      leaf: maps (params, word) to a state.
      node: maps (params, left state, right state) to a state. What follows the children in the
        tuple of a node, such as its kind, follows the states.
      output: maps (params, state) to the result.
    """

    def visit(params: Params, tree: Instance) -> Any:
        if len(tree) == 2:
            return leaf(params, tree[1])
        _, left, right, *more = tree
        return node(params, visit(params, left), visit(params, right), *more)

    return lambda params, tree: output(params, visit(params, tree))


def tree_scorer(
    leaf: Callable[..., Any], node: Callable[..., Any], score: Callable[..., jax.Array]
) -> Callable[[Params, Instance], jax.Array]:
    """A function of (params, tree): the sum of the scores of all nodes of one binary tree.

    Args:
      leaf: as for `tree_classifier`.
      node: as for `tree_classifier`.
      score: maps (params, state, label) to a score.
    """

    def visit(params: Params, tree: Instance, scores: list[jax.Array]) -> Any:
        if len(tree) == 2:
            state = leaf(params, tree[1])
        else:
            _, left, right, *more = tree
            state = node(params, visit(params, left, scores), visit(params, right, scores), *more)
        scores.append(score(params, state, tree[0]))
        return state

    def score_all(params: Params, tree: Instance) -> jax.Array:
        scores: list[jax.Array] = []
        visit(params, tree, scores)
        return total(scores)

    return score_all
