"""Residuals: what the reverse of a kernel reads of the forward pass, and where it finds it.

Consts, operands and results are there anyway and are read again; what is made of consts alone is
computed again, once per program. Of everything else products and large reductions are saved, a row
for each lane, and what is made of these element by element is computed again.
"""

import enum
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from jedbatch._jaxpr.interpret import dependents, inner_programs, is_inexact, reads
from jedbatch._jaxpr.versions import Atom, Equation
from jedbatch._support.types import Array

# Worth keeping for the reverse.
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
# So are these if their results are smaller than their operands by a factor, `LEAST_REDUCTION`.
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
LEAST_REDUCTION = 4

KEPT = "kept"
keep_some = jax.checkpoint_policies.save_only_these_names(KEPT)


def is_kept(eqn: Equation) -> bool:
    """Returns whether the results of an operation are kept for the reverse."""
    name = eqn.primitive.name
    if name not in REDUCTIONS:
        return name in PRODUCTS
    (x,), (result,) = eqn.invars, eqn.outvars
    return is_inexact(result) and result.aval.size * LEAST_REDUCTION <= x.aval.size


# What runs a program of its own is not run again.
LOOPS = frozenset({"scan", "while", "cond", "custom_vjp_call"})


def runs_again(body: Iterable[Equation]) -> bool:
    """Returns whether most of a program may be run again in reverse.

    Loops are not. Of programs with complex numbers JAX keeps all it would: `jax.checkpoint` rounds
    what it keeps by `reduce_precision`, which takes real numbers only.
    """
    body = list(body)
    return not (any(eqn.primitive.name in LOOPS for eqn in body) or any(map(_is_complex, body)))


def _is_complex(eqn: Equation) -> bool:
    """Returns whether complex numbers go into an equation, come out of it, or are inside."""
    atoms = (*eqn.invars, *eqn.outvars)
    if any(jnp.issubdtype(x.aval.dtype, jnp.complexfloating) for x in atoms if is_inexact(x)):
        return True
    return any(_is_complex(e) for program in inner_programs(eqn) for e in program.eqns)


class Source(enum.Enum):
    """The places from which the reverse of a kernel takes what it reads."""

    CONST = enum.auto()  # of the kernel
    OPERAND = enum.auto()  # read again
    RESULT = enum.auto()  # read again
    SAVED = enum.auto()  # a row
    DERIVED = enum.auto()  # from consts alone, once per program
    LITERAL = enum.auto()
    UNREAD = enum.auto()  # zeros will do


# Only move or convert elements: cheaper to do again than to keep.
STRUCTURAL_OPERATIONS = frozenset(
    {
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "expand_dims",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    }
)

Sourced = tuple[Source, Any]  # a source, and which of it; a value if it is a literal


class Residuals:
    """The variables of a forward program that the backward program reads, and their sources.

    Attributes:
      operands: of the kernel.
      saved, derived: variables that are kept, and those that are computed from consts; their
        numbers.
    """

    def __init__(self, forward: Any, num_consts: int, results: list[Array]):
        jaxpr = forward.jaxpr
        self._forward = forward
        self._consts, self.operands = jaxpr.invars[:num_consts], jaxpr.invars[num_consts:]
        self._results = results
        self._varying = dependents(jaxpr, self.operands)
        self.saved: dict[Atom, int] = {}
        self.derived: dict[Atom, int] = {}

    def find(self, v: Atom) -> Sourced:
        """Returns where the value of a variable is found again."""
        jaxpr, values = self._forward.jaxpr, self._forward.consts
        if isinstance(v, Literal):
            return Source.LITERAL, v.val
        if v in jaxpr.constvars:
            return Source.LITERAL, values[jaxpr.constvars.index(v)]
        for source, variables in (
            (Source.CONST, self._consts),
            (Source.OPERAND, self.operands),
            (Source.RESULT, self._results),
        ):
            if v in variables:
                return source, variables.index(v)
        if v not in self._varying:
            return Source.DERIVED, self.derived.setdefault(v, len(self.derived))
        return self.save(v)

    def save(self, v: Atom) -> Sourced:
        """Keeps a variable."""
        return Source.SAVED, self.saved.setdefault(v, len(self.saved))

    def program_of_derived(self) -> Any:
        """Returns the program that computes what is derived from consts."""
        jaxpr, varying = self._forward.jaxpr, self._varying
        fixed = [e for e in jaxpr.eqns if not varying.intersection((*reads(e), *e.outvars))]
        return jaxpr.replace(invars=self._consts, outvars=list(self.derived), eqns=fixed)


def recomputable(kernel: Any) -> dict[Var, list[Equation]]:
    """Variables that structural operations make from operands, with those operations."""
    again: dict[Var, list[Equation]] = {v: [] for v in kernel.operand_vars}
    for eqn in kernel.body:
        if (
            eqn.primitive.name in STRUCTURAL_OPERATIONS
            and reads(eqn)
            and again.keys() >= set(reads(eqn))
        ):
            steps = [step for v in reads(eqn) for step in again[v]]
            steps = list({id(step): step for step in [*steps, eqn]}.values())
            again.update((v, steps) for v in eqn.outvars)
    return again
