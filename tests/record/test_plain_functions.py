"""Functions without cells are run as Python runs them, however often they were called before."""

import functools
import gc
import warnings
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import programs
from cases.helpers import assert_close, assert_no_recompile, check, loop, random_tree
from flax import linen

import jedbatch

H = 4
PARAMS = programs.weights(0, E=(20, H), W=(2 * H, H), b=(H,))


def leaf(params, word):
    return jnp.tanh(params["E"][word])


def node(params, left, right):
    return jnp.tanh(jnp.concatenate([left, right]) @ params["W"] + params["b"])


def recursive(node, leaf=leaf):
    """A function of trees, of two functions."""

    def fn(params, tree):
        if isinstance(tree, int):
            return leaf(params, tree)
        return node(params, fn(params, tree[0]), fn(params, tree[1]))

    return fn


def trees(seed, num=24, largest=12):
    rng = np.random.default_rng(seed)
    word = lambda: int(rng.integers(20))  # noqa: E731
    return [random_tree(rng, int(n), word) for n in rng.integers(2, largest, num)]


@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, words: table[jnp.array(words)],
        lambda table, words: table[np.array(words)],
        lambda table, words: table[jnp.asarray(words), 1],
        lambda table, words: table[np.array(words)[:, None], :2],
        lambda table, words: table[words[0], np.array(words) % H],
        lambda table, words: table[jnp.array(words[0])],
        lambda table, words: table[np.array(words, np.uint8)],
    ],
)
def test_look_ups_of_arrays_of_words_are_one_node(look_up):
    """So JAX computes nothing while instances are recorded; negative numbers count from the end."""
    fn = lambda params, words: jnp.sum(look_up(params["E"], words))  # noqa: E731
    given = np.random.default_rng(0).integers(20, size=(12, 3)).tolist()
    batched = check(fn, PARAMS, given)
    plan = batched.plan(PARAMS, [[4, 4, 1], [9, 2, 0]])
    assert len(plan.graph.node_type) == 4  # with the sums
    if "uint8" not in look_up.__code__.co_names:
        negative = [[3, -1, 19], [-20, 0, 5]]
        assert_close(batched(PARAMS, negative), jnp.stack([fn(PARAMS, x) for x in negative]), 1e-6)


def test_words_that_are_no_rows_are_errors():
    batched = jedbatch.batch(lambda params, words: params["E"][jnp.array(words)].sum())
    given = [[k, k + 1] for k in range(12)]
    with pytest.raises(IndexError, match="instance 1 looks up row 25 of a table of 20 rows"):
        batched(PARAMS, [given[0], [25, 1], *given[1:]])


def test_arrays_of_words_that_instances_make_are_operands():
    """Operations on tables and arrays are computed once only while few instances bring new ones."""
    fn = lambda params, words: jnp.take(params["E"], jnp.asarray(words), axis=0).mean(0)  # noqa: E731
    rng = np.random.default_rng(0)
    minibatches = [[rng.integers(20, size=2 + k % 3).tolist() for k in range(12)] for _ in range(6)]
    batched = check(fn, PARAMS, minibatches[0])
    expected = [loop(fn, PARAMS, given) for given in minibatches]
    got = [batched(PARAMS, given) for given in minibatches[:3]]
    with assert_no_recompile():
        got += [batched(PARAMS, given) for given in minibatches[3:]]
    assert_close(jnp.stack(got), jnp.stack(expected), 1e-5)
    graph = batched.plan(PARAMS, minibatches[1]).graph
    assert not any("shared" in str(graph.types[t]) for t in graph.present_types)


def test_rows_that_all_instances_look_up_are_computed_once():
    order = np.array([3, 1, 0, 2])
    turn = jedbatch.cell(lambda w, x: jnp.tanh(x @ w))
    fn = lambda params, word: turn(params["W"][order], params["E"][word])  # noqa: E731
    batched = check(fn, PARAMS, list(range(16)))
    types = [str(t) for t in batched.plan(PARAMS, list(range(16))).graph.types]
    assert not any("4,4" in t for t in types)


def test_arrays_of_constants_are_computed_once():
    rotations = [np.roll(np.eye(H, dtype=np.float32), k, axis=0) for k in range(6)]
    turn = jedbatch.cell(lambda w, x: jnp.tanh(x @ w))

    def fn(params, word):
        h = params["E"][word]
        for by in rotations:
            h = turn(params["W"][:H] @ by, h)
        return h

    batched = check(fn, PARAMS, list(range(16)), gradients=False)
    types = [str(t) for t in batched.plan(PARAMS, list(range(16))).graph.types]
    assert not any("4,4" in t for t in types)


