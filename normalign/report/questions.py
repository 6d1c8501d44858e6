"""The paper's research questions RQ1 to RQ4: its figures beside what was measured here (UB §4).

The paper's figures come from paper_figures.yaml and stand in their own column; ours come from results alone.
"""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from normalign.report.blocks import Table, number
from normalign.report.measured import Measured, ProbedModel, TextEmbeddings, Tower
from normalign.report.paper import NOT_MEASURED, paper_figures

ENOUGH = 3  # models; two always correlate perfectly
NO_FIGURE = "–"  # the paper has no such figure, or none that we know

Show = Callable[[Any], str | None]


@dataclass(frozen=True)
class Row:
    """A model and quantity, the paper's figure and ours; None where there is none."""

    model: str
    what: str
    paper: str | None
    ours: str | None


@dataclass(frozen=True)
class Correlation:
    """Of norm ratio (its logarithm) and first-8 gap over ``models`` models: Pearson's, and Spearman's of ranks."""

    models: int
    pearson: float | None
    spearman: float | None


@dataclass(frozen=True)
class Quantity:
    """How a quantity of paper_figures.yaml is shown of what was measured; ``show`` gives None where it was not."""

    kind: type[Measured]
    what: str
    show: Show


def _tower(tower: Tower) -> str | None:
    if tower.last_block is None:
        return None
    return number(tower.last_block) + ("" if tower.after_norm is None else f" ({number(tower.after_norm)})")


def _change(model: ProbedModel) -> str | None:
    return None if model.before is None or model.after is None else f"{number(model.before)} → {number(model.after)}"


def _vocabulary(model: ProbedModel) -> str | None:
    if model.vocabulary is None or model.T is None:
        return None
    mean, std = model.vocabulary
    return f"{number(mean)} ({number(std)}); {number(model.T)}"


def _known(value: float | None, unit: str = "") -> str | None:
    return None if value is None else number(value) + unit


QUANTITIES = {
    "encoder_output": Quantity(Tower, "vision tower output (after its final norm)", _tower),
    "text_norm": Quantity(TextEmbeddings, "text embeddings, T", lambda text: _known(text.norm)),
    "projector_change": Quantity(ProbedModel, "visual norm before → after the projector", _change),
    "ratio": Quantity(ProbedModel, "visual norm at the merge over T", lambda model: _known(model.ratio, " ×")),
    "inflation": Quantity(ProbedModel, "T over the base model's", lambda model: _known(model.inflation, " ×")),
    "visual_vocabulary": Quantity(ProbedModel, "visual vocabulary, mean (std); text", _vocabulary),
}
TITLES = {
    "RQ1": "RQ1: norms of vision towers and of text embeddings",
    "RQ2": "RQ2: what the projector changes",
    "RQ3": "RQ3: norm ratio against sync gap",
    "RQ4": "RQ4: a visual vocabulary",
}


def question_rows(question: str, measured: Sequence[Measured]) -> list[Row]:
    """Rows of RQ1, RQ2 or RQ4: the paper's models first, each with every measured one of that name, then the others."""
    rows = []
    for figure in paper_figures():
        if figure.get("question") != question:
            continue
        quantity = QUANTITIES[figure["quantity"]]
        rest = [each for each in measured if isinstance(each, quantity.kind)]
        for model, pattern in figure["models"].items():
            same = [each for each in rest if re.fullmatch(pattern, _plain(each.model))]
            rest = [each for each in rest if each not in same]
            names = [f"{model} ({each.model})" for each in same] or [model]
            shown = [quantity.show(each) for each in same] or [None]
            rows += [Row(name, quantity.what, figure["figure"], ours) for name, ours in zip(names, shown, strict=True)]
        others = [(each.model, quantity.show(each)) for each in rest]
        rows += [Row(name, quantity.what, None, ours) for name, ours in others if ours is not None]
    return rows


def ratios_and_gaps(measured: Sequence[Measured]) -> list[tuple[str, float, float]]:
    """Name, ratio and first-8 gap of every probed model, by rising ratio; what is given twice counts once (RQ3)."""
    probed = [each for each in measured if isinstance(each, ProbedModel)]
    points = [(m.model, m.ratio, m.gap) for m in probed if m.ratio is not None and m.ratio > 0 and m.gap is not None]
    return sorted(set(points), key=lambda point: (point[1], point[0]))


def correlation(points: Sequence[tuple[str, float, float]]) -> Correlation:
    """Of the logarithm of the ratio and the gap; None below three models, or if either is the same in all."""
    ratios, gaps = [math.log(ratio) for _, ratio, _ in points], [gap for _, _, gap in points]
    if len(points) < ENOUGH or len(set(ratios)) == 1 or len(set(gaps)) == 1:
        return Correlation(len(points), None, None)
    ranks = statistics.correlation(_ranks(ratios), _ranks(gaps))
    return Correlation(len(points), statistics.correlation(ratios, gaps), ranks)


def question_tables(measured: Sequence[Measured]) -> list[Table]:
    """RQ1 to RQ4 as tables."""
    notes = {
        "RQ1": "The paper's ranges are over all models of a quantity.",
        "RQ2": "Passive compensation: T of the base language model was inflated in training.",
        "RQ4": "In the paper the cosine curves overlap nevertheless; gaps are in RQ3.",
    }
    tables = {question: _rows_table(question, measured, note) for question, note in notes.items()}
    return [tables["RQ1"], tables["RQ2"], _gap_table(measured), tables["RQ4"]]


def questions_json(measured: Sequence[Measured]) -> dict[str, Any]:
    """RQ1 to RQ4 as one JSON object; ``ours`` is null where nothing was measured."""
    points = ratios_and_gaps(measured)
    rows = {question: [asdict(row) for row in question_rows(question, measured)] for question in ("RQ1", "RQ2", "RQ4")}
    models = [{"model": name, "ratio": ratio, "gap_first8": gap} for name, ratio, gap in points]
    return {
        "RQ1": rows["RQ1"],
        "RQ2": rows["RQ2"],
        "RQ3": {"models": models, "correlation": asdict(correlation(points))},
        "RQ4": rows["RQ4"],
    }


def _rows_table(question: str, measured: Sequence[Measured], note: str) -> Table:
    rows = [[r.model, r.what, r.paper or NO_FIGURE, r.ours or NOT_MEASURED] for r in question_rows(question, measured)]
    return Table(TITLES[question], ["Model", "What", "Paper", "Ours"], rows, "llrr", note)


def _gap_table(measured: Sequence[Measured]) -> Table:
    points = ratios_and_gaps(measured)
    found = correlation(points)
    if found.pearson is None or found.spearman is None:
        note = f"Correlation: {NOT_MEASURED} ({found.models} models; {ENOUGH} that differ are needed)."
    else:
        note = (
            f"Correlation over {found.models} models: {number(found.pearson, signed=True)} (Pearson, log ratio), "
            f"{number(found.spearman, signed=True)} (Spearman)."
        )
    rows = [[name, number(ratio), number(gap)] for name, ratio, gap in points] or [[NOT_MEASURED] * 3]
    note += " The paper's claim is that a larger ratio goes with a larger gap; its figures are not known to us."
    return Table(TITLES["RQ3"], ["Model", "Ratio to T (ours)", "First-8 gap (ours)"], rows, "lrr", note)


def _plain(name: str) -> str:
    """A model's own name, without folder or organisation, in small letters and digits alone."""
    return re.sub(r"[^a-z0-9]", "", name.rstrip("/").rpartition("/")[2].lower())


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]
