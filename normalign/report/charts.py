"""The report's charts as SVG: same inputs, same bytes; colours that colour-blind readers can tell apart."""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from normalign.report.inputs import POINTS, Curves, ReportInputs, dig

# Okabe and Ito's palette, black first for the baseline.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":")
WIDTH, LEFT = 9.0, 0.6  # inches
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES: dict[str, Any] = {"visual": "-", "text": (0, (4, 2))}
PANELS = ("init", "stage2")
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
}


@dataclass(frozen=True)
class Measure:
    """A per-layer quantity, named as in the probe's ``layers``, or in ``attention`` if ``single``."""

    key: str
    label: str
    log: bool = False
    single: bool = False


def layer_chart(inputs: ReportInputs, name: str, measures: Sequence[Measure]) -> str:
    """A row of panels per measure, at initialisation and after stage 2, all variants on shared axes."""
    with rc_context(chart_style(name)):
        figure, grid = panels(len(measures), 2.2, "all")
        for row, measure in zip(grid, measures, strict=True):
            for axes, point in zip(row, PANELS, strict=True):
                sources = [dig(variant.probe, "points", point) for variant in inputs.variants]
                drawn = draw_layers(axes, sources, measure)
                axes.set_title(f"{measure.label}, {POINTS[point]}")
                finish(axes, drawn, measure.log)
        for axes in grid[-1]:
            axes.set_xlabel("layer of the language model")
        both = any(not measure.single for measure in measures)
        legend(figure, [variant.name for variant in inputs.variants], both)
        return svg_text(figure, name)


def training_chart(inputs: ReportInputs, name: str, columns: Sequence[tuple[str, str, bool]]) -> str:
    """A row of panels per column of the training logs (name, label, log axis), a stage per panel."""
    with rc_context(chart_style(name)):
        figure, grid = panels(len(columns), 1.75, "col")
        for row, (column, label, log) in zip(grid, columns, strict=True):
            for axes, stage in zip(row, ("stage1", "stage2"), strict=True):
                drawn = False
                for index, variant in enumerate(inputs.variants):
                    curves: Curves | None = getattr(variant, stage)
                    drawn |= _draw_training(axes, curves, column, index, log)
                axes.set_title(f"{label}, stage {stage[-1]}")
                logged = any(getattr(variant, stage) for variant in inputs.variants)
                finish(axes, drawn, log, "none in this stage" if logged else "not available")
        for axes in grid[-1]:
            axes.set_xlabel("optimizer step")
        legend(figure, [variant.name for variant in inputs.variants], both=False, markers=False)
        return svg_text(figure, name)


def encoder_chart(inputs: ReportInputs, name: str) -> str:
    """Median norm of the vision tower's tokens per hidden state, 5th to 95th percentile, and T."""
    with rc_context(chart_style(name)):
        figure = Figure(figsize=(WIDTH, 3.1))
        axes = figure.subplots()
        figure.subplots_adjust(LEFT / WIDTH, 0.15, 1 - 0.1 / WIDTH, 0.91)
        layers = dig(inputs.encoder_norm, "layers") or []
        band = [[plain(layer.get(key)) for layer in layers] for key in ("p5", "median", "p95")]
        if layers:
            axes.plot(range(len(layers)), band[1], color=COLOURS[2], marker="o", markersize=4, label="median")
            axes.fill_between(
                range(len(layers)),
                band[0],
                band[2],
                color=COLOURS[2],
                alpha=0.18,
                linewidth=0,
                label="5th to 95th percentile",
            )
            text = dig(inputs.text_norm, "T")
            if text is not None:
                axes.axhline(text, color=COLOURS[1], linestyle=(0, (4, 2)), label=f"T = {text:.3g} (text embeddings)")
            axes.legend(loc="upper left")
        axes.set_title("L2 norm of the vision tower's tokens, before its final norm")
        axes.set_xlabel("hidden state of the vision tower")
        finish(axes, bool(layers), log=True)
        return svg_text(figure, name)


