"""The papers' figures, in their own column, beside ours where this run measured the same quantity."""

import math
from importlib import resources
from typing import Any

import yaml

from normalign.report.blocks import Table, number, percent
from normalign.report.inputs import ReportInputs, VariantInputs, dig
from normalign.report.tables import source_name

NOT_MEASURED = "not measured"


def paper_figures() -> list[dict[str, Any]]:
    """Rows of paper_figures.yaml: source, what, setting, figure and, if we can measure it, ``ours``."""
    text = (resources.files("normalign.report") / "paper_figures.yaml").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = yaml.safe_load(text)
    return rows


def paper_table(inputs: ReportInputs) -> Table:
    """Source, what was measured, the paper's figure, and ours where there is one."""
    rows = []
    for entry in paper_figures():
        ours = our_figure(inputs, entry["ours"]) if "ours" in entry else None
        rows.append([entry["source"], entry["what"], entry["setting"], entry["figure"], ours or NOT_MEASURED])
    models = " + ".join(source_name(dig(inputs.weights, part, "source")) for part in ("vision", "language"))
    note = (
        f"Ours: this run ({models}), another model and other data than the papers', so the columns are "
        "not expected "
        "to agree. UB: The Unseen Bias, ICLR 2026. TA: Preventing Expert Collapse in MoE-dVLMs, ECCV 2026."
    )
    columns = ["Paper", "What it measures", "The paper's setting", "The paper's figure", "Ours"]
    return Table("Figures of the papers", columns, rows, "lllrr", note)


def our_figure(inputs: ReportInputs, ours: dict[str, str]) -> str | None:
    """This run's value of a quantity named in paper_figures.yaml; None if it was not measured."""
    baseline = inputs.baseline
    variant = next((v for v in inputs.variants if v.name == ours.get("variant")), None)
    match ours["quantity"]:
        case "vision_output_norm":
            return _known(dig(inputs.encoder_norm, "selected", "mean"))
        case "text_norm":
            return _known(dig(inputs.text_norm, "T"))
        case "projector_change":
            trained = dig(baseline and baseline.probe, "points", "stage2", "interface")
            values = [dig(trained, key, "mean") for key in ("vision_output", "projector_output")]
            return None if None in values else " → ".join(map(number, values))
        case "trained_ratio":
            ratio = dig(baseline and baseline.probe, "points", "stage2", "ratio")
            return None if ratio is None else f"{number(ratio)} ×"
        case "trained_norms":
            return _trained_norms(baseline)
        case "gain_after_stage1":
            return _last_gain(variant)
        case "accuracy_change":
            accuracies = [dig(v and v.evaluation, "tasks", ours["task"], "accuracy") for v in (baseline, variant)]
            return None if None in accuracies else " → ".join(map(percent, accuracies))
        case "accuracy_delta":
            accuracies = [dig(v and v.evaluation, "tasks", ours["task"], "accuracy") for v in (baseline, variant)]
            return None if None in accuracies else percent(accuracies[1] - accuracies[0], signed=True)
        case unknown:
            raise ValueError(f"paper_figures.yaml: unknown quantity {unknown!r}; name one that paper.py computes")


def _trained_norms(baseline: VariantInputs | None) -> str | None:
    point = dig(baseline and baseline.probe, "points", "stage2")
    visual = dig(point, "interface", "aligner_output", "mean")
    text = dig(point, "interface", "text_embeddings", "mean")
    ratio = dig(point, "k_in_context")
    if None in (visual, text, ratio):
        return None
    return f"{number(visual)}, {number(text)}, {number(ratio)} ×"


def _last_gain(variant: VariantInputs | None) -> str | None:
    gains = ((variant and variant.stage1) or {}).get("gain_l2", [])
    return number(gains[-1]) if gains and not math.isnan(gains[-1]) else None


def _known(value: float | None) -> str | None:
    return None if value is None else number(value)