def test_masks_are_no_look_ups():
    mask = np.arange(20) % 3 == 0
    fn = lambda params, k: params["E"][mask].sum() * k  # noqa: E731
    check(fn, PARAMS, [1.0, 2.0, 3.0])


# --- models ---


def by_partial(params, tree):
    """Parts that have their parameters already, and children by `map`."""
    if isinstance(tree, int):
        return leaf(params, tree)
    compose = functools.partial(node, params)
    return compose(*map(functools.partial(by_partial, params), tree))


def by_reduce(params, words):
    return functools.reduce(functools.partial(node, params), (leaf(params, w) for w in words))


class Model:
    """A model whose parts are methods."""

    def __init__(self, scale):
        self.scale = scale

    def leaf(self, params, word):
        return self.scale * jnp.tanh(params["E"][word])

    def node(self, params, left, right):
        return node(params, left, right)

    def __call__(self, params, tree):
        if isinstance(tree, int):
            return self.leaf(params, tree)
        return self.node(params, self(params, tree[0]), self(params, tree[1]))


class Composer(eqx.Module):
    """A part of a model that is a pytree."""

    W: jax.Array

    def __call__(self, left, right):
        return jnp.tanh(jnp.concatenate([left, right]) @ self.W)


def by_composer(params, tree):
    if isinstance(tree, int):
        return leaf(params, tree)
    return params["composer"](by_composer(params, tree[0]), by_composer(params, tree[1]))


class Layer(linen.Module):
    """A part of a model that gets its parameters when it is applied."""

    @linen.compact
    def __call__(self, left, right):
        return jnp.tanh(linen.Dense(H)(left - right))


LAYER = Layer()


def by_layer(params, tree):
    if isinstance(tree, int):
        return leaf(params, tree)
    return LAYER.apply(params["layer"], by_layer(params, tree[0]), by_layer(params, tree[1]))


MODELS = {
    "functions": (recursive(node), PARAMS),
    "methods": (Model(2.0), PARAMS),
    "partial": (by_partial, PARAMS),
    "pytrees": (by_composer, PARAMS | {"composer": Composer(PARAMS["W"])}),
    "modules": (by_layer, PARAMS | {"layer": LAYER.init(jax.random.key(0), *jnp.zeros((2, H)))}),
    "compiled": (recursive(jax.jit(node), jax.jit(leaf)), PARAMS),
}


@pytest.mark.filterwarnings("ignore::jedbatch.errors.SlowCallsWarning")  # under `jax.jit` they are
@pytest.mark.filterwarnings("ignore::jedbatch.errors.NoCellsWarning")  # so are modules of Flax
@pytest.mark.parametrize("granularity", ["auto", None])
@pytest.mark.parametrize("name", MODELS)
def test_parts_of_models_are_nodes(name, granularity):
    fn, params = MODELS[name]
    batched = check(fn, params, trees(0), granularity=granularity)
    for seed in range(1, 4):
        batched.plan(params, trees(seed), gradient=False)
    unseen = trees(4)
    plan = batched.plan(params, unseen, gradient=False)
    num_leaves = sum(str(tree).count(",") + 1 for tree in unseen)
    assert len(plan.graph.node_type) == 2 * num_leaves - len(unseen)
    assert len(plan.graph.present_types) == 2
    assert_close(batched.apply(params, plan), loop(fn, params, unseen), 1e-5)


# --- what Python may do in a function ---


def inner(x):
    return 2 * x


around = jedbatch_calls = inner


def calls_globals(params, left, right):
    """Names that generated code might use, too."""
    return inner(around(jedbatch_calls(node(params, left, right))))


def counts_locals(params, left, right):
    combined = node(params, left, right)
    return combined * len(locals())


def reads_own_name(params, left, right):
    here = reads_own_name
    return node(params, left, right) * len(here.__code__.co_freevars + here.__code__.co_varnames)


class Part:
    def __init__(self):
        self.__scale = 3.0

    def __twice(self, x):
        return 2 * x

    def private(self, params, left, right):
        return self.__twice(node(params, left, right)) * self.__scale

    def scaled(self, x):
        return 2 * x


