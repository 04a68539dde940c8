"""Call sites: the places in the user's program where operations are performed.

Two operations of one kind at one place of a program are likely to play the same part, for
instance in every call of a recursive function; at different places they do not. A place is the
path of Python frames that leads to the operation: code object and instruction of each, from the
operation outwards, through JAX and Flax into the user's functions.

The path must be the same at every level of a recursion, so it ends at the innermost call of a
function that recurs. Which functions recur is learned on the way: the first path that meets a
function twice names it. Only functions of the user count; layers of a library call each other
through the same few functions of the library, whatever the model. A path therefore has as many
frames as lie between an operation and the recursion around it, not as many as the recursion is
deep. What was recorded before a function was known to recur has to be recorded again.
"""

import bisect
import dis
import itertools
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import NamedTuple

from jedbatch._record.identity.assumptions import Assumptions
from jedbatch._support.frames import is_private, records_calls

MAX_FRAMES = 256  # of one path

# Functions of these do not recur on the user's behalf; the standard library is one of them.
LIBRARIES = frozenset({"jax", "jaxlib", "flax", "equinox", "haiku", "numpy", "optax"})

_OUTSIDE, _OWN, _LIBRARY, _USER, _RECURSIVE = range(5)


class Unit(NamedTuple):
    """A function of the user that does one step of what recurs or loops around it.

    Attributes:
      name, line: of the function, and the line where it begins.
      is_whole: whether there is none: this one recurs or loops itself, or is the outermost.
    """

    name: str
    line: str
    is_whole: bool


class Sites:
    """Call sites met so far, as small integers.

    Args:
      assumptions: that functions do not recur.
    """

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions
        self._kinds: dict[int, int] = {}  # by the id of the code: comparing codes is slow
        self._codes: dict[int, CodeType] = {}
        self._starts: dict[int, list[int]] = {}  # of the instructions
        self._paths: list[tuple[int, ...]] = []
        self._ids: dict[tuple[int, ...], int] = {}
        self._onward: dict[tuple[int, int], bool] = {}
        self._last: FrameType | None = None

    def here(self) -> tuple[int, bool]:
        """(site of the caller, whether the same call of a function was the outermost before)."""
        kinds = self._kinds
        frame: FrameType | None = sys._getframe(1)
        last = None
        path: list[int] = []
        users: list[int] = []
        for _ in range(MAX_FRAMES):
            if frame is None:
                break
            code = id(frame.f_code)
            kind = kinds.get(code)
            if kind is None:
                kind = self._meet(frame)
            if kind == _OUTSIDE:
                break
            if kind != _OWN:  # how it reaches us makes no difference
                path += code, frame.f_lasti
                last = frame
            if kind == _RECURSIVE:
                break
            if kind == _USER:
                if code in users:
                    kinds[code] = _RECURSIVE
                    self._assumptions.fail("recursion")
                    break
                users.append(code)
            frame = frame.f_back
        same = last is self._last and last is not None
        self._last = last  # kept, or another frame might get its place in memory
        return self._site(tuple(path)), same

    def release(self) -> None:
        """Lets go of the frame of the last call."""
        self._last = None

    def _site(self, path: tuple[int, ...]) -> int:
        site = self._ids.get(path)
        if site is None:
            exact = [
                part
                for code, last in zip(path[::2], path[1::2], strict=True)
                for part in (code, self._instruction(code, last))
            ]
            site = self._ids.setdefault(tuple(exact), len(self._paths))
            if site == len(self._paths):
                self._paths.append(tuple(exact))
            self._ids[path] = site
        return site

    def _instruction(self, code: int, last: int) -> int:
        """The beginning of an instruction.

        Python specialises instructions while it runs, and some of them then leave a frame at
        their end.
        """
        if code not in self._starts:
            self._starts[code] = [i.offset for i in dis.get_instructions(self._codes[code])]
        starts = self._starts[code]
        return starts[bisect.bisect_right(starts, last) - 1]

    def _meet(self, frame: FrameType) -> int:
        """Returns the kind of function that a frame not seen before belongs to."""
        module = frame.f_globals.get("__name__") or ""
        root = module.partition(".")[0]
        if records_calls(frame.f_globals):
            kind = _OUTSIDE
        elif is_private(module):
            kind = _OWN
        elif root in LIBRARIES or root in sys.stdlib_module_names:
            kind = _LIBRARY
        else:
            kind = _USER
        code = frame.f_code
        self._codes[id(code)] = code  # keeps the id from being used again
        self._kinds[id(code)] = kind
        return kind

    def onward(self, site: int, after: int) -> bool:
        """Returns whether a function that does something at one site gets to another by going on.

        If not, it has gone back in a loop. What loops inside of a library counts as going on.
        """
        answer = self._onward.get((site, after))
        if answer is None:
            answer = self._onward[site, after] = self._goes_on(site, after)
        return answer

    def _goes_on(self, site: int, after: int) -> bool:
        path, next_path = self._paths[site], self._paths[after]
        for k in range(2, min(len(path), len(next_path)) + 1, 2):
            (code, last), (next_code, next_last) = path[-k:][:2], next_path[-k:][:2]
            if code != next_code or last != next_last:
                inside = self._kinds[code] < _USER and self._kinds[next_code] < _USER
                return inside or (code == next_code and next_last > last)
        return len(path) != len(next_path)

    def function(self, sites: Iterable[int]) -> CodeType | None:
        """The innermost function of the user that all of the sites lie in."""
        ways = [self._functions(site) for site in sites]
        steps = itertools.takewhile(lambda s: all(c is s[0] for c in s), zip(*ways, strict=False))
        common = list(steps)
        return common[-1][0] if common else None

    def unit(self, site: int) -> Unit | None:
        """Returns what would be a cell of the operations at a site; None outside of functions."""
        codes = self._functions(site)
        if not codes:
            return None
        around = 1
        if self._kinds[id(codes[0])] != _RECURSIVE:
            around += max((k for k, code in enumerate(codes) if _has_loops(code)), default=0)
        is_whole = around == len(codes)
        code = codes[-1 if is_whole else around]
        name = code.co_qualname.rpartition("<locals>.")[2]
        return Unit(name, f"{code.co_filename}:{code.co_firstlineno}", is_whole)

    def _functions(self, site: int) -> list[CodeType]:
        """Returns the functions of the user that lead to a site, from the outermost."""
        codes = reversed(self._paths[site][::2])
        return [self._codes[c] for c in codes if self._kinds[c] >= _USER]


def _has_loops(code: CodeType) -> bool:
    return any(x.opname.startswith("JUMP_BACKWARD") for x in dis.get_instructions(code))
