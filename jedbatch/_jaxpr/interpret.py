"""Handling programs of JAX equation by equation, with public names only."""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from jedbatch._jaxpr.versions import (
    CALLS,
    Atom,
    ClosedProgram,
    Equation,
    OpenProgram,
    consts_of,
    is_program,
    scan_parts,
    with_equations,
    without_consts,
)
from jedbatch._support.types import Array, Dtype

Bindings = dict[Any, Array]  # values by variable, and those computed on the way by other keys
Rule = Callable[[Equation, list[Array]], Sequence[Array]]  # from an equation and its operands


def names_in(*lines: str) -> frozenset[str]:
    """Returns the words of some lines."""
    return frozenset(" ".join(lines).split())


# Each element of the result is of the elements of the operands at its place.
ELEMENTWISE_OPERATIONS = names_in(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil",
    "clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf",
    "erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow",
    "is_finite le le_to lgamma log log1p logistic lt lt_to max min mul ne neg nextafter not",
    "one_minus_square optimization_barrier or polygamma population_count pow random_gamma_grad",
    "real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left",
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan",
    "tanh xor",
)

# Keep every element in its place, unless they repeat some.
RESHAPES = names_in("broadcast_in_dim expand_dims reshape squeeze")


def reads(eqn: Equation) -> list[Any]:
    """The variables an equation reads, each once."""
    return list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))


def value_of(atom: Atom, env: Bindings) -> Array:
    """The value of a literal or variable."""
    return atom.val if isinstance(atom, Literal) else env[atom]


@functools.cache
def has_gradient(dtype: Dtype) -> bool:
    """True of the dtypes of real and complex numbers."""
    return bool(jax.dtypes.issubdtype(dtype, np.inexact))


def is_inexact(atom: Atom) -> bool:
    """True of variables that have a gradient."""
    return has_gradient(atom.aval.dtype)


def shape_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a variable, to trace with."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def returns_nothing(params: dict[str, Any]) -> bool:
    """Returns whether an operation runs a program, or one of several, that has no results.

    The gradient of a function may have such a `jit` where its values are all known beforehand.
    """
    programs: Sequence[Any] = params.get("branches") or (params.get("jaxpr"),)
    if not is_program(programs[0]) or without_consts(programs[0]).outvars:
        return False
    return not any(program.effects for program in programs)


def is_reshape(eqn: Equation) -> bool:
    """Returns whether an operation gives its operand another shape, and does nothing else."""
    if eqn.primitive.name not in RESHAPES or not isinstance(eqn.invars[0], Var):
        return False
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    return before.size == after.size


def run_equation(jaxpr: OpenProgram, eqn: Equation, values: Sequence[jax.Array]) -> list[Array]:
    """Returns the results of one equation of a jaxpr on some operands: JAX's own rule."""
    operands = {v: x for v, x in zip(eqn.invars, values, strict=True) if isinstance(v, Var)}
    one = jaxpr.replace(constvars=[], invars=list(operands), outvars=list(eqn.outvars), eqns=[eqn])
    return jax.core.eval_jaxpr(one, [], *operands.values())


def run_equations(equations: Sequence[Equation], env: Bindings, rule: Rule) -> None:
    """Runs equations by a rule, one after the other; adds their results to the environment."""
    for eqn in equations:
        values = [value_of(x, env) for x in eqn.invars]
        env.update(zip(eqn.outvars, rule(eqn, values), strict=True))


def interpret(
    jaxpr: OpenProgram, consts: Sequence[jax.Array], args: Sequence[jax.Array], rule: Rule
) -> list[Array]:
    """Returns the results of a jaxpr whose equations are run by a rule.

    Args:
      jaxpr: the program.
      consts: the values of its constants.
      args: the values of its arguments.
      rule: maps an equation and the values of its operands to its results; `run_equation` does
        what JAX does.
    """
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    run_equations(jaxpr.eqns, env, rule)
    return [value_of(x, env) for x in jaxpr.outvars]


def inner_programs(eqn: Equation) -> list[Any]:
    """The programs an equation runs, without their consts."""
    values = [v for p in eqn.params.values() for v in (p if isinstance(p, tuple | list) else [p])]
    return [without_consts(x) for x in values if is_program(x)]


def with_programs(eqn: Equation, change: Callable[[Any], Any]) -> Equation:
    """Returns an equation that runs other programs, those that a function makes of its own."""

    def through(x: Any) -> Any:
        if type(x) in (tuple, list):
            return type(x)(map(through, x))
        return change(x) if is_program(x) else x

    return eqn.replace(params={name: through(x) for name, x in eqn.params.items()})


def as_call(eqn: Equation, fn: Callable[..., Array]) -> Equation:
    """Returns an equation that calls a function in place of what it does."""
    (called,) = jax.make_jaxpr(jax.jit(fn))(*map(shape_of, eqn.invars)).eqns
    return eqn.replace(primitive=called.primitive, params=called.params)


# --- loops, branches and calls whose programs are run in other ways ---

Run = Callable[..., Sequence[Array]]  # a program, from its arguments to its results


