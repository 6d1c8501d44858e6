"""Watching a forward pass: what each decoder layer and each interface does, handed over while it happens.

Nothing is kept: a layer's states reach the caller inside the hook of that layer, so at most two layers' states are
alive. Decoder layers are hooked because the last hidden state that transformers returns is after the final norm.

Shape suffixes: B samples, L length, D width, H heads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normalign.anatomy import UnknownStructureError, attention_of, mlp_of
from normalign.diagnosis.halves import factors_of, first_tokens
from normalign.diagnosis.tokens import token_norms, with_float64


@dataclass(frozen=True)
class LayerStep:
    """One decoder layer's work: the residual stream before and after it, and the norms of what its halves added.

    A norm is None where the layer has no such half, did not run it, adds more than its halves, or its structure does
    not tell.
    """

    index: int
    before_BLD: Tensor
    after_BLD: Tensor
    attention_BL: Tensor | None
    mlp_BL: Tensor | None


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor of a module's input or output: a tensor, or something that holds it first."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):  # also the output classes of transformers
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return next((found for found in map(first_tensor, value) if found is not None), None)
    return None


def tokens_of_all_images(value: Any) -> Tensor | None:
    """As :func:`first_tensor`; where that stands in a list, a tensor for each image, the tokens (N, D) of them all."""
    if isinstance(value, dict):
        value = tuple(value.values())
    given = value[0] if isinstance(value, tuple) and value else value
    if isinstance(given, list) and len(given) > 1 and all(isinstance(each, Tensor) for each in given):
        return torch.cat([each.flatten(0, -2) for each in given])
    return first_tensor(value)


@dataclass
class LayerParts:
    """A decoder layer, and the modules in it that write to the residual stream; None where its structure does not tell.

    Found once per model: it means reading source code. ``factors``, by name of the half, are what the layer multiplies
    its halves by: none if it is no sum of them, and None until a pass in which both ran has told.
    """

    layer: nn.Module
    attention: nn.Module | None
    mlp: nn.Module | None
    factors: dict[str, float] | None = None


def layer_parts(layers: Sequence[nn.Module]) -> list[LayerParts]:
    """The parts of decoder layers."""

    def found(find: Callable[[nn.Module], nn.Module], layer: nn.Module) -> nn.Module | None:
        try:
            return find(layer)
        except UnknownStructureError:
            return None

    return [LayerParts(layer, found(attention_of, layer), found(mlp_of, layer)) for layer in layers]


@contextmanager
def watch_layers(parts: Sequence[LayerParts], take: Callable[[LayerStep], None]) -> Iterator[None]:
    """Call ``take`` after every decoder layer of the forward passes made meanwhile."""
    with ExitStack() as stack:
        for index, each in enumerate(parts):
            _LayerWatch(index, each, take).attach(stack)
        yield


class _LayerWatch:
    """Holds one layer's input (which the caller of the layer holds too) until the layer has run."""

    def __init__(self, index: int, parts: LayerParts, take: Callable[[LayerStep], None]) -> None:
        self.index, self.parts, self.take = index, parts, take
        self.before: Tensor | None = None
        self.norms: dict[str, Tensor] = {}
        self.first: dict[str, Tensor] = {}  # what each half added to the first tokens, until its factor is known

    def attach(self, stack: ExitStack) -> None:
        stack.enter_context(hook_inputs(self.parts.layer, self._begin))
        for name, half in (("attention", self.parts.attention), ("mlp", self.parts.mlp)):
            if half is not None:
                stack.enter_context(hook_output(half, partial(self._half, name)))
        stack.enter_context(hook_output(self.parts.layer, self._end))

    def _begin(self, before: Tensor) -> None:
        self.before, self.norms, self.first = before, {}, {}

    def _half(self, name: str, output: Any) -> None:
        added = first_tensor(output)
        if added is not None and self.before is not None and added.shape[-1] == self.before.shape[-1]:
            self.norms[name] = token_norms(added).reshape(self.before.shape[:-1])
            if self.parts.factors is None:
                self.first[name] = first_tokens(added)

    def _end(self, output: Any) -> None:
        before, after = self.before, first_tensor(output)
        self.before = None
        if before is None or after is None:
            raise ValueError(f"decoder layer {self.index} has no tensor as its first input and output")
        after = with_float64(after)
        before = before.to(after.device)  # where layers lie on several devices
        if len(self.first) == 2:
            found = factors_of(first_tokens(before), first_tokens(after), list(self.first.values()))
            self.parts.factors = dict(zip(self.first, found or (), strict=False))
        self.first = {}
        attention_BL, mlp_BL = self._added("attention"), self._added("mlp")
        self.take(LayerStep(self.index, before, after, attention_BL, mlp_BL))

    def _added(self, name: str) -> Tensor | None:
        """Norms of what a half added in this pass, if that is known."""
        norms_BL, factors = self.norms.pop(name, None), self.parts.factors
        if norms_BL is None or factors is None or factors.get(name) == 1.0:
            return norms_BL
        return norms_BL * abs(factors[name]) if name in factors else None


@contextmanager
def watch_attention(layers: Sequence[nn.Module], take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call ``take(layer, weights_BHLL)`` with each layer's attention weights, where its attention returns any.

    Only the plain ("eager") implementation does, in older code only when it is asked to. The weights are those of one
    layer at a time.
    """

    def catch(index: int, output: Any) -> None:
        for value in output if isinstance(output, tuple) else ():
            if isinstance(value, Tensor) and value.ndim == 4 and value.shape[-2] == value.shape[-1]:
                take(index, with_float64(value.detach()))
                return

    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            for child in layer.children():
                handle = child.register_forward_pre_hook(_ask_for_weights, with_kwargs=True)
                stack.callback(handle.remove)
                stack.enter_context(hook_output(child, partial(catch, index)))
        yield


def _ask_for_weights(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Asking the attention alone, and not the model, makes no one keep the weights of all layers."""
    return (inputs, keywords | {"output_attentions": True}) if "output_attentions" in keywords else None


@contextmanager
def hook_output(module: nn.Module, take: Callable[[Any], None]) -> Iterator[None]:
    """Call ``take`` with the module's output, whatever it is, each time it has run."""
    handle = module.register_forward_hook(lambda _module, _inputs, output: take(_detached(output)))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def hook_inputs(
    module: nn.Module, take: Callable[[Tensor], None], find: Callable[[Any], Tensor | None] = first_tensor
) -> Iterator[None]:
    """Call ``take`` with the tensor that ``find`` sees in what the module is given, each time before it runs."""

    def catch(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found = find(inputs)
        found = find(keywords) if found is None else found
        if found is not None:
            take(found.detach())

    handle = module.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _detached(output: Any) -> Any:
    return output.detach() if isinstance(output, Tensor) else output
