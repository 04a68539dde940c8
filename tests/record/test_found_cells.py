"""Functions that are taken for cells, and what is called in place of what."""

import functools
import gc
import traceback
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import programs
from cases.helpers import assert_close, check, loop, random_tree
from flax import linen

import jedbatch
from jedbatch._record.asking import may_change_things
from jedbatch._record.granularity.converted import convert

pytestmark = pytest.mark.unoptimized

H = 4
PARAMS = programs.weights(0, E=(20, H), W=(2 * H, H), b=(H,))


def leaf(params, word):
    return jnp.tanh(params["E"][word])


def node(params, left, right):
    return jnp.tanh(jnp.concatenate([left, right]) @ params["W"] + params["b"])


def recursive(leaf, node):
    """A function of trees, of two functions."""

    def fn(params, tree):
        if isinstance(tree, int):
            return leaf(params, tree)
        return node(params, fn(params, tree[0]), fn(params, tree[1]))

    return fn


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
    "functions": (recursive(leaf, node), PARAMS),
    "compiled": (recursive(jax.jit(leaf), jax.jit(node)), PARAMS),
    "methods": (Model(2.0), PARAMS),
    "partial": (by_partial, PARAMS),
    "pytrees": (by_composer, PARAMS | {"composer": Composer(PARAMS["W"])}),
    "modules": (by_layer, PARAMS | {"layer": LAYER.init(jax.random.key(0), *jnp.zeros((2, H)))}),
}


def trees(seed, num=24, largest=12):
    rng = np.random.default_rng(seed)
    word = lambda: int(rng.integers(20))  # noqa: E731
    return [random_tree(rng, int(n), word) for n in rng.integers(2, largest, num)]


def count_operations(monkeypatch):
    """Counts what JAX hands to recorders."""
    from jedbatch._record.recorder import Recorder

    counts = [0]
    process = Recorder.process_primitive

    def counting(self, *args, **more):
        counts[0] += 1
        return process(self, *args, **more)

    monkeypatch.setattr(Recorder, "process_primitive", counting)
    return counts


@pytest.mark.parametrize("granularity", ["auto", None])
@pytest.mark.parametrize("name", MODELS)
def test_parts_of_models_are_cells(name, granularity, monkeypatch):
    """Unseen instances pass no operation through JAX, and results are those of the loop."""
    fn, params = MODELS[name]
    batched = check(fn, params, trees(0), granularity=granularity)
    for seed in range(1, 4):
        batched.plan(params, trees(seed), gradient=False)
    counts = count_operations(monkeypatch)
    unseen = trees(4)
    plan = batched.plan(params, unseen, gradient=False)
    assert counts[0] == 0
    num_leaves = sum(str(tree).count(",") + 1 for tree in unseen)
    assert len(plan.graph.node_type) == 2 * num_leaves - len(unseen)
    assert len(plan.graph.present_types) == 2
    assert_close(batched.apply(params, plan), loop(fn, params, unseen), 1e-5)


def test_steps_of_reductions_are_cells(monkeypatch):
    """Of sequences, which have fewer instances of each kind."""

    def words(seed):
        rng = np.random.default_rng(seed)
        return [tuple(rng.integers(20, size=n).tolist()) for n in rng.integers(2, 12, 32)]

    batched = check(by_reduce, PARAMS, words(0), granularity="auto")
    for seed in range(1, 4):
        batched.plan(PARAMS, words(seed), gradient=False)
    counts = count_operations(monkeypatch)
    plan = batched.plan(PARAMS, words(4), gradient=False)
    assert counts[0] == 0
    assert_close(batched.apply(PARAMS, plan), loop(by_reduce, PARAMS, words(4)), 1e-5)


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


class Counting:
    """A part that keeps what it has seen: not a function of its arguments."""

    def __init__(self):
        self.seen = []

    def __call__(self, params, h, depth):
        self.seen.append(depth)
        return jnp.tanh(h) * 2


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
def test_what_python_computes_is_no_part_of_a_cell(part, granularity):
    """Later calls may show that a function is no cell; results are those of the loop."""
    fn = with_depth(part)
    batched = jedbatch.batch(fn, granularity=granularity)
    path = 3
    for word in range(9):
        path = path, word
    for instances in (trees(0, largest=5), trees(1, num=8), [*trees(2, num=6), path]):
        assert_close(batched(PARAMS, instances), loop(fn, PARAMS, instances), 1e-5)


def test_what_changes_things_is_no_cell():
    """It is called for each node of every instance that is recorded."""
    part = Counting()
    batched = jedbatch.batch(with_depth(part), granularity="auto")
    for seed in range(3):
        batched.plan(PARAMS, trees(seed), gradient=False)
    part.seen.clear()
    unseen = trees(3)
    batched.plan(PARAMS, unseen, gradient=False)
    assert len(part.seen) == sum(str(tree).count(",") for tree in unseen)


