"""The doctor's tables: what was measured in probed models. A result is one model's, as the probe makes it."""

from collections.abc import Sequence
from typing import Any

from normalign.report.blocks import MISSING, Table, number, percent
from normalign.report.inputs import dig
from normalign.report.tables import SUMMARY_COLUMNS, summary_cells

INTERFACES = {
    "vision_output": "vision output",
    "projector_input": "projector input",
    "projector_output": "projector output",
    "visual_at_merge": "visual, at the merge",
    "text_at_merge": "text, at the merge",
    "visual_vocabulary": "visual vocabulary",
}
SAME_T = 0.01  # T of two stages of one language model differ less, those of two models hardly ever

Result = dict[str, Any]
Results = Sequence[Result]


def verdict_table(results: Results, names: Sequence[str], verdicts: Results) -> Table:
    """Severity and failure of each model, with the figures they rest on."""
    rows = []
    for name, verdict in zip(names, verdicts, strict=True):
        first = verdict["first_layers"]
        figures = [verdict["k"], verdict["k_in_context"], verdict["gap_first8"]]
        figures += [first["visual_angle"], first["text_angle"], first["first_visual_cosine"]]
        rows.append([name, verdict["severity"], verdict["failure"] or MISSING, *map(number, figures)])
    columns = ["Model", "Severity", "Failure", "Ratio to T", "k", "Gap", "Visual °", "Text °", "First cosine"]
    note = (
        "Ratio: visual norm at the merge over T. k: over the text tokens in the prompts. Gap: first-8 sync gap. "
        "°: mean turn a layer, first 8 layers. First cosine: of visual tokens, in the first layer."
    )
    failed = frozenset(index for index, verdict in enumerate(verdicts) if verdict["severity"] == "strong")
    return Table("Verdict", columns, rows, "lllrrrrrr", note, failed)


def measured_table(results: Results, names: Sequence[str]) -> Table:
    """What each model is and how much was measured."""
    rows = []
    for name, result in zip(names, results, strict=True):
        counts = result["counts"]
        skipped = "; ".join(f"{reason}: {count}" for reason, count in (counts.get("skipped") or {}).items())
        sizes = [len(result["layers"]["visual"]["cosine"]), result["width"]]
        sizes += [counts[key] for key in ("samples", "visual_tokens", "text_tokens")]
        rows.append([name, result["family"], *(f"{size:,}" for size in sizes), skipped or MISSING])
    columns = ["Model", "Family", "Layers", "D", "Samples", "Visual", "Text", "Skipped"]
    return Table("What was measured", columns, rows, "llrrrrrl", "Visual, text: tokens.")


def text_table(results: Results, names: Sequence[str]) -> Table:
    """T as stored and as used, and against the base language model's."""
    rows = []
    for name, result in zip(names, results, strict=True):
        base = result.get("base_T")
        inflation = result["T"] / base if base else None
        values = [result["T"], result["embedding_scale"], result["T_as_used"], base, inflation]
        rows.append([name, *map(number, values)])
    columns = ["Model", "T", "Scale", "T as used", "T of the base model", "T over it"]
    note = (
        "Scale: what forward multiplies text embeddings by. T over the base model's: above 1.1, passive compensation."
    )
    return Table("Text embeddings", columns, rows, "lrrrrr", note)


def norms_table(result: Result, name: str) -> Table:
    """L2 norms at every interface of one model."""
    found = result["interface"]
    rows = [[label, *summary_cells(found[key])] for key, label in INTERFACES.items() if key in found]
    return Table(f"Norms at every interface: {name}", ["Interface", *SUMMARY_COLUMNS], rows, "lrrrrrrr")


def layer_table(result: Result, name: str, first: int | None = None) -> Table:
    """Norms, cosines, angles and ρ of one model, layer by layer (the ``first`` ones, or all)."""
    visual, text = result["layers"]["visual"], result["layers"]["text"]
    depth = len(visual["cosine"])
    theory = [dig(result, "theory", key) or [None] * depth for key in ("angle_predicted", "rho")]
    before = [visual["norm_median"], text["norm_median"]]
    series = [*before, visual["cosine"], text["cosine"], text["angle"], visual["angle"], *theory]
    rows = [[str(layer + 1), *(number(values[layer]) for values in series)] for layer in range(depth)[:first]]
    columns = ["Layer", "Norm visual", "Norm text", "Cosine visual", "Cosine text", "Angle text", "Angle visual"]
    note = "Norm: median, entering the layer. Angles in degrees; expected: of visual tokens given the text's updates."
    return Table(f"Layers: {name}", [*columns, "Expected", "ρ"], rows, "r" * 9, note)


