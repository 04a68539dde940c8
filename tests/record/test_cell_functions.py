"""Cells as functions: compiled ones behave as the functions of Python that they stand for."""

import copy
import functools
import gc
import importlib
import inspect
import itertools
import pickle
import subprocess
import sys
import textwrap
import threading
import types
import typing
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jedbatch
from jedbatch._record.calls import fast_path
from jedbatch._record.cell import recording
from jedbatch._record.identity import escapes
from jedbatch._record.run import trace
from jedbatch._record.run.recorder import Recorder
from jedbatch._support import native


@pytest.fixture(params=["compiled", "in Python"])
def cell(request, monkeypatch):
    """The decorator `cell`."""
    if request.param == "in Python":
        monkeypatch.setenv(native.SWITCH, "0")
    elif native.core() is None:
        pytest.skip("no compiled core")
    return jedbatch.cell


def scaled(params, x: jax.Array, *, by: int = 2) -> jax.Array:
    """Returns a multiple."""
    return params["w"] * x * by


found_by_name = jedbatch.cell(scaled)
found_by_name.__qualname__ = "found_by_name"
P = {"w": jnp.arange(3.0)}


def test_has_the_attributes_of_its_function(cell):
    fn = cell(scaled)
    assert fn.__name__ == "scaled"
    assert fn.__doc__ == scaled.__doc__
    assert fn.__module__ == __name__
    assert fn.__wrapped__ is scaled
    assert inspect.signature(fn) == inspect.signature(scaled)
    assert typing.get_type_hints(fn) == typing.get_type_hints(scaled)
    assert inspect.getsource(fn) == inspect.getsource(scaled)
    assert repr(fn) == f"<function scaled at {hex(id(fn))}>"
    assert isinstance(fn, native.function_types())
    fn.note = 3
    assert vars(fn)["note"] == fn.note == 3
    assert weakref.ref(fn)() is fn


def test_has_names_where_what_it_calls_has_none(cell):
    class Twice:
        def __call__(self, x):
            return 2 * x

    fn, named = cell(Twice()), jedbatch.cell(functools.partial(scaled, P), name="layer")
    assert (fn.__name__, fn.__qualname__) == ("Twice", "Twice")
    assert named.__name__ == "layer"
    assert repr(fn) == f"<function Twice at {hex(id(fn))}>"
    assert repr(named).startswith("<function layer at ")
    assert jax.vmap(jax.grad(fn))(jnp.ones(2)).tolist() == [2, 2]
    np.testing.assert_array_equal(named(2.0), [0, 4, 8])
    with pytest.raises(jedbatch.errors.SymbolicValueError):  # a message that has the name
        jedbatch.batch(lambda _, x: fn(x) if fn(x) > 0 else x, out_axes=None).plan(P, [1.0])


def test_is_its_function_where_nothing_is_recorded(cell):
    fn, named = cell(scaled), {"x": 2.0}
    np.testing.assert_array_equal(fn(P, 2.0), [0, 4, 8])
    np.testing.assert_array_equal(fn(P, x=2.0, by=3), [0, 6, 12])
    np.testing.assert_array_equal(fn(*[P], **named), [0, 4, 8])
    np.testing.assert_array_equal(functools.partial(fn, P, by=1)(2.0), [0, 2, 4])
    np.testing.assert_array_equal(jax.jit(fn, static_argnames="by")(P, 2.0), [0, 4, 8])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        fn(P)
    with pytest.raises(TypeError, match="unexpected keyword argument 'to'"):
        fn(P, 1, to=2)


def test_arguments_in_any_form_are_recorded_alike(cell):
    fn = cell(scaled)
    nothing = {}
    forms = {
        "plain": lambda params, x: fn(params, x) + fn(params, x),
        "unpacked": lambda params, x: fn(*(params, x)) + fn(params, *[x], **nothing),
        "partial": lambda params, x: functools.partial(fn, params)(x) + fn(params, x),
    }
    for form in forms.values():
        batched = jedbatch.batch(form)
        for instances in ([1.0, 2.0], [3.0, 4.0, 5.0]):
            np.testing.assert_allclose(batched(P, instances), [form(P, x) for x in instances])
        assert len(batched.plan(P, [6.0]).graph.node_type) == 3


def test_keywords_are_recorded(cell):
    fn = cell(scaled)

    def both(params, x):
        return fn(params, x, by=2) + fn(params, x, by=int(x))

    batched = jedbatch.batch(both)
    for instances in ([1.0, 2.0], [3.0, 1.0, 2.0]):
        np.testing.assert_allclose(batched(P, instances), [both(P, x) for x in instances])


def square(x):
    return x * x


def wrapped_by_hand(fn, factor):
    @functools.wraps(fn)
    def wrapper(x):
        return factor * fn(x)

    return wrapper


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def method(self, x):
        return self.factor * x


