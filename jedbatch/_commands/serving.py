"""`serve`: a function of the user's behind HTTP."""

import argparse
import contextlib
import gc
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jedbatch
from jedbatch import checks, serve
from jedbatch._commands.lookup import CommandError, attribute_of, described, nested
from jedbatch._commands.user_function import argument_names, instances_of, value_of

try:
    import uvicorn
except ModuleNotFoundError:  # other commands do without
    uvicorn = None

WARM_INSTANCES = 640  # of the module, that programs are compiled for


def run(args: argparse.Namespace) -> int:
    """Serves until it is interrupted or told to end; returns the exit status.

    On SIGTERM no further connections are accepted, and requests that have come are answered. The
    status is 0 then, and 1 if the server closed by itself, since something failed.
    """
    if uvicorn is None:
        raise CommandError("`serve` needs uvicorn; write `pip install 'jedbatch[serve]'`")
    application = application_of(args)
    status = 0

    async def look() -> None:
        nonlocal status
        if not application.state.server.is_serving:
            status, process.should_exit = 1, True

    process = uvicorn.Server(
        uvicorn.Config(
            application,
            host=args.host,
            port=args.port,
            log_level="info",
            callback_notify=look,
            timeout_notify=1,
        )
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))  # uvicorn raises it again at its end
    with contextlib.suppress(KeyboardInterrupt):
        process.run()
    return status


def application_of(args: argparse.Namespace) -> Any:
    """Returns the ASGI application that the command line describes.

    Raises:
      CommandError: something is not there, or does not fit.
    """
    module, found = attribute_of(args.model)
    if not callable(found):
        raise CommandError(
            f"{args.model} is {checks.shown(found)}; expected a function of one instance, plain or "
            "batched"
        )
    shared_names, mapped_names = argument_names(args, found)
    axes: tuple[int | None, ...] = (None,) * len(shared_names) + (0,) * len(mapped_names)
    batched = found if isinstance(found, jedbatch.Batched) else jedbatch.batch(found, axes)
    shared = [_shared(module, name) for name in shared_names]
    server = serve.Server(
        batched,
        *shared,
        max_batch=args.max_batch,
        max_wait_ms=args.max_wait_ms,
        max_queue=args.max_queue,
        deadline_ms=args.deadline_ms,
    )
    options: dict[str, Any] = {
        name: _function(module, getattr(args, name), name)
        for name in ("decode", "encode")
        if getattr(args, name)
    }
    sample = _sample(module, mapped_names, explicit=bool(args.instances))
    if sample is None:
        print(
            f"{described(module)} has no {' and '.join(mapped_names)}: programs are compiled when "
            "requests need them, not before"
        )
    return serve.application(
        server, sample=sample, max_bytes=args.max_bytes, when_ready=_freeze, **options
    )


def _freeze() -> None:
    """Takes all objects that are there out of later collections of garbage.

    A full one goes through all that JAX keeps of programs, and takes longer than most requests. The
    process has no other use than serving, so this command may decide it.
    """
    gc.collect()
    gc.freeze()


def _shared(module: ModuleType, name: str) -> Any:
    """Returns a shared argument: of a file, in the structure of `params` if the module has it."""
    if not name.endswith(".npz"):
        return value_of(module, name, "params")
    like = value_of(module, "params", "params") if hasattr(module, "params") else None
    return serve.load_params(name, like)


def _sample(module: ModuleType, names: Sequence[str], explicit: bool) -> list[Any] | None:
    """Returns instances of the module; None if it has none and they were not asked for."""
    try:
        for name in names:
            nested(module, name)
    except AttributeError:
        if not explicit:
            return None
    columns = [instances_of(module, name)[:WARM_INSTANCES] for name in names]
    return list(columns[0]) if len(columns) == 1 else list(zip(*columns, strict=True))


def _function(module: ModuleType, name: str, option: str) -> Callable[[Any], Any]:
    try:
        found: Any = nested(module, name)
    except AttributeError:
        raise CommandError(f"{described(module)} has no `{name}`, which --{option} names") from None
    if not callable(found):
        raise CommandError(f"--{option} {name} is {checks.shown(found)}; expected a function")
    return found
