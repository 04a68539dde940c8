"""Stacks of Python lists outside of cells: types for a few lengths, and the loop's results."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.helpers import assert_close, check, loop, mostly_slow
from jax import lax

import jedbatch
from jedbatch._jaxpr.interpret import inlined
from jedbatch._jaxpr.list_arrays import numbers_of_length
from jedbatch._jaxpr.list_expressions import Expressions
from jedbatch._jaxpr.rolling import Roller
from jedbatch.errors import PerformanceWarning

SIZE = 4
W = {
    "w": jnp.asarray(np.random.default_rng(0).normal(size=(SIZE, SIZE)), jnp.float32),
    "q": jnp.asarray(np.random.default_rng(1).normal(size=SIZE), jnp.float32),
}


def attend(w, rows, values=None):
    hidden = jnp.tanh(rows @ w["w"])
    weights = jax.nn.softmax(hidden @ w["q"])
    return weights @ (hidden if values is None else values)


def attention(w, xs):
    return attend(w, jnp.stack(xs)) @ w["w"]


def two_lists(w, xs):
    keys, values = [w["w"] @ x for x in xs], [jnp.sin(x) for x in xs]
    return attend(w, jnp.stack(keys), jnp.stack(values))


def mean(w, xs):
    rows = jnp.stack(xs)
    return jnp.tanh(rows).sum(axis=0) / len(xs) + rows.max(axis=0) * w["q"]


def read_early(w, xs):
    """A result is read before all results are there."""
    rows = jnp.stack(xs)
    largest = jnp.tanh(rows.max(axis=0)) * w["q"]
    return largest + jnp.cos(rows).sum(axis=0)


def there_and_back(w, xs):
    """A vector that is made of the list meets the list again."""
    rows = jnp.stack(xs)
    largest = jnp.tanh(w["w"] @ rows.max(axis=0))
    return jnp.exp(rows - largest[None]).sum(axis=0)


def one_after_the_other(w, xs):
    """A list of what comes from lists."""
    first = [attend(w, jnp.stack(xs[: i + 1])) for i in range(len(xs))]
    return attend(w, jnp.stack(first))


def after_a_learned_one(w, xs):
    """All states so far, of which the first is a weight."""
    states = [w["q"]]
    for x in xs:
        states.append(jnp.tanh(attend(w, jnp.stack(states)) + states[-1] * x))
    return states[-1]


def in_a_cell(w, xs):
    squared = jedbatch.cell(lambda rows: (rows**2).sum(axis=0))
    return jnp.tanh(squared(jnp.stack(xs)) + w["q"])


def last_axis(w, xs):
    columns = jnp.stack(xs, axis=-1)
    return jax.nn.relu(w["w"] @ columns).sum(axis=-1)


def rows_put_together(w, xs):
    return attend(w, jnp.vstack(xs)) + attend(w, jnp.concatenate([x[None] for x in xs]))


def end_to_end(w, xs):
    """Vectors put together to a longer one."""
    vectors = jnp.concatenate(xs)
    largest = jnp.concatenate([jnp.sin(x) * w["q"] for x in xs]).max()
    return jax.nn.softmax(vectors) @ vectors + largest * w["q"] + vectors.mean()


def by_number(w, xs):
    """Results of a list are read row by row."""
    hidden = jnp.tanh(jnp.stack(xs) @ w["w"])
    weights = jax.nn.softmax(jnp.stack([row @ w["q"] for row in xs]))
    pairs = [jnp.sin(hidden[i]) * hidden[i - 1] for i in range(len(xs))]
    return sum(weights[i] * pair for i, pair in enumerate(pairs)) + hidden.sum(axis=0)


def by_number_backwards(w, xs):
    columns = jnp.stack(xs, axis=1)
    rows = (w["w"] @ columns).T
    return sum((k + 1.0) * rows[-1 - k] for k in range(len(xs)))


def in_order(w, xs):
    """Places of extremes, sorts, and sums of what came before."""
    rows = jnp.stack(xs)
    hidden = jnp.tanh(rows @ w["w"])
    scores = hidden @ w["q"] + hidden[:, 0] - hidden[:, -2:].max(axis=1)
    nearest = rows[jnp.argmax(scores)] - rows[jnp.argmin(scores)]
    sums = jnp.cumsum(jnp.sin(rows), axis=0) * jnp.flip(jnp.sort(rows, axis=0), 0)
    return nearest * w["q"] + (sums * w["q"]).sum(axis=0) + jnp.argmax(jnp.concatenate(xs))


def ranked(w, xs):
    """Rows in the order of their scores, and the best two."""
    rows = jnp.stack(xs)
    scores = rows @ w["q"]
    discounts = 1 / (2.0 + jnp.arange(len(xs)))
    best, places = lax.top_k(scores, 2)
    return (rows[jnp.argsort(-scores)] * discounts[:, None]).sum(axis=0) + best @ rows[places]


def lists(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [list(rng.normal(size=(n, SIZE)).astype(np.float32)) for n in lengths]


LENGTHS = [2, 7, 3, 5, 6, 9, 8, 11, 2, 7]
FEW = [2, 7, 3, 9, 2]  # of each room for elements; the loop compiles its operations for each
# fn: node types at most, for ten lengths
PROGRAMS = {
    attention: 4,
    two_lists: 5,
    mean: 6,
    read_early: 6,
    there_and_back: 3,
    one_after_the_other: 3,
    after_a_learned_one: 10,
    in_a_cell: 5,
    last_axis: 3,
    rows_put_together: 6,
    end_to_end: 14,
    by_number: 13,
    by_number_backwards: 7,
    in_order: 11,
    ranked: 7,
}


FAST = (
    "two_lists",
    "read_early",
    "end_to_end",
    "one_after_the_other",
    "after_a_learned_one",
    "in_order",
    "ranked",
)


@pytest.mark.parametrize("fn", mostly_slow(PROGRAMS, *FAST))
def test_many_lengths_are_few_types(fn):
    with jax.numpy_rank_promotion("allow"):
        check(fn, W, lists(FEW), alone=jax.jit(fn))
        plan = jedbatch.batch(fn).plan(W, lists(LENGTHS))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)
            apart = jedbatch.batch(fn, granularity="cell").plan(W, lists(LENGTHS))
    assert len(plan.graph.present_types) <= PROGRAMS[fn] < len(apart.graph.present_types)
    assert len(plan.schedule) < len(apart.schedule)


def stacked_again(w, xs):
    weights = jnp.cumsum(jnp.stack(xs), axis=0) @ w["q"]
    return jnp.stack([weights, jnp.sin(weights)]).max()


def weights_of_each(w, xs):
    weights = [jax.nn.softmax(jnp.stack([x @ w["w"] @ y for y in xs])) for x in xs]
    return (jnp.tanh(jnp.stack(weights)) @ jnp.stack(xs)).sum(axis=0)


@pytest.mark.parametrize("fn", [stacked_again, weights_of_each])
def test_results_as_long_as_lists_are_stacked_like_elements(fn):
    """Four elements of four numbers: results of one for each are of the type of an element."""
    check(fn, W, lists([2, 4, 3, 4]))


ALONG = {
    "cumsum": lambda x, axis: jnp.cumsum(x, axis=axis),
    "reversed cumsum": lambda x, axis: lax.cumsum(x, axis, reverse=True),
    "cumprod": lambda x, axis: jnp.cumprod(x, axis=axis),
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "sort": lambda x, axis: lax.sort(x, axis),
    "flip": jnp.flip,
    "flip all axes": lambda x, axis: jnp.flip(x),
    "argmax": lambda x, axis: lax.argmax(x, axis, np.int32),
    "argmin": lambda x, axis: lax.argmin(x, axis, np.int32),
}
OF_ROWS = {  # of elements that are stacked
    "row": lambda x, axis: lax.dynamic_index_in_dim(x, (x.sum() > 0) * 9 - 1, axis),
    "columns": lambda x, axis: lax.slice_in_dim(x, 1, None, axis=1 - axis),
    "column": lambda x, axis: lax.dynamic_index_in_dim(x, (x.sum() > 0) * 9 - 1, 1 - axis),
}
PLACED = {  # the same, of which the length counts
    "ranks": lambda x, axis: jnp.argsort(jnp.argsort(x[:, 0])),
    "ranked": lambda x, axis: x[jnp.argsort(x[:, 0], descending=True)],
    "sorted by two": lambda x, axis: lax.sort((x[:, 1], x[:, 0]), 0, num_keys=2)[1],
    "sorted in themselves": lambda x, axis: lax.sort((x, x[:, ::-1]), 1)[1],
    "best": lambda x, axis: lax.top_k(x.T, 1)[0],
    "best of each": lambda x, axis: lax.top_k(x, 1)[0],
    "row of the best": lambda x, axis: x.T[:, lax.top_k(x[:, 1], 1)[1]],
    "not all there": lambda x, axis: x.at[2 * jnp.argsort(x[:, 0]) - 1].get(mode="fill"),
    "those nearest": lambda x, axis: x.at[2 * jnp.argsort(x[:, 0])].get(mode="clip"),
}
ELEMENTS = {
    "numbers": np.array([[3.0, -1, 2], [0, 5, -1], [np.inf, 5, -np.inf], [3, -2, -0.0]], "float32"),
    "not a number": np.array([[3, np.nan], [np.nan, -np.inf], [1, np.nan], [0, 0]], "float32"),
    "least": np.full((4, 2), np.iinfo(np.int32).min, np.int32),
}


ONE_RESULT = "argmax", "argmin", "row", "best", "row of the best"  # and not one for each element


@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize(
    ("name", "put_together"),
    [*itertools.product(ALONG, [False, True]), *((name, False) for name in OF_ROWS | PLACED)],
)
def test_what_is_done_along_a_list_is_what_jax_does(name, put_together, elements):
    """In programs with room for more elements, which hold anything and have no derivatives."""
    given, done = ELEMENTS[elements], (ALONG | OF_ROWS | PLACED)[name]
    join = jnp.concatenate if put_together else jnp.stack
    listed = name not in ONE_RESULT

    def program(*xs):
        made = done(join(xs), 0)
        return list(made.reshape(len(xs), -1)) if listed else [made]

    expressions = Expressions(lambda params: str(params))
    results, numbers = set(), {}
    for length in {2, 3, 4} - {given.shape[1]}:
        roles = [("element", 0, k) for k in range(length)]
        traced = inlined(jax.make_jaxpr(program)(*given[:length]))
        roller = Roller(expressions, traced, roles, (length,))
        results.add(roller.results(listed))
        numbers[length,] = roller.numbers
    (result,) = results
    part = expressions.given(given[0].shape, given.dtype, "element", 0)
    run = expressions.program(result, [], [False], 6, [part], numbers_of_length(numbers))
    for length in (2, 4):
        xs = list(given[:length])
        filling = [np.full_like(xs[0], k) for k in (7, -9, 3, 1)][: 6 - length]

        @jax.jit
        def both(xs, filling, length=length):
            """Results and derivatives of the program with room for more, and of the one in it."""
            found, pull = jax.vjp(lambda *xs: run([], [*xs, *filling], [jnp.int32(length)])[0], *xs)
            expected, pull_expected = jax.vjp(lambda *xs: jnp.stack(program(*xs)), *xs)
            expected = expected if listed else expected[0]
            if found.dtype.kind != "f":
                return found, expected
            slopes = np.ones(found.shape, found.dtype)
            if listed:  # nobody reads the others
                slopes[length:] = 0
            slopes_expected = jnp.ones_like(expected if listed else expected[None])
            return found, expected, pull(slopes), pull_expected(slopes_expected)

        found, expected, *slopes = both(xs, filling)
        np.testing.assert_allclose(found[:length] if listed else found, expected, rtol=1e-6)
        if slopes:
            assert_close(*slopes, rtol=1e-6)


def test_lists_of_weights_are_stacked_once():
    """Each instance reads stacks of two and of three weights, of which none is its own."""

    def fn(w, xs):
        few, more = jnp.stack([w["q"], -w["q"]]), jnp.stack([w["q"], *w["w"][:2]])
        return sum((few @ x).sum() * (more @ x) for x in xs)

    batched = check(fn, W, lists([2, 3]))
    graph = batched.plan(W, lists([2, 3])).graph
    names = {graph.types[t].name for t in graph.present_types}
    assert "matmul" in names
    assert not names & {"stack", "shared"}


def test_few_lengths_are_types_of_their_own_until_there_are_more():
    """Instances that were recorded before are recorded again."""
    batched = jedbatch.batch(attention)
    few, many = lists([2, 3, 4, 2]), lists([2, 3, 4, 5, 6, 7])
    assert len(batched.plan(W, few).graph.present_types) > 3
    for instances in (few, many, few):
        assert_close(batched(W, instances), loop(attention, W, instances), 1e-5)
    assert len(batched.plan(W, few).graph.present_types) == 2
    assert len(batched.plan(W, lists(range(9, 15))).graph.present_types) == 2


def test_results_of_lists_do_not_make_types():
    """Those of lists of one element are among them, and new lengths compile nothing."""
    batched = jedbatch.batch(by_number)
    for lengths in (LENGTHS, [1, 4, 9, 2, 3, 6, 1, 10, 12, 8]):
        instances = lists(lengths)
        assert_close(batched(W, instances), loop(by_number, W, instances), 1e-5)
    assert len(batched.plan(W, instances).graph.present_types) <= PROGRAMS[by_number]
    with jedbatch.testing.assert_no_recompile():
        batched(W, lists([7, 4, 2, 1, 5, 13, 6, 3, 10, 2]))


def decoder(w, instance):
    """Attends over one list as often as the instance says, each time after the time before."""
    xs, steps = instance
    memory, state = jnp.stack(xs), xs[-1]
    for _ in range(steps):
        read = jax.nn.softmax(memory @ state) @ memory
        state = jnp.tanh(w["w"] @ state + read)
    return state


def decoder_with_keys(w, instance):
    """Keys of the list are computed once and read in every step, as is the sum of the weights."""
    xs, steps = instance
    memory, state = jnp.stack(xs), w["q"] * xs[0]
    keys, covered = jnp.tanh(memory @ w["w"]), jnp.zeros_like(memory[:, 0])
    for _ in range(steps):
        weights = jax.nn.softmax(keys @ state - covered)
        covered = covered + weights
        state = jnp.tanh(w["w"] @ state + weights @ memory)
    return state + memory[0]


def many_queries(w, instance):
    """Uses that do not wait for each other."""
    xs, count = instance
    memory = jnp.stack(xs)
    queries = [jnp.sin((k + 1.0) * xs[0]) for k in range(count)]
    return sum(w["w"] @ (jax.nn.softmax(memory @ q) @ memory) for q in queries)


def without_those_taken(w, instance):
    """A mask of the length of the list, a position in it, and what is read of it in each step."""
    xs, steps = instance
    memory, state, total = jnp.stack(xs), w["q"], 0.0
    place, free = np.arange(len(xs)), np.ones(len(xs), bool)
    for step in range(min(steps, len(xs))):
        near = jnp.where(free, memory @ state - 0.1 * place, -jnp.inf)
        taken = (5 * step) % len(xs) if free[(5 * step) % len(xs)] else int(free.argmax())
        total = total + jax.nn.log_softmax(near)[taken]
        free = free & (place != taken)
        state = jnp.tanh(w["w"] @ state + xs[taken])
    return total


@pytest.mark.parametrize(
    ("fn", "most"),
    [
        (decoder, 6),
        pytest.param(decoder_with_keys, 20, marks=pytest.mark.slow),
        (many_queries, 8),
        (without_those_taken, 20),
    ],
)
def test_lists_that_are_read_again_and_again(fn, most):
    """Types are as few for any number of times."""

    def instances(seed, count):
        rng = np.random.default_rng(seed)
        lengths = [2, 7, 3, 5, 6, 9, 8, 11, *rng.integers(2, 12, size=count - 8)]
        return list(zip(lists(lengths, seed), rng.integers(1, 6, size=count).tolist(), strict=True))

    few = instances(0, 8)
    check(fn, W, few)
    batched = jedbatch.batch(fn)
    many = instances(1, 40)
    assert len(batched.plan(W, many).graph.present_types) <= most
    assert_close(batched(W, many), loop(fn, W, many), 1e-5)
    batched(W, instances(2, 40))
    with jedbatch.testing.assert_no_recompile():
        batched(W, instances(3, 40))


def test_a_stack_that_is_returned_stays_as_it_is():
    def rows(w, xs):
        return jnp.stack(xs) @ w["w"]

    instances = lists(LENGTHS)
    results = jedbatch.batch(rows, out_axes=None)(W, instances)
    for found, xs in zip(results, instances, strict=True):
        assert_close(found, rows(W, xs), 1e-5)


def test_trees_attend_over_children():
    """Regions follow on each other, of several lengths in one instance."""

    def encode(w, tree):
        if isinstance(tree, float):
            return jnp.tanh(w["q"] * tree)
        return attend(w, jnp.stack([encode(w, child) for child in tree]))

    rng = np.random.default_rng(0)

    def tree(depth):
        if depth == 0:
            return float(rng.normal())
        return tuple(tree(depth - 1) for _ in range(rng.integers(2, 8)))

    trees = [tree(2) for _ in range(8)]
    batched = check(encode, W, trees)
    assert len(batched.plan(W, trees).graph.present_types) <= 5


def each_other(w, xs):
    """Two lists wait for what comes of each other."""
    left, right = jnp.stack(xs), jnp.stack([jnp.sin(x) for x in xs])
    a, b = left.max(axis=0), right.max(axis=0)
    return (right * a[None]).sum(axis=0) + (left * b[None]).sum(axis=0)


def in_a_circle(w, xs):
    """Three lists of different lengths, on the way a vector."""
    lists_given = [jnp.stack(xs), jnp.stack(xs[1:]), jnp.stack([*xs, w["q"], w["q"]])]
    largest = [jnp.tanh(w["w"] @ rows.max(axis=0)) for rows in lists_given]
    others = [*largest[1:], largest[0]]
    return sum((rows * x[None]).sum(axis=0) for rows, x in zip(lists_given, others, strict=True))


@pytest.mark.parametrize("fn", mostly_slow([each_other, in_a_circle], "each_other"))
def test_lists_that_wait_for_each_other(fn):
    check(fn, W, lists([2, 7, 3, 2, 5, 3]))


@pytest.mark.filterwarnings("ignore:.*were recorded one by one")
def test_many_lists_read_in_another_order():
    """Each is a node, in the order in which they can run; none waits for Python's recursion."""

    def fn(w, xs):
        rows = [jnp.stack([x * k for x in xs]) for k in range(300)]
        largest = w["q"]
        for r in rows:
            largest = (r * largest[None]).max(axis=0)
        return largest + sum(r.sum(axis=0) for r in reversed(rows))

    instances = lists([2, 3, 2, 3])
    batched = jedbatch.batch(fn)
    plan = batched.plan(W, instances)
    names = {plan.graph.types[t].name for t in plan.graph.present_types}
    assert "stack" not in names
    assert_close(batched.apply(W, plan), loop(fn, W, instances), 1e-3)


def test_stacks_of_arrays_of_any_length_are_packed():
    """Lists that meet rows of different lengths are left to them."""

    def weigh(w, xs, rows):
        weights = jax.nn.softmax(rows @ jnp.stack(xs).T, axis=0)
        return (weights.T @ rows).sum(axis=0) + attend(w, jnp.stack(xs))

    rng = np.random.default_rng(0)
    instances = [
        (xs, rng.normal(size=(n, SIZE)).astype(np.float32))
        for xs, n in zip(lists(LENGTHS), [3, 8, 5, 2, 9, 4, 7, 3, 6, 1], strict=True)
    ]
    apart = [xs for xs, _ in instances], [rows for _, rows in instances]
    batched = jedbatch.batch(weigh, (None, 0, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        found = batched(W, *apart)
    expected = jnp.stack([weigh(W, xs, rows) for xs, rows in instances])
    assert_close(found, expected, 1e-5)
