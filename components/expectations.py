"""Expectations on the metric files, judged by Great Expectations, and the verdicts that come of them."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normalign.files import write_json
from normalign.metrics import is_finite, significant

if TYPE_CHECKING:
    import pandas as pd

Verdict = dict[str, Any]


@dataclass(frozen=True)
class Expectation:
    """``observed`` of ``variant`` (or "data") at a point of training has to lie between ``low`` and ``high``.

    ``strict``: the bounds themselves do not pass. ``what`` names the observed quantity in the verdict's
    sentence. A value that is None, NaN or infinite never passes.
    """

    variant: str
    name: str
    point: str
    what: str
    observed: float | None
    low: float | None = None
    high: float | None = None
    strict: bool = False

    def limits(self) -> tuple[float, float]:
        """The least and the greatest value that pass."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return (math.nextafter(low, math.inf), math.nextafter(high, -math.inf)) if self.strict else (low, high)

    def bound(self) -> str:
        """The bounds in words."""
        low, high = ("above", "below") if self.strict else ("at least", "at most")
        limits = [(low, self.low), (high, self.high)]
        return " and ".join(f"{word} {limit:.6g}" for word, limit in limits if limit is not None) or "finite"


def judge(expectations: list[Expectation]) -> list[Verdict]:
    """One verdict per expectation, in order.

    Raises:
        RuntimeError: Great Expectations could not compute, which it reports as if the values were bad.
    """
    import pandas as pd

    # A row per expectation: Great Expectations takes its time per column and rule, not per row.
    rows = [(e.observed if is_finite(e.observed) else None, *e.limits()) for e in expectations]
    failed = _failed_rows(pd.DataFrame(rows, columns=["observed", "low", "high"], dtype="float64"))
    return [_verdict(expectation, passed=row not in failed) for row, expectation in enumerate(expectations)]


def write_verdicts(path: Path, expectations: list[Expectation]) -> str:
    """Judge ``expectations``, write the verdicts to ``path``, bad ones too, and return a summary line."""
    verdicts = judge(expectations)
    held = sum(verdict["passed"] for verdict in verdicts)
    write_json(path, {"passed": held == len(verdicts), "verdicts": verdicts})
    return f"{held} of {len(verdicts)} expectations hold"


def _failed_rows(frame: "pd.DataFrame") -> set[int]:
    """Rows of a frame with columns observed, low and high whose observed value is missing or out of bounds."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations as gx
    from great_expectations.data_context.types.base import ProgressBarsConfig
    from great_expectations.expectations.core import expect_column_pair_values_a_to_be_greater_than_b as pair
    from great_expectations.expectations.core import expect_column_values_to_not_be_null as present

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    asset = context.data_sources.add_pandas("metrics").add_dataframe_asset("observed")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": frame})
    rules = [
        # A null passes every range, so its absence is a rule of its own.
        present.ExpectColumnValuesToNotBeNull(column="observed"),
        pair.ExpectColumnPairValuesAToBeGreaterThanB(column_A="observed", column_B="low", or_equal=True),
        pair.ExpectColumnPairValuesAToBeGreaterThanB(column_A="high", column_B="observed", or_equal=True),
    ]
    suite = gx.ExpectationSuite("invariants", expectations=rules)
    failed: set[int] = set()
    for result in batch.validate(suite, result_format="COMPLETE").results:
        _raise_if_not_computed(result.exception_info)
        failed.update(result.result["unexpected_index_list"])
    return failed


def _raise_if_not_computed(exception_info: dict[str, Any] | None) -> None:
    """An exception inside a rule reads as success=False; its information comes flat or one per metric."""
    info = exception_info or {}
    for entry in [info, *info.values()]:
        if isinstance(entry, dict) and entry.get("raised_exception"):
            raise RuntimeError(f"Great Expectations failed to compute: {entry.get('exception_message')}")


def _verdict(expectation: Expectation, passed: bool) -> Verdict:
    observed = significant(expectation.observed)
    seen = "not finite" if observed is None else f"{observed:.6g}"
    return {
        "variant": expectation.variant,
        "expectation": expectation.name,
        "point": expectation.point,
        "observed": observed,
        "low": significant(expectation.low),
        "high": significant(expectation.high),
        "passed": passed,
        "message": (
            f"{expectation.variant}: {expectation.name} at {expectation.point}: "
            f"{expectation.what} is {seen}, must be {expectation.bound()}"
        ),
    }
