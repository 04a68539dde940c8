"""Minibatches cut over devices, against the loop on one; `test_shards.py` runs it with eight.

Every function whose name begins with `check` is called.
"""

import functools
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from cases.helpers import assert_close as assert_close_to
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jedbatch
from jedbatch import testing
from jedbatch.data import synthetic_treebank
from jedbatch.errors import UnfinishedLoopError

DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES, ("data",))
PARAMS = {
    "w": jnp.linspace(-0.5, 0.5, 32).reshape(8, 4),
    "e": jnp.sin(jnp.arange(36.0)).reshape(9, 4),
}
WORD = jedbatch.cell(lambda p, i: p["e"][i], name="word")
ADD = jedbatch.cell(lambda p, x, y: jnp.tanh(jnp.concatenate([x, y]) @ p["w"]), name="add")
MUL = jedbatch.cell(lambda p, x, y: jnp.tanh(x * y + p["w"][0]), name="mul")


def encode(p, tree):
    """A tree of words; one in three inner nodes is of another type."""
    if isinstance(tree, int):
        return WORD(p, tree)
    combine = MUL if len(tree) == 3 else ADD
    return combine(p, encode(p, tree[0]), encode(p, tree[1]))


ENCODE = jedbatch.batch(encode)


def trees(count, seed=0, largest=9):
    rng = np.random.default_rng(seed)

    def grow(leaves):
        if leaves == 1:
            return int(rng.integers(9))
        left = int(rng.integers(1, leaves))
        pair = grow(left), grow(leaves - left)
        return (*pair, "mul") if rng.integers(3) == 0 else pair

    return [grow(int(rng.integers(1, largest))) for _ in range(count)]


def assert_close(want, got):
    assert_close_to(got, want, rtol=1e-5)


def squared(x):
    return sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(x))


def loop(fn, p, instances):
    return jnp.stack([fn(p, x) for x in instances])


@functools.cache
def judged(fn, *instances):
    """(results, (their sum of squares, its gradient)) of the loop."""
    run = jax.value_and_grad(lambda p: squared(loop(fn, p, instances)))
    return loop(fn, PARAMS, instances), run(PARAMS)


def assert_equal_to_loop(batched, fn, p, instances, mesh=MESH, **options):
    """Values and gradients, outside of `jax.jit` and inside of it, are those of the loop."""
    plan = batched.plan(p, instances, mesh=mesh, **options)
    testing.check_plan(plan)
    results, want = judged(fn, *instances)
    assert_close(results, batched.apply(p, plan))
    run = jax.value_and_grad(lambda p, plan: squared(batched.apply(p, plan)))
    for step in (run, jax.jit(run)):
        assert_close(want, step(p, plan))
    return plan


def put(spec_of, mesh=MESH):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec_of(x))), PARAMS)


def check_parameters_anywhere():
    instances = trees(16)
    assert_equal_to_loop(ENCODE, encode, PARAMS, instances)
    cut = put(lambda x: P("data") if x.shape[0] == 8 else P())
    plan = assert_equal_to_loop(ENCODE, encode, cut, instances)
    assert "8 shards over data (8)" in str(plan)
    assert sum(p.graph.num_instances for p in plan.shards) == 16


def check_gradients_stay_where_parameters_are():
    cut = put(lambda x: P("data") if x.shape[0] == 8 else P())
    shardings = jax.tree.map(lambda x: x.sharding, cut)
    run = jax.jit(jax.grad(lambda p, plan: squared(ENCODE.apply(p, plan))), out_shardings=shardings)
    slope = run(cut, ENCODE.plan(cut, trees(16), mesh=MESH))
    assert slope["w"].sharding.spec == P("data")


def check_two_axes():
    mesh = Mesh(DEVICES.reshape(4, 2), ("data", "model"))
    cut = put(lambda x: P(None, "model"), mesh)
    assert_equal_to_loop(ENCODE, encode, cut, trees(16), mesh, axis="data")
    assert_equal_to_loop(ENCODE, encode, PARAMS, trees(16), mesh, axis=("model", "data"))


def check_some_devices():
    mesh = Mesh(DEVICES[4:6], ("data",))
    plan = assert_equal_to_loop(ENCODE, encode, PARAMS, trees(16), mesh)
    assert plan.inputs["int32[]"].sharding.device_set == set(DEVICES[4:6])


