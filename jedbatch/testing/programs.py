"""Programs as data, for random tests: statements that overwrite registers, and their source.

A program is a tuple of statements. Registers have a kind, which says shape and dtype, and all exist
from the start, so that any part of a program is a program: a failure shrinks by leaving out
statements. `Program.source` is the function as one would write it, and what is run:

    def fn(params, n, words):
        v0 = params["b"]
        for w in words:
            v0 = affine(params, v0)
        return v0

Kinds: `v` float32[H], `b` bfloat16[H], `s` scalar, `i` integer, `t` truth value, `k` random key,
`x` float32[n, H], an array of any length.

States of two vectors come as tuples, dicts, lists, `Named` and `Data`.
"""

import dataclasses
import functools
import linecache
import string
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jedbatch


class Named(NamedTuple):
    """A state as a named tuple."""

    a: jax.Array
    b: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    """A state as a dataclass, with a method that is a cell."""

    a: jax.Array
    b: jax.Array

    @jedbatch.cell
    def mixed(self) -> "Data":
        """Returns another one."""
        return Data(self.a - self.b, jnp.tanh(self.a * self.b))


H = 4  # elements of a vector
WORDS = 7  # rows of the look-up table
REGISTERS = {"v": 4, "b": 2, "s": 2, "i": 2, "t": 2, "k": 2, "x": 2}
MARKS = ("", "@jedbatch.cell", "@jax.jit")

Statement = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class StatementOperation:
    """An operation that a statement computes.

    Attributes:
      result: the kind of the register that is written.
      operands: the kinds of those that are read, one letter each.
      template: the expression; `{0}` is the first operand.
      helper: the function of `HELPERS` that it calls.
      merges: whether it runs for arrays of any length together, if it reads one.
    """

    result: str
    operands: str
    template: str
    helper: str = ""
    merges: bool = True


def _table(
    result: str, operands: str, *templates: str, **options: Any
) -> dict[str, StatementOperation]:
    """Operations by name, which says the kinds of registers: some templates are for several."""
    return {
        f"{result}({operands}): {t}": StatementOperation(result, operands, t, **options)
        for t in templates
    }


