"""Hypothesis strategies for programs, instances and ways to run them.

    from hypothesis import given
    from jedbatch.testing import strategies

    @given(strategies.cases())
    def test_against_the_loop(case):
        case.check()

What fails shrinks to a few lines, which `print(case)` shows as Python. `hypothesis` is the module.
"""

import dataclasses

from jedbatch.testing.cases import (
    GRANULARITIES,
    LAYOUTS,
    POLICIES,
    READ,
    RUNS,
    TARGETS,
    Case,
    Way,
)
from jedbatch.testing.programs import (
    FLOATS,
    HELPERS,
    MANY_FLOATS,
    MARKS,
    OPERATIONS,
    REGISTERS,
    WORDS,
    Instance,
    Program,
)

try:
    import hypothesis
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "`jedbatch.testing.strategies` needs Hypothesis; install it with `pip install hypothesis`, "
        "or all that tests need with `pip install 'jedbatch[test]'`."
    ) from error

__all__ = [
    "bodies",
    "calls",
    "cases",
    "chains",
    "hypothesis",
    "instances",
    "minibatches",
    "programs",
    "statements",
    "ways",
]

DEPTH = 2  # blocks inside of blocks
SIZES = (2, 1, 1, 2, 3, 3, 4)  # statements at most; small programs compile fast
WEIGHTS = {"v": 8, "x": 2}  # how often statements write registers of a kind, otherwise once

_OF_V = [name for name, op in OPERATIONS.items() if (op.result, op.operands) == ("v", "v")]
_INSIDE_V = [name for name, op in OPERATIONS.items() if (op.result, op.operands) == ("v", "vv")]


@st.composite
def calls(draw: st.DrawFn) -> tuple:
    """A statement that computes one register from others."""
    kind = draw(st.sampled_from([k for k in REGISTERS for _ in range(WEIGHTS.get(k, 1))]))
    name = draw(st.sampled_from([name for name, op in OPERATIONS.items() if op.result == kind]))
    registers = (kind, *OPERATIONS[name].operands)
    return "do", name, *(draw(st.integers(0, REGISTERS[k] - 1)) for k in registers)


@st.composite
def chains(draw: st.DrawFn) -> tuple:
    """A loop that updates one register, in ways that depend on the instance."""
    v = draw(st.integers(0, REGISTERS["v"] - 1))
    updates = st.sampled_from(_OF_V).map(lambda name: ("do", name, v, v))
    some = st.lists(updates, min_size=1, max_size=2).map(tuple)
    match draw(st.sampled_from(["loop", "words", "even", "either"])):
        case "even":
            return "loop", (*draw(some), ("even", draw(some)))
        case "either":
            return "either", draw(some), draw(some)
        case kind:
            return kind, draw(some)


@st.composite
def statements(draw: st.DrawFn, depth: int = 0, decides: bool = False) -> tuple:
    """A statement; with `decides` maybe one that decides on computed values."""
    kinds = ["do"] * 6 + ["tree", "dag"]
    if depth < DEPTH:
        kinds += ["loop", "words", "even", "either", "chain", "chain", "chain"]
    if decides:
        kinds += ["pick", "float", *(["if", "while"] * (depth < DEPTH))]
    kind = draw(st.sampled_from(kinds))
    register = st.integers(0, REGISTERS["v"] - 1)
    inside = bodies(depth=depth + 1, decides=decides, largest=2)
    bound = st.sampled_from([0.0, -0.3, 0.25])
    match kind:
        case "do":
            return draw(calls())
        case "tree" | "dag":
            return kind, draw(st.sampled_from(_INSIDE_V)), draw(register)
        case "chain":
            return draw(chains())
        case "either":
            return kind, draw(inside), draw(inside)
        case "pick" | "float":
            return kind, draw(register), draw(register)
        case "if":
            other = st.one_of(st.just(()), inside)
            return kind, draw(register), draw(bound), draw(inside), draw(other)
        case "while":
            return kind, draw(register), draw(bound), draw(inside)
    return kind, draw(inside)


def bodies(depth: int = 0, decides: bool = False, largest: int = SIZES[-1]) -> st.SearchStrategy:
    """A few statements."""
    return st.lists(statements(depth, decides), min_size=1, max_size=largest).map(tuple)


