"""Compares or rewrites the golden texts: `python -m tests.golden [--write]`."""

import argparse
import sys

from . import TEXTS
from .files import difference, write


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="some of the texts; all by default")
    parser.add_argument("--write", action="store_true", help="take what there is now as right")
    args = parser.parse_args()
    differences = {}
    for name in args.names or TEXTS:
        text = TEXTS[name]()
        differences[name] = difference(name, text)
        if args.write:
            write(name, text)
    changed = [name for name, found in differences.items() if found]
    print("\n".join(differences[name] for name in changed) or "nothing has changed")
    sys.exit(bool(changed) and not args.write)


if __name__ == "__main__":
    main()
