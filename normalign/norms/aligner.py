"""Aligners: what stands between the projector and the language model and sets the norm of visual tokens.

Every aligner aims at ``target_norm`` = multiple x T, T being the mean L2 norm of the language model's non-zero text
embeddings (UB §5.1; TA). One registry, :func:`build_aligner`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from normalign.norms.gwc import compensate

EPS = 1e-6


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded over processes (every process has to ask), detached."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Aligner(nn.Module):
    """Maps visual tokens (..., D) to visual tokens (..., D)."""

    def gain_statistics(self) -> dict[str, float]:
        """L2 norm, mean absolute value and drift of the gain; empty for aligners without one."""
        return {}


class NoAligner(Aligner):
    """The baseline: visual tokens enter as the projector made them."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class LayerNormAligner(Aligner):
    """LayerNorm over the width (UB §5.1): y = x̂ ⊙ g + b, g started at target_norm/√D (or 1), b at 0.

    Gain and bias are kept in float32: bfloat16 would lose updates below 4.9e-4 of a gain near 0.1.
    """

    def __init__(
        self,
        width: int,
        target_norm: float,
        init: str = "target",
        gwc: bool = False,
        gwc_limit: float | None = None,
    ) -> None:
        super().__init__()
        self.gwc, self.gwc_limit = gwc, gwc_limit
        self.initial_gain = target_norm / math.sqrt(width) if init == "target" else 1.0
        self.weight = nn.Parameter(torch.full((width,), self.initial_gain))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.gwc and self.training:
            x = compensate(x, self.weight, self.gwc_limit)
        y = functional.layer_norm(x.float(), x.shape[-1:], self.weight.float(), self.bias.float(), EPS)
        return y.to(x.dtype)

    def gain_statistics(self) -> dict[str, float]:
        gain = whole(self.weight).float()
        return {
            "gain_l2": gain.norm().item(),
            "gain_mean_abs": gain.abs().mean().item(),
            "gain_drift": (gain - self.initial_gain).norm().item(),
        }


class GlobalScaleAligner(Aligner):
    """One scalar for all visual tokens (TA): λ = target_norm / mean token norm; relative norms are kept.

    In training λ comes from the micro-batch, as published, so it depends on what else is in the batch. For inference a
    running mean of the token norm is stored, so that an answer never does.
    """

    def __init__(self, target_norm: float, momentum: float = 0.1) -> None:
        super().__init__()
        self.target_norm = target_norm
        self.momentum = momentum
        self.running_norm: Tensor
        self.register_buffer("running_norm", torch.zeros(()))

    @torch.no_grad()
    def calibrate(self, x: Tensor) -> None:
        """Store the mean token norm of ``x`` (..., D) as the one that inference uses."""
        self.running_norm.copy_(x.float().norm(dim=-1).mean())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean_norm = x.float().norm(dim=-1).mean()
            with torch.no_grad():
                first = self.running_norm == 0
                step = torch.where(first, 1.0, self.momentum)
                self.running_norm.lerp_(mean_norm.detach(), step)
        else:
            mean_norm = self.running_norm
            if not x.is_meta and mean_norm == 0:
                raise ValueError(
                    "global_scale has no stored norm yet: call calibrate(x) with projector outputs, or train a step"
                )
        return (x.float() * (self.target_norm / mean_norm.clamp_min(EPS))).to(x.dtype)


class TokenRMSAligner(Aligner):
    """Every visual token is rescaled to norm target_norm (TA): sink tokens lose their salience."""

    def __init__(self, target_norm: float) -> None:
        super().__init__()
        self.target_norm = target_norm

    def forward(self, x: Tensor) -> Tensor:
        norm = x.float().norm(dim=-1, keepdim=True)
        return (x.float() * (self.target_norm / norm.clamp_min(EPS))).to(x.dtype)


FIELDS = ("aligner", "init", "gwc", "gwc_limit", "multiple")


def build_aligner(settings: dict[str, Any], width: int, text_norm: float) -> Aligner:
    """The aligner that ``settings`` names, with what it says of ``init``, ``gwc``, ``gwc_limit`` and ``multiple``.

    Args:
        settings: a variant's fields.
        width: D of the language model.
        text_norm: T; the target norm is ``multiple`` x T.

    Raises:
        ValueError: an unknown aligner or field, or a target norm that is not above 0.
    """
    name = settings["aligner"]
    if unknown := [field for field in settings if field not in FIELDS]:
        raise ValueError(f"aligner {name}: unknown field {unknown[0]!r}; valid: {', '.join(FIELDS)}")
    target_norm = settings.get("multiple", 1.0) * text_norm
    if name == "none":
        return NoAligner()
    if not (math.isfinite(target_norm) and target_norm > 0):
        raise ValueError(f"aligner {name}: target norm is {target_norm}; multiple and T must be above 0")
    if name == "layernorm":
        chosen = {name: settings[name] for name in ("init", "gwc", "gwc_limit") if name in settings}
        return LayerNormAligner(width, target_norm, **chosen)
    if name == "global_scale":
        return GlobalScaleAligner(target_norm)
    if name == "token_rms":
        return TokenRMSAligner(target_norm)
    raise ValueError(f"unknown aligner {name!r}; valid: none, layernorm, global_scale, token_rms")