OPERATIONS: dict[str, StatementOperation] = {
    **_table("v", "v", "jnp.tanh({0})", "0.5 * {0}", "{0} - 1", "{0}[::-1]", "jax.nn.softmax({0})"),
    **_table("v", "v", 'jnp.tanh({0} @ params["W"])', "jnp.cumsum({0}) / 4", "jnp.roll({0}, 1)"),
    **_table("v", "v", 'jnp.sin({0}) * params["b"]', "jax.lax.stop_gradient({0})", "jnp.sort({0})"),
    **_table("v", "v", "{0} / (1 + jnp.abs({0}))", "jnp.linalg.norm({0} + 2) * {0} / 8"),
    **_table("v", "v", "jnp.sqrt(jnp.abs({0}))"),
    **_table("v", "vv", "{0} + {1}", "jnp.tanh({0} * {1})", "jnp.maximum({0}, {1})"),
    **_table("v", "vv", "jnp.concatenate([{0}[:1], {1}[1:]])", "{0} / (2 + jnp.cos({1}))"),
    **_table("v", "vv", "jnp.stack([{0}, {1}]).mean(axis=0)", "jnp.outer({0}, {1}).sum(0) / 8"),
    **_table("v", "vs", "jnp.tanh({0} * {1})", "{0} + {1}", "jnp.asarray({0}).at[1].add({1})"),
    **_table("v", "tvv", "jnp.where({0}, {1}, {2})"),
    **_table("v", "i", 'params["E"][{0}]', 'params["E"][{0} % 3] * 2', "jax.nn.one_hot({0}, H)"),
    **_table("v", "vi", "jnp.asarray({0}).at[{1} % H].set(0.5)", "{0} * ({1} % 3)"),
    **_table("v", "b", "{0}.astype(jnp.float32)"),
    **_table("v", "kv", "{1} * jax.random.bernoulli({0}, 0.5, (H,))"),
    **_table("v", "k", "jax.random.normal({0}, (H,)) / 4"),
    **_table("b", "v", "{0}.astype(jnp.bfloat16)"),
    **_table("b", "b", "{0} * 0.5", "jnp.tanh({0})", "{0}[::-1]"),
    **_table("b", "bb", "{0} + {1}", "jnp.maximum({0}, {1})"),
    **_table("b", "bs", "jnp.asarray({1}).astype(jnp.bfloat16) + {0}"),
    **_table("s", "v", "{0}.sum()", "{0}[0]", "{0}.max()", "jnp.tanh({0} @ {0})"),
    **_table("s", "vv", "jnp.tanh({0} @ {1})"),
    **_table("s", "s", "jnp.tanh({0})", "0.5 * {0}", "{0} + 1"),
    **_table("s", "ss", "{0} - {1}", "jnp.tanh({0} * {1})"),
    **_table("s", "vi", "{0}[{1} % H]"),
    **_table("i", "v", "jnp.argmax({0})", "({0} > 0).sum()"),
    **_table("i", "i", "({0} + 3) % WORDS", "{0} * 2 % WORDS"),
    **_table("i", "ii", "jnp.maximum({0}, {1})", "({0} + {1}) % WORDS"),
    **_table("i", "k", "jax.random.randint({0}, (), 0, WORDS)"),
    **_table("i", "t", "jnp.int32({0}) + 1"),
    **_table("t", "v", "{0}.sum() > 0", "jnp.any({0} > 0.5)"),
    **_table("t", "s", "{0} > 0.25"),
    **_table("t", "ii", "{0} < {1}", "{0} == {1}"),
    **_table("t", "tt", "jnp.logical_and({0}, {1})", "jnp.logical_not({0}) | {1}"),
    **_table("k", "k", "jax.random.split({0})[1]", "jax.random.fold_in({0}, 3)"),
    **_table("k", "ki", "jax.random.fold_in({0}, {1})"),
    # functions of the user, marked in one way or another
    **_table("v", "v", "affine(params, {0})", helper="affine"),
    **_table("v", "v", "node(params, {0}, {0})", helper="node"),
    **_table("v", "v", "{0} * jnp.sin({0}) + {0}", "jnp.concatenate([{0}, {0}]).reshape(2, H)[1]"),
    **_table("v", "vv", "node(params, {0}, {1})", helper="node"),
    **_table("v", "i", "embed(params, {0})", helper="embed"),
    **_table("v", "v", "power({0}, p=2)", "power({0}, p=3)", helper="power"),
    **_table("v", "vs", "scale({0}, {1})", helper="scale"),
    **_table("v", "v", "scale({0}, 0.3)", "scale({0}, 2)", helper="scale"),
    **_table("v", "v", "settle(params, {0}, n=2)", "settle(params, {0}, n=3)", helper="settle"),
    **_table("v", "vi", "choose(params, {0}, {1})", helper="choose"),
    **_table("v", "v", "shrink({0})", helper="shrink"),
    **_table("v", "v", "force(params, {0})", helper="force"),
    **_table("v", "v", "gated(params, {0})", helper="gated"),
    **_table("v", "v", "mixed({0})", helper="mixed"),
    **_table("v", "v", "clipped({0})", helper="clipped"),
    **_table("v", "kv", "drop({0}, {1})", helper="drop"),
    **_table("b", "b", "half({0})", helper="half"),
    **_table("v", "vv", 'several({0}, {1})["h"]', 'several({0}, {1})["pair"][0]', helper="several"),
    **_table("s", "vv", 'several({0}, {1})["pair"][1]', helper="several"),
    **_table("i", "vv", 'several({0}, {1})["best"]', helper="several"),
    # states in containers, cells that are made inside, arguments by name
    **_table("v", "vv", "turned(params, Named({0}, {1})).b", helper="turned"),
    **_table("v", "vv", "crossed(params, Data({0}, {1})).a", helper="crossed"),
    **_table("v", "vv", "Data({0}, {1}).mixed().b"),
    **_table(
        "v", "vv", 'swapped(params, {{"b": {0}, "a": ({1}, None)}})["a"][0]', helper="swapped"
    ),
    **_table("v", "vv", "of_list(params, [Named({0}, {1}), Named({1}, {0})])", helper="of_list"),
    **_table("v", "vv", "by_name(params, state=({0}, {1}), factor=0.5)", helper="by_name"),
    **_table("v", "vv", "closed(params, {0})({1})", helper="closed"),
    **_table("v", "v", "held(params)({0})", helper="held"),
    # arrays of any length
    **_table("x", "x", "jnp.tanh({0})", "0.5 * {0}", 'jnp.tanh({0} @ params["W"])', "{0} - 1"),
    **_table("x", "x", "jax.nn.softmax({0}, axis=-1)", "{0}[:, ::-1]"),
    **_table("x", "x", "jax.nn.softmax({0} @ {0}.T, axis=-1) @ {0}"),
    **_table("x", "x", "jnp.cumsum({0}, axis=0) / 4", "{0}[::-1]", "{0} - {0}.mean(axis=0)[None]"),
    **_table("x", "xv", "{0} + {1}[None]", "jnp.tanh({0} * {1}[None])"),
    **_table("x", "xx", "jax.nn.softmax({0} @ {1}.T, axis=-1) @ {1}"),
    **_table("v", "x", "{0}.mean(axis=0)", "{0}.max(axis=0)", "{0}[0]", "{0}[-1]"),
    **_table("v", "x", "{0}.sum(axis=0) / {0}.shape[0]", "jnp.tanh({0}.sum(axis=0))"),
    **_table("v", "x", "rows({0})", helper="rows"),
    **_table("v", "xv", "jax.nn.softmax({0} @ {1}) @ {0}"),
    **_table("s", "xx", "jnp.tanh(({0} @ {1}.T).max(axis=-1).mean())"),
    **_table("s", "x", "{0}.shape[0] / 4"),
}