def check_meshes_that_are_set():
    """The function has met no mesh, an explicit one, and one of XLA's choice."""
    batched, instances = jedbatch.batch(encode), trees(16)
    _, (_, want) = judged(encode, *instances)
    run = jax.grad(lambda p, plan: squared(batched.apply(p, plan)))
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        cut = put(lambda x: P("data") if x.shape[0] == 8 else P(), mesh)
        assert_close(want, jax.jit(run)(cut, batched.plan(cut, instances, mesh=mesh)))
        with jax.set_mesh(mesh):
            cut = put(lambda x: P("data") if x.shape[0] == 8 else P(), mesh)
            plan = batched.plan(cut, instances, mesh=mesh)
            for step in (run, jax.jit(run)):
                assert_close(want, step(cut, plan))
    assert_close(want, run(PARAMS, batched.plan(PARAMS, instances)))


def check_plans_for_one_device_where_a_mesh_is_set():
    """Parameters are whole or cut along an explicit axis; their gradients are cut as they are."""
    batched, instances = jedbatch.batch(encode), trees(4)
    plan = batched.plan(PARAMS, instances)
    _, (_, want) = judged(encode, *instances)
    run = jax.grad(lambda p: squared(batched.apply(p, plan)))
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,), devices=DEVICES[:2])
    with jax.set_mesh(mesh):
        for given in (PARAMS, put(lambda x: P(None, "model"), mesh)):
            assert_close(want, run(given))
            found = jax.jit(run)(given)
            assert_close(want, found)
            assert found["w"].sharding.spec[1:] == jax.typeof(given["w"]).sharding.spec[1:]
        many = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
        assert_close(want, jax.tree.map(lambda x: x[1], jax.jit(jax.vmap(run))(many)))


def check_inside_of_shard_map():
    """Inputs of each device are its own, and cotangents of parameters that all share add up."""
    mesh = Mesh(DEVICES[:2], ("data",))
    batched, instances = jedbatch.batch(encode), trees(4)
    plan = batched.plan(PARAMS, instances)
    rows = jax.tree.map(lambda x: jnp.stack([x, jnp.flip(x)]), plan.inputs)
    many = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), PARAMS)
    mapped = functools.partial(jax.shard_map, mesh=mesh)

    def loss(p, inputs):
        return squared(batched.apply(p, plan, inputs=inputs))

    def of_own(p, inputs):
        own = jax.tree.map(lambda x: x[0], inputs)
        return jax.lax.psum(loss(p, own), "data")

    each = [jax.tree.map(lambda x, i=i: x[i], rows) for i in range(2)]
    want = jax.grad(lambda p: sum(loss(p, own) for own in each))(PARAMS)
    inside = mapped(jax.grad(of_own), in_specs=(P(), P("data")), out_specs=P())
    for run in (inside, jax.grad(mapped(of_own, in_specs=(P(), P("data")), out_specs=P()))):
        assert_close(want, jax.jit(run)(PARAMS, rows))

    def product(p):  # of the Hessian and p
        return jax.jvp(jax.grad(lambda p: loss(jax.tree.map(lambda x: x[0], p), each[0])), [p], [p])

    found = jax.jit(mapped(product, in_specs=P("data"), out_specs=P("data")))(many)
    every = jax.vmap(lambda p: product(jax.tree.map(lambda x: x[None], p)))(many)
    assert_close(jax.tree.map(lambda x: x[:, 0], every), found)


def check_costs_not_counts():
    """The largest tree has a device of its own."""
    chain = 1
    for i in range(200):
        chain = (chain, i % 9)
    instances = [*trees(30, largest=4), chain]
    plan = assert_equal_to_loop(ENCODE, encode, PARAMS, instances)
    counts = [p.graph.num_instances for p in plan.shards]
    assert min(counts) == 1, counts
    assert max(counts) < 9, counts


def check_lists_of_results():
    """Results of other shapes, in the order of the instances."""

    def outs(p, tree):
        state = encode(p, tree)
        return [state] if isinstance(tree, int) else (state[:2], state.sum(), 3)

    instances = trees(16)
    batched = jedbatch.batch(outs, out_axes=None)
    plan = batched.plan(PARAMS, instances, mesh=MESH)
    got, want = batched.apply(PARAMS, plan), [outs(PARAMS, x) for x in instances]
    assert [jax.tree.structure(x) for x in got] == [jax.tree.structure(x) for x in want]
    assert_close(want, got)
    slope = jax.grad(lambda p: squared([outs(p, x) for x in instances]))(PARAMS)
    run = jax.grad(lambda p: squared(batched.apply(p, plan)))
    assert_close(slope, run(PARAMS))
    assert_close(slope, jax.jit(run)(PARAMS))


