"""What was measured of which model: the result files of text-norm, encoder-norm and probe, and of the pipeline."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normalign.files import read_json
from normalign.report.inputs import dig
from normalign.report.tables import source_name


@dataclass(frozen=True)
class Tower:
    """Mean norm of a vision tower's tokens behind its last block, and behind its final norm."""

    model: str
    last_block: float | None
    after_norm: float | None


@dataclass(frozen=True)
class TextEmbeddings:
    """T of a language model, as stored."""

    model: str
    norm: float | None


@dataclass(frozen=True)
class ProbedModel:
    """Norms before and behind the projector, over T; the first-8 gap; T against the base language model's.

    ``vocabulary``: mean and standard deviation of the norms of a visual vocabulary, where the model has one.
    """

    model: str
    before: float | None
    after: float | None
    ratio: float | None
    gap: float | None
    T: float | None
    inflation: float | None
    vocabulary: tuple[float, float] | None


Measured = Tower | TextEmbeddings | ProbedModel


def read_results(files: Sequence[Path]) -> list[Measured]:
    """What the result files hold, in their order; models that could not be measured are left out.

    Raises:
        FileNotFoundError, ValueError: a file is missing or holds no result; the message names it.
    """
    return [measured for file in files for measured in _read(file)]


def find_results(root: Path = Path()) -> list[Measured]:
    """What the pipeline measured in the project at ``root``: towers and text embeddings, and its trained variants."""
    return [measured for folder in sorted(root.glob("data/*")) for measured in _pipeline(folder)]


def _read(file: Path) -> Iterator[Measured]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not a file; give what --json or --out of a command wrote")
    content = read_json(file)
    towers, models = dig(content, "encoders"), dig(content, "models")
    entries = towers or models or [content]
    found = [_entry(entry) for entry in entries if not dig(entry, "error")] if isinstance(entries, list) else [None]
    for measured in found:
        if measured is None:
            raise ValueError(f"{file} holds no result of normalign probe, text-norm or encoder-norm")
        yield measured


def _entry(entry: Any) -> Measured | None:
    model = dig(entry, "model")
    if not isinstance(model, str):
        return None
    if isinstance(dig(entry, "sync_gap"), dict):
        return _probed(model, entry)
    if isinstance(dig(entry, "layers"), list) and entry["layers"]:
        last = _number(entry["layers"][-1], "patches", "mean")
        after = _number(entry, "after_final_norm", "patches", "mean")
        return None if last is None else Tower(model, last, after)
    return TextEmbeddings(model, _number(entry, "T")) if _number(entry, "T") is not None else None


def _probed(model: str, result: dict[str, Any]) -> ProbedModel:
    text, base = _number(result, "T"), _number(result, "base_T")
    return ProbedModel(
        model=model,
        before=_number(result, "interface", "projector_input", "mean"),
        after=_number(result, "interface", "projector_output", "mean"),
        ratio=_number(result, "ratio"),
        gap=_number(result, "sync_gap", "first8"),
        T=text,
        inflation=text / base if text is not None and base else None,
        vocabulary=_spread(result, "interface", "visual_vocabulary"),
    )


def _pipeline(folder: Path) -> Iterator[Measured]:
    """The metric files of one profile; those that are not there yet are left out."""
    weights, encoder, text = (_json(folder / f"{name}.json") for name in ("weights", "encoder_norm", "text_norm"))
    given = {part: dig(weights, part, "source") for part in ("vision", "language")}
    sources = {part: source_name(source if isinstance(source, str) else None) for part, source in given.items()}
    names = {part: f"{folder.name}: {source}" for part, source in sources.items()}
    layers = dig(encoder, "layers")
    if isinstance(layers, list) and layers:
        after = _number(encoder, "after_final_norm", "mean")
        yield Tower(names["vision"], _number(layers[-1], "mean"), after)
    if text is not None:
        yield TextEmbeddings(names["language"], _number(text, "T"))
    for file in sorted(folder.glob("results/*/probe.json")):
        point = dig(read_json(file), "points", "stage2")
        if point is None:
            continue
        yield ProbedModel(
            model=f"{folder.name}: {file.parent.name}",
            before=_number(point, "interface", "vision_output", "mean"),
            after=_number(point, "interface", "projector_output", "mean"),
            ratio=_number(point, "ratio"),
            gap=_number(point, "sync_gap", "first8"),
            T=_number(text, "T"),
            inflation=None,
            vocabulary=None,
        )


def _json(path: Path) -> Any:
    return read_json(path) if path.is_file() else None


def _number(source: Any, *keys: str) -> float | None:
    value = dig(source, *keys)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if number else None


def _spread(source: Any, *keys: str) -> tuple[float, float] | None:
    mean, std = _number(source, *keys, "mean"), _number(source, *keys, "std")
    return None if mean is None or std is None else (mean, std)