def theory_table(names: Sequence[str], verdicts: Results) -> Table:
    """How well the assumptions hold, and where the paper's inequality does."""
    rows = []
    for name, verdict in zip(names, verdicts, strict=True):
        theory = verdict["theory"] or {}
        relative = theory.get("relative_angle_error")
        values = [theory.get(key) for key in ("rho", "threshold", "holds_below_cosine")]
        rows.append(
            [
                name,
                number(theory.get("mean_angle_error")),
                MISSING if relative is None else percent(relative),
                _beside(theory.get("divergence_measured"), theory.get("divergence_expected")),
                *map(number, values),
                _beside(dig(theory, "score", "imbalanced"), dig(theory, "score", "balanced")),
            ]
        )
    columns = ["Model", "Angle error °", "Angle error %", "Diverged °", "ρ", "ρ*", "Holds below", "Score (balanced)"]
    note = (
        "First 8 layers. Diverged: by how much text has turned more than visual tokens (as expected of their norms "
        "alone). ρ* and the scores are of related pairs with a cosine of 0.6 at the merge, which is assumed; holds "
        "below: the cosine at the merge below which imbalance lowers the score."
    )
    return Table("Theory", columns, rows, "lrrrrrrr", note)


def routing_table(result: Result, name: str) -> Table:
    """Router entropy, utilisation entropy and the busiest expert's load of one model, per mixture layer."""
    routing = result["routing"]
    sides = [routing[modality] for modality in ("visual", "text")]
    rows = []
    for index, layer in enumerate(routing["layers"]):
        cells = [number(side[key][index]) for key in ("softmax_entropy", "utilisation_entropy") for side in sides]
        loads = [side["load"][index] for side in sides]
        busiest = [MISSING if load is None else percent(max(load)) for load in loads]
        rows.append([str(layer + 1), *cells, *busiest])
    columns = ["Layer", "Softmax visual", "Softmax text", "Load visual", "Load text", "Busiest visual", "Busiest text"]
    note = f"{routing['experts']} experts, {routing['top_k']} a token. Entropies in nats; busiest expert: % of choices."
    return Table(f"Routing: {name}", columns, rows, "r" * 7, note)


def changes(results: Results) -> list[tuple[int, int]]:
    """Pairs (before, after) that are stages of one model: each later result with the first of its language model."""
    pairs = []
    for after, result in enumerate(results):
        same = (index for index in range(after) if _same_language_model(results[index], result))
        pairs += [(before, after) for before in [next(same, None)] if before is not None]
    return pairs


def change_table(results: Results, names: Sequence[str], verdicts: Results, pair: tuple[int, int]) -> Table:
    """Two stages of one model side by side."""
    sides = [(results[index], verdicts[index]) for index in pair]
    rows = [["severity", *(verdict["severity"] for _, verdict in sides)]]
    rows.append(["failure", *(verdict["failure"] or MISSING for _, verdict in sides)])
    figures = {
        "visual norm at the merge": [dig(result, "interface", "visual_at_merge", "mean") for result, _ in sides],
        "ratio to T": [verdict["k"] for _, verdict in sides],
        "k in context": [verdict["k_in_context"] for _, verdict in sides],
        "sync gap, first 8 layers": [verdict["gap_first8"] for _, verdict in sides],
        "sync gap, all layers": [result["sync_gap"]["all"] for result, _ in sides],
        "visual turn a layer, °": [verdict["first_layers"]["visual_angle"] for _, verdict in sides],
        "text turn a layer, °": [verdict["first_layers"]["text_angle"] for _, verdict in sides],
        "visual cosine, first layer": [verdict["first_layers"]["first_visual_cosine"] for _, verdict in sides],
        "update correlation ρ": [dig(verdict, "theory", "rho") for _, verdict in sides],
    }
    rows += [[label, *map(number, values)] for label, values in figures.items()]
    before, after = (names[index] for index in pair)
    note = "Taken as stages of one model because width, depth and T of the language model agree."
    return Table(f"Before and after: {after}", ["", before, after], rows, "lrr", note)


def _beside(value: float | None, other: float | None) -> str:
    return MISSING if value is None or other is None else f"{number(value)} ({number(other)})"


def _same_language_model(one: Result, other: Result) -> bool:
    depths = [len(result["layers"]["text"]["cosine"]) for result in (one, other)]
    alike = one["width"] == other["width"] and depths[0] == depths[1]
    return alike and abs(one["T"] / other["T"] - 1) < SAME_T
