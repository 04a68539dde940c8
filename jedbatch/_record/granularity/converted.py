"""Converted functions: what a Python function calls is asked about first, as in AutoGraph.

A converted function does what the function does, line by line, except that each call `f(x)` in it,
functions defined inside included, is `hook(f)(x)`. It is compiled from the function's source with
every line where it was, so that errors show the user's lines, and it has the function's globals and
closure. Nothing is converted of which the source cannot be found, or where what is found there
compiles to something else than the function: where a file has been edited since, say.

Source: the conversion of calls is that of AutoGraph (Moldovan et al., 2019); it converts control
flow, too, which stays Python's here.
"""

import __future__

import ast
import concurrent.futures
import functools
import linecache
import types
from collections.abc import Callable, Iterator
from typing import Any

HOOK = "jedbatch_calls"  # the free variable of converted code that holds the hook
_FUTURE = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag,
    __future__.all_feature_names,
    0,
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def is_converted(code: types.CodeType) -> bool:
    """Returns whether code has been converted, or that of a function around it."""
    return HOOK in code.co_freevars


def convert(fn: types.FunctionType, hook: Callable) -> types.FunctionType | None:
    """Returns a function that passes what it calls through a hook; None without its source.

    Args:
      fn: the function.
      hook: returns what is called in place of its argument.
    """
    code = converted_code(fn.__code__)
    if code is None:
        return None
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    cells[HOOK] = types.CellType(hook)
    closure = tuple([cells[name] for name in code.co_freevars])
    converted = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    converted.__kwdefaults__ = fn.__kwdefaults__
    functools.update_wrapper(converted, fn)
    return converted


@functools.lru_cache(maxsize=1024)
def converted_code(code: types.CodeType) -> types.CodeType | None:
    """Returns code with all calls hooked; None if its source cannot be told.

    Python compiles less the deeper functions recur, so this is done in a thread of its own.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_converted, code).result()


def _converted(code: types.CodeType) -> types.CodeType | None:
    source = "".join(linecache.getlines(code.co_filename))
    try:
        tree = ast.parse(source)
        module = compile(tree, code.co_filename, "exec", code.co_flags & _FUTURE, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    if not any(_is_equal(found, code) for found in _codes(module)):
        return None
    nodes = [node for node in ast.walk(tree) if _is_source(node, code)]
    if len(nodes) != 1:
        return None
    made = _compiled(_Hooking().visit(nodes[0]), code)
    return made if HOOK in made.co_freevars else None


class _Hooking(ast.NodeTransformer):
    """Replaces `f(x)` by `hook(f)(x)`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.copy_location(ast.Name(HOOK, ast.Load()), node.func)
        node.func = ast.copy_location(ast.Call(name, [node.func], []), node.func)
        return node


def _is_source(node: ast.AST, code: types.CodeType) -> bool:
    """Returns whether a function in a file is the one that has been compiled to some code."""
    if not isinstance(node, _Function) or getattr(node, "name", "<lambda>") != code.co_name:
        return False
    lines = [node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]
    if min(lines) != code.co_firstlineno:
        return False
    if not isinstance(node, ast.Lambda):
        return True
    body = node.body  # several may begin in one line
    first, last = (body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)
    return all(
        None in at or (first <= (at[0], at[2]) and (at[1], at[3]) <= last)
        for at in list(code.co_positions())[1:]
        if at[2:] != (0, 0)  # where there is no source
    )


def _compiled(node: _Function, code: types.CodeType) -> types.CodeType:
    """Returns the code of a function, defined where the hook and what was free are."""
    if isinstance(node, ast.Lambda):
        plain = ast.copy_location(ast.Lambda(_without_defaults(node.args), node.body), node)
        inner: ast.stmt = ast.Return(plain)
        name = "<lambda>"
    else:
        kind, name = type(node), "inner"  # not its own, which may be that of a global
        fields = {field: getattr(node, field, None) for field in node._fields}
        fields |= {"name": name, "decorator_list": [], "returns": None}
        fields |= {"args": _without_defaults(node.args)}
        inner = kind(**fields)  # type: ignore[arg-type]
    free = [ast.arg(x) for x in (*code.co_freevars, HOOK)]
    around = ast.FunctionDef("around", ast.arguments([], free, None, [], [], None, []), [inner], [])
    if "type_params" in ast.FunctionDef._fields:
        around.type_params = []  # type: ignore[attr-defined]
    for made in (inner, around):
        ast.copy_location(made, node)
    module = ast.fix_missing_locations(ast.Module([around], []))
    flags = code.co_flags & _FUTURE
    compiled = compile(module, code.co_filename, "exec", flags=flags, dont_inherit=True)
    (found,) = [c for c in _codes(compiled) if c.co_qualname == f"around.<locals>.{name}"]
    return found.replace(co_name=code.co_name, co_qualname=code.co_qualname)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the codes of all functions in some code."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _without_defaults(args: ast.arguments) -> ast.arguments:
    """Returns the same parameters without annotations, and with None for defaults."""

    def plain(arg: Any) -> Any:
        return arg and ast.copy_location(ast.arg(arg.arg), arg)

    return ast.arguments(
        [plain(a) for a in args.posonlyargs],
        [plain(a) for a in args.args],
        plain(args.vararg),
        [plain(a) for a in args.kwonlyargs],
        [d and ast.copy_location(ast.Constant(None), d) for d in args.kw_defaults],
        plain(args.kwarg),
        [ast.copy_location(ast.Constant(None), d) for d in args.defaults],
    )


def _is_equal(a: types.CodeType, b: types.CodeType) -> bool:
    """Returns whether codes are those of one function: equal, at the same place of a file."""
    return a == b and list(a.co_positions()) == list(b.co_positions())
