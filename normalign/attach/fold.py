"""Folding a constant factor into the projector, so that no code is needed to apply it.

Shape suffixes: none, parameters of any shape.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def foldable_parameters(projector: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> list[str]:
    """Names (within the projector) of parameters that scale its output when they are scaled: those of its last Linear.

    Found by trying: modules are taken from the last to the first, their weight and bias doubled, and the output of
    the call (``args``, ``keywords``) compared with twice the output before. Doubling and halving are exact.

    Raises:
        ValueError: no module's parameters do that.
    """
    with torch.no_grad():
        before = output_of(projector(*args, **keywords))
        for names in _candidates(projector):
            parameters = [projector.get_parameter(name) for name in names]
            for parameter in parameters:
                parameter.mul_(2)
            after = output_of(projector(*args, **keywords))
            for parameter in parameters:
                parameter.div_(2)
            if torch.allclose(after, 2 * before, rtol=1e-5, atol=1e-6 * before.abs().max().item()):
                return names
    raise ValueError(
        f"{type(projector).__name__}: found no parameters that scale its output, so a factor cannot be folded into it; "
        "choose layernorm or token_rms"
    )


def _candidates(projector: nn.Module) -> Iterator[list[str]]:
    for path, module in reversed(list(projector.named_modules())):
        own = [f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)]
        if own:
            yield own
            yield from ([name] for name in own if len(own) > 1)


def output_of(output: Any) -> Tensor:
    """The visual tokens (..., D) in what a projector returns; ValueError where there are none."""
    tokens = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
    if tokens is None:
        raise ValueError(f"what was named as projector returns a {type(output).__name__} instead of visual tokens")
    return tokens