# What programs call. A mark stands before each; `cell` in place of `mark`: not to be jit-ted, since
# keyword arguments are static.
HELPERS = {
    "affine": """{mark}
def affine(params, v):
    return jnp.tanh(v @ params["W"] + params["b"])""",
    "node": """{mark}
def node(params, left, right):
    return jnp.tanh(jnp.concatenate([left, right]) @ params["U"] + params["b"])""",
    "embed": """{mark}
def embed(params, word):
    return jnp.tanh(params["E"][word])""",
    "power": """{cell}
def power(v, *, p):
    return v**p / p""",
    "scale": """{mark}
def scale(v, factor):
    return jnp.tanh(factor * v)""",
    "settle": """{cell}
def settle(params, v, *, n):
    step = lambda h, x: (jnp.tanh(h @ params["W"] + x), h[0])
    return jax.lax.scan(step, v, jnp.arange(n) / 4.0)[0]""",
    "choose": """{mark}
def choose(params, v, i):
    return jax.lax.cond(i > 1, lambda v: v * params["b"], jnp.sin, v)""",
    "shrink": """{mark}
def shrink(v):
    small = lambda v: jnp.abs(v).max() > 0.3
    return jax.lax.stop_gradient(jax.lax.while_loop(small, lambda v: v / 2, v))""",
    "force": """{mark}
def force(params, v):
    return -jax.grad(lambda v: jnp.square(jnp.sin(v) * params["b"]).sum())(v)""",
    "gated": """{mark}
def gated(params, v):
    return jnp.tanh(v @ params["W"]) * jax.nn.sigmoid(v @ params["U"][:H] + params["b"])""",
    "mixed": """table = jnp.linspace(-1, 1, 2 * H).reshape(2, H)
gain = 0.7
{mark}
def mixed(v):
    return gain * v + table[1] - np.full(H, 0.1, np.float32)""",
    "clipped": """clip = jax.custom_vjp(lambda v: jnp.clip(v, -0.5, 0.5))
clip.defvjp(lambda v: (clip(v), None), lambda _, ct: (2 * ct,))
{mark}
def clipped(v):
    return clip(v)""",
    "drop": """{mark}
def drop(key, v):
    return jnp.where(jax.random.bernoulli(key, 0.5, v.shape), 2 * v, 0)""",
    "half": """{mark}
def half(b):
    return 0.5 * b + 1""",
    "several": """{mark}
def several(a, b):
    h = jnp.where(a > 0, a, b)
    return {{"h": h, "best": jnp.argmax(a + b), "pair": (jnp.sin(a), (a * b).mean())}}""",
    "turned": """{mark}
def turned(params, state):
    return Named(jnp.tanh(state.b @ params["W"]), state.a)""",
    "crossed": """{mark}
def crossed(params, state):
    return Data(jnp.tanh(state.a * state.b), state.a + params["b"])""",
    "swapped": """{mark}
def swapped(params, state):
    return {{"a": [state["b"] * params["b"], None], "b": state["a"][0]}}""",
    "of_list": """{mark}
def of_list(params, states):
    return jnp.tanh(sum(state.a * state.b for state in states) + params["b"])""",
    "by_name": """{cell}
def by_name(params, *, state, factor):
    return factor * jnp.tanh(state[0] @ params["W"]) + state[1]""",
    "closed": """def closed(params, v):
    return jedbatch.cell(lambda x: jnp.tanh(x * v + params["b"]))""",
    "held": """def held(params):
    return jedbatch.cell(functools.partial(lambda p, x: jnp.tanh(x @ p["W"]), params))""",
    "rows": """{mark}
def rows(x):
    return jnp.square(x).mean(axis=0)""",
}

