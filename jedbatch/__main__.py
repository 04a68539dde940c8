"""Command line: `jedbatch demo` trains a TreeLSTM on trees of every shape.

`show`, `bench` and `learn` take a function of yours, as module:function or file.py:function, or the
name of a model of `jedbatch.models`. `serve` answers requests to a function of yours over HTTP.
`fuzz` compares random programs with the loop over single instances. `info` says what is installed.
"""

import argparse
import functools
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

from jedbatch._commands.lookup import CommandError

COMMANDS = {  # the function that runs each, imported once it is known which
    "demo": "demo:demo",
    "show": "user_commands:show",
    "learn": "user_commands:learn",
    "bench": "user_commands:bench",
    "serve": "serving:run",
    "fuzz": "user_commands:fuzz",
    "info": "user_commands:info",
}
MAX_SIZE = 10**9  # of sizes on the command line
EXAMPLES = {  # with which the help of a command ends
    "demo": "demo --hidden 128",
    "show": "show my_model.py:encode --explain",
    "learn": "learn my_model.py:encode --save policy.json",
    "bench": "bench my_model.py:encode --batch-size 32 --no-gradient",
    "serve": "serve my_model.py:encode --params trained.npz --port 8080",
    "fuzz": "fuzz --programs 1000 --jobs 4 --plans",
    "info": "info",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = command_line()
    args = parser.parse_args(argv)
    for name in args.sizes:
        if not 1 <= getattr(args, name) <= MAX_SIZE:
            option = name.replace("_", "-")
            parser.error(
                f"--{option} is {getattr(args, name)}; expected a positive number, at most "
                f"{MAX_SIZE:,}"
            )
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed is {args.seed}; expected a number from 0 to 2**32 - 1")
    if args.device:
        import jax  # not for `-h`, which takes no time then

        jax.config.update("jax_platforms", args.device)
    try:
        run = pkgutil.resolve_name(f"jedbatch._commands.{COMMANDS[args.command]}")
        return run(args) or 0
    except (OSError, ValueError, RuntimeError, MemoryError, ImportError) as error:
        is_of_user = ":" in getattr(args, "model", "")
        if is_of_user and not isinstance(error, OSError | CommandError):
            raise  # with the lines of the module in which it happened
        print(f"error: {error}", file=sys.stderr)
        return 1


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="jedbatch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = functools.partial(add_command, commands)
    hidden = {"hidden": (64, "size of the states")}
    sizes = hidden | {"batch_size": (64, "instances per minibatch")}
    command(
        "demo",
        "train a TreeLSTM written for one tree on minibatches of trees",
        sizes | {"epochs": (4, "passes over the trees"), "trees": (1600, "trees to use")},
    )
    showing = command("show", "print the plan of a minibatch", sizes)
    add_function(showing)
    showing.add_argument("--explain", action="store_true", help="how operands are read, and why")
    showing.add_argument("--gradient", action="store_true", help="plan for training")
    showing.add_argument("--pictures", metavar="DIRECTORY", help="where to draw it as SVG files")
    learning = command(
        "learn",
        "learn a policy and print what was tried",
        hidden | {"batch_size": (32, "instances to learn from")},
    )
    add_function(learning)
    learning.add_argument("--verbose", action="store_true", help="print all states of the policy")
    learning.add_argument("--save", metavar="FILE", help="where to write the policy, as JSON")
    benching = command(
        "bench",
        "measure how fast it runs, against the loop over single instances",
        sizes | {"minibatches": (8, "minibatches never seen before, to plan")},
    )
    add_function(benching)
    benching.add_argument(
        "--loop",
        metavar="NAME",
        help="what the loop calls instead of the function; by default that with jit-ted cells, if "
        "its module has some",
    )
    benching.add_argument(
        "--no-gradient",
        dest="gradient",
        action="store_false",
        help="leave out gradients, whose programs take longer to compile",
    )
    serving = command(
        "serve",
        "answer requests over HTTP, many at a time; needs `pip install 'jedbatch[serve]'`",
        {
            "max_batch": (64, "requests in a minibatch at most"),
            "max_queue": (1024, "requests that may wait"),
            "max_bytes": (1 << 20, "bytes of a request"),
        },
    )
    add_function(serving, reads_files=True)
    serving.add_argument("--host", default="127.0.0.1", help="(default %(default)s)")
    serving.add_argument("--port", type=int, default=8000, help="(default %(default)s)")
    serving.add_argument(
        "--max-wait-ms",
        type=float,
        default=0.0,
        help="milliseconds for which a request waits for others (default %(default)s)",
    )
    serving.add_argument(
        "--deadline-ms", type=float, help="milliseconds in which a request is to be done"
    )
    for name, text in (
        ("decode", "from JSON to an instance"),
        ("encode", "from a result to JSON"),
    ):
        serving.add_argument(f"--{name}", metavar="NAME", help=f"a function of the module, {text}")
    policy = "a saved policy; the model's own by default"
    benching.add_argument("--policy", metavar="FILE", help=policy)
    fuzzing = command(
        "fuzz",
        "compare random programs with the loop over instances; needs `pip install hypothesis`",
        {
            "programs": (100, "how many"),
            "shrink": (60, "seconds in which each new failure is made small"),
            "jobs": (1, "processes that run them"),
        },
    )
    fuzzing.add_argument(
        "--first", type=int, default=0, help="the number of the first program (default %(default)s)"
    )
    fuzzing.add_argument("--plans", action="store_true", help="only plan, and check the plans")
    command("info", "print versions and devices, and whether planning is compiled", {})
    return parser


def add_command(
    commands: Any, name: str, help: str, sizes: dict[str, tuple[int, str]]
) -> argparse.ArgumentParser:
    """Adds a command with the options that all have, and sizes: (default, meaning) by name."""
    example = f"example: jedbatch {EXAMPLES[name]}"
    parser = commands.add_parser(name, help=help, description=help, epilog=example)
    parser.set_defaults(sizes=tuple(sizes))
    if name == "demo":
        parser.add_argument("--data", metavar="FILE", help="a treebank, one tree a line")
    elif name == "serve":
        named = (
            "a function of one instance, plain or batched, as module:function or file.py:function"
        )
        parser.add_argument("model", metavar="function", help=named)
    elif name not in ("fuzz", "info"):
        parser.add_argument(
            "model",
            help="a function of one instance, as module:function or file.py:function; a model of "
            "`jedbatch.models`, such as treelstm; or your own `jedbatch.models.Workload` as "
            "module:attribute",
        )
        parser.add_argument(
            "--data",
            nargs="+",
            default=[],
            metavar="FILE",
            help="instances, one a line (may be .gz); tags of lattices in a file of their own",
        )
    parser.add_argument("--device", help="cpu, gpu or tpu; JAX's choice by default")
    parser.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    for size, (default, explanation) in sizes.items():
        help = f"{explanation} (default {default})"
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, default=default, help=help)
    return parser


def add_function(parser: argparse.ArgumentParser, *, reads_files: bool = False) -> None:
    """Adds what is said of a function of the user's."""
    of_files = (
        "; or a file that `jedbatch.serve.save_params` wrote, FILE.npz" if reads_files else ""
    )
    for option, kind in (
        ("params", "what all instances share"),
        ("instances", "a sequence of instances"),
    ):
        parser.add_argument(
            f"--{option}",
            action="append",
            metavar="NAME",
            help=f"{kind}, for a function of yours: an attribute of its module, or a function "
            f"there that makes it (default {option}); repeated where there are more arguments"
            f"{of_files if option == 'params' else ''}",
        )


if __name__ == "__main__":
    sys.exit(main())
