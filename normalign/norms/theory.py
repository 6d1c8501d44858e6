"""How fast tokens of different norm turn, and what that does to attention (SCIENCE §1; UB §3; TA).

A pre-norm layer adds an update of length C at an angle θ to the state h, whatever the length of h. So a long state
turns less. Angles are in degrees everywhere; C and ‖h‖ are in the units of the residual stream.

Shape suffixes: N tokens, D width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Updates:
    """What each layer adds to a token: ``size`` C and ``angle`` θ to the state, one entry per layer.

    The same for both modalities: the paper's assumptions of uniform magnitude and of consistent geometry.
    """

    size: Sequence[float]
    angle: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.size) != len(self.angle):
            raise ValueError(f"one size and one angle per layer are needed, got {len(self.size)} and {len(self.angle)}")

    @classmethod
    def uniform(cls, size: float, angle: float, layers: int) -> "Updates":
        """The same update in every layer."""
        return cls([size] * layers, [angle] * layers)

    @classmethod
    def between(cls, norms: Sequence[float], turned: Sequence[float]) -> "Updates":
        """The updates that take a token through ``norms`` (before the first layer, after each), turning it ``turned``.

        Two sides and the angle between them determine the triangle of state, update and new state.
        """
        sizes, angles = [], []
        for before, after, degrees in zip(norms[:-1], norms[1:], turned, strict=True):
            along = after * _cos(degrees) - before
            across = after * math.sin(math.radians(degrees))
            sizes.append(math.hypot(along, across))
            angles.append(math.degrees(math.atan2(across, along)))
        return cls(sizes, angles)


def turning_angle(norm: float, size: float, angle: float) -> float:
    """Degrees by which a state of ``norm`` turns: tan θ_eff = C sin θ / (‖h‖ + C cos θ), exact also beyond 90°."""
    theta = math.radians(angle)
    return math.degrees(math.atan2(size * math.sin(theta), norm + size * math.cos(theta)))


def norms_over_layers(norm: float, updates: Updates) -> list[float]:
    """‖h‖ before the first layer and after each: the residual stream grows, since it is never normalised again."""
    norms = [norm]
    for size, angle in zip(updates.size, updates.angle, strict=True):
        norms.append(math.sqrt(max(0.0, norms[-1] ** 2 + 2 * norms[-1] * size * _cos(angle) + size**2)))
    return norms


def turning_angles(norm: float, updates: Updates) -> list[float]:
    """Degrees by which a token that enters with ``norm`` turns in each layer."""
    norms = norms_over_layers(norm, updates)[:-1]
    return [turning_angle(*each) for each in zip(norms, updates.size, updates.angle, strict=True)]


def divergence(k: float, updates: Updates, text_norm: float = 1.0) -> list[float]:
    """After each layer, by how many degrees text has turned more than visual tokens of ``k`` times its norm.

    The difference of the lengths of the two paths on the sphere; 0 throughout for k = 1.
    """
    text, visual = (turning_angles(norm, updates) for norm in (text_norm, k * text_norm))
    gaps, total = [], 0.0
    for one, other in zip(text, visual, strict=True):
        total += one - other
        gaps.append(total)
    return gaps


def predict_angles(
    text_size: Sequence[float], text_angle: Sequence[float], visual_norm: Sequence[float]
) -> list[float]:
    """Per layer, the degrees by which visual tokens should turn if they were given the *text* tokens' updates.

    ``text_size`` C and ``text_angle`` θ of each layer's text tokens, and ‖h‖ of the visual tokens entering it. The
    distance to the measured angle tests the paper's assumptions of uniform magnitude and consistent geometry;
    predicting from the visual tokens' own C and θ would be an identity.
    """
    return [turning_angle(*each) for each in zip(visual_norm, text_size, text_angle, strict=True)]


def expected_cosines(
    k: float, rho: float, updates: Updates, initial_cosine: float = 0.6, text_norm: float = 1.0
) -> list[float]:
    """Expected cosine of a related text and visual token, at the merge and after each layer.

    The visual token enters with ``k`` times the text token's norm; both get ``updates``, whose turning parts have
    random directions with expected cosine ``rho`` (share of their variance that is common). Norms are then certain,
    and directions drawn anew have no expected product with anything but each other, so that

        E[a'·b'] = (1 + C cos θ/‖a‖)(1 + C cos θ/‖b‖) E[a·b] + ρ C² sin² θ,

    exact in the limit of large D (relative error of the last term below 1/D). For θ = 90° after l layers:
    (k c₀ + l ρ C²) / √((k² + l C²)(1 + l C²)), with norms in units of the text's.
    """
    text, visual = (norms_over_layers(norm, updates) for norm in (text_norm, k * text_norm))
    product = initial_cosine * text[0] * visual[0]
    cosines = [initial_cosine]
    for layer, (size, angle) in enumerate(zip(updates.size, updates.angle, strict=True)):
        along, across = size * _cos(angle), size * math.sin(math.radians(angle))
        product *= (1 + along / text[layer]) * (1 + along / visual[layer])
        product += rho * across**2
        cosines.append(product / (text[layer + 1] * visual[layer + 1]))
    return cosines


def expected_score(cosine: float, width: int) -> float:
    """Expected attention score of a pair whose states have ``cosine``, in standard deviations of unrelated pairs.

    Norm brings states to length √D; taking query·key for their product (W_q and W_k that keep angles), the score over
    √D is √D cos, and that of unrelated, near-orthogonal pairs has mean 0 and standard deviation 1.
    """
    return math.sqrt(width) * cosine


def threshold_correlation(
    k: float, updates: Updates, initial_cosine: float = 0.6, text_norm: float = 1.0
) -> float | None:
    """ρ*: above it norm imbalance lowers the expected score of related pairs, as the paper says; below, it raises it.

    A token that hardly turns keeps the alignment it came with, so with independent updates (ρ = 0) imbalance *helps*.
    Both sides are linear in ρ. May exceed 1 (the inequality then never holds). None for k ≤ 1 (to six digits), where
    there is no imbalance of the kind in question, and where the two sides do not cross at all.
    """
    if k < 1 + 1e-6:
        return None

    def side(ratio: float, rho: float) -> float:
        return expected_cosines(ratio, rho, updates, initial_cosine, text_norm)[-1]

    start = side(k, 0) - side(1, 0)
    slope = (side(1, 1) - side(1, 0)) - (side(k, 1) - side(k, 0))
    return start / slope if slope > 0 else None


def turning_directions(before_ND: Tensor, after_ND: Tensor) -> Tensor:
    """Unit vectors (N, D) of the part of each token's update that is orthogonal to its state; 0 where there is none.

    In float64. With Δ = after − before and w = Δ − (Δ·h/‖h‖²) h, the sum over tokens that ``update_correlation`` needs
    is Δᵀp − hᵀq with p = 1/‖w‖ and q = p Δ·h/‖h‖²: two matrix-vector products.
    """
    before_ND, after_ND = before_ND.double(), after_ND.double()
    update_ND = after_ND - before_ND
    along_N1 = (update_ND * before_ND).sum(-1, keepdim=True) / before_ND.square().sum(-1, keepdim=True).clamp_min(
        1e-300
    )
    across_ND = update_ND - along_N1 * before_ND
    length_N1 = across_ND.norm(dim=-1, keepdim=True)
    return torch.where(length_N1 > 1e-12 * update_ND.norm(dim=-1, keepdim=True), across_ND / length_N1, 0.0)


def update_correlation(visual_sum_D: Tensor, visual_tokens: int, text_sum_D: Tensor, text_tokens: int) -> float:
    """ρ of one layer as a model shows it: mean cosine between the turning updates of a visual and of a text token.

    The mean over all pairs is the product of two means, so that one running sum of ``turning_directions`` (D,) and one
    count per modality suffice, over any number of batches. If every update is √ρ of a direction that all tokens share
    plus √(1−ρ) of its own, this is ρ. Which pairs are related is not known in a model, so this is over all: it raises
    the expected cosine of unrelated pairs by as much, and what related pairs share beyond it is not in it.

    Raises:
        ValueError: a modality has no tokens.
    """
    if visual_tokens < 1 or text_tokens < 1:
        raise ValueError(f"both modalities need tokens, got {visual_tokens} visual and {text_tokens} text")
    return float((visual_sum_D.double() / visual_tokens) @ (text_sum_D.double() / text_tokens))


def _cos(angle: float) -> float:
    return math.cos(math.radians(angle))
