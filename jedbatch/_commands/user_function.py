"""A function of the user's, and what it runs on.

The function is that of one instance, plain or batched already. Its arguments are attributes of its
module: `params`, which all instances share, and `instances`, or those that the command line names.
Each is a value, or a function without arguments that makes it.
"""

import argparse
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax

import jedbatch
from jedbatch import checks
from jedbatch._commands.lookup import CommandError, attribute_of, described, nested
from jedbatch._commands.loop import compiled_cells
from jedbatch.policies import FSM

OPTIONS_OF_MODELS = {"data": [], "hidden": 64, "seed": 0}


@dataclasses.dataclass(frozen=True)
class UserFunction:
    """A function of one instance, and what to run it on.

    Attributes:
      name: as the command line has it.
      alone: what the loop calls with one instance: the function itself, with compiled cells if it
        has some and runs with them, unless another one is named.
      loop: what that is, in words.
      batched: the function of many instances.
      axes: None for each argument that all instances share, 0 for each that differs.
      shared: the arguments that all instances share.
      mapped: for each of the others, instances.
      total: how many instances there are in the module.
    """

    name: str
    alone: Callable[..., Any]
    batched: jedbatch.Batched
    axes: tuple[int | None, ...]
    shared: list[Any]
    mapped: list[list[Any]]
    total: int
    loop: str = "the function as it is"

    @staticmethod
    def of(args: argparse.Namespace, limit: int) -> "UserFunction":
        """Returns what the command line names, with so many instances at most.

        Raises:
          CommandError: something is not there, or does not fit.
        """
        for option, default in OPTIONS_OF_MODELS.items():
            if getattr(args, option) != default:
                raise CommandError(
                    f"--{option} is for the models of `jedbatch.models`; {args.model} runs on what "
                    "its module holds: see --params and --instances"
                )
        module, found = attribute_of(args.model)
        shared_names, mapped_names = argument_names(args, found)
        axes: tuple[int | None, ...] = (None,) * len(shared_names) + (0,) * len(mapped_names)
        if isinstance(found, jedbatch.Batched):
            batched, alone = found, inspect.unwrap(found, stop=_is_no_batched)
            axes = found.in_axes if isinstance(found.in_axes, tuple) else axes
        else:
            batched, alone = jedbatch.batch(found, axes), found
        if getattr(args, "policy", None):
            batched.policy = FSM.load(args.policy)
        if getattr(args, "loop", None):
            alone = _attribute(module, args.loop, "loop", f"def {args.loop}(params, instance): ...")
            if not callable(alone):
                raise CommandError(
                    f"--loop {args.loop} is {checks.shown(alone)}; expected a function of one "
                    "instance"
                )
        shared = [value_of(module, name, "params") for name in shared_names]
        sequences = [instances_of(module, name) for name in mapped_names]
        lengths = dict(zip(mapped_names, map(len, sequences), strict=True))
        if len(set(lengths.values())) != 1:
            raise CommandError(f"there are {lengths} instances; expected as many of each argument")
        mapped = [list(itertools.islice(x, limit)) for x in sequences]
        user = UserFunction(args.model, alone, batched, axes, shared, mapped, len(sequences[0]))
        named = getattr(args, "loop", "")
        if named is None:
            return user._with_compiled_cells(module)
        return dataclasses.replace(user, loop=f"`{named}`") if named else user

    def _with_compiled_cells(self, module: ModuleType) -> "UserFunction":
        """Returns the same, whose loop calls compiled cells if there are some and it runs so."""
        fn = compiled_cells(self.alone, module)
        if fn is None:
            return self
        try:
            fn(*self.arguments(self.shared, [x[0] for x in self.mapped]))
        except Exception:  # such as of cells that are given what JAX cannot trace
            return self
        return dataclasses.replace(self, alone=fn, loop="the function, with jit-ted cells")

    def minibatch(self, begin: int, size: int) -> list[list[Any]]:
        """Returns the instances of a minibatch, for each argument."""
        return [x[begin : begin + size] for x in self.mapped]

    def arguments(self, shared: Sequence[Any], mapped: Sequence[Any]) -> Iterator[Any]:
        """Arguments of the function, in their order."""
        sources = iter(shared), iter(mapped)
        return (next(sources[axis is not None]) for axis in self.axes)

    def announce(self, size: int) -> None:
        """Prints what is going to run."""
        leaves = jax.tree.leaves(self.shared)
        numbers = sum(getattr(x, "size", isinstance(x, int | float)) for x in leaves)
        print(
            f"{self.name}: a minibatch of {size}, of {self.total:,} instances; parameters: "
            f"{numbers:,} numbers; on {jax.devices()[0]}\n"
        )


