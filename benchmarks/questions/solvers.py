"""How do solvers and samplers of other libraries run, whose loops end when values say so?

van_der_pol  Diffrax: 256 oscillators for 5 seconds, stiffness 1 to 100 (equally spaced logarithms).
             Tsit5 with an adaptive controller.
pulled       the same with 32 oscillators in an instance that pull at each other: steps with work.
nuts         BlackJAX: 100 chains of 10 draws; logistic regression, 300 points of 20 dimensions.
cg           Lineax: conjugate gradients, 256 systems of 128 unknowns, conditions 1 to 1000.
adam         Optax: 256 quadratics of 64 unknowns until the gradient is small, conditions 1 to 30.

vmap         `jax.vmap` of the same function, jit-compiled.
rows         `jedbatch.batch` as it is, called on rows of arrays.
list         the same with a list of instances; what Python does for each instance counts, too.
gradient     the same as `vmap` and `rows`, for the gradient of parameters that all share.

All run in turns in one process, each warmed up; results are compared with those of `vmap` before
anything is timed. `waits` is how many steps `vmap` does, over those that are needed.
"""

import functools
from collections.abc import Callable
from typing import Any

import blackjax
import diffrax
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optax

import jedbatch
from benchmarks import common

DRAWS = 10


def oscillators(count: int, many: int) -> tuple[Callable, Any, Any]:
    """Returns (function, shared arguments, rows); results end with steps, as in all here."""
    pull = np.random.default_rng(0).normal(size=(many, many)) / 10 / np.sqrt(many) * (many > 1)

    def field(t: Any, y: Any, args: Any) -> Any:
        (stiffness, pull), (x, v) = args, y
        return jnp.stack([v, stiffness * (1 - x**2) * v - x + pull @ x])

    def solve(params: Any, stiffness: Any) -> Any:
        found = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            0.0,
            5.0,
            1e-3,
            jnp.stack([params["start"], 0 * params["start"]]),
            args=(stiffness, params["pull"]),
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4),
            max_steps=1024,
        )
        return found.ys[-1], found.stats["num_steps"]

    params = {"start": jnp.linspace(2.0, 1.0, many), "pull": jnp.asarray(pull, jnp.float32)}
    return solve, params, jnp.geomspace(1, 100, count, dtype=jnp.float32)


def nuts(count: int) -> tuple[Callable, Any, Any]:
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.normal(size=(300, 20)), jnp.float32)
    params = {"features": features, "labels": jnp.asarray(rng.random(300) < 0.5, jnp.float32)}

    def chain(params: Any, seed: Any) -> Any:
        def log_density(q: Any) -> Any:
            z = params["features"] @ (jnp.exp(q[0]) * q[1:])
            likelihood = jnp.sum(jnp.logaddexp(0.0, z) - params["labels"] * z)
            return -(likelihood + 0.5 * q[1:] @ q[1:] + 0.5 * q[0] ** 2)

        sampler = blackjax.nuts(log_density, step_size=0.08, inverse_mass_matrix=jnp.ones(21))

        def draw(state: Any, key: Any) -> Any:
            state, info = sampler.step(key, state)
            return state, (state.position, info.num_integration_steps)

        keys = jax.random.split(jax.random.wrap_key_data(seed), DRAWS)
        positions, steps = jax.lax.scan(draw, sampler.init(jnp.zeros(21)), keys)[1]
        return positions.mean(0), steps

    return chain, params, jax.random.key_data(jax.random.split(jax.random.key(5), count))


def systems(count: int, size: int, condition: float) -> dict[str, Any]:
    """Returns rows of symmetric matrices and vectors."""
    rng = np.random.default_rng(0)
    bases, _ = np.linalg.qr(rng.normal(size=(count, size, size)))
    exponents = np.linspace(0, 1, size) * np.log(np.geomspace(1, condition, count))[:, None]
    matrices = np.einsum("nij,nj,nkj->nik", bases, np.exp(exponents), bases)
    vectors = rng.normal(size=(count, size))
    rows = {"matrix": matrices, "vector": vectors}
    return {k: jnp.asarray(x, jnp.float32) for k, x in rows.items()}