class Derived(Part):
    def scaled(self, x):
        return super().scaled(x) + 1

    def of_super(self, params, left, right):
        return self.scaled(super().scaled(node(params, left, right)))

    def of_class(self, params, left, right):
        return node(params, left, right) * len(__class__.__name__)


def sum_of(params, tree, part, state):
    """What a part does with each node, and what it leaves in a state of the instance."""

    def visit(tree):
        return leaf(params, tree) if isinstance(tree, int) else part(*map(visit, tree), state)

    return visit(tree) + jax.tree.reduce(jnp.add, state)


def adds_to_list(params, tree):
    def part(left, right, state):
        state += [node(params, left, right)]
        return state[-1]

    return sum_of(params, tree, part, [jnp.zeros(H)])


def calls_append(params, tree):
    def part(left, right, state):
        list.append(state, jnp.tanh(left - right))
        return node(params, left, right)

    return sum_of(params, tree, part, [jnp.zeros(H)])


def writes_dict(left, right, state):
    state |= {"last": state["last"] + jnp.tanh(left - right)}
    return jnp.tanh(left * right)


def keeps_last(params, tree):
    """A part that writes into an argument, which no instruction of it says."""
    state = {"last": params["b"]}

    def visit(tree):
        if isinstance(tree, int):
            return leaf(params, tree)
        return writes_dict(visit(tree[0]), visit(tree[1]), state)

    return visit(tree) + state["last"]


def writes_closure(params, tree):
    total, count = jnp.zeros(H), 0

    def visit(tree):
        nonlocal total, count
        if isinstance(tree, int):
            return leaf(params, tree)
        combined = node(params, visit(tree[0]), visit(tree[1]))
        total, count = total + combined, count + 1
        return combined * count

    return visit(tree) + total


def of_large_ints(params, tree, depth=1):
    """Python's integers do not wrap."""
    if isinstance(tree, int):
        return leaf(params, tree)
    left, right = (of_large_ints(params, child, depth + 1) for child in tree)
    return of_depth(params, left, right, depth)