@st.composite
def _returned(draw: st.DrawFn, program: Program, ragged: bool) -> tuple[str, ...]:
    """The registers that a program returns: mostly those that it writes, or it would do nothing."""
    kinds = "vvvvvsitb" + "x" * ragged
    every = [f"{k}{i}" for k in kinds for i in range(REGISTERS[k])]
    written = [r for r in program.written if r[0] in kinds] or every
    which = draw(st.sampled_from(["any", "some written", "some written", "written"]))
    if which == "written":
        return tuple(written[-4:])
    one = st.sampled_from(every if which == "any" else written)
    return tuple(draw(st.lists(one, min_size=1, max_size=3, unique=True)))


@st.composite
def programs(draw: st.DrawFn, decides: bool | None = None, ragged: bool = True) -> Program:
    """A program.

    Args:
      draw: of Hypothesis.
      decides: whether it may decide on computed values; None to draw that.
      ragged: whether it may return arrays of any length.
    """
    if decides is None:
        decides = draw(st.sampled_from([False, False, True]))
    body = draw(bodies(decides=decides, largest=draw(st.sampled_from(SIZES))))
    returned = draw(_returned(Program(body), ragged))
    form = draw(st.sampled_from(["one", "tuple", "dict"]))
    marks = []
    for name in sorted(HELPERS.keys() & Program(body).uses):
        marks.append((name, draw(st.sampled_from(["@jedbatch.cell", *MARKS]))))
    inner, together = draw(st.booleans()), draw(st.booleans())
    return Program(body, returned, form, tuple(marks), inner and not decides, together)


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """An instance."""
    word = st.integers(0, WORDS - 1)
    tree = st.recursive(word, lambda inner: st.tuples(inner, inner), max_leaves=6)
    lengths = st.integers(1, 5)
    dag = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
    return Instance(
        draw(st.integers(0, 4)),
        tuple(draw(st.lists(word, max_size=4))),
        draw(tree),
        tuple((p % (i + 2), q % (i + 2)) for i, (p, q) in enumerate(dag)),
        (draw(lengths), draw(lengths)),
        draw(st.integers(0, 99)),
    )


@st.composite
def ways(draw: st.DrawFn, decides: bool = False, floats: bool = False) -> Way:
    """Returns a strategy of ways to run a program.

    Args:
      draw: of Hypothesis.
      decides: whether the program decides on computed values.
      floats: whether it takes floats of values that are not differentiated; in a lazy scope that
        is differentiated, they have no value.
    """
    runs = [name for name, x in RUNS.items() if not decides or x.eager]
    return Way(
        draw(st.sampled_from([name for name in runs if not floats or name != "grad(lazy)"])),
        draw(st.sampled_from(GRANULARITIES)),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from([None, True, False])),
        draw(st.sampled_from(sorted(POLICIES))),
        draw(st.sampled_from(["narrow"] * 4 + ["switch"] + sorted(TARGETS))),
        draw(st.sampled_from(["all", *READ])),
        draw(st.sampled_from([1] * 19 + [15])),
        draw(st.booleans()),
        draw(st.sampled_from([False, False, False, True])),
        draw(st.booleans()),
    )


@st.composite
def minibatches(draw: st.DrawFn, known: int, unseen: int) -> tuple[tuple[int, ...], ...]:
    """Minibatches that come later: a few known instances, one again and again, and unseen ones.

    Args:
      draw: of Hypothesis.
      known: instances that a minibatch had before.
      unseen: those that none had; they have the next numbers.
    """
    number = st.integers(0, known - 1)
    some = draw(st.lists(number, min_size=1, max_size=4))
    found = [some, [draw(number)] * draw(st.integers(2, 5))]
    if unseen:
        found.append(draw(st.permutations([*some[:2], *range(known, known + unseen)])))
    return tuple(map(tuple, found))


@st.composite
def cases(draw: st.DrawFn, decides: bool | None = None) -> Case:
    """A program, its instances, and a way to run it."""
    program = draw(programs(decides))
    some = draw(st.lists(instances(), min_size=1, max_size=5))
    floats = any(s[0] == "float" for s in program.statements)
    way = draw(ways(program.decides, floats))
    seed, kind = draw(st.integers(0, 9)), draw(st.sampled_from(["float", *FLOATS]))
    if draw(st.sampled_from([False, False, True])):
        some = some[0].others(MANY_FLOATS)
    unseen = draw(st.lists(instances(), max_size=2))
    later = draw(minibatches(len(some), len(unseen)))
    known, others = (
        tuple(dataclasses.replace(instance, floats=kind) for instance in x) for x in (some, unseen)
    )
    return Case(program, known, way, seed, others, later)