def _is_no_batched(fn: Any) -> bool:
    return not isinstance(fn, jedbatch.Batched)


def argument_names(args: argparse.Namespace, found: Any) -> tuple[list[str], list[str]]:
    """Returns the names of (what all instances share, sequences of instances)."""
    mapped = args.instances or ["instances"]
    axes = found.in_axes if isinstance(found, jedbatch.Batched) else None
    if isinstance(axes, tuple):
        num_shared = axes.count(None)
    elif axes is None:
        num_shared = int(not _takes(found, len(mapped)))
    else:
        num_shared = 0
    shared = args.params or ["params"] * min(num_shared, 1)
    if isinstance(axes, tuple):
        fits = len(shared) == num_shared and len(mapped) == axes.count(0)
    else:
        fits = _takes(found, len(shared) + len(mapped)) and not (axes == 0 and shared)
    if not fits:
        how = f"takes {_signature(found)}" if axes is None else f"has in_axes={axes}"
        raise CommandError(
            f"{args.model} {how} and got {', '.join(shared) or 'nothing'} for what all instances "
            f"share and {', '.join(mapped)} for what differs; expected a function of (params, "
            "instance) or (instance). For more arguments repeat --params NAME or --instances NAME"
        )
    return shared, mapped


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    """None of functions that do not say it, such as some that are written in C."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def _takes(fn: Callable[..., Any], count: int) -> bool:
    """Returns whether a function can be called with so many arguments, as far as it says it."""
    signature = _signature(fn)
    try:
        if signature is not None:
            signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _attribute(module: ModuleType, name: str, option: str, example: str) -> Any:
    try:
        return nested(module, name)
    except AttributeError:
        raise CommandError(
            f"{described(module)} has no `{name}`; write `{example}` there, or name what it has "
            f"with --{option} NAME"
        ) from None


def value_of(module: ModuleType, name: str, option: str) -> Any:
    """Returns an attribute, or what it returns if it is a function."""
    example = "[...]" if option == "instances" else "{...}"
    example = f"{name} = {example}` or `def {name}(): return {example}"
    found = _attribute(module, name, option, example)
    if not callable(found) or not jax.tree_util.all_leaves([found]):
        return found  # layers of Equinox can be called, and are pytrees
    if not _takes(found, 0):
        raise CommandError(
            f"`{name}` of {described(module)} takes {_signature(found)}; expected a value, or a "
            "function without arguments that makes it"
        )
    return found()


def instances_of(module: ModuleType, name: str) -> Sequence[Any]:
    found = value_of(module, name, "instances")
    sized = hasattr(found, "__len__") and hasattr(found, "__getitem__")
    if not sized or isinstance(found, dict | str | bytes) or not getattr(found, "ndim", 1):
        raise CommandError(
            f"`{name}` of {described(module)} is {checks.shown(found)}; expected a sequence of "
            "instances, such as a list, or an array whose rows they are; write `list(...)` around "
            "what can only be iterated over"
        )
    if not len(found):
        raise CommandError(f"`{name}` of {described(module)} is empty; expected instances")
    return found
