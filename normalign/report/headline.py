"""The report's opening sentences."""

from normalign.report.accuracy import SEEDS, sentence, text_comparisons, visual_comparisons
from normalign.report.blocks import NOT_AVAILABLE, number
from normalign.report.inputs import ReportInputs, VariantInputs, dig
from normalign.report.tables import bounds_text, feature_sentence, observed_text, source_name, verdict_rows


def headline(inputs: ReportInputs) -> list[str]:
    """What was run, on what, how unbalanced it is at the start, and whether the gates passed."""
    names = ", ".join(variant.name for variant in inputs.variants)
    vision, language = (_model(inputs, part) for part in ("vision", "language"))
    text = number(dig(inputs.text_norm, "T")) if inputs.text_norm else NOT_AVAILABLE
    return [
        f"Profile {inputs.profile}, variants {names}: vision tower {vision}, language model {language}.",
        f"T, the mean norm of the language model's text embeddings, is {text}. {feature_sentence(inputs)} "
        + _imbalance(inputs.baseline),
        _gates(inputs),
    ]


def failures(inputs: ReportInputs) -> list[str]:
    """One sentence per failed expectation, with the observed value and the bound."""
    return [
        f"{verdict['variant']} failed “{verdict['expectation']}” ({verdict.get('point') or 'no point'}): "
        f"observed {observed_text(verdict.get('observed'))}, allowed {bounds_text(verdict)}."
        for verdict in verdict_rows(inputs)
        if not verdict["passed"]
    ]


def accuracy_verdict(inputs: ReportInputs) -> list[str]:
    """For each variant, whether its accuracy differs from the baseline's by more than chance."""
    visual, text = visual_comparisons(inputs), text_comparisons(inputs)
    sentences = [f"Pooled visual accuracy, {sentence(comparison)}" for comparison in visual]
    if not visual:
        sentences.append(f"Comparison of visual accuracy with a baseline: {NOT_AVAILABLE}.")
    sentences += [f"Text accuracy, {sentence(comparison)}" for comparison in text]
    if not text:
        sentences.append(f"Comparison of text accuracy with the untouched language model: {NOT_AVAILABLE}.")
    return [*sentences, SEEDS]


def _imbalance(baseline: VariantInputs | None) -> str:
    point = dig(baseline and baseline.probe, "points", "init")
    if baseline is None or point is None:
        return f"The imbalance of a baseline at initialisation is {NOT_AVAILABLE}."
    return (
        f"At initialisation the visual tokens of {baseline.name} reach the language model at "
        f"{number(dig(point, 'ratio'))} × T; against the text tokens in the prompts, k = "
        f"{number(dig(point, 'k_in_context'))}."
    )


def _gates(inputs: ReportInputs) -> str:
    checks = {"data": inputs.check_data} | {variant.name: variant.check for variant in inputs.variants}
    missing = [name for name, check in checks.items() if check is None]
    failed = [name for name, check in checks.items() if check is not None and not check["passed"]]
    if not missing and not failed:
        return f"Every gate passed: {', '.join(checks)}."
    parts = [f"Stopped by their gate: {', '.join(failed)}."] if failed else []
    if missing:
        parts.append(f"No verdict for: {', '.join(missing)} (the run did not get that far).")
    return " ".join(parts)


def _model(inputs: ReportInputs, part: str) -> str:
    entry = dig(inputs.weights, part)
    parameters = dig(entry, "parameters")
    size = "" if parameters is None else f" ({parameters / 1e6:,.1f} M parameters)"
    kind = f"{dig(entry, 'class')} from " if dig(entry, "class") else ""
    return kind + source_name(dig(entry, "source")) + size
