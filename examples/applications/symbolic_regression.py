"""Symbolic regression: how well a thousand random expressions fit ten thousand points.

An expression is a variable (its number, an int), a constant (a float), or `(operator, *operands)`
of eight operators. Its fitness is the mean squared distance to the target. A population of a search
is new in each generation, so that what counts is the time from expressions to numbers.

    python examples/applications/symbolic_regression.py [--quick] [--write]
"""

import functools

import jax
import jax.numpy as jnp
import measuring
import numpy as np
from measuring import Application, Side

import jedbatch

# --- operators ---

OPERATORS = {
    "add": lambda xp, a, b: a + b,
    "subtract": lambda xp, a, b: a - b,
    "multiply": lambda xp, a, b: a * b,
    "divide": lambda xp, a, b: a / xp.sqrt(1 + b * b),
    "sin": lambda xp, a: xp.sin(a),
    "cos": lambda xp, a: xp.cos(a),
    "tanh": lambda xp, a: xp.tanh(a),
    "square": lambda xp, a: a * a,
}
BINARY = list(OPERATORS)[:4]

# --- one expression ---

CELLS = {
    name: jedbatch.cell(functools.partial(fn, jnp), name=name) for name, fn in OPERATORS.items()
}


@jedbatch.cell
def constant(data, number):
    return jnp.full_like(data["target"], number)


@jedbatch.cell
def distance(data, value):
    return jnp.square(value - data["target"]).mean()


def evaluate(data, expression):
    if isinstance(expression, int):
        return data["x"][expression]
    if isinstance(expression, float):
        return constant(data, expression)
    name, *operands = expression
    return CELLS[name](*[evaluate(data, operand) for operand in operands])


def fitness(data, expression):
    return distance(data, evaluate(data, expression))


# --- blocks of points ---


def in_blocks(batched, block=500):
    """Fitness of what was planned, a block of points after the other, which stays in caches."""

    @jax.jit
    def run(data, plan):
        blocks = {
            "x": data["x"].reshape(3, -1, block).swapaxes(0, 1),
            "target": data["target"].reshape(-1, block),
        }
        return jax.lax.map(lambda block: batched.apply(block, plan), blocks).mean(0)

    def prepare(data, expressions):
        first = {name: x[..., :block] for name, x in data.items()}
        return batched.plan(first, expressions, gradient=False)

    return Side(prepare, run)


# --- stack machine ---

CODE = {name: number for number, name in enumerate(["variable", "constant", *OPERATORS])}


def postfix(expression):
    """Instructions (code, variable, number, operands), operands first."""
    if isinstance(expression, int):
        return [(CODE["variable"], expression, 0.0, 0)]
    if isinstance(expression, float):
        return [(CODE["constant"], 0, expression, 0)]
    name, *operands = expression
    below = [instruction for operand in operands for instruction in postfix(operand)]
    return [*below, (CODE[name], 0, 0.0, len(operands))]


def as_arrays(data, expressions, length):
    """Instructions of all expressions, [expressions, length] each, and the rows they write to.

    A row is where the value of an instruction lies on the stack; padding copies the result.
    """
    kinds = (np.int32, np.int32, np.float32, np.int32)
    code, variable, number, row = (np.zeros((len(expressions), length), kind) for kind in kinds)
    depth = 0
    for i, expression in enumerate(expressions):
        top = 0
        for j, (c, v, x, operands) in enumerate(postfix(expression)):
            top -= operands
            code[i, j], variable[i, j], number[i, j], row[i, j] = c, v, x, top
            top += 1
            depth = max(depth, top)
        code[i, j + 1 :] = len(CODE)
    return code, variable, number, row, np.zeros(1 << (depth - 1).bit_length())