def check_several_results():
    """Of which some are integers, some inputs, and some not differentiated."""

    def outs(p, tree):
        state = encode(p, tree)
        size = len(str(tree))
        return {"state": state, "bad": jnp.sqrt(state - state), "at": state.argmax(), "n": size}

    instances = trees(16)
    batched = jedbatch.batch(outs)
    plan = batched.plan(PARAMS, instances, mesh=MESH)
    want = jax.tree.map(lambda *x: jnp.stack(x), *[outs(PARAMS, x) for x in instances])
    assert_close(want, batched.apply(PARAMS, plan))
    _, (_, slope) = judged(encode, *instances)
    assert_close(slope, jax.grad(lambda p: squared(batched.apply(p, plan)["state"]))(PARAMS))


def check_results_that_are_not_read():
    """Of lists: a second one, whose derivative is infinite, and a first one that is for some."""

    def fn(w, x):
        return (jnp.sqrt(w * w * abs(x % 3)) * x).sum(), jnp.log(jnp.linalg.norm(0 * w))

    w, xs = jnp.arange(1.0, 4), [np.float32(x) for x in range(17)]
    batched = jedbatch.batch(fn, out_axes=None)
    plan = batched.plan(w, xs, mesh=MESH)
    read = [k for k in range(17) if k % 3]

    def loss(found):
        return sum(found[k][0] ** 2 for k in read)

    want = jax.grad(lambda w: loss([fn(w, x) for x in xs]))(w)
    assert np.isfinite(want).all()
    for step in (lambda f: f, jax.jit):
        assert_close(want, step(jax.grad(lambda w: loss(batched.apply(w, plan))))(w))


def check_inputs():
    """Arrays of instances, which are differentiated by `inputs`."""

    def mix(p, xs):
        total = xs[0]
        for x in xs[1:]:
            total = ADD(p, total, x)
        return total

    rng = np.random.default_rng(0)
    rows = iter(rng.normal(size=(64, 4)).astype(np.float32))
    instances = [[next(rows) for _ in range(rng.integers(1, 5))] for _ in range(11)]
    batched = jedbatch.batch(mix)
    plan = batched.plan(PARAMS, instances, mesh=MESH)
    assert_close(loop(mix, PARAMS, instances), batched.apply(PARAMS, plan))
    given = plan.inputs
    back = jax.jit(
        jax.grad(lambda inputs: squared(batched.apply(PARAMS, plan, inputs=inputs)), allow_int=True)
    )(given)["float32[4]"]
    want = jax.grad(lambda xs: squared(loop(mix, PARAMS, xs)))(instances)
    got = np.asarray(back).reshape(-1, 4)
    flat = np.concatenate([np.stack(x) for x in want])
    rows = got[np.abs(got).sum(1) > 0]
    assert_close(flat[np.lexsort(flat.T)], rows[np.lexsort(rows.T)])
    assert given["float32[4]"].sharding.is_equivalent_to(NamedSharding(MESH, P("data")), 3)


def check_derivatives_of_higher_order():
    instances = trees(16)
    plan = ENCODE.plan(PARAMS, instances, mesh=MESH)
    one = ENCODE.plan(PARAMS, instances)

    def along(plan, order):
        def f(t):
            return squared(ENCODE.apply(jax.tree.map(lambda x: x * t, PARAMS), plan))

        for transform in order:
            f = transform(f)
        return f(1.0)

    for order in ([jax.jacfwd], [jax.grad, jax.grad], [jax.grad, jax.jacfwd]):
        assert_close(along(one, order), along(plan, order))


def check_vmap_over_parameters():
    several = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), PARAMS)
    instances = trees(16)
    plan = ENCODE.plan(PARAMS, instances, mesh=MESH)
    got = jax.vmap(lambda p: ENCODE.apply(p, plan))(several)
    for i in range(3):
        p = jax.tree.map(lambda x, i=i: x[i], several)
        assert_close(loop(encode, p, instances), got[i])


def check_a_nan_stays_where_it_is():
    instances = trees(16)
    bad = {**PARAMS, "e": PARAMS["e"].at[3].set(jnp.nan)}
    got = ENCODE.apply(bad, ENCODE.plan(bad, instances, mesh=MESH))
    want = loop(encode, bad, instances)
    assert np.isnan(want).any()
    assert not np.isnan(want).all()
    np.testing.assert_array_equal(np.isnan(want), np.isnan(got))