MADE_OF_CELLS = {
    "jax.grad": lambda fn, cell: [jax.grad(fn), fn],
    "jax.vmap": lambda fn, cell: [lambda x: jax.vmap(fn)(jnp.stack([x, x])).sum(), fn],
    "functools.wraps": lambda fn, cell: [wrapped_by_hand(fn, k) for k in (2, 3)],
    "methods": lambda fn, cell: [types.MethodType(cell(Scale.method), Scale(k)) for k in (2, 3)],
}


@pytest.mark.parametrize("is_closed_over", [False, True])
@pytest.mark.parametrize("made", MADE_OF_CELLS.values(), ids=MADE_OF_CELLS)
def test_what_has_the_attributes_of_a_cell_is_none(cell, made, is_closed_over):
    """Functions made of a cell, and methods of objects, are told apart from the cell."""
    functions = made(cell(square), cell)

    def fn(params, x):
        total = 0 * params["w"]
        for f in functions:
            total += (cell(lambda x: 1 * f(x)) if is_closed_over else cell(f))(x)  # noqa: B023
        return total

    batched = jedbatch.batch(fn)
    for instances in ([1.0, 2.0], [3.0]):
        np.testing.assert_allclose(batched(P, instances), [fn(P, x) for x in instances])


FACTOR = 2.0


def test_what_wraps_a_cell_is_watched_for_changes(cell, monkeypatch):
    fn = cell(square)

    @functools.wraps(fn)
    def wrapper(x):
        return FACTOR * fn(x)

    batched = jedbatch.batch(lambda params, x: wrapper(x) * params["w"])
    np.testing.assert_allclose(batched(P, [3.0]), [18 * P["w"]])
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5.0)
    np.testing.assert_allclose(batched(P, [3.0]), [45 * P["w"]])


@pytest.mark.parametrize("is_cell", [False, True])
def test_attributes_of_cells_are_watched_for_changes(cell, is_cell):
    fn = cell(square)
    fn.factor = 2.0
    scaled_by = cell(lambda x: fn.factor * x) if is_cell else lambda x: fn.factor * fn(x)
    batched = jedbatch.batch(lambda params, x: scaled_by(x) * params["w"])
    for factor in (2.0, 5.0, jnp.float32(3), jnp.arange(1.0, 4.0)):
        fn.factor = factor
        np.testing.assert_allclose(batched(P, [3.0]), [scaled_by(3.0) * P["w"]])
    fn.other = 1
    np.testing.assert_allclose(batched(P, [3.0]), [scaled_by(3.0) * P["w"]])


def test_evaluate_calls_what_wraps_a_cell(cell):
    graph = jedbatch.Graph.from_dag(
        [0, 0], [[-1], [0]], names=["f"], inputs=[np.array([3.0], np.float32)]
    )
    fn = wrapped_by_hand(cell(square), 2)
    model = lambda g: jedbatch.evaluate(g, {"f": fn})[-1]  # noqa: E731
    assert model(graph) == 648
    assert jedbatch.batch(model, in_axes=0)([graph, graph]).tolist() == [648, 648]


def test_functions_may_have_an_attribute_of_that_name(cell):
    def twice(x):
        return 2 * x

    twice.cell = "A1"
    fn = cell(lambda x: twice(x) + 1)
    batched = jedbatch.batch(lambda params, x: twice(fn(x)) * params["w"])
    np.testing.assert_allclose(batched(P, [3.0]), [14 * P["w"]])


def test_many_arguments(cell):
    most = cell(lambda *xs: functools.reduce(jnp.add, xs))

    def fn(params, x):
        return most(params["w"], *[x + i for i in range(40)])

    batched = jedbatch.batch(fn)
    for instances in ([1.0, 2.0], [3.0]):
        np.testing.assert_allclose(batched(P, instances), [fn(P, x) for x in instances])


def test_methods(cell):
    class Model(typing.NamedTuple):
        w: float
        scale = cell(lambda self, x: self.w * x)

    model = Model(3.0)
    assert isinstance(model.scale, types.MethodType)
    assert Model.scale(model, 2.0) == model.scale(2.0) == 6.0
    batched = jedbatch.batch(lambda _, x: model.scale(x))
    np.testing.assert_allclose(batched(P, [1.0, 2.0]), [3, 6])


def test_copies(cell):
    fn = cell(scaled)
    assert copy.copy(fn) is fn
    assert copy.deepcopy({"a": fn})["a"] is fn


def test_pickled_by_name():
    assert pickle.loads(pickle.dumps(found_by_name)) is found_by_name


