"""The program of a node type for one lane, forwards and backwards.

A node type brings a jaxpr that maps shared values and operands to results. Three things are done
to it, once, when the type first runs:

**Shared work is lifted out.** What depends on shared values only (`w.T`, a slice of packed
weights) moves to a prologue that runs once per program. It is ordinary JAX, so gradients flow
back through it. What is left maps `consts`, computed by the prologue, and `operands`, one row
each, to results.

**Products put rows first.** For a vector x, JAX writes `x @ w` as `dot_general(w, x)`, which
batches to a transposed result. Swapped, a batch of them is one matrix product of the rows.

**Products are put together** where several meet the same rows, and weights are transposed once if
they would be summed over their last axis (see `_kernel.pack`).

Its reverse is found by `_kernel.vjp`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.extend.core import Jaxpr, Var

from jedbatch._graph.types import NodeType, operation_of
from jedbatch._jaxpr.bounded import bounded
from jedbatch._jaxpr.branch_residuals import saving_little
from jedbatch._jaxpr.configuration import without_mesh
from jedbatch._jaxpr.divergent import BranchesName, diverges, without_lock_step
from jedbatch._jaxpr.faults import made_in
from jedbatch._jaxpr.gates import derives, with_derived
from jedbatch._jaxpr.interpret import (
    Bindings,
    cares_for_padding,
    inlined,
    performs,
    reads,
    rows_per_weight,
    run_equation,
    run_equations,
    value_of,
    work,
)
from jedbatch._jaxpr.lane_steps import LaneCounter, LaneForms, program_of
from jedbatch._jaxpr.single_instances import may_differ
from jedbatch._jaxpr.storage import Kind, distinct_kinds, from_stored, row_bytes, stored, to_stored
from jedbatch._jaxpr.versions import Atom, Equation
from jedbatch._kernel.factors import with_summed_last
from jedbatch._kernel.operand_lists import ListPlaces, single_parameters, with_lists
from jedbatch._kernel.pack import fused
from jedbatch._kernel.products import is_lopsided
from jedbatch._kernel.residuals import KEPT, is_kept
from jedbatch._kernel.rows_times_matrix import with_calls
from jedbatch._kernel.target import CPU, Target, lane_rule
from jedbatch._kernel.vjp import KernelVjp, differentiable, tap
from jedbatch._layout.bucketing import Buckets
from jedbatch._support.types import Array, ControlFlowName


class Kernel:
    """The program of a node type for one lane.

    Attributes:
      node_type: whose program it is.
      control_flow: how loops and branches run that values decide on (see `_jaxpr.divergent`).
      max_steps: the bound of its loops; None if they have none.
      lanes: how nodes run that are at different places of it, and what a step costs.
      forms: how its loops and branches run, as far as it was made part of programs.
      counter: counts their steps; None to count none.
      shared: ids of the shared values that the prologue reads.
      is_bounded: whether there are loops that have one.
      in_loops: whether what runs it chooses by loops (see `_kernel.target`).
      transient: whether it reads a tracer, which will be gone at the next call.
      reached: whether it reads arrays that the function closes over.
      operands, results: value types of one lane.
      parameters: the arguments of the program after the consts: operands, or lists of them.
      lists: the operands that are elements of lists of which some do not exist; None if all do.
      num_consts: consts a lane reads, with `const_kinds`, (shape, dtype) of each.
      lane_work: floating-point operations of a lane.
      buckets: the widths it is compiled in.
      blocks: the widths in which the gradients of its weights are computed.
      result_bytes: of the results of one lane.
      cotangent_bytes: of what the reverse of one lane sends back.
      cares_for_values: whether it must not run on any values (see `cares_for_padding`).
      loose: for each operand, whether lanes whose results are not read may have any value for it:
        no index, and in no loop that might not end or call of Python.
    """

    def __init__(
        self,
        node_type: NodeType,
        target: Target = CPU,
        transient: bool = False,
        reached: bool = False,
        lists: bool = True,
        plain: bool = False,
        control_flow: ControlFlowName = "auto",
        max_steps: int | None = None,
        counter: LaneCounter | None = None,
    ):
        """Makes the program of a type.

        Without `lists`, each operand is a parameter. If it is `plain`, there are no sums of lists
        among the parameters.
        """
        self.node_type = node_type
        self._target = target
        self.in_loops = target.control == "loops"
        self.transient = transient
        self.reached = reached
        self.control_flow = control_flow
        self.max_steps = max_steps
        self.lanes = lane_rule(target)
        self.forms = LaneForms()
        self.counter = counter
        self._bodies: dict[BranchesName, Sequence[Equation]] = {}
        self.operands = node_type.operands
        self.results = node_type.results
        operation = operation_of(node_type)
        num_shared = len(node_type.shared)
        in_lists = operation.lists if lists else None
        sums = in_lists is not None and any(in_lists.summed) and not plain
        closed = inlined(in_lists.program if in_lists and sums else operation.jaxpr)
        self.is_bounded = max_steps is not None and performs(closed, "while")
        if max_steps is not None and self.is_bounded:
            closed = bounded(closed, max_steps)
        self.lists = ListPlaces.of(in_lists)
        self.parameters = single_parameters(self.operands, in_lists, sums)
        if lists:
            closed, self.parameters = with_lists(closed, num_shared, self.parameters)
        closed = fused(closed, num_shared)
        program = closed.jaxpr
        shared_vars, self.operand_vars = program.invars[:num_shared], program.invars[num_shared:]
        self._outvars: list[Any] = list(program.outvars)
        self.jaxpr = jaxpr = program.replace(outvars=self._outvars[: len(self.results)])
        before_lanes = with_derived(jaxpr.eqns, [*jaxpr.constvars, *shared_vars])
        before = [eqn for eqn in jaxpr.eqns if derives(eqn, before_lanes)]
        self.body = [eqn for eqn in jaxpr.eqns if not derives(eqn, before_lanes)]
        read = [v for eqn in self.body for v in reads(eqn)]
        read += [v for v in self._outvars if isinstance(v, Var)]
        self.const_vars = list(dict.fromkeys(v for v in read if v in before_lanes))
        self.num_consts = len(self.const_vars)
        self.const_kinds = tuple((v.aval.shape, v.aval.dtype) for v in self.const_vars)
        self._before = jaxpr.replace(invars=shared_vars, eqns=before, outvars=self.const_vars)
        self._before_consts = list(closed.consts)
        self.result_bytes = sum(row_bytes(stored(t)) for t in self.results)
        moving = [x for x in self.parameters if differentiable(x.type)]
        self.cotangent_bytes = sum(row_bytes(stored(x.type)) * x.num_rows for x in moving)
        operand_bytes = sum(row_bytes(stored(t)) for t in self.operands)
        self.lane_work = sum(map(work, self.body))
        lane = self.lane_work, operand_bytes + self.result_bytes
        self.buckets = target.buckets(*lane)
        self.blocks = target.weight_blocks(*lane, rows_per_weight(self.body, self.const_vars))
        if self.diverges:
            self.buckets = target.diverging
            # Wide ones: each branch of a block runs for its own lanes, however few these are.
            self.blocks = Buckets(target.diverging.widths[1:], target.diverging.overhead)
        self.cares_for_values = any(map(cares_for_padding, self.body))
        self.loose = tuple(not self.cares_for_values and differentiable(t) for t in self.operands)

    def prologue(self, shared: Sequence[jax.Array]) -> list[Array]:
        """The consts, from the shared values that its type reads; once per program."""
        with made_in(f"`{self.node_type}`"):
            return jax.core.eval_jaxpr(self._before, self._before_consts, *shared)

    def arguments(self, operands: Sequence[Array]) -> list[Array]:
        """The operands, with arrays in place of lists of them."""
        return [
            operands[x.first] if x.length is None else jnp.stack([operands[j] for j in x.operands])
            for x in self.parameters
        ]

    def forward(
        self,
        consts: Sequence[Array],
        operands: Sequence[Array],
        branches: BranchesName = "forward",
    ) -> list[Array]:
        """The results of one lane; `branches` as in `without_lock_step`."""
        return self.forward_bounded(consts, operands, branches)[0]

    def forward_bounded(
        self,
        consts: Sequence[Array],
        operands: Sequence[Array],
        branches: BranchesName = "forward",
    ) -> tuple[list[Array], list[Array]]:
        """The results of one lane, and, if loops have a bound, whether one was stopped."""
        with program_of(self.node_type, self.forms, self.counter):
            results, env = self.evaluate(consts, operands, {}, self._over_lanes(branches))
            return results, [value_of(v, env) for v in self._outvars[len(results) :]]

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """(shape, dtype) of the arenas of its operands and results, each once."""
        return distinct_kinds((*self.operands, *self.results))

    @functools.cached_property
    def diverges(self) -> bool:
        """Returns whether lanes take different ways, or loop for different times, by themselves."""
        return self.control_flow != "lockstep" and diverges(self.jaxpr.replace(eqns=self.body))

    def _over_lanes(self, branches: BranchesName) -> Sequence[Equation]:
        """The body, for `vmap` without lock step."""
        if branches not in self._bodies:
            program = self.jaxpr.replace(eqns=self.body, outvars=self._outvars)
            program = self._laid_out(program, self.const_vars)
            given = program, self.control_flow, branches, self.lanes
            self._bodies[branches] = without_lock_step(*given).eqns
        return self._bodies[branches]

    def over_lanes(self, program: Jaxpr, shared: Sequence[Var]) -> Any:
        """Returns a program of the reverse, for `vmap` without lock step.

        Some of its variables are the same for all lanes, `shared`.
        """
        program = may_differ(self._laid_out(program, shared))
        if not self.diverges:
            return program
        return without_lock_step(program, self.control_flow, "forward", self.lanes)

    def _laid_out(self, program: Jaxpr, shared: Sequence[Var]) -> Jaxpr:
        """Returns a program of a lane with products as the target multiplies them fastest."""
        if self._target.summed_last:
            program = with_summed_last(program, shared)
        if self._target.called_work and not self.diverges:
            program = with_calls(program, shared, self._target.called_work)
        return program

    @property
    def _differentiated(self) -> Sequence[Equation]:
        """The body, to be differentiated in reverse.

        Made anew each time: what branches save depends on what is differentiated, and JAX keeps
        the structure of the last time only for an operation with a rule.
        """
        equations: Sequence[Equation] = saving_little(self.jaxpr.replace(eqns=self.body)).eqns
        return equations

    def environment(self, operands: Sequence[Array]) -> Bindings:
        """The operands and lists of operands by variable."""
        pairs = zip(operands, self.parameters, strict=True)
        values = [from_stored(x, parameter.type) for x, parameter in pairs]
        return dict(zip(self.operand_vars, values, strict=True))

    def evaluate(
        self,
        consts: Any,
        operands: Any,
        deltas: dict[Var | int, Array],
        body: Sequence[Equation] | None = None,
    ) -> tuple[list, dict]:
        """(results, all values) of one lane.

        `deltas` count as added to some variables; to result s by the key s. `body` is another
        program that computes the same, in place of one that is to be differentiated in reverse.
        """
        env = self.environment(operands)
        env.update(zip(self.const_vars, consts, strict=True))

        def rule(eqn: Equation, values: list[jax.Array]) -> list[Array]:
            outs = self.run(eqn, values)
            if is_kept(eqn):
                outs = [checkpoint_name(x, KEPT) for x in outs]
            return [
                tap(x, deltas[v]) if v in deltas else x
                for v, x in zip(eqn.outvars, outs, strict=True)
            ]

        run_equations(self._differentiated if body is None else body, env, rule)
        results = []
        for s, (v, t) in enumerate(zip(self.jaxpr.outvars, self.results, strict=True)):
            x = to_stored(value_of(v, env), t)
            results.append(tap(x, deltas[s]) if s in deltas else x)
        return results, env

    def run(self, eqn: Equation, values: Sequence[Array]) -> list[Array]:
        """Returns the results of an equation of the body.

        A product of a const and a vector puts the vector first.
        """
        if eqn.primitive.name == "dot_general":
            left, right = eqn.invars
            (left_dims, right_dims), batch = eqn.params["dimension_numbers"]
            is_vector = len(right_dims) == len(right.aval.shape)
            precision = eqn.params["precision"]
            swaps = is_vector and not batch[0] and not is_lopsided(precision)
            if swaps and self.is_const(left) and not self.is_const(right):
                product = jax.lax.dot_general(
                    values[1],
                    values[0],
                    ((right_dims, left_dims), batch),
                    precision=precision,
                    preferred_element_type=eqn.params["preferred_element_type"],
                )
                return [product]
        return run_equation(self.jaxpr, eqn, values)

    @functools.cached_property
    def _const_set(self) -> set[Var]:
        return set(self.const_vars)

    def is_const(self, atom: Atom) -> bool:
        """True of the variables computed by the prologue."""
        return isinstance(atom, Var) and atom in self._const_set

    @functools.cached_property
    def _constant_set(self) -> set[Var]:
        pairs = zip(self._before.constvars, self._before_consts, strict=True)
        found = {v for v, x in pairs if not isinstance(x, Tracer)}
        for eqn in self._before.eqns:
            if found.issuperset(reads(eqn)) or eqn.primitive.name == "stop_gradient":
                found.update(eqn.outvars)
        return found & self._const_set

    def is_constant(self, atom: Atom) -> bool:
        """True of consts that nothing is differentiated by.

        Those are made of no shared value, or of what `jax.lax.stop_gradient` gives.
        """
        return isinstance(atom, Var) and atom in self._constant_set

    @functools.cached_property
    def plain(self) -> "Kernel":
        """A kernel of the same type whose derivatives may be left to JAX, see `__init__`."""
        if not any(x.is_sum for x in self.parameters):
            return self
        with without_mesh():
            made = Kernel(
                self.node_type,
                self._target,
                self.transient,
                self.reached,
                plain=True,
                control_flow=self.control_flow,
                max_steps=self.max_steps,
                counter=self.counter,
            )
        made.forms = self.forms
        return made

    @functools.cached_property
    def reverse(self) -> KernelVjp:
        """The reverse of the lane; traced when it is first needed."""
        with without_mesh():
            return KernelVjp.of(self)