def check_collectives():
    """Devices talk once forwards and once backwards, in no loop."""
    p = put(lambda x: P())
    plan = ENCODE.plan(p, trees(16), mesh=MESH)
    run = jax.jit(jax.value_and_grad(lambda p, plan: squared(ENCODE.apply(p, plan))))
    text = run.lower(p, plan).compile().as_text()
    found = re.compile(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(")
    by_computation = {}
    for block in re.split(r"\n\}\n", text):
        name = next((x for x in block.split("\n") if x.endswith("{")), "")
        by_computation[name.split(" (")[0].strip()] = found.findall(block)
    everywhere = [x for names in by_computation.values() for x in names]
    at_top = next(v for k, v in by_computation.items() if k.startswith("ENTRY"))
    assert sorted(everywhere) == sorted(at_top) == ["all-gather", "all-reduce"], by_computation


def check_unseen_minibatches_compile_nothing():
    batched = jedbatch.batch(encode)
    p, traced = put(lambda x: P()), []

    @jax.jit
    def step(p, plan):
        traced.append(plan.static)
        slope = jax.grad(lambda p: squared(batched.apply(p, plan)))(p)
        return jax.tree.map(lambda x, g: x - 0.01 * g, p, slope)

    for i in range(12):
        p = step(p, batched.plan(p, trees(64, seed=i), mesh=MESH))
        if i == 1:
            before, compiled = len(traced), batched.compilations
    assert (len(traced), batched.compilations) == (before, compiled)


def check_minibatches_that_come_back():
    """They are not cut and scheduled again."""
    instances = trees(16)
    first = ENCODE.plan(PARAMS, instances, mesh=MESH)
    again = ENCODE.plan(PARAMS, list(instances), mesh=MESH)
    assert [a.graph is b.graph for a, b in zip(first.shards, again.shards, strict=True)] == [
        True
    ] * 8
    assert again.static is first.static
    assert_close(loop(encode, PARAMS, instances), ENCODE.apply(PARAMS, again))


def check_warm():
    def plain(t):
        return t[1] if len(t) == 2 else (plain(t[1]), plain(t[2]))

    sample = [jax.tree.map(lambda i: i % 9, plain(t)) for t in synthetic_treebank(256, seed=5)]
    batched = jedbatch.batch(encode)
    replicated = put(lambda x: P())
    batched.warm(replicated, sample[:160], batch_size=32, gradient=True, mesh=MESH)
    compiled = batched.compilations
    assert compiled
    run = jax.value_and_grad(lambda p, plan: squared(batched.apply(p, plan)))
    for first in (160, 192, 224):
        instances = sample[first : first + 32]
        plan = batched.plan(replicated, instances, mesh=MESH)
        value, _ = run(replicated, plan)
        assert_close(squared(loop(encode, PARAMS, instances)), value)
        quick = batched.plan(replicated, instances, gradient=False, mesh=MESH)
        batched.apply(replicated, quick)
    assert batched.compilations == compiled


def check_plans_ahead():
    minibatches = [trees(16, seed=i) for i in range(4)]
    made = ENCODE.plans(PARAMS, minibatches, mesh=MESH, axis="data")
    for instances, plan in zip(minibatches, made, strict=True):
        assert_close(loop(encode, PARAMS, instances), ENCODE.apply(PARAMS, plan))


def check_transfers():
    """A plan is on its devices, and nothing else is sent to them."""
    p = put(lambda x: P())
    plan = ENCODE.plan(p, trees(16), mesh=MESH)
    ENCODE.apply(p, plan)
    with jax.transfer_guard("disallow"):
        ENCODE.apply(p, ENCODE.plan(p, trees(16, seed=1), mesh=MESH))


@jedbatch.cell
def spin(p, n):
    """n steps of loops in a loop; negative n never ends."""

    def body(carry):
        i, x = carry
        return i + 1, jax.lax.fori_loop(0, i, lambda _, x: jnp.tanh(x @ p["w"][:4] + x), x)

    return jax.lax.while_loop(lambda c: c[0] != n, body, (0, p["e"][0]))[1]


def check_nested_loops():
    numbers = [3, 0, 5, 1, 2, 4, 6, 1, 0, 2, 3]
    batched = jedbatch.batch(spin, control_flow="lanes", max_steps=7)
    apply = jax.jit(batched.apply)
    plan = batched.plan(PARAMS, numbers, gradient=False, mesh=MESH)
    assert_close(loop(spin, PARAMS, numbers), apply(PARAMS, plan))
    assert_close(loop(spin, PARAMS, numbers), batched.apply(PARAMS, plan))
    numbers[4] = numbers[9] = -1  # in shards of their own
    plan = batched.plan(PARAMS, numbers, gradient=False, mesh=MESH)
    message = raised(lambda: batched.apply(PARAMS, plan), UnfinishedLoopError)
    assert "max_steps=7" in message
    assert "instances 4, 9." in message
    leaves, form = jax.tree.flatten(plan)
    nameless = jax.tree.unflatten(form, leaves)
    assert "instances" not in raised(lambda: batched.apply(PARAMS, nameless), UnfinishedLoopError)
    stopped = np.isnan(apply(PARAMS, plan)).any(axis=1)
    assert np.flatnonzero(stopped).tolist() == [4, 9]


def bag(p, words):
    """Of words in any number, as an array."""
    rows = jnp.tanh(p["e"][words] @ p["w"][:4] + p["w"][4])
    return jax.nn.softmax(rows @ p["w"][0]) @ rows


def check_arrays_that_differ_in_length():
    rng = np.random.default_rng(0)
    batched = jedbatch.batch(bag)
    for _ in range(2):
        words = [rng.integers(0, 9, n) for n in rng.integers(1, 20, 19)]
        plan = batched.plan(PARAMS, words, mesh=MESH)
        testing.check_plan(plan)
        run = jax.jit(jax.value_and_grad(lambda p, plan: squared(batched.apply(p, plan))))

        @functools.partial(jax.value_and_grad, has_aux=True)
        def alone(p, words=words):
            found = loop(bag, p, words)
            return squared(found), found

        (total, want), slope = jax.jit(alone)(PARAMS)  # operations of each length take long
        assert_close(want, batched.apply(PARAMS, plan))
        assert_close((total, slope), run(PARAMS, plan))
    rows = jedbatch.batch(lambda p, words: jnp.tanh(p["e"][words]))
    others = [rng.integers(0, 9, 4 + k // 8) for k in range(16)]
    assert "do not stack" in raised(lambda: rows.plan(PARAMS, others, mesh=MESH), ValueError)
    words = [rng.integers(0, 9, 5) for _ in range(19)]  # the same program, whose results stack
    results = rows.apply(PARAMS, rows.plan(PARAMS, words, mesh=MESH))
    assert_close(jnp.tanh(PARAMS["e"][jnp.stack(words)]), results)


def raised(run, kind):
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError("no error")


def check_rows_that_are_cut_along_an_explicit_axis():
    mesh = Mesh(DEVICES, ("data",), axis_types=(AxisType.Explicit,))
    rows = jnp.sin(jnp.arange(64.0)).reshape(16, 4)
    there = jax.device_put(rows, NamedSharding(mesh, P("data")))
    score = jedbatch.batch(lambda x: jnp.tanh(x).sum(), in_axes=0)
    want = np.tanh(np.asarray(rows)).sum(1)
    for run in (score, jax.jit(lambda x: score(x))):
        assert_close(want, run(there))


def check_errors():
    few = raised(lambda: ENCODE.plan(PARAMS, trees(7), mesh=MESH), ValueError)
    assert "7 instances" in few
    assert "8 devices along data (8)" in few
    plan = ENCODE.plan(PARAMS, trees(8), mesh=MESH)
    there = jax.device_put(PARAMS, DEVICES[3])
    elsewhere = raised(lambda: ENCODE.apply(there, plan), ValueError)
    assert "jax.device_put(params, NamedSharding(mesh" in elsewhere
    inference = ENCODE.plan(PARAMS, trees(8), gradient=False, mesh=MESH)
    slope = jax.grad(lambda p: squared(ENCODE.apply(p, inference)))
    assert "gradient=True" in raised(lambda: slope(PARAMS), ValueError)
    inputs = {"int32[]": np.zeros(3, np.int32)}
    raised(lambda: ENCODE.apply(PARAMS, plan, inputs=inputs), ValueError)
    bad = [*trees(16), (1, 99)]
    assert "instance 16" in raised(lambda: ENCODE.plan(PARAMS, bad, mesh=MESH), IndexError)
    odd = jedbatch.batch(lambda p, t: jnp.zeros(len(str(t))))
    unlike = raised(lambda: odd.plan(PARAMS, trees(16), mesh=MESH), ValueError)
    assert "do not stack" in unlike
    short = raised(lambda: ENCODE.warm(PARAMS, trees(16), batch_size=4, mesh=MESH), ValueError)
    assert "minibatches of 4 instances" in short


if __name__ == "__main__":
    assert len(DEVICES) == 8, DEVICES
    chosen = sys.argv[1:]
    for name, check in list(globals().items()):
        if name.startswith("check") and (not chosen or name in chosen):
            begin = time.process_time()
            check()
            print(f"{name} {time.process_time() - begin:.1f} CPU s", flush=True)
