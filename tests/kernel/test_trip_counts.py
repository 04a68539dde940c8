"""Trip counts that programs say, against those counted; and loops that become scans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jedbatch
from jedbatch._jaxpr.interpret import performs
from jedbatch._jaxpr.trip_counts import trips, with_equal_trips

W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)) / 4, jnp.float32)


def counting(goes_on, grows=lambda i: i + 1):
    """A function of a flag that begins at 0 or 1 and returns how many trips were taken."""

    def count(flag):
        start = (jnp.where(flag, 0, 1), jnp.int32(7), jnp.int32(0))
        return lax.while_loop(goes_on, lambda c: (grows(c[0]), c[1], c[2] + 1), start)[2]

    return count


SAID = {
    "less": counting(lambda c: c[0] < 7),
    "at most": counting(lambda c: c[0] <= 7),
    "the other way around": counting(lambda c: c[1] > c[0]),
    "at least": counting(lambda c: c[1] - 1 >= c[0]),
    "carried end": counting(lambda c: c[0] < c[1]),
    "two counters": counting(lambda c: (c[0] < 9) & (c[2] < 5)),
    "sum": counting(lambda c: c[0] + 2 < 9 - 1),
    "never": counting(lambda c: c[0] < -3),
    "in a call": counting(jax.jit(lambda c: c[0] < 7), jax.jit(lambda i: i + 1)),
    "number of a flag": lambda flag: lax.fori_loop(
        flag.astype(jnp.int32), 7, lambda _, n: n + 1, jnp.int32(0)
    ),
    "steps of two": counting(lambda c: c[0] < 8, lambda i: i + 2),
    "backwards": counting(lambda c: c[0] > -7, lambda i: i - 1),
    "equality": counting(lambda c: c[0] != 7),
    "either": counting(lambda c: (c[0] < 7) | (c[2] < 3)),
}
NOT_SAID = {
    "too many": counting(lambda c: c[0] < 7000),
    "never ends": counting(lambda c: c[0] < 7, lambda i: i - 1),
    "an end that moves": counting(lambda c: c[0] < c[2] + 3, lambda i: i + 1),
    "a start that is data": lambda n: lax.fori_loop(n, 7, lambda _, x: x + 1, jnp.int32(0)),
    "a number of reals": lambda x: lax.while_loop(lambda x: x < 7, lambda x: x + 1, x),
}


def loop_and_start(fn, arg):
    """The program of a function of one loop, and the trips that it says."""
    found = []
    original = trips

    def recording(eqn, start):
        found.append(original(eqn, start))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jedbatch._jaxpr.trip_counts.trips", recording)
        program = with_equal_trips(jax.make_jaxpr(fn)(arg))
    (trip_count,) = found
    return program, trip_count


@pytest.mark.parametrize("name", SAID)
def test_fewest_and_most_are_those_counted(name):
    counted = [int(SAID[name](jnp.bool_(flag))) for flag in (False, True)]
    program, said = loop_and_start(SAID[name], jnp.bool_(True))
    assert said == (min(counted), max(counted))
    assert not performs(program, "while")
    for flag, expected in zip((False, True), counted, strict=True):
        (got,) = jax.core.eval_jaxpr(program.jaxpr, program.consts, jnp.bool_(flag))
        assert got == expected


@pytest.mark.parametrize("name", NOT_SAID)
def test_where_programs_do_not_say_loops_stay(name):
    arg = {"a start that is data": jnp.int32(3), "a number of reals": jnp.float32(3)}.get(name)
    program, said = loop_and_start(NOT_SAID[name], jnp.bool_(True) if arg is None else arg)
    assert said is None
    assert performs(program, "while")


DTYPES = [np.dtype(f"{sign}int{bits}") for bits in (8, 16, 32, 64) for sign in ("", "u")]
MOST_COUNTED = 300


def near_an_edge(rng, dtype, span=40):
    """A number near 0 or near an end of the range of a dtype."""
    info = np.iinfo(dtype)
    edge = (info.min, info.max, 0)[rng.integers(3)]
    number = int(edge) + int(rng.integers(-span, span))
    return dtype.type(min(max(number, info.min), info.max))


def random_loop(rng):
    """(two first numbers, the condition of a loop), by any arithmetic that is followed."""
    dtype, other = (DTYPES[k] for k in rng.integers(len(DTYPES), size=2))
    first = near_an_edge(rng, dtype)
    begins = [first, dtype.type(min(int(first) + int(rng.integers(2)), np.iinfo(dtype).max))]
    converts = rng.random() < 0.4
    to = other if converts else dtype
    added, kept, end = near_an_edge(rng, dtype), near_an_edge(rng, to), near_an_edge(rng, to)
    inner, outer = rng.integers(3, size=2)
    compares = (lax.lt, lax.le, lambda a, b: lax.gt(b, a), lambda a, b: lax.ge(b, a))
    judges = (np.less, np.less_equal, np.less, np.less_equal)
    which = rng.integers(4)

    def goes_on(i, compare):
        i = (i, i + added, i - added)[inner]
        i = i.astype(to) if converts else i
        return compare((i, i + kept, i - kept)[outer], end)

    return (
        begins,
        lambda i: goes_on(i, compares[which]),
        lambda i: goes_on(i, judges[which]),
    )


def counted_with_wrapping(first, goes_on):
    """How many trips NumPy takes, whose integers wrap around; None if there are many."""
    i, count = first, 0
    with np.errstate(over="ignore"):
        while goes_on(i):
            i, count = i + i.dtype.type(1), count + 1
            if count > MOST_COUNTED:
                return None
    return count


def test_integers_wrap_around():
    """Numbers of any dtype, near the ends of its range: the count is NumPy's, or none is said."""
    rng = np.random.default_rng(0)
    num_said = num_wrapping = 0
    with jax.enable_x64():
        for _ in range(400):
            begins, goes_on, judge = random_loop(rng)
            counts = [counted_with_wrapping(x, judge) for x in begins]

            def count(flag, goes_on=goes_on, begins=begins):
                i = jnp.where(flag, *begins)
                step = lambda c: (c[0] + c[0].dtype.type(1), c[1] + 1)  # noqa: E731
                return lax.while_loop(lambda c: goes_on(c[0]), step, (i, 0))[1]

            _, said = loop_and_start(count, jnp.bool_(True))
            if said is None:
                num_wrapping += None in counts
                continue
            fewest, most = said
            if most > MOST_COUNTED:
                assert None in counts
                continue
            assert (fewest, most) == (min(counts), max(counts))
            num_said += most > 0
    assert min(num_said, num_wrapping) > 20