def machine(data, code, variable, number, row, room):
    """Fitness of one expression."""
    branches = [
        lambda a, b, v, x: data["x"][v],
        lambda a, b, v, x: jnp.full_like(a, x),
        *(
            (lambda a, b, v, x, fn=fn: fn(jnp, a, b))
            if name in BINARY
            else (lambda a, b, v, x, fn=fn: fn(jnp, a))
            for name, fn in OPERATORS.items()
        ),
        lambda a, b, v, x: a,
    ]

    def step(stack, instruction):
        code, variable, number, row = instruction
        value = jax.lax.switch(code, branches, stack[row], stack[row + 1], variable, number)
        return jax.lax.dynamic_update_index_in_dim(stack, value, row, 0), None

    stack = jnp.zeros((len(room) + 1, *data["target"].shape))
    stack, _ = jax.lax.scan(step, stack, (code, variable, number, row))
    return jnp.square(stack[0] - data["target"]).mean()


# --- stack machine, vmap ---


@jax.jit
def by_vmap(data, programs):
    *instructions, room = programs
    return jax.vmap(machine, (None, 0, 0, 0, 0, None))(data, *instructions, room)


# --- stack machine, one by one ---


@jax.jit
def one_by_one(data, programs):
    *instructions, room = programs
    return jax.lax.map(lambda x: machine(data, *x, room), tuple(instructions))


# --- NumPy ---


@np.errstate(over="ignore")
def in_numpy(data, expressions):
    def evaluate(expression):
        if isinstance(expression, int):
            return data["x"][expression]
        if isinstance(expression, float):
            return np.full_like(data["target"], expression)
        name, *operands = expression
        return OPERATORS[name](np, *map(evaluate, operands))

    return [np.square(evaluate(e) - data["target"]).mean() for e in expressions]


# --- all of them ---


def population(rng, count, depth):
    """Random expressions; those of a variable or a constant alone are left out."""

    def grow(depth):
        draw = rng.random()
        if depth == 0 or draw < 0.15:
            return int(rng.integers(3)) if rng.random() < 0.7 else round(float(rng.normal()), 3)
        name = list(OPERATORS)[rng.integers(len(OPERATORS))]
        return (name, *(grow(depth - 1) for _ in range(2 if name in BINARY else 1)))

    def large_enough():
        while not isinstance(expression := grow(depth), tuple):
            pass
        return expression

    return [large_enough() for _ in range(count)]


def make(quick):
    rng = np.random.default_rng(0)
    count, depth, points, many = (6, 3, 5, 5) if quick else (1000, 6, 10_000, 10)
    x = rng.normal(size=(3, points)).astype(np.float32)
    on_host = {"x": x, "target": np.sin(x[0]) * x[1] + 0.5 * x[2]}
    data = jax.device_put(on_host)
    populations = [population(rng, count, depth) for _ in range(measuring.WARM + many)]
    length = max(len(postfix(e)) for p in populations for e in p)
    arrays = functools.partial(as_arrays, length=length)

    def sides():
        for function in (by_vmap, one_by_one):
            function.clear_cache()
        return {
            "jedbatch": in_blocks(jedbatch.batch(fitness), min(points, 500)),
            "jedbatch, all points at once": measuring.planned(
                jedbatch.batch(fitness), gradient=False
            ),
            "`vmap` of a stack machine": Side(arrays, by_vmap, few=1),
            "`lax.map` of a stack machine": Side(arrays, one_by_one),
            "NumPy": Side(lambda _, p: p, lambda _, p: np.array(in_numpy(on_host, p))),
        }

    loop = lambda data, p: jnp.stack([fitness(data, e) for e in p])
    return Application(data, populations, loop, sides, rtol=1e-3)


def illustrate(axis):
    """Sizes of the expressions of a population."""
    sizes = [len(postfix(e)) for e in population(np.random.default_rng(0), 1000, 6)]
    axis.hist(sizes, bins=range(0, max(sizes) + 2, 2))
    axis.set(xlabel="operators, variables and constants", ylabel="expressions of 1,000")


SHARES = {
    "jedbatch": ["one expression", "blocks of points"],
    "jedbatch, all points at once": ["one expression"],
    "`vmap` of a stack machine": ["stack machine", "stack machine, vmap"],
    "`lax.map` of a stack machine": ["stack machine", "stack machine, one by one"],
    "NumPy": ["NumPy"],
}

if __name__ == "__main__":
    measuring.main(__file__, __doc__, make, illustrate, SHARES)
