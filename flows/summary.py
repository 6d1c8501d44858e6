"""The closing table of a run, read from the metric files."""

from pathlib import Path
from typing import Any

from rich.table import Table

from normalign.files import read_json
from normalign.settings import Profile

COLUMNS = ("variant", "ratio", "first-8 gap", "visual", "shuffled", "text", "gate")
NOT_KNOWN = "–"


def closing_table(profile: Profile, variants: list[str]) -> Table:
    """Variants by: visual norm / T and first-8 sync gap after training, accuracies in percent (± one standard
    error), and what the gate said. What has not been computed is a dash.
    """
    table = Table(title=f"{profile.name}: after training", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("variant", "gate") else "right")
    for variant in variants:
        table.add_row(*closing_row(profile, variant))
    return table


def closing_row(profile: Profile, variant: str) -> tuple[str, ...]:
    """The cells of ``COLUMNS`` for one variant."""
    results = profile.results(variant)
    point = _read(results / "probe.json").get("points", {}).get("stage2", {})
    evaluation = _read(results / "evaluation.json")
    pooled = evaluation.get("pooled_visual", {})
    return (
        variant,
        _number(point.get("ratio")),
        _number(point.get("sync_gap", {}).get("first8")),
        _percent(pooled.get("accuracy"), pooled.get("stderr")),
        _percent(pooled.get("shuffled_accuracy")),
        _percent(_text_accuracy(evaluation)),
        _gate(profile, variant),
    )


def _read(path: Path) -> dict[str, Any]:
    return dict(read_json(path)) if path.exists() else {}


def _number(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.3g}"


def _percent(share: float | None, error: float | None = None) -> str:
    if share is None:
        return NOT_KNOWN
    return f"{100 * share:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def _text_accuracy(evaluation: dict[str, Any]) -> float | None:
    """Accuracy over the items of all text tasks."""
    tasks = [task for task in evaluation.get("tasks", {}).values() if task["kind"] == "text"]
    items = sum(task["items"] for task in tasks)
    return sum(task["items"] * task["accuracy"] for task in tasks) / items if items else None


def _gate(profile: Profile, variant: str) -> str:
    check = _read(profile.results(variant) / "check.json")
    if not check:
        return NOT_KNOWN
    if check["passed"]:
        return "passed" if (profile.folder / "gates" / f"{variant}.json").exists() else NOT_KNOWN
    broken = [str(verdict["expectation"]) for verdict in check["verdicts"] if not verdict["passed"]]
    return f"stopped: {', '.join(dict.fromkeys(broken))}"