def test_loops_that_wrap_around_are_those_of_a_while_loop():
    u8, u32, i8, most = np.uint8, np.uint32, np.int8, np.int32(2**31 - 1)
    loops = [
        (u32(0), lambda i: i - u32(5) < u32(3)),
        (np.int32(1), lambda i: i + most < -most + 10),
        (u8(250), lambda i: i + u8(10) < u8(9)),
        (i8(100), lambda i: i.astype(jnp.int32) - 100 < 20),
        (np.int32(250), lambda i: i.astype(jnp.uint8) + u8(2) < u8(255)),
        (np.int32(120), lambda i: i.astype(jnp.int8) < i8(127)),
        (u8(3), lambda i: i < u8(7)),
        (i8(126), lambda i: i <= i8(126)),
    ]

    def run(p, x):
        def product(begin, goes_on):
            step = lambda c: (c[0] + c[0].dtype.type(1), c[1] * p)  # noqa: E731
            return lax.while_loop(lambda c: goes_on(c[0]), step, (begin, x))[1]

        return jnp.stack([product(*loop) for loop in loops])

    p, xs = np.float32(1.01), [np.float32(1), np.float32(3)]
    found = jedbatch.batch(lambda p, x: jedbatch.cell(run)(p, x))(p, xs)
    np.testing.assert_allclose(found, [jax.jit(run)(p, x) for x in xs], rtol=1e-5)


def test_loops_whose_lanes_differ_much_stay():
    def uneven(flag):
        return lax.fori_loop(jnp.where(flag, 0, 4), 7, lambda _, n: n + 1, jnp.int32(0))

    program, said = loop_and_start(uneven, jnp.bool_(True))
    assert said == (3, 7)
    assert performs(program, "while")


def solve(w, x):
    """Steps until x is small, each of three or four stages: the first one keeps the last stage."""

    def step(carry):
        x, stage, is_first = carry
        start = jnp.where(is_first, 0, 1)

        def one(_, stage):
            return jnp.tanh(stage @ w)

        stage = lax.fori_loop(start, 4, one, jnp.where(is_first, x, stage))
        return 0.9 * x + 0.02 * stage, stage, jnp.bool_(False)

    def goes_on(carry):
        return jnp.abs(carry[0]).max() > 0.5

    return lax.while_loop(goes_on, step, (x, x, jnp.bool_(True)))[0]


def test_a_loop_of_such_loops_runs_as_one_block():
    """Values and directional derivatives are the loop's; no loop in a loop waits by itself."""
    rng = np.random.default_rng(1)
    xs = [
        scale * rng.normal(size=8).astype(np.float32)
        for scale in rng.choice([0.3, 1.0, 30.0], 64).tolist()
    ]
    ran = jedbatch.batch(solve, control_flow="lanes")
    assert [x.what for x in ran.lane_steps(W, xs)] == ["block"]
    expected = jnp.stack([solve(W, x) for x in xs])
    np.testing.assert_allclose(ran(W, xs), expected, rtol=1e-4, atol=1e-5)
    tangent = jnp.ones_like(W)
    by_loop = jnp.stack([jax.jvp(lambda w, x=x: solve(w, x), (W,), (tangent,))[1] for x in xs])
    _, got = jax.jvp(lambda w: ran(w, xs), (W,), (tangent,))
    np.testing.assert_allclose(got, by_loop, rtol=1e-3, atol=1e-4)
