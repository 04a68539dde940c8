"""Arithmetic expressions of eight operators, evaluated at points: symbolic regression.

An expression is the name of a variable, a number, or `(operator, *operands)`. The result is the
mean squared distance to the values that it should have.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch
from benchmarks.programs import Program, forest

VARIABLES = ("x", "y", "z")


def divide(a, b):
    return a / (1.0 + b * b)


BINARY = {"add": jnp.add, "subtract": jnp.subtract, "multiply": jnp.multiply, "divide": divide}
UNARY = {"sin": jnp.sin, "cos": jnp.cos, "tanh": jnp.tanh, "negative": jnp.negative}
OPERATORS = BINARY | UNARY
CELLS = {name: jedbatch.cell(operator, name=name) for name, operator in OPERATORS.items()}


@jedbatch.cell
def constant(params, value):
    return params["scale"] * jnp.full_like(params["x"], value)


@jedbatch.cell
def distance(params, value):
    return jnp.square(value - params["target"]).mean()


def evaluate(params, expression):
    if isinstance(expression, str):
        return params[expression]
    if isinstance(expression, float):
        return constant(params, expression)
    name, *operands = expression
    return CELLS[name](*[evaluate(params, operand) for operand in operands])


def model(params, expression):
    return distance(params, evaluate(params, expression))


def evaluate_plain(params, expression):
    if isinstance(expression, str):
        return params[expression]
    if isinstance(expression, float):
        return params["scale"] * jnp.full_like(params["x"], expression)
    name, *operands = expression
    return OPERATORS[name](*[evaluate_plain(params, operand) for operand in operands])


def model_plain(params, expression):
    return jnp.square(evaluate_plain(params, expression) - params["target"]).mean()


def instances(rng, count, tiny):
    def grow(depth):
        draw = rng.random()
        if depth == 0 or draw < 0.15:
            if draw < 0.1:
                return round(float(rng.normal()), 3)
            return str(rng.choice(VARIABLES))
        if draw < 0.6:
            return (str(rng.choice(list(BINARY))), grow(depth - 1), grow(depth - 1))
        return (str(rng.choice(list(UNARY))), grow(depth - 1))

    def large_enough():
        while isinstance(expression := grow(3 if tiny else 6), (str, float)):
            pass
        return expression

    return [large_enough() for _ in range(count)]


def parameters(key, tiny):
    names = (*VARIABLES, "target")
    drawn = jax.random.normal(key, (len(names), 4 if tiny else 64))
    return dict(zip(names, drawn, strict=True)) | {"scale": jnp.ones(())}


def prepare(minibatches):
    """Trees whose data are (number of the operator or variable, constant)."""

    def read(_, expression):
        if isinstance(expression, str):
            return 0, np.array([VARIABLES.index(expression), 0.0]), ()
        if isinstance(expression, float):
            return 0, np.array([len(VARIABLES), expression]), ()
        name, *operands = expression
        kind = 0 if name in BINARY else 1
        return kind, np.array([list((BINARY, UNARY)[kind]).index(name), 0.0]), operands

    return forest.prepare(minibatches, read, 2)


def by_hand(params, trees):
    """All operators of as many operands are computed for every node, and one is chosen."""

    def chosen(operators, which, *operands):
        results = jnp.stack([operator(*operands) for operator in operators.values()])
        return jnp.take_along_axis(results, which.astype(int)[None, :, None], axis=0)[0]

    def leaf(data):
        which, number = data.T
        variables = jnp.stack([params[name] for name in VARIABLES])[which.astype(int)]
        is_constant = which[:, None] == len(VARIABLES)
        return jnp.where(is_constant, params["scale"] * number[:, None], variables)

    def binary(data, below, _):
        return chosen(BINARY, data[:, 0], below[::2], below[1::2])

    def unary(data, below, _):
        return chosen(UNARY, data[:, 0], below)

    values = forest.climb(trees, leaf, [binary, unary])
    return jnp.square(values - params["target"]).mean(1)


PROGRAMS = {
    "expressions": Program(instances, parameters, model, prepare, by_hand, 1000),
    "expressions_plain": Program(instances, parameters, model_plain, prepare, by_hand, 1000),
}
