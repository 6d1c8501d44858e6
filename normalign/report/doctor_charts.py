"""The doctor's charts: probed models on shared axes. A result is one model's, as the probe makes it."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes

from normalign.diagnosis.theory import RELATED_COSINE, measured_correlation, text_norm, text_updates
from normalign.norms.theory import expected_cosines, expected_score, threshold_correlation
from normalign.report.charts import (
    LINES,
    MARKERS,
    Measure,
    chart_style,
    colour,
    draw_layers,
    finish,
    legend,
    panels,
    plain,
    svg_text,
)
from normalign.report.inputs import dig

LOOSE_COSINE = 0.2  # a second related pair, to show how the threshold depends on it
GRID = 60  # ratios per curve

Results = Sequence[dict[str, Any]]
Draw = Callable[[Axes, dict[str, Any], int], bool]


def layer_panels(results: Results, names: Sequence[str], name: str, measures: Sequence[Measure]) -> str:
    """Two measures a row, all models on shared axes."""
    with rc_context(chart_style(name)):
        figure, grid = panels(-(-len(measures) // 2), 2.2, "all", "none")
        for axes, measure in zip(grid.flat, measures, strict=False):
            drawn = draw_layers(axes, results, measure)
            axes.set_title(measure.label)
            finish(axes, drawn, measure.log)
        for axes in grid.flat[len(measures) :]:
            axes.set_axis_off()
        for axes in grid[-1]:
            axes.set_xlabel("layer of the language model")
        legend(figure, names, both=any(not measure.single for measure in measures))
        return svg_text(figure, name)


def theory_panels(results: Results, names: Sequence[str], name: str) -> str:
    """Predicted and measured angles, and ρ, per layer."""
    drawings: list[tuple[str, Draw, str]] = [
        ("Angle of visual tokens, degrees", _angles, "layer of the language model"),
        ("Update correlation ρ", _correlations, "layer of the language model"),
    ]
    return _pair(results, names, name, drawings)


def inequality_panels(results: Results, names: Sequence[str], name: str) -> str:
    """Where the paper's inequality holds, and what it is about: the expected score over the norm ratio."""
    highest = max([100.0, *(1.5 * result["k_in_context"] for result in results)])
    ratios = [math.exp(math.log(highest) * step / (GRID - 1)) for step in range(GRID)]
    drawings: list[tuple[str, Draw, str]] = [
        ("Threshold ρ* and measured ρ", partial(_thresholds, ratios), "k, visual norm over text norm"),
        ("Expected score of a related pair", partial(_scores, ratios), "k, visual norm over text norm"),
    ]
    return _pair(results, names, name, drawings, log_x=True)


def routing_panels(results: Results, names: Sequence[str], name: str) -> str:
    """Entropies of the routers per mixture layer."""
    keys = (("softmax_entropy", "Entropy of the router"), ("utilisation_entropy", "Entropy of the experts' load"))
    drawings: list[tuple[str, Draw, str]] = [
        (label, partial(_routing, key), "layer of the language model") for key, label in keys
    ]
    return _pair(results, names, name, drawings, both=True)


def _pair(
    results: Results,
    names: Sequence[str],
    name: str,
    drawings: Sequence[tuple[str, Draw, str]],
    *,
    log_x: bool = False,
    both: bool = False,
) -> str:
    """Two panels, each drawn model by model."""
    with rc_context(chart_style(name)):
        figure, grid = panels(1, 2.6, "none", "none")
        for axes, (title, draw, label) in zip(grid[0], drawings, strict=True):
            drawn = [draw(axes, result, index) for index, result in enumerate(results)]
            axes.set_title(title)
            axes.set_xlabel(label)
            if log_x and any(drawn):
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            finish(axes, any(drawn), log=False)
        legend(figure, names, both=both)
        return svg_text(figure, name)


def _line(axes: Axes, x: Sequence[float], y: Sequence[Any], index: int, style: Any, markers: bool = True) -> None:
    axes.plot(
        x,
        [plain(value) for value in y],
        color=colour(index),
        linestyle=style,
        marker=MARKERS[index % len(MARKERS)] if markers else None,
        markersize=3.2,
        markevery=(index, max(3, len(x) // 8)),
    )


def _angles(axes: Axes, result: dict[str, Any], index: int) -> bool:
    measured, predicted = (dig(result, "theory", f"angle_{kind}") for kind in ("measured", "predicted"))
    if not measured:
        return False
    layers = range(1, len(measured) + 1)
    _line(axes, layers, measured, index, LINES["visual"])
    _line(axes, layers, predicted, index, LINES["text"])
    return True


def _correlations(axes: Axes, result: dict[str, Any], index: int) -> bool:
    rho = dig(result, "theory", "rho")
    if rho:
        _line(axes, range(1, len(rho) + 1), rho, index, "-")
    return bool(rho)


def _thresholds(ratios: Sequence[float], axes: Axes, result: dict[str, Any], index: int) -> bool:
    updates, start = text_updates(result), text_norm(result)
    for cosine, style in ((RELATED_COSINE, "-"), (LOOSE_COSINE, LINES["text"])):
        curve = [threshold_correlation(ratio, updates, cosine, start) for ratio in ratios]
        _line(axes, ratios, curve, index, style, markers=False)
    _mark(axes, result["k_in_context"], measured_correlation(result), index)
    return True


def _scores(ratios: Sequence[float], axes: Axes, result: dict[str, Any], index: int) -> bool:
    rho = measured_correlation(result)
    if rho is None:
        return False
    updates, start, width = text_updates(result), text_norm(result), result["width"]

    def score(ratio: float) -> float:
        return expected_score(expected_cosines(ratio, rho, updates, RELATED_COSINE, start)[-1], width)

    _line(axes, ratios, [score(ratio) for ratio in ratios], index, "-", markers=False)
    _mark(axes, result["k_in_context"], score(result["k_in_context"]), index)
    return True


def _mark(axes: Axes, x: float, y: float | None, index: int) -> None:
    if y is not None and x > 0:
        axes.plot([x], [y], color=colour(index), marker=MARKERS[index % len(MARKERS)], markersize=8)


def _routing(key: str, axes: Axes, result: dict[str, Any], index: int) -> bool:
    layers = dig(result, "routing", "layers")
    if not layers:
        return False
    for modality, style in LINES.items():
        _line(axes, [layer + 1 for layer in layers], dig(result, "routing", modality, key), index, style)
    return True
