"""What the figures of a probed model mean (UB §3 to §5; TA): severity, failure and sentences."""

from typing import Any

from normalign.diagnosis.layers import FIRST_LAYERS
from normalign.diagnosis.theory import mean_of_first, theory_figures
from normalign.diagnosis.thresholds import (
    INERT_COSINE,
    INERT_SHARE,
    INFLATED,
    OVERWRITING_UPDATE,
    OVERWRITTEN_COSINE,
    severity,
)
from normalign.diagnosis.verdict_words import verdict_advice, verdict_words


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
        "theory": theory_figures(result),
    }
    return {**verdict, "words": verdict_words(result, verdict), "advice": verdict_advice(result, verdict)}


def _first_layers(result: dict[str, Any]) -> dict[str, Any]:
    """Figures of the first layers: how many, mean cosines and angles, and what the very first does."""
    visual, text = result["layers"]["visual"], result["layers"]["text"]
    turned = {name: mean_of_first(layers["angle"]) or 0.0 for name, layers in (("visual", visual), ("text", text))}
    return {
        "count": min(FIRST_LAYERS, len(visual["cosine"])),
        "visual_cosine": mean_of_first(visual["cosine"]),
        "text_cosine": mean_of_first(text["cosine"]),
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
