"""What the source of a module's methods says about the order of things, where the structure alone does not tell.

Shape suffixes: none, no tensors here.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def definition(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The parsed definition of a function, behind its decorators; None where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    found = tree.body[0]
    return found if isinstance(found, ast.FunctionDef) else None


def children_used(module: nn.Module, method: str) -> list[str]:
    """Names of the child modules that ``module.method`` mentions, each time, in the order in which they are called.

    Methods that it calls on itself are followed.
    """
    return _mentions(module, method, set())


def written_at(module: nn.Module, method: str, argument: str = "input_ids") -> list[int]:
    """The constants ID for which ``module.method`` writes into ``x[argument == ID]``: how models put visual tokens in.

    Methods that it calls on itself are followed. A constant is a whole number with a name in the source's module.
    """
    found: list[int] = []
    for function, parsed in _followed(module, method, set()):
        names = getattr(inspect.unwrap(function), "__globals__", {})
        for node in ast.walk(parsed):
            if not (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)):
                continue
            match node.slice:
                case ast.Compare(left=ast.Name(id=left), ops=[ast.Eq()], comparators=[ast.Name(id=right)]):
                    value = names.get(right) if left == argument else None
                    found += [value] if type(value) is int else []
    return found


def _followed(module: nn.Module, method: str, seen: set[str]) -> Iterator[tuple[Callable[..., Any], ast.FunctionDef]]:
    """``module.method`` and the methods that it calls on itself, each once, with their definitions."""
    function = getattr(type(module), method, None)
    if method in seen or not callable(function) or function is getattr(nn.Module, method, None):
        return
    seen.add(method)
    parsed = definition(function)
    if parsed is None or not parsed.args.args:
        return
    yield function, parsed
    for name in _attributes_in_order(parsed, parsed.args.args[0].arg):
        yield from _followed(module, name, seen)


def _mentions(module: nn.Module, method: str, seen: set[str]) -> list[str]:
    function = getattr(type(module), method, None)
    if method in seen or function is None or function is getattr(nn.Module, method, None):
        return []
    seen.add(method)
    parsed = definition(function)
    if parsed is None or not parsed.args.args:
        return []
    children = dict(module.named_children())
    names: list[str] = []
    for name in _attributes_in_order(parsed, parsed.args.args[0].arg):
        names += [name] if name in children else _mentions(module, name, seen)
    return names


def _attributes_in_order(parsed: ast.FunctionDef, owner: str) -> list[str]:
    """The attributes of ``owner``: one that is called counts where its call ends, behind the calls in its arguments."""
    ends = {id(node.func): node for node in ast.walk(parsed) if isinstance(node, ast.Call)}
    places: list[tuple[int, int, str]] = []
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner:
            end = ends.get(id(node), node)
            places.append((end.end_lineno or 0, end.end_col_offset or 0, node.attr))
    return [name for *_, name in sorted(places)]
