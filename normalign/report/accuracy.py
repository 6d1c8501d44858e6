"""Comparisons of accuracy between the variants of a run, from their per-sample scores."""

from dataclasses import dataclass
from typing import Any

from normalign.report.blocks import Table, interval, p_text, percent
from normalign.report.inputs import ReportInputs, VariantInputs, dig
from normalign.report.significance import Difference, holm, paired_difference, unpaired_difference

CONFIDENCE = 0.95
SEEDS = (
    "The intervals cover which items and images happened to be asked, not training: every variant was "
    "trained once, "
    "with one seed, so a difference between two seeds of the same variant is not covered."
)


@dataclass(frozen=True)
class Comparison:
    """``variant`` against ``reference``; ``adjusted_p``: Holm's over all comparisons of one question."""

    variant: str
    reference: str
    difference: Difference
    adjusted_p: float

    @property
    def significant(self) -> bool:
        return self.adjusted_p < 1 - CONFIDENCE


def visual_comparisons(inputs: ReportInputs) -> list[Comparison]:
    """Pooled visual accuracy of each variant against the baseline, paired over items, clustered by image."""
    baseline = inputs.baseline
    if baseline is None:
        return []
    reference = visual_scores(baseline)
    found = []
    for variant in inputs.variants:
        scores = visual_scores(variant)
        shared = [key for key in scores if key in reference]
        images = [scores[key][1] for key in shared]
        if variant is baseline or len(set(images)) < 2:
            continue
        pairs = [(scores[key][0], reference[key][0]) for key in shared]
        ours, theirs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        found.append((variant.name, baseline.name, paired_difference(ours, theirs, images, CONFIDENCE)))
    return _adjusted(found)


def text_comparisons(inputs: ReportInputs) -> list[Comparison]:
    """Each variant's text accuracy against the untouched language model, task by task, unpaired."""
    found = []
    for variant in inputs.variants:
        for task, ours in (dig(variant.evaluation, "tasks") or {}).items():
            reference = dig(inputs.language_reference, "tasks", task)
            a, a_se, b, b_se = (dig(side, key) for side in (ours, reference) for key in ("accuracy", "stderr"))
            if ours.get("kind") == "text" and None not in (a, a_se, b, b_se):
                label = f"{variant.name} ({task})"
                found.append(
                    (
                        label,
                        "the untouched language model",
                        unpaired_difference(a, a_se, b, b_se, CONFIDENCE),
                    )
                )
    return _adjusted(found)


def visual_scores(variant: VariantInputs) -> dict[tuple[str, str], tuple[float, tuple[str, str]]]:
    """(task, item id) → (score, image) for every item about an image; images of two data sets stay apart."""
    rows: dict[tuple[str, str], tuple[float, tuple[str, str]]] = {}
    for task, samples in (variant.samples or {}).items():
        for row in samples:
            if row.get("image") and row.get("score") is not None:
                rows[(task, str(row["id"]))] = (float(row["score"]), _image_name(task, row))
    return rows


def sentence(comparison: Comparison) -> str:
    """One comparison in words."""
    d = comparison.difference
    size = f"{d.items} items about {d.clusters} images, " if d.items else ""
    verdict = "statistically significant" if comparison.significant else "not statistically significant"
    return (
        f"{comparison.variant} against {comparison.reference}: {percent(d.difference, True)} percentage "
        "points "
        f"(95 % interval {interval(d.low, d.high)}; {size}p {p_text(comparison.adjusted_p)} after Holm): "
        f"{verdict}."
    )


def comparison_table(title: str, comparisons: list[Comparison], note: str) -> Table:
    """The comparisons as a table, differences in percentage points."""
    rows = []
    for c in comparisons:
        d = c.difference
        counts = [str(d.items), str(d.clusters)] if d.items else ["–", "–"]
        verdict = "yes" if c.significant else "no"
        p_value = p_text(c.adjusted_p).removeprefix("= ")
        numbers = [percent(d.difference, True), percent(d.stderr), interval(d.low, d.high), p_value]
        rows.append([c.variant, c.reference, *numbers, verdict, *counts])
    columns = ["Variant", "Against", "Difference", "± se", "95 % interval", "p (Holm)", "Significant"]
    return Table(title, [*columns, "Items", "Images"], rows, "llrrrrlrr", note)


def _image_name(task: str, row: dict[str, Any]) -> tuple[str, str]:
    return task, str(row["image"])


def _adjusted(found: list[tuple[str, str, Difference]]) -> list[Comparison]:
    adjusted = holm([difference.p_value for _, _, difference in found])
    return [Comparison(*entry, p) for entry, p in zip(found, adjusted, strict=True)]