# What registers hold at the start, and the instance's arguments that they are made of.
INITIAL = {
    "v0": 'params["b"]',
    "v1": "vector",
    "v2": 'params["E"][word]',
    "v3": "jnp.ones(H) * n / 2",
    "b0": "brief",
    "b1": 'params["b"].astype(jnp.bfloat16)',
    "s0": "number",
    "s1": "vector[0]",
    "i0": "word",
    "i1": "index",
    "t0": "flag",
    "t1": "vector[1] > 0",
    "k0": "key",
    "k1": "jax.random.fold_in(key, 1)",
    "x0": "xs",
    "x1": "ys",
}
PYTHON = ("n", "words", "tree", "dag", "word", "number", "flag")
ARGUMENTS = (*PYTHON, "vector", "brief", "index", "key", "xs", "ys")  # of an instance


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of parameters and one instance.

    Statements: `("do", operation, target, *sources)`; `("loop" | "words" | "even", body)`, as often
    as the instance says, for each of its words, or if its number is even; `("either", body,
    other)`, one of them for each word; `("tree", name, target)` and `("dag", operation, target)`
    along structures; `("if", register, bound, body, other)`, `("while", register, bound, body)`,
    `("pick", target, source)` and `("float", target, source)`, which decide on computed values.

    Attributes:
      body: the statements.
      returned: the registers that are returned.
      form: of the result: "one" register, "tuple" or "dict".
      marks: the helpers that are marked, each with an element of `MARKS`; "@jedbatch.cell" if not.
      inner: whether helpers are defined inside of the function.
      together: whether the arguments of an instance are one dict.
    """

    body: tuple[Statement, ...]
    returned: tuple[str, ...] = ("v0",)
    form: str = "one"
    marks: tuple[tuple[str, str], ...] = ()
    inner: bool = False
    together: bool = False

    @functools.cached_property
    def statements(self) -> tuple[Statement, ...]:
        """All statements, those of blocks too."""
        return tuple(_walk(self.body))

    @property
    def decides(self) -> bool:
        """Returns whether it decides on computed values."""
        return any(s[0] in ("if", "while", "pick", "float") for s in self.statements)

    @functools.cached_property
    def written(self) -> tuple[str, ...]:
        """The registers that are assigned, in the order of the last assignments of each."""
        targets = [line.strip().partition(" = ") for line in _block(self.body, "")]
        last = {name: i for i, (name, equals, _) in enumerate(targets) if equals}
        known = [f"{kind}{i}" for kind, count in REGISTERS.items() for i in range(count)]
        return tuple(sorted(last.keys() & set(known), key=last.__getitem__))

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """The lines of the function, without its head."""
        lines = [*_block(self.body, ""), f"return {self._result}"]
        return (*self._initial(lines), *lines)

    @property
    def _result(self) -> str:
        if self.form == "one":
            return self.returned[0]
        if self.form == "tuple":
            return f"({', '.join(self.returned)}, {self.returned[0]})"
        pairs = ", ".join(f'"{r}": {r}' for r in self.returned)
        return f'{{{pairs}, "b": params["b"], "more": [{self.returned[-1]}, 3]}}'

    def _initial(self, lines: list[str]) -> list[str]:
        """Returns initial assignments of registers that are read before being written."""
        found = []
        for register, value in INITIAL.items():
            first = next((line for line in lines if register in _names(line)), "")
            target, _, expression = first.partition(" = ")
            if first and (target != register or register in _names(expression)):
                found.append(f"{register} = {value}")
        return found

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of an instance, at least one."""
        used = set().union(*map(_names, self.lines))
        return tuple(a for a in ARGUMENTS if a in used) or ("n",)

    @functools.cached_property
    def uses(self) -> frozenset[str]:
        """Names that occur in the source of the function."""
        return frozenset().union(*map(_names, self.lines))

    @property
    def helpers(self) -> list[str]:
        """Source of the functions it calls."""
        marks = dict(self.marks)
        found = []
        for name, text in HELPERS.items():
            if name in self.uses:
                mark = marks.get(name, "@jedbatch.cell")
                cell = mark.replace("@jax.jit", "")
                found.append(text.format(mark=mark, cell=cell).replace("\n\n", "\n").lstrip("\n"))
        return found

    @functools.cached_property
    def source(self) -> str:
        """The function as Python."""
        head = "instance" if self.together else ", ".join(self.arguments)
        lines = list(self.lines)
        if self.together:
            lines = [f'{a} = instance["{a}"]' for a in self.arguments] + lines
        helpers = [line for text in self.helpers for line in text.split("\n")]
        if self.inner:
            lines, helpers = helpers + lines, []
        lines = [f"def fn(params, {head}):", *(f"    {line}" for line in lines)]
        return "\n".join([*helpers, *lines]) + "\n"

    @property
    def in_axes(self) -> tuple[int | None, ...]:
        """For `jedbatch.batch`."""
        return None, *[0] * (1 if self.together else len(self.arguments))

    def function(self) -> Any:
        """The function, made anew."""
        name = f"<program {abs(hash(self.source)):x}>"
        linecache.cache[name] = len(self.source), None, self.source.splitlines(True), name
        space: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "jedbatch": jedbatch}
        space |= {"H": H, "WORDS": WORDS, "__name__": "program", "functools": functools}
        space |= {"Named": Named, "Data": Data}
        exec(compile(self.source, name, "exec"), space)
        return space["fn"]

    def __str__(self) -> str:
        return self.source


