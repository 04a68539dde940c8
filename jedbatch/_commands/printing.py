"""Prints numbers and policies."""

import argparse
import math

from jedbatch.policies import FSM


def digits(x: float, unit: str = "") -> str:
    """Returns a number with three significant digits, `30,700` or `0.0123`; a dash for none."""
    if not math.isfinite(x):
        return "–"
    rounded = float(f"{x:.3g}")
    places = 2 - math.floor(math.log10(abs(rounded))) if rounded else 2
    return f"{rounded:,.{max(0, places)}f}{unit}"


def print_learned(policy: FSM, args: argparse.Namespace) -> None:
    """Prints what was tried and the policy that was chosen, all its states if asked; saves it."""
    print(policy.report)
    lines = str(policy).splitlines()
    print("", *(lines if args.verbose else [f"{lines[0]}; --verbose lists them"]), sep="\n")
    if args.save:
        policy.save(args.save)
        print(f"\nsaved as {args.save}; use it with `jedbatch.batch(fn, policy=FSM.load(path))`")
