"""The verdict on a probed model as sentences, and what to do. No more than its figures say."""

from typing import Any

from normalign.diagnosis.thresholds import GAP, OVERWRITTEN_COSINE, RATIO, imbalance, level

PIPELINE = "normalign_llava"  # the family of models that the pipeline trains; their aligner is a variant's


def verdict_words(result: dict[str, Any], verdict: dict[str, Any]) -> list[str]:
    """What was found in the probed model ``result``, whose ``verdict`` has its figures already."""
    counts, first = result["counts"], verdict["first_layers"]
    words = [
        f"Visual tokens enter the language model at {verdict['k']:.3g} × T (T = {result['T_as_used']:.3g}, the mean "
        f"norm of its text embeddings); against the text in the same prompts, k = {verdict['k_in_context']:.3g}. "
        f"Samples measured: {counts['samples']}, with {counts['visual_tokens']} visual and "
        f"{counts['text_tokens']} text tokens.",
        f"Over the first {first['count']} layers visual tokens turn by {first['visual_angle']:.3g}° a layer, text "
        f"tokens by {first['text_angle']:.3g}°; their cosines differ by {verdict['gap_first8']:.3g} on average (sync "
        f"gap). Severity: {verdict['severity']}.",
        _failure_words(verdict),
    ]
    words += _compensation_words(verdict["passive_compensation"])
    words += _theory_words(verdict)
    return words + _structure_words(result)


def _failure_words(verdict: dict[str, Any]) -> str:
    first, balanced = verdict["first_layers"], not level(imbalance(verdict["k"]), RATIO)
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
            f"tokens {'fare alike' if alike else 'do not fare so'} (cosine {first['first_text_cosine']:.2f})"
            + (", but the layer was pretrained on them." if alike else ".")
        )
    if not balanced and verdict["severity"] == "none":
        return "The norms differ, but the first layers turn both modalities alike: neither inertia nor overwriting."
    if balanced and level(verdict["gap_first8"], GAP):
        return "The norms are balanced, so the gap has another cause than norm imbalance."
    if not balanced and first["turning_share"] is not None:
        return (
            f"Visual tokens turn {first['turning_share']:.2g} times as far as text, with a mean cosine of "
            f"{first['visual_cosine']:.2f}: neither inertia (near 1, and less than half as far) nor overwriting."
        )
    return "Neither inertia nor overwriting."


def _compensation_words(compensation: dict[str, Any] | None) -> list[str]:
    if compensation is None:
        return []
    change = f"T is {compensation['inflation']:.3g} times the base language model's ({compensation['base_T']:.3g})"
    if compensation["inflated"]:
        return [f"{change}: its text embeddings were inflated in training, the papers' passive compensation."]
    return [f"{change}: no sign of passive compensation."]


def _theory_words(verdict: dict[str, Any]) -> list[str]:
    theory = verdict["theory"]
    if theory is None or theory["relative_angle_error"] is None:
        return []
    words = [
        "Angles of visual tokens in the first layers, predicted from the text tokens' updates, are off by "
        f"{theory['mean_angle_error']:.3g}° a layer, {theory['relative_angle_error']:.0%} of the measured ones: the "
        "paper's assumptions of uniform magnitude and consistent geometry "
        f"{'hold roughly' if theory['assumptions_hold'] else 'do not hold'} here."
    ]
    if theory["rho"] is None:
        return words
    rho = f"ρ = {theory['rho']:.3g} over all pairs, related or not"
    correlation = f"Updates of visual and text tokens correlate with {rho}."
    unbalanced = theory["holds_below_cosine"] is not None and level(imbalance(verdict["k"]), RATIO)
    return [*words, f"{correlation} {_inequality(theory)}" if unbalanced else correlation]


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
        layers = ", ".join(str(layer + 1) for layer in result["injected_layers"])
        words.append(
            f"Visual features are added again after layers {layers} (counted from 1), so angles there are not the "
            "layers' own."
        )
    if result.get("visual_vocabulary"):
        words.append("Visual tokens are mixtures of a visual embedding table, as text tokens are rows of theirs.")
    if result.get("attention") is None:
        words.append(f"Attention was not measured: {result.get('attention_reason') or 'no reason given'}.")
    return words


def verdict_advice(result: dict[str, Any], verdict: dict[str, Any]) -> list[str]:
    """What to do about it; no gain is promised, for none was measured."""
    control = "Whether accuracy gains is for an evaluation to say, with shuffled images as the control."
    train = "the outputs change, so the model must then be trained"
    if verdict["failure"] == "overwriting":
        how = "normalign attach MODEL OUT --multiple 8"
        if result["family"] == PIPELINE:
            how = "a variant with multiple: 8.0 in params.yaml"
        return [f"Try a larger target norm ({how}) against the present one, in equal trainings: {train}. {control}"]
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
