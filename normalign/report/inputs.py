"""Everything the report shows, read from a profile's metric files. What a variant never reached is None."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normalign.files import read_json, read_jsonl
from normalign.settings import Profile, VariantSettings

POINTS = {"init": "initialisation", "stage1": "after stage 1", "stage2": "after stage 2"}
Curves = dict[str, list[float]]


@dataclass(frozen=True)
class VariantInputs:
    """One variant's files; ``samples``: rows per task; ``stage1``, ``stage2``: the logs' columns."""

    name: str
    settings: VariantSettings
    stage1: Curves | None
    stage2: Curves | None
    evaluation: dict[str, Any] | None
    probe: dict[str, Any] | None
    check: dict[str, Any] | None
    samples: dict[str, list[dict[str, Any]]] | None
    attention: list[dict[str, Any]] | None


@dataclass(frozen=True)
class ReportInputs:
    """One profile's files; the variants in the order of ``run``."""

    profile: str
    variants: list[VariantInputs]
    weights: dict[str, Any] | None
    dataset: dict[str, Any] | None
    text_norm: dict[str, Any] | None
    encoder_norm: dict[str, Any] | None
    language_reference: dict[str, Any] | None
    check_data: dict[str, Any] | None

    @property
    def baseline(self) -> VariantInputs | None:
        """What the other variants are compared with: the first one without an aligner."""
        return next((v for v in self.variants if v.settings.aligner == "none"), None)


def load_inputs(profile: Profile, variants: list[str], root: Path = Path()) -> ReportInputs:
    """Read the metric files of ``profile`` below ``root`` (the project's folder) for the named variants."""
    folder = root / profile.folder
    return ReportInputs(
        profile.name,
        [_load_variant(profile, name, root) for name in variants],
        *(
            _json(folder / f"{name}.json")
            for name in (
                "weights",
                "dataset",
                "text_norm",
                "encoder_norm",
                "language_reference",
                "check_data",
            )
        ),
    )


def dig(value: Any, *keys: str) -> Any:
    """``value[key][key]...``, or None as soon as a step is missing."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _load_variant(profile: Profile, name: str, root: Path) -> VariantInputs:
    results = root / profile.results(name)
    return VariantInputs(
        name=name,
        settings=profile.variant(name),
        stage1=_curves(results / "stage1.csv"),
        stage2=_curves(results / "stage2.csv"),
        evaluation=_json(results / "evaluation.json"),
        probe=_json(results / "probe.json"),
        check=_json(results / "check.json"),
        samples=_samples(root / profile.folder / "samples" / name),
        attention=_json(root / profile.folder / "attention" / f"{name}.json"),
    )


def _json(path: Path) -> Any:
    return read_json(path) if path.is_file() else None


def _samples(folder: Path) -> dict[str, list[dict[str, Any]]] | None:
    tasks = {path.stem: read_jsonl(path) for path in sorted(folder.glob("*.jsonl"))}
    return tasks or None


def _curves(path: Path) -> Curves | None:
    """Columns of a training log; an empty cell (frozen module, no gain) is NaN, which no chart draws."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    if not rows:
        return None
    return {name: [float(row[name]) if row[name] else math.nan for row in rows] for name in rows[0]}
