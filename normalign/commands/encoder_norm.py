"""`normalign encoder-norm`: norms of vision towers' tokens, layer by layer, as tables or JSON."""

import json
import logging
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from normalign.diagnosis.encoder_table import measure_tower
from normalign.diagnosis.pictures import Pictures
from normalign.diagnosis.towers import load_tower
from normalign.metrics import rounded

NOTHING = "–"


def encoder_norm(encoders: list[Path], images: Path, *, as_json: bool, trust_remote_code: bool) -> bool:
    """Measure each of ``encoders`` on the images of a folder and print the tables; one that fails loses no other.

    Returns:
        Whether all of them could be measured.

    Raises:
        ValueError: the folder of images is missing, empty, or holds no usable image.
    """
    pictures = Pictures(images)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    results = [_measure(folder, pictures, trust_remote_code=trust_remote_code) for folder in encoders]
    if as_json:
        print(json.dumps(rounded({"encoders": results}), indent=2, allow_nan=False, ensure_ascii=False))
    else:
        _show(results)
    return not any("error" in result for result in results)


def _measure(folder: Path, pictures: Pictures, *, trust_remote_code: bool) -> dict[str, Any]:
    try:
        tower = load_tower(folder, trust_remote_code=trust_remote_code)
        with tqdm(total=len(pictures), desc=tower.name, unit="image") as bar:
            result = measure_tower(tower, pictures, lambda files: _advance(bar, files))
            _advance(bar, len(pictures))
            return result
    except ValueError as error:
        return {"model": folder.name, "error": str(error)}


def _advance(bar: Any, files: int) -> None:
    bar.update(files - bar.n)


def _show(results: list[dict[str, Any]]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # piped: one line per row
    console.print(_overview(results))
    for result in results:
        if "error" not in result:
            console.print(_layers(result))
    for result in results:
        if "error" in result:
            console.print(f"{result['model']} could not be measured: {result['error']}", markup=False, soft_wrap=True)
    console.print(
        "Sinks: patch norms more than 10 median absolute deviations above the layer's median. `--json` has every "
        "figure, `normalign text-norm` the norm of the language model's embeddings to compare with.",
        markup=False,
        soft_wrap=True,
    )


def _overview(results: list[dict[str, Any]]) -> Table:
    table = Table(title="Patch norms of vision towers", box=box.SIMPLE_HEAD)
    for column in ("model", "family", "blocks", "images", "skipped", "last block", "without sinks", "after the norm"):
        table.add_column(column, overflow="fold")
    for result in results:
        if "error" in result:
            table.add_row(result["model"], *[NOTHING] * 7)
            continue
        last, after = result["layers"][-1]["patches"], result["after_final_norm"]
        table.add_row(
            result["model"],
            result["family"],
            str(result["blocks"]),
            str(result["images"]),
            ", ".join(f"{count} {reason}" for reason, count in result["skipped"].items()) or "0",
            _spread(last),
            _number(last["mean_without_sinks"]),
            _spread(after["patches"]) if after else NOTHING,
        )
    return table


def _layers(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['model']} ({result['tower']})", box=box.SIMPLE_HEAD)
    for column in (
        "after block",
        "patches",
        "median",
        "5–95 %",
        "sinks",
        "their norm",
        "row, column",
        "CLS",
        "registers",
    ):
        table.add_column(column, overflow="fold")
    rows = list(enumerate(result["layers"]))
    named: list[tuple[str, dict[str, Any]]] = [("input" if i == 0 else str(i), layer) for i, layer in rows]
    if result["after_final_norm"]:
        named.append(("final norm", result["after_final_norm"]))
    for name, layer in named:
        patches, sinks = layer["patches"], layer["patches"]["sinks"]
        table.add_row(
            name,
            _spread(patches),
            _number(patches["median"]),
            f"{_number(patches['p5'])} – {_number(patches['p95'])}",
            f"{sinks['count']} ({sinks['share']:.1%})",
            _number(sinks["mean_norm"]),
            _places(sinks),
            _number(layer["cls"] and layer["cls"]["mean"]),
            _number(layer["registers"] and layer["registers"]["mean"]),
        )
    return table


def _places(sinks: dict[str, Any]) -> str:
    if sinks["places"] is None:
        return "not known"
    return "; ".join(f"{place['row']}, {place['column']}" for place in sinks["places"][:3]) or NOTHING


def _spread(summary: dict[str, Any]) -> str:
    return f"{_number(summary['mean'])} ± {_number(summary['std'])}"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4g}"