def of_depth(params, left, right, depth):
    return node(params, left, right) * (((depth << 40) + depth) // 2**40 % 7)


PLAIN = {
    "globals": recursive(calls_globals),
    "locals": recursive(counts_locals),
    "own name": recursive(reads_own_name),
    "private": recursive(Part().private),
    "super": recursive(Derived().of_super),
    "class": recursive(Derived().of_class),
    "list": adds_to_list,
    "append": calls_append,
    "dict": lambda params, tree: sum_of(params, tree, writes_dict, {"last": jnp.zeros(H)}),
    "last": keeps_last,
    "nonlocal": writes_closure,
    "integers": of_large_ints,
}


@pytest.mark.parametrize("granularity", ["auto", None])
@pytest.mark.parametrize("name", PLAIN)
def test_functions_do_what_they_do_in_python(name, granularity):
    fn = PLAIN[name]
    batched = jedbatch.batch(fn, granularity=granularity)
    for seed in range(3):  # the first ones decide what is recorded how
        assert_close(batched(PARAMS, trees(seed)), loop(fn, PARAMS, trees(seed)), 1e-5)


class Counting:
    """A part that keeps what it has seen."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, params, left, right):
        self.num_calls += 1
        return node(params, left, right)


@pytest.mark.parametrize("granularity", ["auto", None])
def test_functions_run_for_each_node_of_what_is_unseen(granularity):
    part = Counting()
    batched = jedbatch.batch(recursive(part), granularity=granularity)
    for seed in range(3):
        batched.plan(PARAMS, trees(seed), gradient=False)
    part.num_calls = 0
    batched.plan(PARAMS, trees(3), gradient=False)
    assert part.num_calls == sum(str(tree).count(",") for tree in trees(3))


def halved(params, h, depth):
    return h * (depth // 2) + jnp.tanh(h)  # Python divides


def chosen(params, h, depth):
    return jnp.tanh(h) * 2 if depth > 5 else jnp.sin(jnp.tanh(h))  # the other way is met later


def asked(params, h, depth):
    return jnp.tanh(h) * (0.5 if isinstance(depth, int) else 2.0) + depth


def spelt(params, h, depth):
    return jnp.tanh(h) * params[f"{'WEb'[2 - depth // 100]}"][0] + depth


def caught(params, h, depth):
    try:
        return jnp.tanh(h) * [0.5, 0.25][depth - 1]
    except (TypeError, IndexError):
        return jnp.tanh(h) + 1


def with_depth(part):
    """A function of trees that applies a part to all nodes, which gets the depth, too."""

    def fn(params, tree, depth=1):
        if isinstance(tree, int):
            return leaf(params, tree)
        left, right = (fn(params, child, depth + 1) for child in tree)
        return part(params, node(params, left, right), depth)

    return fn


@pytest.mark.parametrize("granularity", ["auto", None])
@pytest.mark.parametrize("part", [halved, chosen, asked, spelt, caught])
def test_python_computes_with_numbers_of_functions(part, granularity):
    fn = with_depth(part)
    batched = jedbatch.batch(fn, granularity=granularity)
    path = 3
    for word in range(9):
        path = path, word
    for instances in (trees(0, largest=5), trees(1, num=8), [*trees(2, num=6), path]):
        assert_close(batched(PARAMS, instances), loop(fn, PARAMS, instances), 1e-5)


def test_attributes_that_change_are_read():
    model = Model(2.0)
    batched = jedbatch.batch(model, granularity="auto")
    for scale in (2.0, 3.0):
        model.scale = scale
        for instances in (trees(0), trees(1)):
            assert_close(batched(PARAMS, instances), loop(model, PARAMS, instances), 1e-5)


def test_values_of_instances_are_not_kept():
    """Functions that are made for an instance go with it."""
    held = []

    def fn(params, tree):
        class Mark:
            pass

        mark = Mark()
        held.append(weakref.ref(mark))

        def visit(tree, mark=mark):
            if isinstance(tree, int):
                return leaf(params, tree)
            return node(params, visit(tree[0]), visit(tree[1]))

        return visit(tree)

    batched = jedbatch.batch(fn, granularity="auto")
    for seed in range(3):
        batched.plan(PARAMS, trees(seed), gradient=False)
    batched.plan(PARAMS, trees(3, num=1), gradient=False)
    gc.collect()
    assert sum(ref() is not None for ref in held) <= 1


def test_bodies_of_loops_call_functions_too():
    def fn(params, tree):
        if isinstance(tree, int):
            return leaf(params, tree)
        left, right = fn(params, tree[0]), fn(params, tree[1])
        turn = lambda k, h: node(params, h, right)  # noqa: E731
        return node(params, jax.lax.fori_loop(0, 2, turn, left), right)

    for granularity in ("auto", None):
        check(fn, PARAMS, trees(0), granularity=granularity, gradients=False)


def test_deep_trees_come_first():
    fn = recursive(node)
    deep = 3
    for word in range(3000):
        deep = deep, word % 20
    batched = jedbatch.batch(fn, granularity="auto")
    plan = batched.plan(PARAMS, [deep, *trees(0)], gradient=False)
    assert len(plan.graph.present_types) == 2
    assert_close(batched(PARAMS, trees(1)), loop(fn, PARAMS, trees(1)), 1e-5)


def spectrum(params):
    """Of the shared arguments alone, as many models begin."""
    scaled = params["W"][:H] * 0.1
    values, vectors = jnp.linalg.eigh(scaled + scaled.T)
    mixed = vectors @ jnp.diag(jnp.exp(values)) @ vectors.T
    return mixed / jnp.sum(jnp.abs(mixed)) + jnp.eye(H)


def test_operations_on_shared_arguments_alone_are_warned_of():
    """They are computed once, but each instance passes through JAX with them."""
    turn = jedbatch.cell(lambda mixed, row: jnp.tanh(mixed @ row))

    def inside(params, words):
        return sum(turn(spectrum(params), params["E"][word]) for word in words)

    def outside(params, mixed, words):
        return sum(turn(mixed, params["E"][word]) for word in words)

    minibatches = np.random.default_rng(0).integers(20, size=(5, 32, 3)).tolist()
    batched = jedbatch.batch(inside)
    for given in minibatches[:3]:
        batched.plan(PARAMS, given)
    with pytest.warns(jedbatch.errors.NoCellsWarning, match=r"on shared arguments.*test_plain"):
        batched.plan(PARAMS, minibatches[3])
    given = minibatches[4]
    assert_close(batched(PARAMS, given), loop(inside, PARAMS, given), 1e-5)

    before = jedbatch.batch(outside, in_axes=(None, None, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", jedbatch.errors.PerformanceWarning)
        for given in minibatches:
            before.plan(PARAMS, spectrum(PARAMS), given)
    assert_close(before(PARAMS, spectrum(PARAMS), given), loop(inside, PARAMS, given), 1e-5)