def svg_text(figure: Figure, name: str) -> str:
    """The figure as one SVG element without date or metadata; prefixed ids let a page hold many."""
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip() + "\n"
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(?<= id=")', f"{name}-", svg)
    return re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last ``window`` values at each step; NaN steps count as missing."""
    means = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - window) : end] if not math.isnan(value)]
        means.append(math.fsum(known) / len(known) if known else math.nan)
    return means


def panels(
    rows: int, height: float, sharex: Literal["all", "col", "none"], sharey: Literal["row", "none"] = "row"
) -> tuple[Figure, Any]:
    """A figure of ``rows`` × 2 panels, each ``height`` inches high, with the same margins in every chart."""
    top, bottom, gap = 0.62, 0.5, 0.42
    total = top + bottom + rows * height + (rows - 1) * gap
    figure = Figure(figsize=(WIDTH, total))
    grid = figure.subplots(rows, 2, squeeze=False, sharex=sharex, sharey=sharey)
    figure.subplots_adjust(
        left=LEFT / WIDTH,
        right=1 - 0.1 / WIDTH,
        bottom=bottom / total,
        top=1 - top / total,
        hspace=gap / height,
        wspace=0.07 if sharey == "row" else 0.17,
    )
    return figure, grid


def chart_style(name: str) -> Any:
    """Settings of one chart; its name is the salt of its ids, which are random otherwise."""
    return {**STYLE, "svg.hashsalt": name}


def draw_layers(axes: Axes, sources: Sequence[Any], measure: Measure) -> bool:
    """The curves of each probed model; over states they start at 0 (the merge), over layers at 1."""
    drawn = False
    states = measure.key in ("norm_median", "effective_rank")
    for index, source in enumerate(sources):
        for modality, style in LINES.items():
            values = dig(source, "attention", measure.key)
            if not measure.single:
                values = dig(source, "layers", modality, measure.key)
            elif modality == "text":
                continue
            if not values:
                continue
            start = 0 if states else 1
            axes.plot(
                range(start, start + len(values)),
                [plain(value) for value in values],
                color=colour(index),
                linestyle=style,
                marker=MARKERS[index % len(MARKERS)],
                markersize=3.2,
                markevery=(index, max(3, len(values) // 8)),
            )
            drawn = True
    return drawn


def _draw_training(axes: Axes, curves: Curves | None, column: str, index: int, log: bool) -> bool:
    """The raw curve pale, its running mean over 5 % of the steps on top."""
    values = (curves or {}).get(column, [])
    if log:
        values = [value if value > 0 else math.nan for value in values]
    points = [
        (step, value) for step, value in enumerate(values, 1) if not math.isnan(value)
    ]  # some are measured rarely
    if not points:
        return False
    steps, values = [step for step, _ in points], [value for _, value in points]
    axes.plot(steps, values, color=colour(index), linewidth=0.6, alpha=0.3)
    mean = running_mean(values, max(1, round(len(values) / 20)))
    axes.plot(steps, mean, color=colour(index), linestyle=DASHES[index % 4])
    return True


def finish(axes: Axes, drawn: bool, log: bool, empty: str = "not available") -> None:
    """Plain numbers on log axes; a panel without curves says so."""
    if log and drawn:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        narrow = high / low < 1000
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if not drawn:
        axes.grid(False)
        axes.text(0.5, 0.5, empty, transform=axes.transAxes, ha="center", va="center", color="#777777")


def legend(figure: Figure, names: Sequence[str], both: bool, markers: bool = True) -> None:
    """Above all panels: a colour per model, and with ``both`` a line style per modality."""
    handles = []
    for index, name in enumerate(names):
        marker = MARKERS[index % len(MARKERS)] if markers else None
        style: Any = "-" if markers else DASHES[index % 4]
        line = Line2D([], [], color=colour(index), marker=marker, linestyle=style, markersize=5, label=_label(name))
        handles.append(line)
    if both:
        for modality, dashes in LINES.items():
            handles.append(Line2D([], [], color="#777777", linestyle=dashes, label=f"{modality} tokens"))
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.0), ncols=min(5, len(handles)))


def _label(name: str) -> str:
    """A name as matplotlib shows it as it is: neither as a formula nor, for a leading underscore, not at all."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def plain(value: float | None) -> float:
    return math.nan if value is None else float(value)