def _walk(body: tuple[Statement, ...]) -> Iterator[Statement]:
    for statement in body:
        yield statement
        for part in statement[1:]:
            if isinstance(part, tuple):
                yield from _walk(part)


@functools.cache
def _names(line: str) -> frozenset[str]:
    """The identifiers in a line."""
    kept = string.ascii_letters + string.digits + "_"
    return frozenset("".join(c if c in kept else " " for c in line).split())


def _block(body: tuple[Statement, ...], indent: str) -> list[str]:
    """The lines of some statements."""
    return [f"{indent}{line}" for statement in body for line in _lines(*statement)] or [
        f"{indent}pass"
    ]


def _lines(kind: str, *rest: Any) -> list[str]:
    """The lines of one statement."""
    inner = "    "
    if kind == "do":
        name, target, *sources = rest
        operation = OPERATIONS[name]
        read = [f"{k}{i}" for k, i in zip(operation.operands, sources, strict=True)]
        return [f"{operation.result}{target} = {operation.template.format(*read)}"]
    if kind == "loop":
        return ["for _ in range(n):", *_block(rest[0], inner)]
    if kind == "words":
        return ["for i0 in words:", *_block(rest[0], inner)]
    if kind == "either":
        body, other = (_block(block, inner * 2) for block in rest)
        return ["for i0 in words:", f"{inner}if i0 % 2 == 0:", *body, f"{inner}else:", *other]
    if kind == "even":
        return ["if n % 2 == 0:", *_block(rest[0], inner)]
    if kind == "tree":
        name, target = rest
        both = OPERATIONS[name].template.format("visit(t[0])", "visit(t[1])")
        leaf = f'{both} if isinstance(t, tuple) else params["E"][t]'
        return [f"visit = lambda t: {leaf}", f"v{target} = visit(tree)"]
    if kind == "dag":
        name, target = rest
        both = OPERATIONS[name].template.format("made[p]", "made[q]")
        return [
            f"made = [v1, v{target}]",
            "for p, q in dag:",
            f"{inner}made.append({both})",
            f"v{target} = made[-1]",
        ]
    if kind == "if":
        register, bound, body, other = rest
        lines = [f"if v{register}[0] > {bound}:", *_block(body, inner)]
        return [*lines, "else:", *_block(other, inner)] if other else lines
    if kind == "while":
        register, bound, body = rest
        lines = [
            "for _ in range(3):",
            f"{inner}if not v{register}[0] < {bound}:",
            f"{inner * 2}break",
        ]
        return [*lines, *_block(body, inner)]
    target, source = rest
    if kind == "pick":
        return [f"v{target} = [v0, v1, v2, v3][int(jnp.argmax(v{source}))]"]
    assert kind == "float", kind
    number = f"float(jax.lax.stop_gradient(jnp.tanh(v{source}.sum())))"
    return [f"v{target} = v{target} * {number}"]


