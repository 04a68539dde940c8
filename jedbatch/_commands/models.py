"""The models of `jedbatch.models`, as functions that run on data of their own."""

import argparse

import jax

import jedbatch
from jedbatch._commands.lookup import CommandError
from jedbatch._commands.user_function import UserFunction
from jedbatch.models import WORKLOADS, Workload
from jedbatch.models.parts import jitted
from jedbatch.policies import FSM


def function_of(args: argparse.Namespace, found: object, limit: int) -> UserFunction:
    """Returns the function of a model, with so many instances of its data at most.

    Args:
      args: of the command line, which names the model and its data.
      found: the model, if it is one of the user's; None if it is one of `jedbatch.models`.
      limit: instances.

    Raises:
      CommandError: there is no such model, or it has no such options.
      ValueError: names what in a file is no instance.
    """
    workload = WORKLOADS.get(args.model) if found is None else found
    if workload is None:
        raise CommandError(
            f"there is no model {args.model!r}; expected one of {', '.join(WORKLOADS)}, or a "
            "function of yours as module:function"
        )
    if not isinstance(workload, Workload):
        raise CommandError(
            f"{args.model} is of type {type(workload).__name__}; expected a "
            "`jedbatch.models.Workload`, or a function of one instance"
        )
    for name in ("params", "instances", "loop"):
        if getattr(args, name, None):
            raise CommandError(
                f"--{name} is for functions of yours, named module:function; {args.model} is a "
                "model, which has its own"
            )
    instances, sizes = workload.load(*args.data, limit=limit, seed=args.seed)
    sizes |= {"hidden": args.hidden}
    cells = workload.cells(**sizes)
    given = getattr(args, "policy", None)
    policy = FSM.load(given) if given else workload.policy()
    source = " and ".join(args.data) or "synthetic data"
    return UserFunction(
        f"{workload.title}, {', '.join(f'{name} {size}' for name, size in sizes.items())}, on "
        f"{source}",
        workload.scorer(jitted(cells)),
        jedbatch.batch(workload.scorer(cells), policy=policy),
        (None, 0),
        [cells.init(jax.random.key(args.seed))],
        [instances],
        len(instances),
        "the model, with jit-ted cells",
    )
