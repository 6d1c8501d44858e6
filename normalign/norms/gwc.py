"""Global Weight Compensation (UB §5.1): undo, in the backward pass only, the shrinking by a small LayerNorm gain."""

from typing import Any

import torch
from torch import Tensor


class _Compensate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        (grad,) = grad_outputs
        return grad * factor.to(grad.dtype), None


def compensate(x: Tensor, gain_D: Tensor, limit: float | None = None) -> Tensor:
    """Identity forward; multiplies the gradient that reaches ``x`` by 1/mean|gain|, or by ``limit`` if that is less.

    The paper scales the gradient at the normalised activation x̂. LayerNorm's backward is linear in its incoming
    gradient, so the same factor on the LayerNorm's *input* gives the same gradient and leaves the fused kernel intact.
    The gradients of gain and bias stay plain, and the factor itself gets none.

    Args:
        x: input of the LayerNorm, any shape.
        gain_D: the LayerNorm's gain; its mean absolute value is ḡ.
        limit: largest factor. The smaller the gain, the larger 1/ḡ and with it the swings of the gradient norm that
            the paper warns of; a bound keeps most of the compensation and takes those away.

    Source: UB §5.1, ∇_x̂ L = (∇_y L ⊙ g)/ḡ; the limit is ours.
    """
    mean_gain = gain_D.detach().abs().mean()
    factor = mean_gain.clamp_min(torch.finfo(mean_gain.dtype).tiny).reciprocal()
    return _Compensate.apply(x, factor if limit is None else factor.clamp_max(limit))
