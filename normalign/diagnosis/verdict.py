"""What the figures of a probed model mean, in words (UB §3 to §5; TA). No more than they say.

Thresholds are conventions, with their reasons beside them; the figures they are applied to are returned too.
"""

import math
from collections.abc import Sequence
from typing import Any

from normalign.diagnosis.layers import FIRST_LAYERS
from normalign.norms.theory import Updates, divergence, expected_cosines, expected_score, threshold_correlation

# k, or 1/k: a long state turns by about C sin θ/‖h‖, so at 2 half as far as a balanced one, at 10 a tenth as far.
RATIO = (2.0, 10.0)
# First-8 gap: at 1/8 the modalities differ as much as if, in one layer of eight, one were replaced and the other left
# untouched; half of that is mild. Aligned models measured here lie at 0.02 to 0.07, unaligned ones (k > 100) at 0.16.
GAP = (0.0625, 0.125)
INERT_COSINE = 0.9  # mean visual cosine of the first layers: less than 26° a layer...
INERT_SHARE = 0.5  # ...and less than half as far as text in the same layers
# The first layer overwrites: under a quarter of the old direction is left, because what is added is over 3 × as long.
OVERWRITTEN_COSINE = 0.25
OVERWRITING_UPDATE = 3.0
INFLATED = 1.1  # T over the base language model's T; fine-tuning at usual learning rates moves norms by far less
# The assumptions hold roughly: angles predicted from them are off by less than this share of the measured ones.
ASSUMPTIONS_ERROR = 0.25
RELATED_COSINE = 0.6  # of a related pair at the merge; unknown in a model, so the value of SCIENCE's simulated case

SEVERITIES = ("none", "mild", "strong")


