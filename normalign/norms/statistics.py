"""Statistics of token norms and of how tokens turn from layer to layer (SCIENCE: UB §4; TA).

Shape suffixes: N tokens, D width.
"""

from typing import Any

import torch
from torch import Tensor

LANGUAGE_SINK_FACTOR = 10.0  # a language model's sink token: norm above 10 x the layer's median
VISION_SINK_DEVIATIONS = 10.0  # a vision tower's: only ~1.7 x the ordinary norm, so by median absolute deviation


def language_sinks(norms_N: Tensor) -> Tensor:
    """Which tokens are attention sinks of a language model: norm above 10 x the median. Boolean (N,)."""
    return norms_N > LANGUAGE_SINK_FACTOR * norms_N.median()


def vision_sinks(norms_N: Tensor) -> Tensor:
    """Which tokens are high-norm outliers of a vision tower: above the median by 10 median absolute deviations."""
    median = norms_N.median()
    deviation = (norms_N - median).abs().median()
    return norms_N > median + VISION_SINK_DEVIATIONS * deviation.clamp_min(1e-6 * median)


def summarise_norms(norms_N: Tensor, sinks_N: Tensor) -> dict[str, Any]:
    """Mean, spread and percentiles of token norms (N,), with the sink tokens ``sinks_N`` reported apart."""
    norms_N = norms_N.double()
    if norms_N.numel() == 0:
        raise ValueError("no tokens to summarise")
    ordinary, high = norms_N[~sinks_N], norms_N[sinks_N]
    return {
        "mean": norms_N.mean().item(),
        "std": norms_N.std(unbiased=False).item(),
        "median": norms_N.quantile(0.5).item(),
        "p5": norms_N.quantile(0.05).item(),
        "p95": norms_N.quantile(0.95).item(),
        "tokens": norms_N.numel(),
        "mean_without_sinks": ordinary.mean().item() if ordinary.numel() else None,
        "sinks": {
            "count": high.numel(),
            "share": high.numel() / norms_N.numel(),
            "mean_norm": high.mean().item() if high.numel() else None,
        },
    }


def cosine(a_ND: Tensor, b_ND: Tensor) -> Tensor:
    """Cosine similarity (N,) of matching rows; 0 where a row is zero. Computed in float64."""
    a_ND, b_ND = a_ND.double(), b_ND.double()
    product = (a_ND * b_ND).sum(-1)
    scale = a_ND.norm(dim=-1) * b_ND.norm(dim=-1)
    return torch.where(scale > 0, product / scale.clamp_min(1e-300), 0.0).clamp(-1.0, 1.0)


def angle_degrees(cosine_N: Tensor) -> Tensor:
    """Angle (N,) in degrees between two states, from their cosine."""
    return torch.rad2deg(torch.arccos(cosine_N.clamp(-1.0, 1.0)))


def sync_gap(cosine_visual: list[float], cosine_text: list[float], layers: int | None = None) -> float:
    """Mean over layers of |cos_visual − cos_text| (the first ``layers`` of them, or all): 0 when both turn alike."""
    if len(cosine_visual) != len(cosine_text) or not cosine_visual:
        raise ValueError(
            f"one cosine per layer and modality is needed, got {len(cosine_visual)} visual, {len(cosine_text)} text"
        )
    gaps = [abs(v - t) for v, t in zip(cosine_visual, cosine_text, strict=True)][:layers]
    return sum(gaps) / len(gaps)