def test_attributes_that_change_are_read():
    """A method of an object is the same cell as long as the object is the same."""
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
    """Their arguments are tracers of JAX there; the same function may be called outside."""

    def fn(params, tree):
        if isinstance(tree, int):
            return leaf(params, tree)
        left, right = fn(params, tree[0]), fn(params, tree[1])
        turn = lambda k, h: node(params, h, right)  # noqa: E731
        return node(params, jax.lax.fori_loop(0, 2, turn, left), right)

    for granularity in ("auto", None):
        check(fn, PARAMS, trees(0), granularity=granularity, gradients=False)


def test_deep_trees_come_first():
    """Functions are converted and looked at wherever they are called."""
    fn = recursive(lambda params, word: leaf(params, word), lambda *args: node(*args))
    deep = 3
    for word in range(3000):
        deep = deep, word % 20
    batched = jedbatch.batch(fn, granularity="auto")
    plan = batched.plan(PARAMS, [deep, *trees(0)], gradient=False)
    assert len(plan.graph.present_types) == 2
    assert_close(batched(PARAMS, trees(1)), loop(fn, PARAMS, trees(1)), 1e-5)


# --- converted functions ---


def named(x, y=2, *more, z: int = 3, **rest):
    """A function with all kinds of parameters."""
    return [abs(x), max([y, z, *more]), sorted(rest)]


class Base:
    def size(self):
        return 1


class Derived(Base):
    def size(self):
        return super().size() + len("ab")


def counting_down(number):
    if not number:
        return [0]
    return [number, *counting_down(number - 1)]


def generated(number):
    for k in range(number):
        yield float(k)


def closure(number):
    """A function that holds a number, and one of two in a line."""
    total = 0

    def add(x):
        nonlocal total
        total += int(x) + number
        return total

    return add, (lambda x: str(x), lambda x: repr(x))[1]


ADD, SPELL = closure(2)


@pytest.mark.parametrize(
    ("fn", "args", "called"),
    [
        (named, (-1, 2, 9), [abs, max, sorted]),
        (Derived.size, (Derived(),), [super, len]),
        (counting_down, (2,), [counting_down]),
        (generated, (2,), [range, float, float]),
        (SPELL, ("a",), [repr]),
        (lambda x: [len(y) for y in x], (["a"],), [len]),
    ],
    ids=["parameters", "super", "recursion", "generator", "lambda", "comprehension"],
)
def test_calls_of_converted_functions_pass_by(fn, args, called):
    seen = []

    def hook(what):
        seen.append(what)
        return what

    converted = convert(fn, hook)
    assert converted is not None
    result, expected = converted(*args), fn(*args)
    if isinstance(result, types.GeneratorType):
        result, expected = list(result), list(expected)
    assert result == expected
    of_methods = [x for x in seen if not isinstance(x, types.MethodType | types.MethodWrapperType)]
    assert [x for x in of_methods if not isinstance(x, types.BuiltinMethodType) or x in called] == (
        called
    )
    assert converted.__name__ == fn.__name__
    assert converted.__defaults__ == fn.__defaults__


def test_converted_functions_share_closures_and_lines():
    converted = convert(ADD, lambda what: what)
    assert [ADD(1), converted(1), ADD(1)] == [3, 6, 9]
    with pytest.raises(ValueError, match="invalid literal") as raised:
        convert(ADD, lambda what: what)("x")
    frame = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert frame.line == "total += int(x) + number"
    assert frame.filename == __file__


def test_nothing_is_converted_whose_source_is_another(tmp_path):
    """Written at run time, or edited since it was read."""
    names = {}
    exec("def fn(x):\n    return abs(x)\n", names)
    assert convert(names["fn"], lambda what: what) is None
    path = tmp_path / "edited.py"
    path.write_text("def fn(x):\n    return abs(x) + 1\n")
    exec(compile("def fn(x):\n    return abs(x)\n", str(path), "exec"), names)
    assert convert(names["fn"], lambda what: what) is None


def changes_argument(xs):
    xs.append(1)
    return xs


def changes_alias(self):
    stack = self.stack
    stack.append(1)
    return stack


def changes_own(xs):
    found = []
    for x in xs:
        found.append(x)
    return found


@pytest.mark.parametrize(
    ("fn", "changes"),
    [
        (changes_argument, True),
        (changes_alias, True),
        (changes_own, False),
        (Counting.__init__, True),
        (Counting.__call__, True),
        (ADD, True),
        (node, False),
    ],
)
def test_code_that_changes_things(fn, changes):
    assert may_change_things(fn.__code__) == changes
