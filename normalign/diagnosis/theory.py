"""The theory tested on a probed model: predicted against measured angles, and where the paper's inequality holds.

Angles in degrees. Of the layers, the first ones count (UB §4 finds the gap there).
"""

import math
from collections.abc import Sequence
from typing import Any

from normalign.diagnosis.layers import FIRST_LAYERS
from normalign.diagnosis.thresholds import ASSUMPTIONS_ERROR
from normalign.norms.theory import Updates, divergence, expected_cosines, expected_score, threshold_correlation

RELATED_COSINE = 0.6  # of a related pair at the merge; unknown in a model, so the value of SCIENCE's simulated case


def text_updates(result: dict[str, Any]) -> Updates:
    """What the first layers add to text tokens, from their median norm and mean angle per layer."""
    text = result["layers"]["text"]
    norms, angles = text["norm_median"][: FIRST_LAYERS + 1], text["angle"][:FIRST_LAYERS]
    return Updates.between(norms, angles)


def text_norm(result: dict[str, Any]) -> float:
    """Median norm of the text tokens at the merge, where ``text_updates`` start."""
    return float(result["layers"]["text"]["norm_median"][0])


def measured_correlation(result: dict[str, Any]) -> float | None:
    """ρ of a probed model's first layers together; None if it was not measured.

    Layers weigh as much as they turn text tokens (C sin θ squared), so that it is the share of all these layers' update
    variance that is in common, as in the theory.
    """
    rho = ((result.get("theory") or {}).get("rho") or [])[:FIRST_LAYERS]
    updates = text_updates(result)
    sizes = (size * math.sin(math.radians(angle)) for size, angle in zip(updates.size, updates.angle, strict=True))
    known = [(size**2, value) for size, value in zip(sizes, rho, strict=False) if value is not None]
    total = math.fsum(weight for weight, _ in known)
    return math.fsum(weight * value for weight, value in known) / total if total > 0 else None


def mean_of_first(values: Sequence[float | None] | None) -> float | None:
    """Mean of the first layers' values that are known."""
    known = [value for value in (values or [])[:FIRST_LAYERS] if value is not None]
    return math.fsum(known) / len(known) if known else None


def theory_figures(result: dict[str, Any]) -> dict[str, Any] | None:
    """Predicted against measured angles, and where the paper's inequality holds with the ρ measured."""
    theory = result.get("theory")
    if not theory:
        return None
    pairs = zip(theory["angle_predicted"], theory["angle_measured"], strict=True)
    errors = [None if None in (p, m) else p - m for p, m in pairs]
    error = mean_of_first([None if e is None else abs(e) for e in errors])
    measured = mean_of_first(theory["angle_measured"])
    relative = error / measured if error is not None and measured else None
    updates, start, k = text_updates(result), text_norm(result), result["k_in_context"]
    rho = measured_correlation(result)
    per_cosine = threshold_correlation(k, updates, 1.0, start)  # proportional to the initial cosine
    turned = zip(result["layers"]["text"]["angle"], result["layers"]["visual"]["angle"], strict=True)
    return {
        "angle_error": errors,
        "mean_angle_error": error,
        "relative_angle_error": relative,
        "assumptions_hold": None if relative is None else relative < ASSUMPTIONS_ERROR,
        "divergence_expected": divergence(k, updates, start)[-1],
        "divergence_measured": math.fsum(text - visual for text, visual in list(turned)[:FIRST_LAYERS]),
        "rho": rho,
        "threshold": None if per_cosine is None else RELATED_COSINE * per_cosine,
        "holds_below_cosine": None if rho is None or per_cosine is None else _holds_below(rho, per_cosine),
        "score": None if rho is None else _scores(k, rho, updates, start, result["width"]),
    }


def _holds_below(rho: float, per_cosine: float) -> float:
    """Initial cosine, within 0 to 1, below which ρ exceeds the threshold, which is ``per_cosine`` times the cosine."""
    if per_cosine <= 0:
        return 1.0 if rho > 0 else 0.0
    return max(0.0, min(1.0, rho / per_cosine))


def _scores(k: float, rho: float, updates: Updates, start: float, width: int) -> dict[str, float]:
    """Expected score of a related pair after the first layers, as it is and with balanced norms."""
    return {
        name: expected_score(expected_cosines(ratio, rho, updates, RELATED_COSINE, start)[-1], width)
        for name, ratio in (("imbalanced", k), ("balanced", 1.0))
    }
