"""Reading the metric files that the stages write; a missing or malformed field is named with its file."""

import csv
import math
from pathlib import Path
from typing import Any

from normalign.files import read_json


class MetricFile:
    """A JSON metric file, read field by field."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.document: Any = read_json(path)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing; run the stage that writes it (`dvc repro`)") from None

    def field(self, *keys: str) -> Any:
        """The value under ``keys``.

        Raises:
            ValueError: there is no such field; the message names the file and the field.
        """
        value = self.document
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                raise ValueError(f"{self.path}: field {'.'.join(keys)!r} is missing; run the stage again")
            value = value[key]
        return value

    def number(self, *keys: str) -> float | None:
        """The number under ``keys``; None where the file says null (a value that was not finite)."""
        value = self.field(*keys)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.path}: field {'.'.join(keys)!r} is {value!r}, not a number")
        return float(value)

    def mapping(self, *keys: str) -> dict[str, Any]:
        """The mapping under ``keys``."""
        value = self.field(*keys)
        if not isinstance(value, dict):
            raise ValueError(f"{self.path}: field {'.'.join(keys)!r} is {value!r}, not a mapping")
        return value


def read_curves(path: Path) -> dict[str, list[float | None]]:
    """The columns of a per-step CSV file; an empty cell (frozen module, no gain) is None, ``nan`` stays NaN.

    Raises:
        ValueError: no such file, no rows, or a cell that is not a number; the message names it.
    """
    if not path.exists():
        raise ValueError(f"{path} is missing; run the stage that writes it (`dvc repro`)")
    with path.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    if not rows:
        raise ValueError(f"{path} holds no step; run the stage again")
    return {
        column: [_cell(row[column], f"{path}: line {line}, column {column!r}") for line, row in enumerate(rows, 2)]
        for column in rows[0]
        if column is not None
    }


def _cell(text: str | None, where: str) -> float | None:
    if text == "":
        return None
    try:
        return float(text)  # type: ignore[arg-type]  # None: a short line, refused below
    except (TypeError, ValueError):
        raise ValueError(f"{where} is {text!r}, not a number; run the stage again") from None


def is_finite(value: float | None) -> bool:
    """Whether ``value`` is there, and neither NaN nor infinite."""
    return value is not None and math.isfinite(value)


def significant(value: float | None) -> float | None:
    """``value`` at 6 significant digits, as metric files hold it; None if it is not finite."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def rounded(value: Any) -> Any:
    """``value`` with every float in it, however deep, at 6 significant digits (None if not finite)."""
    if isinstance(value, float):
        return significant(value)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
