"""Which sub-modules of a decoder layer write to the residual stream.

The layer's forward is read, not run: a value that comes out of a child module and is added to the stream is that
child's. So a norm behind the attention (Gemma 3) is found as what writes, and not the attention before it.

Shape suffixes: none, no tensors here.
"""

import ast
from dataclasses import dataclass

from torch import nn

from normalign.anatomy.modules import UnknownStructureError, unwrap
from normalign.anatomy.source import definition

_PASSING = (nn.Identity, nn.Dropout)
_ATTENTION_ARGUMENTS = ("attention_mask", "position_embeddings", "position_ids", "cache", "past_key_values")


def attention_of(layer: nn.Module) -> nn.Module:
    """The sub-module of a decoder layer whose output, made by attention, is added to the residual stream.

    Raises:
        UnknownStructureError: the layer's forward does not tell.
    """
    return _writer(layer, attends=True)


def mlp_of(layer: nn.Module) -> nn.Module:
    """The sub-module of a decoder layer whose output, made token by token, is added to the residual stream.

    Raises:
        UnknownStructureError: the layer's forward does not tell.
    """
    return _writer(layer, attends=False)


@dataclass(frozen=True)
class _Value:
    """Where a value comes from: the children that made it last (each: did attention make it?), or the stream."""

    made_by: tuple[tuple[str, bool], ...] = ()
    stream: bool = False

    def __or__(self, other: "_Value") -> "_Value":
        return _Value(tuple(dict.fromkeys(self.made_by + other.made_by)), self.stream or other.stream)


def _writer(layer: nn.Module, *, attends: bool) -> nn.Module:
    layer = unwrap(layer)
    parsed = definition(type(layer).forward)
    if parsed is not None and len(parsed.args.args) > 1:
        reader = _Reader(layer, parsed)
        for name, mixes in reader.writes:
            if mixes == attends:
                return layer.get_submodule(name)
    kind = "attention" if attends else "MLP"
    raise UnknownStructureError(
        f"{type(layer).__name__}: could not tell from its forward which sub-module's {kind} output is added to the "
        "residual stream, so updates of attention and MLP are not measured apart"
    )


class _Reader:
    """Follows values through a layer's forward; ``writes`` lists (child, made by attention) in order."""

    def __init__(self, layer: nn.Module, parsed: ast.FunctionDef) -> None:
        self.layer = layer
        self.children = dict(layer.named_children())
        self.owner, stream = parsed.args.args[0].arg, parsed.args.args[1].arg
        self.values: dict[str, _Value] = {stream: _Value(stream=True)}
        self.writes: list[tuple[str, bool]] = []
        self._run(parsed.body)

    def _run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.Assign):
                value = self._value(statement.value)
                for target in statement.targets:
                    self._assign(target, value)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._assign(statement.target, self._value(statement.value))
            elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                sides = (self._value(ast.Name(statement.target.id)), self._value(statement.value))
                added = isinstance(statement.op, ast.Add)
                self._assign(statement.target, self._add(*sides) if added else sides[0] | sides[1])
            elif isinstance(statement, ast.If):
                self._branch(statement)
            elif isinstance(statement, ast.With | ast.For):
                self._run(statement.body)
            elif isinstance(statement, ast.Return | ast.Expr) and statement.value is not None:
                self._value(statement.value)

    def _branch(self, statement: ast.If) -> None:
        """The side that this layer takes, where its own attributes decide; else both, and their values together."""
        try:
            test = compile(ast.Expression(statement.test), "<layer>", "eval")
            known = eval(test, {"__builtins__": {}}, {self.owner: self.layer})
        except Exception:  # it depends on more than the layer
            before = dict(self.values)
            self._run(statement.body)
            after, self.values = self.values, dict(before)
            self._run(statement.orelse)
            for name, value in after.items():
                self.values[name] = value | self.values.get(name, value)
            return
        self._run(statement.body if known else statement.orelse)

    def _assign(self, target: ast.expr, value: _Value) -> None:
        if isinstance(target, ast.Name):
            self.values[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._assign(part, value)

    def _value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Name():
                return self.values.get(node.id, _Value())
            case ast.BinOp(op=ast.Add()):
                return self._add(self._value(node.left), self._value(node.right))
            case ast.BinOp():
                return self._value(node.left) | self._value(node.right)
            case ast.Call():
                return self._call(node)
            case ast.IfExp():
                return self._value(node.body) | self._value(node.orelse)
            case ast.Tuple() | ast.List():
                return self._first(node.elts)
            case ast.Subscript() | ast.Attribute() | ast.Starred() | ast.NamedExpr():
                return self._value(node.value)
            case _:
                return _Value()

    def _first(self, nodes: list[ast.expr]) -> _Value:
        return self._value(nodes[0]) if nodes else _Value()

    def _call(self, node: ast.Call) -> _Value:
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        source = self._first(node.args)
        if not node.args:
            source = self._value(keywords.get("hidden_states") or keywords.get("x") or ast.Constant(None))
        if not isinstance(node.func, ast.Attribute):
            return source
        owner = node.func.value
        if not (isinstance(owner, ast.Name) and owner.id == self.owner):
            inner = self._value(owner)  # a method of a tensor; of a library otherwise
            return inner if inner != _Value() else source
        child = self.children.get(node.func.attr)
        if child is None or isinstance(child, _PASSING) or "drop" in type(child).__name__.lower():
            return source  # also where it is a helper of the layer's own
        names = {a.id for a in node.args if isinstance(a, ast.Name)} | {k for k in keywords if k}
        attends = bool(names & set(_ATTENTION_ARGUMENTS)) or any(mixed for _, mixed in source.made_by)
        return _Value(((node.func.attr, attends),))

    def _add(self, left: _Value, right: _Value) -> _Value:
        if left.stream == right.stream:
            return left | right
        self.writes += (right if left.stream else left).made_by
        return _Value(stream=True)