def judge(result: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one probed model; ``result`` as the probe makes it.

    Returns:
        ``severity`` (none, mild or strong), ``failure`` (inertia, overwriting or None), the figures both rest on
        (``k``, ``gap_first8``, ``first_layers``), ``passive_compensation`` and ``theory`` (None where there is nothing
        to judge by), and the sentences ``words`` and ``advice``. Angles in degrees.
    """
    k, gap = result["ratio"], result["sync_gap"]["first8"]
    first = _first_layers(result)
    failure = _failure(first)
    verdict = {
        "severity": severity(k, gap, failure),
        "failure": failure,
        "k": k,
        "k_in_context": result["k_in_context"],
        "gap_first8": gap,
        "first_layers": first,
        "passive_compensation": _passive_compensation(result),
        "theory": _theory(result),
    }
    return {**verdict, "words": _words(result, verdict), "advice": _advice(result, verdict)}


def severity(k: float, gap: float, failure: str | None) -> str:
    """How bad a norm imbalance is: the imbalance has to be there (``k``) and to show in the first layers (``gap``).

    Strong if both are strong; mild if both are at least mild, if the ratio is strong and does not show, or if visual
    tokens are overwritten. A gap between balanced norms is no norm imbalance.
    """
    imbalance, effect = _level(_imbalance(k), RATIO), _level(gap, GAP)
    level = min(imbalance, effect)
    if imbalance == len(RATIO) or failure == "overwriting":
        level = max(level, 1)
    return SEVERITIES[level]


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


def _imbalance(k: float) -> float:
    """The ratio of the larger norm to the smaller."""
    return max(k, 1 / k) if k > 0 else math.inf


def _level(value: float, bounds: Sequence[float]) -> int:
    return sum(value >= bound for bound in bounds)


def _mean(values: Sequence[float | None] | None) -> float | None:
    """Mean of the first layers' values that are known."""
    known = [value for value in (values or [])[:FIRST_LAYERS] if value is not None]
    return math.fsum(known) / len(known) if known else None


def _first_layers(result: dict[str, Any]) -> dict[str, Any]:
    """Figures of the first layers: how many, mean cosines and angles, and what the very first does."""
    visual, text = result["layers"]["visual"], result["layers"]["text"]
    turned = {name: _mean(layers["angle"]) or 0.0 for name, layers in (("visual", visual), ("text", text))}
    return {
        "count": min(FIRST_LAYERS, len(visual["cosine"])),
        "visual_cosine": _mean(visual["cosine"]),
        "text_cosine": _mean(text["cosine"]),
        "visual_angle": turned["visual"],
        "text_angle": turned["text"],
        "turning_share": turned["visual"] / turned["text"] if turned["text"] > 0 else None,
        "first_visual_cosine": visual["cosine"][0],
        "first_text_cosine": text["cosine"][0],
        "first_visual_update": visual["relative_update"][0],
    }


def _failure(first: dict[str, Any]) -> str | None:
    share = first["turning_share"]
    if first["visual_cosine"] >= INERT_COSINE and share is not None and share < INERT_SHARE:
        return "inertia"
    if first["first_visual_cosine"] <= OVERWRITTEN_COSINE and first["first_visual_update"] >= OVERWRITING_UPDATE:
        return "overwriting"
    return None


def _passive_compensation(result: dict[str, Any]) -> dict[str, Any] | None:
    base = result.get("base_T")
    if not base:
        return None
    inflation = result["T"] / base
    return {"T": result["T"], "base_T": base, "inflation": inflation, "inflated": inflation >= INFLATED}


def _theory(result: dict[str, Any]) -> dict[str, Any] | None:
    """Predicted against measured angles, and where the paper's inequality holds with the ρ measured."""
    theory = result.get("theory")
    if not theory:
        return None
    pairs = zip(theory["angle_predicted"], theory["angle_measured"], strict=True)
    errors = [None if None in (p, m) else p - m for p, m in pairs]
    error = _mean([None if e is None else abs(e) for e in errors])
    measured = _mean(theory["angle_measured"])
    relative = error / measured if error is not None and measured else None
    updates, start, k = text_updates(result), text_norm(result), result["ratio"]
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


def _words(result: dict[str, Any], verdict: dict[str, Any]) -> list[str]:
    counts, first = result["counts"], verdict["first_layers"]
    words = [
        f"Visual tokens enter the language model at {verdict['k']:.3g} × T (T = {result['T_as_used']:.3g}, the mean "
        f"norm of its text embeddings); against the text in the same prompts, k = {verdict['k_in_context']:.3g}. "
        f"Measured on {counts['samples']} samples: {counts['visual_tokens']} visual and {counts['text_tokens']} text "
        "tokens.",
        f"Over the first {first['count']} layers visual tokens turn by {first['visual_angle']:.3g}° a layer, text "
        f"tokens by {first['text_angle']:.3g}°; their cosines differ by {verdict['gap_first8']:.3g} on average (sync "
        f"gap). Severity: {verdict['severity']}.",
        _failure_words(verdict),
    ]
    words += _compensation_words(verdict["passive_compensation"])
    words += _theory_words(verdict["theory"])
    return words + _structure_words(result)


def _failure_words(verdict: dict[str, Any]) -> str:
    first, balanced = verdict["first_layers"], not _level(_imbalance(verdict["k"]), RATIO)
    if verdict["failure"] == "inertia":
        return (
            f"Inertia: visual tokens keep their direction (mean cosine {first['visual_cosine']:.3f}) and turn "
            f"{first['turning_share']:.2g} times as far as text"
            + (", but not because of their norm, which is balanced." if balanced else ".")
        )
    if verdict["failure"] == "overwriting":
        alike = first["first_text_cosine"] <= OVERWRITTEN_COSINE
        return (
            f"Overwriting, the opposite of inertia: the first layer adds {first['first_visual_update']:.3g} times what "
            f"visual tokens bring and leaves them with a cosine of {first['first_visual_cosine']:.2f} to it. Text "
            f"tokens {'fare alike' if alike else 'do not fare so'} (cosine {first['first_text_cosine']:.2f})."
        )
    if not balanced and verdict["severity"] == "none":
        return "The norms differ, but the first layers turn both modalities alike: neither inertia nor overwriting."
    if balanced and _level(verdict["gap_first8"], GAP):
        return "The norms are balanced, so the gap has another cause than norm imbalance."
    return "Neither inertia nor overwriting."


def _compensation_words(compensation: dict[str, Any] | None) -> list[str]:
    if compensation is None:
        return []
    change = f"T is {compensation['inflation']:.3g} times the base language model's ({compensation['base_T']:.3g})"
    if compensation["inflated"]:
        return [f"{change}: its text embeddings were inflated in training, the papers' passive compensation."]
    return [f"{change}: no sign of passive compensation."]


def _theory_words(theory: dict[str, Any] | None) -> list[str]:
    if theory is None or theory["relative_angle_error"] is None:
        return []
    words = [
        "Angles of visual tokens in the first layers, predicted from the text tokens' updates, are off by "
        f"{theory['mean_angle_error']:.3g}° a layer, {theory['relative_angle_error']:.0%} of the measured ones: the "
        "paper's assumptions of uniform magnitude and consistent geometry "
        f"{'hold roughly' if theory['assumptions_hold'] else 'do not hold'} here."
    ]
    if theory["holds_below_cosine"] is None:
        return words
    return [
        *words,
        f"Updates of visual and text tokens correlate with ρ = {theory['rho']:.3g} over all pairs, related or not. "
        + _inequality(theory),
    ]


def _inequality(theory: dict[str, Any]) -> str:
    """For which related pairs the paper's inequality holds."""
    bound = theory["holds_below_cosine"]
    if bound in (0.0, 1.0):
        effect = "lowers" if bound else "raises"
        return (
            f"At this ρ imbalance {effect} the expected attention score of related pairs, however close at the merge."
        )
    return (
        "At this ρ imbalance lowers the expected attention score of related pairs whose cosine at the merge is below "
        f"{bound:.2g}, and raises it for closer ones; which pairs are related was not measured."
    )


def _structure_words(result: dict[str, Any]) -> list[str]:
    words = []
    if result.get("injected_layers"):
        layers = ", ".join(str(layer) for layer in result["injected_layers"])
        words.append(f"Visual features are added again after layers {layers}, so angles there are not the layers' own.")
    if result.get("visual_vocabulary"):
        words.append("Visual tokens are mixtures of a visual embedding table, as text tokens are rows of theirs.")
    if result.get("attention") is None:
        words.append(f"Attention was not measured: {result.get('attention_reason') or 'no reason given'}.")
    return words


def _advice(result: dict[str, Any], verdict: dict[str, Any]) -> list[str]:
    control = "Whether accuracy gains is for an evaluation to say, with shuffled images as the control."
    train = "the outputs change, so the model must then be trained"
    if verdict["failure"] == "overwriting":
        return [
            "Try a larger target norm (normalign attach MODEL OUT --multiple 8) against the present one, in equal "
            f"trainings: {train}. " + control
        ]
    if verdict["severity"] == "none":
        return ["Norms call for no change."]
    if result.get("visual_vocabulary"):
        return ["Compare the cosine curves first: the paper saw them overlap in Ovis in spite of such norms."]
    advice = [
        f"Put an aligner behind the projector (normalign attach MODEL OUT --aligner layernorm); {train}. " + control
    ]
    if verdict["severity"] == "mild":
        advice.insert(0, "The imbalance is moderate: compare with an unchanged copy in equal trainings before you act.")
    return advice
