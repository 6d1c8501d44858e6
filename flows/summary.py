"""The closing table of a run, read from the metric files."""

from pathlib import Path
from typing import Any

from rich.table import Table

from normalign.files import read_json
from normalign.settings import Profile

COLUMNS = ("variant", "ratio", "first-8 gap", "visual", "shuffled", "text", "gate")
NOT_KNOWN = "–"
UNREADABLE = "unreadable"


def closing_table(profile: Profile, variants: list[str]) -> Table:
    """Variants by: visual norm / T and first-8 sync gap after training, accuracies in percent (± one standard
    error), and what the gate said. What has not been computed is a dash; a broken file does not cost the table.
    """
    table = Table(title=f"{profile.name}: after training", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("variant", "gate") else "right")
    for variant in variants:
        table.add_row(*closing_row(profile, variant))
    return table


def closing_row(profile: Profile, variant: str) -> tuple[str, ...]:
    """The cells of ``COLUMNS`` for one variant."""
    try:
        summary = _read(profile.results(variant) / "summary.json")
        numbers = _numbers(summary)
    except (ValueError, TypeError):
        numbers = (UNREADABLE, *[NOT_KNOWN] * 4)
    return (variant, *numbers, _gate(profile, variant))


def _numbers(summary: dict[str, Any]) -> tuple[str, ...]:
    return (
        _number(summary.get("ratio/stage2")),
        _number(summary.get("sync_gap_first8/stage2")),
        _percent(summary.get("visual/accuracy"), summary.get("visual/stderr")),
        _percent(summary.get("visual/shuffled_accuracy")),
        _percent(summary.get("text/accuracy")),
    )


def _read(path: Path) -> dict[str, Any]:
    return dict(read_json(path)) if path.exists() else {}


def _number(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.3g}"


def _percent(share: float | None, error: float | None = None) -> str:
    if share is None:
        return NOT_KNOWN
    return f"{100 * share:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")


def _gate(profile: Profile, variant: str) -> str:
    path = profile.results(variant) / "check.json"
    if not path.exists():
        return NOT_KNOWN
    try:
        check = _read(path)
        passed = check["passed"]
        broken = [str(verdict["expectation"]) for verdict in check["verdicts"] if not verdict["passed"]]
    except (ValueError, TypeError, KeyError):  # not JSON, or cut or edited by hand
        return UNREADABLE
    if passed:
        return "passed" if (profile.folder / "gates" / f"{variant}.json").exists() else NOT_KNOWN
    return f"stopped: {', '.join(dict.fromkeys(broken))}"
