"""`lazy`: just-in-time dynamic batching of imperative code.

`batch` is given a function and calls it once per instance. Training loops are often written the
other way round: a Python loop computes the loss of one instance after the other, prints, and
decides on what it has computed. Inside of a lazy scope such code runs as it stands, and is batched.

The scope is a recorder like that of `batch`, installed for as long as the scope lasts. Operations
on what is lazy return futures (see `_lazy.futures`). When Python needs a value, or at the end, the
nodes recorded so far are planned and run like a minibatch, and futures become values: a *round*.
Only values that futures still in use depend on are computed, for futures are known to the
scope by weak references; and nothing is computed twice, since the values of a round are inputs of
the next.

What counts as a weight and what as a value is guessed: see `_lazy.recorder`.

Types, kernels and programs are kept between scopes, or every step of training would compile them.
They belong to an object, as always: to a `Lazy`, as they do to a `Batched`. `jedbatch.lazy` is one
that a process has for everybody, as `jax.jit` has one cache, since one line should do. In there
every `with` in the source has something of its own, as every batched function has; else programs of
unrelated models would grow together. It is a pool. A scope takes what an earlier one gave back;
scopes at the same time, in other threads or in a recursion, take different ones. Both how many
places are known and how much one may keep are limited.

Source: Zha et al., Just-in-time dynamic batching, 2019. Theirs batches operators or whole blocks of
Gluon; here cells say what is worth a node, and batches are chosen, laid out and differentiated as
everywhere in jedbatch.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend.core import set_current_trace

from jedbatch import checks
from jedbatch._graph.record import Record
from jedbatch._jaxpr.configuration import configuration
from jedbatch._kernel.target import target_of
from jedbatch._layout.layout import Layout
from jedbatch._lazy.recorder import LazyRecorder, Scope
from jedbatch._learn.adaptive import Adaptive
from jedbatch._program.output_spec import OutputSpec
from jedbatch._record.cell import recording
from jedbatch._record.run.trace import ending, trace_of_caller
from jedbatch._schedule.policy import Policy, checked_policy
from jedbatch._session.options import ONE_EXECUTOR, Options, written
from jedbatch._session.plans.pipeline import make_plan, run_plan
from jedbatch._session.session import Flags, Minibatch, Session
from jedbatch._support.caches import Memory
from jedbatch._support.restored import Restored
from jedbatch._support.types import OrderName

MANY_TYPES = 4096  # node types and shared values, before what a place keeps is forgotten
MANY_PLACES = 64  # scopes in the source, before the oldest is forgotten
ROWS_ONLY = OutputSpec((), (), None)  # rows are not made into results


class Lazy:
    """A scope in which Python code on single instances is batched as it runs.

    Inside of the scope, calls of cells and operations of JAX on what is lazy are not computed. They
    return futures: arrays with a shape and a dtype, and a value once it is needed. At the end
    of the scope, or when Python needs a value, all that has been recorded is computed in batches.
    `float`, `int`, `bool`, `if`, `print`, `numpy.asarray`, `.item()` and `jax.block_until_ready`
    need values; most code needs them rarely. A future without references is not
    computed. After that, a future is the array it stands for.

        with jedbatch.lazy():
            losses = [loss(params, tree) for tree in trees]
        total = jnp.stack(losses).mean()

    Arrays of JAX with real or complex numbers that come from outside are weights, which all
    operations share, and to which gradients flow: a function with such a scope in it can be
    differentiated, by `jax.grad` or `jax.vjp` around the whole. Pass data as arrays of NumPy, or as
    numbers. Values computed in a scope count as data for later ones too; `jax.numpy.asarray` turns
    a computed future into an array that does not, and that functions take which want no tracer,
    such as `jax.device_put`.

    What is recorded beside an operation changes its result in the last bits at most, where sums and
    matrix products are involved (see `jedbatch.batch`).

    A scope inside of another belongs to it; at its end, too, all is computed. Inside of a batched
    function a scope does nothing, since all is recorded anyway. A scope left by an exception
    computes nothing, and its futures have no value. Each thread has its own scopes. A scope that a
    generator opens lasts until it is left, also while the generator is suspended; it must be left
    in the thread that it was opened in. Recursion is as deep as Python allows, which
    `sys.setrecursionlimit` changes.

    Under `jax.jit` the end of a scope becomes part of the program that is traced, which is
    compiled again for every topology; `if` and `print` of a value raise a `SymbolicValueError`.

    `jedbatch.lazy` is the scope to use. Make another `Lazy` for other options, or to have
    compiled programs of your own: they are kept by it, for all scopes that come.

    Args:
      policy: as for `jedbatch.batch`.
      layout: as for `jedbatch.batch`.
      reuse: as for `jedbatch.batch`.

    Raises:
      ValueError, TypeError: an option makes no sense.

    Examples:
      >>> import jax, jax.numpy as jnp, jedbatch
      >>> @jedbatch.cell
      ... def node(params, left, right):
      ...     return jnp.tanh(params @ (left + right))
      >>> def encode(params, tree):
      ...     if isinstance(tree, tuple):
      ...         return node(params, encode(params, tree[0]), encode(params, tree[1]))
      ...     return jnp.full(3, tree / 10)
      >>> params = jnp.eye(3)
      >>> with jedbatch.lazy() as scope:
      ...     states = [encode(params, tree) for tree in [(1, 2), ((1, 2), 3), (4, 5)]]
      >>> jnp.stack(states).shape
      (3, 3)
      >>> [(r.nodes, r.batches) for r in scope.rounds]
      [(4, 2)]

    References:
      Zha et al., Just-in-time dynamic-batching, 2019, https://arxiv.org/abs/1904.07421.
    """

    @checks.without(executor=ONE_EXECUTOR)
    def __init__(
        self,
        policy: Policy | None = None,
        layout: OrderName = "auto",
        reuse: bool | None = None,
    ):
        self._policy = None if policy is None else checked_policy(policy)
        self._options = Options(layout, reuse, cache_size=0).checked("Lazy")
        self._free: dict[Hashable, list[Kept]] = Memory(MANY_PLACES)

    def __repr__(self) -> str:
        given = {} if self._policy is None else {"policy": self._policy}
        given |= {k: x for k, x in self._options.given.items() if k != "cache_size"}
        return f"Lazy({written(given)}): {self.compilations} programs"

    @property
    def compilations(self) -> int:
        """XLA programs built so far by scopes that have ended."""
        kept = [kept for free in self._free.values() for kept in free]
        return sum(sum(k.session.programs.compilations.values()) for k in kept)

    def clear(self) -> None:
        """Forgets all that is kept for later scopes."""
        self._free.clear()

    def __call__(self) -> contextlib.AbstractContextManager[Scope]:
        """A scope: `with jedbatch.lazy():`.

        Returns:
          A context manager.
        """
        frame = sys._getframe(1)
        return self._scope((frame.f_code, frame.f_lasti))

    @contextlib.contextmanager
    def _scope(self, place: Hashable) -> Iterator[Scope]:
        """A scope that is opened at a place in the source."""
        caller = trace_of_caller()
        outer = recording.recorder
        if outer is not None and caller is outer:
            yield outer.scope if isinstance(outer, LazyRecorder) else Scope()
            if isinstance(outer, LazyRecorder):
                outer.compute()
            return
        free = self._free.setdefault((place, configuration()), [])
        try:
            scope = free.pop()
        except IndexError:
            scope = self._new_kept()
        recorder = LazyRecorder(scope.session.registry, caller, self._compute_with(scope), Scope())
        end, is_here = ending(recorder), _is_here()
        try:
            with (
                _Inside(is_here, Restored(end)),
                _Inside(is_here, Restored(end)),
                _Inside(is_here, set_current_trace(caller)),
                _Inside(is_here, set_current_trace(recorder)),
            ):
                recording.recorder = recorder
                yield recorder.scope
                if is_here():
                    recorder.compute()
        except RecursionError as error:
            error.add_note(
                "A lazy scope recurses as deep as Python does: `sys.setrecursionlimit` allows "
                "more, and a function given to `jedbatch.batch` may recurse without a limit."
            )
            raise
        finally:
            if not is_here():
                raise RuntimeError(
                    "a lazy scope is left in another thread than the one it was opened in, where "
                    "it lasts; expected the same thread. A generator or a coroutine with a scope "
                    "in it must run in one thread until it has left the scope."
                )
            registry = scope.session.registry
            if len(registry.node_types) + len(registry.shared) <= MANY_TYPES:
                free.append(scope)

    def _new_kept(self) -> "Kept":
        session = Session.empty((), jax.tree.structure(()), self._options, target_of(()))
        return Kept(session, Adaptive() if self._policy is None else self._policy)

    def _compute_with(self, kept: "Kept") -> Callable:
        """Returns the function by which a recorder has a graph computed."""

        def compute(graph, rows, held, traced) -> tuple[Layout, dict[Any, Any]]:
            """(what ran, the rows returned from each arena, one by one if they may be traced)."""
            keeps = any(isinstance(x, Tracer) for x in jax.tree.leaves((held, traced)))
            record = Record(graph, 0, None, ())
            minibatch = Minibatch(kept.session, [record], [traced], kept.policy, tracers=held)
            returned = rows, ROWS_ONLY
            plan = make_plan(minibatch, graph, returned, Flags(keeps=keeps), brought=held.keys())
            assert plan.host is not None
            outputs, _ = run_plan(plan, [], plan.inputs, "a lazy scope")
            arenas = zip(plan.static.signature.arenas, outputs, strict=True)
            return plan.host.placed.layout, dict(arenas)

        return compute


class _Inside:
    """A context that is left only where it was entered."""

    def __init__(self, is_here: Callable[[], bool], context: Any):
        self._is_here, self._context = is_here, context

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._is_here():
            self._context.__exit__(*error)


def _is_here() -> Callable[[], bool]:
    """Returns what says whether it is called in the thread of now."""
    thread = threading.get_ident()
    return lambda: threading.get_ident() == thread


class Kept(NamedTuple):
    """The session and the policy that a scope leaves to later ones."""

    session: Session
    policy: Policy


lazy = Lazy()