def test_cloudpickle_sends_cells_of_a_script_as_code(tmp_path):
    pytest.importorskip("cloudpickle")
    script = """
        import cloudpickle, jedbatch, subprocess, sys
        @jedbatch.cell
        def twice(x):
            return 2 * x if x < 4 else twice(x - 4)
        if __name__ == "__main__":
            code = "import cloudpickle, sys; print(cloudpickle.load(sys.stdin.buffer)(7))"
            sent = cloudpickle.dumps(twice)
            print(subprocess.run([sys.executable, "-c", code], input=sent,
                                 capture_output=True, check=True).stdout.decode())
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["6"], done.stderr


@pytest.mark.parametrize("name", ["cells_sent", "sent.cells"])
def test_cloudpickle_sends_cells_of_registered_modules_as_code(tmp_path, monkeypatch, name):
    cloudpickle = pytest.importorskip("cloudpickle")
    path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text("import jedbatch\n@jedbatch.cell\ndef twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    twice = importlib.import_module(name).twice
    assert cloudpickle.loads(cloudpickle.dumps(twice)) is twice
    package = importlib.import_module(name.split(".")[0])
    cloudpickle.register_pickle_by_value(package)
    try:
        sent = cloudpickle.dumps(twice)
    finally:
        cloudpickle.unregister_pickle_by_value(package)
    code = "import cloudpickle, sys; print(cloudpickle.load(sys.stdin.buffer)(7))"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, input=sent, capture_output=True, check=True).stdout == b"14\n"


def test_recorders_are_kept_per_thread(cell):
    fn, found = cell(scaled), []

    def recorded(params, x):
        thread = threading.Thread(target=lambda: found.append(fn(P, 2.0)))
        thread.start()
        thread.join()
        return fn(params, x)

    assert len(jedbatch.batch(recorded).plan(P, [1.0]).graph.node_type) == 1
    np.testing.assert_array_equal(found[0], [0, 4, 8])
    assert recording.recorder is None


def test_errors_pass_and_what_is_read_is_let_go(cell):
    def fail(params, x):
        raise LookupError("no such thing")

    fn = cell(fail)
    with pytest.raises(LookupError, match="no such thing"):
        jedbatch.batch(lambda params, x: fn(params, x)).plan(P, [1.0])
    with pytest.raises(LookupError):
        fn(P, 1.0)


@pytest.mark.usefixtures("older_frozen")
@pytest.mark.parametrize("ends", ["well", "by an error", "after rounds"])
def test_no_recorder_outlives_its_recording(cell, monkeypatch, ends):
    """The collector does not follow symbols of the compiled core; no circle goes through one."""
    made, fn = [], cell(scaled)

    class Noted(Recorder):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))

    def recursive(params, depth):
        symbols = []

        def visit(depth):
            x = fn(params, 1.0 * depth) if depth == 0 else fn(params, 1.0) + visit(depth - 1)
            symbols.append(x)  # in a circle: `visit` refers to itself
            if ends == "after rounds" and x[0] > 100:
                raise AssertionError
            if ends == "by an error" and depth == 3:
                raise LookupError(symbols)
            return x

        return visit(depth)

    monkeypatch.setattr(trace, "Recorder", Noted)
    monkeypatch.setattr("jedbatch._control_flow.attempt.Recorder", Noted)
    batched = jedbatch.batch(recursive)
    for depths in ([1, 2], [3, 4]):
        if ends == "by an error" and 3 in depths:
            with pytest.raises(LookupError):
                batched(P, depths)
        else:
            np.testing.assert_allclose(batched(P, depths), [recursive(P, n) for n in depths])
    gc.collect()
    assert made
    assert [ref() for ref in made] == [None] * len(made)


@pytest.mark.usefixtures("older_frozen")
@pytest.mark.parametrize("has_rounds", [False, True])
def test_symbols_kept_where_cells_reach_them_are_collected(cell, has_rounds):
    """All that was recorded is let go with the batched function, though symbols escaped."""

    def made():
        kept = []
        fn = cell(lambda params, x, _kept=kept: params["w"] * x)

        def both(params, x):
            first = fn(params, x)
            if has_rounds and first[1] > 100:
                raise AssertionError
            second = fn(params, x)
            kept.extend([params["w"], first, second])
            return first + second

        batched = jedbatch.batch(both)
        for instances in ([1.0, 2.0], [3.0, 4.0]):
            np.testing.assert_allclose(batched(P, instances), [2 * P["w"] * x for x in instances])
        assert repr(kept[-1]) == "symbolic float32[3]"
        return [weakref.ref(x._trace) for x in kept], kept[-3:]

    refs, last = made()
    gc.collect()
    for x in last:
        assert repr(x) == "symbolic array of a function that was recorded before"
        for use in (float, bool, jnp.sin, len, np.asarray, lambda x: x + 1):
            with pytest.raises(jedbatch.errors.EscapedValueError):
                use(x)
    del x, last
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_tracing_collects_no_older_garbage(frozen, monkeypatch):
    monkeypatch.setattr(escapes, "_frozen_until", 0.0)

    class Cycle:
        def __init__(self):
            self.itself = self

    @jedbatch.cell
    def in_a_cycle(params, x):
        cycle = [params["w"] * x]
        cycle.append(cycle)  # holds what is traced until it is collected, which is no escape
        return cycle[0]

    gc.unfreeze()
    older = weakref.ref(Cycle())
    if frozen:
        gc.freeze()
    count = gc.get_freeze_count()
    try:
        got = jedbatch.batch(in_a_cycle)(P, [1.0, 2.0])
        assert older() is not None
        assert (gc.get_freeze_count() > 1000) == frozen == (count > 1000)
    finally:
        gc.unfreeze()
        gc.collect()
        assert older() is None
    np.testing.assert_allclose(got, [P["w"], 2 * P["w"]])


def test_compiled_cells_are_collected():
    if native.core() is None:
        pytest.skip("no compiled core")

    def around():
        @jedbatch.cell
        def inner(x):
            return inner(x)

        return weakref.ref(inner)

    ref = around()
    gc.collect()
    assert ref() is None


def test_refuses_what_does_not_fit():
    if native.core() is None:
        pytest.skip("no compiled core")
    with pytest.raises(TypeError):
        native.core().CellFunction(scaled)


def test_cells_made_by_every_instance_are_described_once(cell, monkeypatch):
    described = []
    describe = fast_path.describe_cell

    def noted(*args):
        described.append(args)
        return describe(*args)

    monkeypatch.setattr(fast_path, "describe_cell", noted)

    def step(w, by, x):
        return jnp.sin(x * by) * w["w"]

    def fn(w, xs):
        by = jnp.ones(3)
        ends = cell(functools.partial(step, w))
        inner = cell(lambda x: ends(by, x) + step(w, by, x))
        found = [inner(x) for x in xs]
        by = jnp.full(3, 3.0) if len(xs) == 3 else by  # seen by the cell that was made before
        return sum(found) + inner(found[-1])

    instances = [[float(i + k) for k in range(1 + i % 3)] for i in range(12)]
    batched = jedbatch.batch(fn)
    batched.plan(P, instances[:2])  # types are found
    described.clear()
    plan = batched.plan(P, instances)
    loop = jnp.stack([fn(P, x) for x in instances])
    np.testing.assert_allclose(batched.apply(P, plan), loop, rtol=1e-5)
    assert len(described) <= 4


class Combining:
    """A model as people write it: an object of weights with a cell that reads its attributes."""

    def __init__(self, params, calls, sign=1.0):
        self.params, self.calls, self.sign = params, calls, sign
        self.combine = jedbatch.cell(lambda a, b: self.join(a, b))

    def join(self, a, b):
        next(self.calls)
        return self.sign * a * self.params["w"] + b

    def run(self, tree):
        if isinstance(tree, float):
            return tree * self.params["w"]
        return self.combine(*map(self.run, tree))


def test_cells_of_objects_made_for_each_instance_are_traced_once():
    calls = itertools.count()
    fn = lambda params, tree: Combining(params, calls).run(tree)  # noqa: E731
    batched = jedbatch.batch(fn)
    trees = [((1.0, 2.0), 3.0), (1.0, (2.0, (3.0, 4.0)))]
    for given in (trees[:1], trees):
        np.testing.assert_allclose(batched(P, given), [fn(P, t) for t in given], rtol=1e-6)
    num_calls = next(calls)
    plan = batched.plan(P, [((float(k), 1.0), (2.0, 3.0)) for k in range(8)])
    assert next(calls) == num_calls + 1
    assert len(plan.graph.present_types) == 2


def test_objects_made_for_each_instance_are_told_apart_by_their_attributes():
    fn = lambda params, inst: Combining(params, itertools.count(), inst[1]).run(inst[0])  # noqa: E731
    batched = jedbatch.batch(fn)
    trees = [((1.0, 2.0), 3.0), (1.0, (2.0, (3.0, 4.0)))]
    for signs in ((1.0, -1.0), (-1.0, 1.0), (0.5, 2.0)):
        given = list(zip(trees, signs, strict=True))
        np.testing.assert_allclose(batched(P, given), [fn(P, x) for x in given], rtol=1e-6)


def test_objects_that_functions_compare_are_told_apart():
    class Marked:
        pass

    first, second = Marked(), Marked()

    class Model:
        def __init__(self, mark):
            self.mark = mark
            self.step = jedbatch.cell(lambda x: x * 2 if self.mark is first else x * 3)

    def fn(params, inst):
        mark, x = inst
        return Model(first if mark else second).step(x * params["w"])

    batched = jedbatch.batch(fn)
    for given in ([(0, 1.0), (1, 2.0)], [(1, 1.0), (0, 5.0), (1, 3.0)]):
        np.testing.assert_allclose(batched(P, given), [fn(P, x) for x in given])