def cg(count: int) -> tuple[Callable, Any, Any]:
    def solve(params: Any, system: Any) -> Any:
        matrix = system["matrix"] + params["damping"] * jnp.eye(128)
        operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
        solver = lineax.CG(rtol=1e-4, atol=1e-4)
        found = lineax.linear_solve(operator, system["vector"], solver)
        return found.value, found.stats["num_steps"]

    return solve, {"damping": jnp.float32(0.01)}, systems(count, 128, 1000)


def adam(count: int) -> tuple[Callable, Any, Any]:
    def descend(params: Any, system: Any) -> Any:
        optimizer = optax.adam(params["rate"])

        def gradient(x: Any) -> Any:
            return system["matrix"] @ x - system["vector"]

        def step(carry: Any) -> Any:
            x, state, n = carry
            updates, state = optimizer.update(gradient(x), state, x)
            return optax.apply_updates(x, updates), state, n + 1

        def goes_on(carry: Any) -> Any:
            return (jnp.linalg.norm(gradient(carry[0])) > 0.1) & (carry[2] < 2000)

        x = jnp.zeros(64)
        x, _, n = jax.lax.while_loop(goes_on, step, (x, optimizer.init(x), 0))
        return x, n

    return descend, {"rate": jnp.float32(0.05)}, systems(count, 64, 30)


def measure(table: common.Table, name: str, case: Any, gradient: bool, seconds: float) -> None:
    """Prints a row."""
    fn, params, rows = case
    by_vmap = jax.vmap(fn, (None, 0))
    on_rows = jedbatch.batch(fn, in_axes=(None, 0))
    on_list = jedbatch.batch(fn)
    host = jax.tree.map(np.asarray, rows)
    count = len(jax.tree.leaves(host)[0])
    instances = [jax.tree.map(lambda x, i=i: x[i], host) for i in range(count)]

    def slope(run: Callable) -> Callable:
        return jax.grad(lambda p: jnp.sin(run(p, rows)[0]).sum())

    jitted = common.jit(by_vmap)
    values = [jitted(params, rows), on_rows(params, rows), on_list(params, instances)]
    for x in values[1:]:
        close = np.isclose(x[0], values[0][0], rtol=1e-2, atol=5e-2).reshape(count, -1).all(1)
        assert close.mean() >= 0.9, f"{name}: {1 - close.mean():.0%} of instances differ"
    steps = np.asarray(values[0][1], float).reshape(count, -1)
    runs = [
        lambda: jitted(params, rows),
        lambda: on_rows(params, rows),
        lambda: on_list(params, instances),
    ]
    if gradient:
        jitted_slope = common.jit(slope(by_vmap))
        runs += [lambda: jitted_slope(params), lambda: slope(on_rows)(params)]
    times = common.interleaved(runs, seconds, least=5)
    waits = f"{count * steps.max(0).sum() / steps.sum():.1f}"
    milliseconds = [f"{1e3 * times.median(i):.2f}" for i in range(3)]
    of_gradient = times.ratio(3, 4) if gradient else "–"
    table.row(name, count, waits, *milliseconds, times.ratio(0, 1), times.ratio(0, 2), of_gradient)
    jax.clear_caches()


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="per row (%(default)s)")
    parser.add_argument("--cases", default="van_der_pol,pulled,nuts,cg,adam", help="such as cg")
    args = parser.parse_args()
    if args.data:
        parser.error("--data: instances are always synthetic here")
    sizes = {"van_der_pol": 256, "pulled": 256, "nuts": 100, "cg": 256, "adam": 256}
    if args.quick:
        args.seconds = 0.1
        sizes = dict.fromkeys(sizes, 8)
    makers: dict[str, Callable[[int], Any]] = {
        "van_der_pol": functools.partial(oscillators, many=1),
        "pulled": functools.partial(oscillators, many=32),
        "nuts": nuts,
        "cg": cg,
        "adam": adam,
    }
    print(common.machine())
    columns = ("instances", "waits", "vmap ms", "rows ms", "list ms", "vmap / rows", "vmap / list")
    table = common.Table("", *columns, "gradient, vmap / rows")
    for name in args.cases.split(","):
        case = makers[name](sizes[name])
        measure(table, name, case, name in ("van_der_pol", "cg"), args.seconds)


if __name__ == "__main__":
    main()
