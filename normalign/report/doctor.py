"""The doctor's report on probed models: one self-contained page, and tables in the terminal.

A result is one model's, as the probe makes it; several are drawn on shared axes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from normalign.diagnosis.layers import FIRST_LAYERS
from normalign.diagnosis.verdict import judge
from normalign.files import write_text
from normalign.report.blocks import NOT_AVAILABLE, Chart, Gallery, Section, Table, Text
from normalign.report.charts import Measure
from normalign.report.doctor_charts import inequality_panels, layer_panels, routing_panels, theory_panels
from normalign.report.doctor_tables import (
    change_table,
    changes,
    layer_table,
    measured_table,
    norms_table,
    routing_table,
    text_table,
    theory_table,
    verdict_table,
)
from normalign.report.maps import map_gallery
from normalign.report.page import render_page
from normalign.report.terminal import print_blocks
from normalign.report.words import (
    ANGLES_CAPTION,
    CURVES_CAPTION,
    DOCTOR_TERMS,
    INEQUALITY_CAPTION,
    MAPS_CAPTION,
    MASS_CAPTION,
    RANK_CAPTION,
    ROUTING_CAPTION,
    TERMS,
    UPDATES_CAPTION,
)

CURVES = (Measure("norm_median", "Median L2 norm", log=True), Measure("cosine", "Inter-layer cosine"))
UPDATES = (
    Measure("relative_update_attention", "Relative update, attention", log=True),
    Measure("relative_update_mlp", "Relative update, MLP", log=True),
)
DIRECTIONS = (Measure("effective_rank", "Effective rank", log=True), Measure("angle", "Turn a layer, degrees"))
ATTENTION = (
    Measure("mass", "Attention mass, text → image", single=True),
    Measure("entropy", "Entropy over visual tokens, nats", single=True),
)

Results = Sequence[dict[str, Any]]
Blocks = list[Text | Table | Chart | Gallery]


def write_page(results: Results, out: Path) -> Path:
    """Write the page on one or more probed models as ``index.html`` in the folder ``out``; returns its path.

    Raises:
        ValueError: there is no result.
        NotWritten: no space or no permission.
    """
    if not results:
        raise ValueError("there is no result to write a page on; probe a model first")
    names = model_names(results)
    path = out / "index.html"
    write_text(path, render_page(f"Norm doctor: {', '.join(names)}", doctor_sections(results, names)))
    return path


def print_results(results: Results, console: Console) -> None:
    """Print verdict and tables; 80 columns suffice."""
    names, verdicts = model_names(results), [judge(result) for result in results]
    blocks: list[Text | Table] = [verdict_table(results, names, verdicts)]
    for name, verdict in zip(names, verdicts, strict=True):
        blocks += [Text([name]), Text([*verdict["words"], *verdict["advice"]], bullets=True)]
    blocks += [change_table(results, names, verdicts, pair) for pair in changes(results)]
    blocks += [measured_table(results, names), text_table(results, names)]
    for name, result in zip(names, results, strict=True):
        blocks += [norms_table(result, name), layer_table(result, name, FIRST_LAYERS)]
    blocks.append(theory_table(names, verdicts))
    print_blocks(console, blocks)


def model_names(results: Results) -> list[str]:
    """The models' names, numbered where one occurs again."""
    names: list[str] = []
    for result in results:
        name, number = str(result["model"]), 2
        while name in names:
            name, number = f"{result['model']} ({number})", number + 1
        names.append(name)
    return names


def doctor_sections(results: Results, names: Sequence[str]) -> list[Section]:
    """Everything the page shows, in order."""
    verdicts = [judge(result) for result in results]
    sections = _verdicts(results, names, verdicts)
    pairs = [change_table(results, names, verdicts, pair) for pair in changes(results)]
    if pairs:
        sections.append(Section("change", "Before and after", pairs))
    sections += [_norms(results, names), _layers(results, names), _theory(results, names, verdicts)]
    routed = [(result, name) for result, name in zip(results, names, strict=True) if result.get("routing")]
    if routed:
        chart = Chart("Routing", routing_panels(results, names, "routing"), ROUTING_CAPTION)
        sections.append(Section("routing", "Routing to experts", [chart, *(routing_table(*each) for each in routed)]))
    gallery = map_gallery({name: result.get("maps") or [] for name, result in zip(names, results, strict=True)})
    maps: Blocks = [Text([MAPS_CAPTION]), gallery] if gallery.items else [Text([f"Attention maps: {NOT_AVAILABLE}."])]
    tables = [layer_table(result, name) for name, result in zip(names, results, strict=True)]
    return [
        *sections,
        Section("maps", "Where the text looks", maps),
        Section("numbers", "Layer by layer, in numbers", tables),
        Section("reading", "How to read this page", [Text([*DOCTOR_TERMS, *TERMS], bullets=True)]),
    ]


def _verdicts(results: Results, names: Sequence[str], verdicts: Results) -> list[Section]:
    """An overview, and a section per model where there are several."""
    overview = [verdict_table(results, names, verdicts), measured_table(results, names)]
    words: list[Blocks] = [
        [Text(verdict["words"], bullets=True), Text(["What to do:"]), Text(verdict["advice"], bullets=True)]
        for verdict in verdicts
    ]
    if len(results) == 1:
        return [Section("verdict", "Verdict", [*words[0], *overview])]
    models = [
        Section(f"model-{index}", name, blocks) for index, (name, blocks) in enumerate(zip(names, words, strict=True))
    ]
    return [Section("verdict", "Verdict", overview), *models]


def _norms(results: Results, names: Sequence[str]) -> Section:
    tables = [norms_table(result, name) for name, result in zip(names, results, strict=True)]
    return Section("norms", "Norms", [text_table(results, names), *tables])


def _layers(results: Results, names: Sequence[str]) -> Section:
    blocks: Blocks = [
        Chart("Norm and cosine", layer_panels(results, names, "curves", CURVES), CURVES_CAPTION),
        Chart("Relative updates", layer_panels(results, names, "updates", UPDATES), UPDATES_CAPTION),
        Chart("Effective rank and turn", layer_panels(results, names, "rank", DIRECTIONS), RANK_CAPTION),
    ]
    if any(result.get("attention") for result in results):
        blocks.append(Chart("Attention", layer_panels(results, names, "mass", ATTENTION), MASS_CAPTION))
    return Section("layers", "Layer by layer", blocks)


def _theory(results: Results, names: Sequence[str], verdicts: Results) -> Section:
    blocks: Blocks = [
        Chart("Angles and correlation", theory_panels(results, names, "theory"), ANGLES_CAPTION),
        Chart("The inequality", inequality_panels(results, names, "inequality"), INEQUALITY_CAPTION),
        theory_table(names, verdicts),
    ]
    return Section("theory", "The theory, tested on this model" if len(results) == 1 else "The theory, tested", blocks)
