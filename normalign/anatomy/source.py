"""What the source of a module's methods says about the order of things, where the structure alone does not tell.

Shape suffixes: none, no tensors here.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
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
    """Names of the child modules that ``module.method`` mentions, in the order of the source, last mention counting.

    Methods that it calls on itself are followed.
    """
    mentions = _mentions(module, method, set())
    return [name for i, name in enumerate(mentions) if name not in mentions[i + 1 :]]


def _mentions(module: nn.Module, method: str, seen: set[str]) -> list[str]:
    function = getattr(type(module), method, None)
    if method in seen or function is None or function is getattr(nn.Module, method, None):
        return []
    seen.add(method)
    parsed = definition(function)
    if parsed is None or not parsed.args.args:
        return []
    owner = parsed.args.args[0].arg
    attributes = [
        node
        for node in ast.walk(parsed)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner
    ]
    children = dict(module.named_children())
    names: list[str] = []
    for node in sorted(attributes, key=lambda node: (node.lineno, node.col_offset)):
        names += [node.attr] if node.attr in children else _mentions(module, node.attr, seen)
    return names