# --- parameters and instances ---


FLOATS = {"float": float, "float32": np.float32, "float64": np.float64, "float16": np.float16}
MANY_FLOATS = 6  # more than are constants


@dataclasses.dataclass(frozen=True)
class Instance:
    """The Python values that differ between instances; arrays are drawn from a seed.

    Attributes:
      n: how often loops run.
      words: a sequence of words.
      tree: nested pairs of words.
      dag: pairs of earlier results, of which there are two at first.
      lengths: of the arrays of any length.
      seed: of the values of arrays.
      floats: their type.
    """

    n: int = 0
    words: tuple[int, ...] = ()
    tree: Any = 0
    dag: tuple[tuple[int, int], ...] = ()
    lengths: tuple[int, int] = (1, 1)
    seed: int = 0
    floats: str = "float"

    def others(self, count: int) -> "list[Instance]":
        """Instances that differ in floats and arrays alone."""
        return [dataclasses.replace(self, seed=self.seed + 2 * WORDS * k) for k in range(count)]

    def arguments(self) -> Mapping[str, Any]:
        """The arguments of a program by name."""
        rng = np.random.default_rng(self.seed)
        vector, brief = rng.normal(size=(2, H)).astype(np.float32)
        return {
            "n": self.n,
            "words": self.words,
            "tree": self.tree,
            "dag": self.dag,
            "word": self.seed % WORDS,
            "number": FLOATS[self.floats](round(float(rng.normal()), 2)),
            "flag": self.seed % 2 == 0,
            "vector": vector,
            "brief": jnp.asarray(brief, jnp.bfloat16),
            "index": np.int32(rng.integers(WORDS)),
            "key": jax.random.key(self.seed),
            "xs": rng.normal(size=(self.lengths[0], H)).astype(np.float32),
            "ys": rng.normal(size=(self.lengths[1], H)).astype(np.float32),
        }


def make_params(seed: int = 0) -> dict[str, jax.Array]:
    """Parameters for every program."""
    rng = np.random.default_rng(seed)
    shapes = {"W": (H, H), "U": (2 * H, H), "b": (H,), "E": (WORDS, H)}
    return {k: jnp.asarray(0.5 * rng.normal(size=s), jnp.float32) for k, s in shapes.items()}