def run_with_bodies(eqn: Equation, bodies: Sequence[Run], values: Sequence[Array]) -> list[Array]:
    """Returns the results of a loop, a branch or a call, whose programs are run by functions.

    Parameters of such operations differ between versions of JAX, so these are traced again with the
    public functions that make them.

    Args:
      eqn: of an operation in `REBUILT`.
      bodies: a function for each of `bodies_of` the equation.
      values: of its operands.
    """
    return list(_REBUILDS[eqn.primitive.name](eqn, bodies, values))


def bodies_of(eqn: Equation) -> list[Any]:
    """Returns the programs of a loop, a branch or a call in `REBUILT`."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        return list(params["branches"])
    if name == "while":
        return [params["cond_jaxpr"], params["body_jaxpr"]]
    return [params[CALLS.get(name, "jaxpr")]]


def is_fixed(eqn: Equation) -> bool:
    """Returns whether a branch has effects, or the platform chooses it, as in `jnp.diag`."""
    return bool(eqn.effects) or eqn.params.get("branches_platforms") is not None


def _call(_: Equation, bodies: Sequence[Run], values: Sequence[Array]) -> Sequence[Array]:
    return bodies[0](*values)


def _checkpoint(eqn: Equation, bodies: Sequence[Run], values: Sequence[Array]) -> Sequence[Array]:
    policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
    return jax.checkpoint(bodies[0], policy=policy, prevent_cse=prevent_cse)(*values)


def _scan(eqn: Equation, bodies: Sequence[Run], values: Sequence[Array]) -> Sequence[Array]:
    num_consts, num_carried = scan_parts(eqn)
    first_scanned = num_consts + num_carried

    def body(carried: list[Any], scanned: list[Any]) -> tuple[list[Array], list[Array]]:
        out = list(bodies[0](*values[:num_consts], *carried, *scanned))
        return out[:num_carried], out[num_carried:]

    how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carried, scanned = list(values[num_consts:first_scanned]), list(values[first_scanned:])
    return [x for part in jax.lax.scan(body, carried, scanned, **how) for x in part]


def _while(eqn: Equation, bodies: Sequence[Run], values: Sequence[Array]) -> Sequence[Array]:
    num_carried = len(eqn.outvars)
    num_read = len(without_consts(eqn.params["cond_jaxpr"]).invars) - num_carried
    first = len(values) - num_carried
    condition = functools.partial(bodies[0], *values[:num_read])
    body = functools.partial(bodies[1], *values[num_read:first])
    return jax.lax.while_loop(
        lambda carried: condition(*carried)[0],
        lambda carried: list(body(*carried)),
        list(values[first:]),
    )


def _cond(_: Equation, bodies: Sequence[Run], values: Sequence[Array]) -> Sequence[Array]:
    return jax.lax.switch(values[0], bodies, *values[1:])


_REBUILDS: Mapping[str, Callable[..., Sequence[Array]]] = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call"), _call),
    **dict.fromkeys(("checkpoint", "remat2"), _checkpoint),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
REBUILT = frozenset(_REBUILDS)  # of calls, those without a rule of differentiation


def cares_for_padding(eqn: Equation) -> bool:
    """True of what must not run on arbitrary values, even where its results are not read.

    Loops whose length depends on what they compute, calls of Python, and what contains one.
    """
    return calls_python(eqn) or any_performs([eqn], "while")


def calls_python(eqn: Equation) -> bool:
    """True of calls of Python, and what contains one."""
    if "callback" in eqn.primitive.name:
        return True
    return any(calls_python(e) for program in inner_programs(eqn) for e in program.eqns)


def performs(program: Any, *names: str) -> bool:
    """True of programs with one of these primitives in them, however deep inside."""
    return any_performs(without_consts(program).eqns, *names)


def any_performs(equations: Sequence[Equation], *names: str) -> bool:
    """Returns whether some equation is one of these primitives, or has one somewhere inside."""
    return any(
        eqn.primitive.name in names or any(performs(x, *names) for x in inner_programs(eqn))
        for eqn in equations
    )


_OTHER_NUMBERS = (("key<urbg>",), ("key<rbg>", "key<urbg>"))  # of other draws, and of bits
_DRAWS = ("random_bits", "random_split", "random_fold_in", "rng_bit_generator")


def one_by_one(program: Any) -> Any:
    """The program, with what `vmap` cannot do for many at a time done one by one.

    `jax.pure_callback` has no rule for `vmap` unless it is given a `vmap_method`. Random numbers
    by the generators of XLA (keys of the kinds "rbg" and "unsafe_rbg") are others under `vmap`
    than one by one.
    """
    if not performs(program, "pure_callback", *_DRAWS):
        return program

    eqns = []
    for eqn in without_consts(program).eqns:
        eqn = with_programs(eqn, one_by_one)
        if eqn.primitive.name == "pure_callback" and eqn.params["vmap_method"] is None:
            eqn = eqn.replace(params={**eqn.params, "vmap_method": "sequential"})
        eqns.append(_apart(eqn) if _depends_on_lanes(eqn) else eqn)
    return with_equations(program, eqns)


def _depends_on_lanes(eqn: Equation) -> bool:
    """Returns whether `vmap` of an operation gives other random numbers than the operation."""
    name = eqn.primitive.name
    if name not in _DRAWS:
        return False
    kind = str(eqn.invars[0].aval.dtype)
    return name == "rng_bit_generator" or kind in _OTHER_NUMBERS[name == "random_bits"]


def _apart(eqn: Equation) -> Any:
    """The operation, done for one lane after the other."""
    call = jax.custom_batching.sequential_vmap(lambda *xs: eqn.primitive.bind(*xs, **eqn.params))
    traced = jax.make_jaxpr(call)(*(v.aval for v in eqn.invars))
    (called,) = traced.eqns
    return eqn.replace(primitive=called.primitive, params=called.params)


# Floating-point operations of factorizations of a matrix [n, n], as a multiple of n³ (Golub and Van
# Loan, Matrix Computations).
FACTORIZATIONS = {
    "cholesky": 1 / 3,
    "lu": 2 / 3,
    "qr": 8 / 3,
    "geqrf": 4 / 3,
    "householder_product": 4 / 3,
    "hessenberg": 10 / 3,
    "tridiagonal": 4 / 3,
    "eigh": 9.0,
    "eig": 25.0,
    "schur": 25.0,
    "svd": 21.0,
}


CALLBACK_WORK = 1 << 20  # of a call of Python, which takes as long as so many operations


def work(eqn: Equation) -> int:
    """Roughly the floating-point operations of an equation."""
    elements = sum(math.prod(v.aval.shape) for v in eqn.outvars)
    if "callback" in eqn.primitive.name:
        return CALLBACK_WORK
    if eqn.primitive.name in FACTORIZATIONS:
        matrix = eqn.invars[0].aval.shape
        return int(FACTORIZATIONS[eqn.primitive.name] * math.prod(matrix) * matrix[-1])
    if eqn.primitive.name == "triangular_solve":
        return elements * eqn.invars[0].aval.shape[-1]
    if eqn.primitive.name == "dot_general":
        (left, _), _ = eqn.params["dimension_numbers"]
        return 2 * elements * math.prod(eqn.invars[0].aval.shape[i] for i in left)
    if eqn.primitive.name == "conv_general_dilated":
        return 2 * elements * math.prod(eqn.invars[1].aval.shape[1:])
    times = eqn.params.get("length", 1)
    return elements + times * sum(work(e) for x in inner_programs(eqn) for e in x.eqns)


def rows_per_weight(body: Iterable[Equation], weights: Collection[Var]) -> float:
    """Returns how many rows the products of a program multiply by each weight, on average."""
    operations = sizes = 0
    for eqn in body:
        if eqn.primitive.name == "dot_general":
            mine = [v for v in reads(eqn) if v in weights]
            if len(mine) == 1:
                operations += work(eqn)
                sizes += math.prod(mine[0].aval.shape)
    return operations / (2 * sizes) if sizes else 1.0


def used_variables(jaxpr: OpenProgram) -> set[Var]:
    """Variables that the results of a jaxpr depend on."""
    used = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in reversed(jaxpr.eqns):
        if used.intersection(eqn.outvars):
            used.update(reads(eqn))
    return used


def dependents(jaxpr: OpenProgram, variables: Sequence[Var]) -> set[Var]:
    """The variables themselves and all that depend on one of them."""
    reached = set(variables)
    for eqn in jaxpr.eqns:
        if reached.intersection(reads(eqn)):
            reached.update(eqn.outvars)
    return reached


def body_of(*primitives: str) -> Callable[[Any], Any]:
    """A function that gives the program which a call of these primitives stands for, or None."""
    return lambda eqn: eqn.params["jaxpr"] if eqn.primitive.name in primitives else None


jitted = body_of("jit")


def inlined(closed: ClosedProgram, body: Callable[[Any], Any] = jitted) -> Any:
    """The program with calls replaced by their bodies, as far as `body` gives one.

    Roundings to the precision a value has anyway, which `jax.checkpoint` leaves around what it
    keeps, are left out.
    """

    def evaluate(
        jaxpr: OpenProgram, consts: Sequence[jax.Array], args: Sequence[jax.Array]
    ) -> list[Array]:
        def rule(eqn: Equation, values: list[jax.Array]) -> list[Array]:
            inner = body(eqn)  # closed or open, by primitive and version
            if inner is not None:
                return evaluate(without_consts(inner), consts_of(inner), values)
            return values if _rounds_nothing(eqn) else run_equation(jaxpr, eqn, values)

        return interpret(jaxpr, consts, args, rule)

    avals = map(shape_of, closed.jaxpr.invars)
    return jax.make_jaxpr(lambda *args: evaluate(closed.jaxpr, closed.consts, args))(*avals)


def _rounds_nothing(eqn: Equation) -> bool:
    if eqn.primitive.name != "reduce_precision":
        return False
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    return eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant
