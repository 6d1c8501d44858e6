"""Verdicts on data, weights and the untouched language model, before anything is trained."""

import math

from components import stage_main
from components.expectations import Expectation, write_verdicts
from normalign.metrics import MetricFile
from normalign.settings import Profile

# Metric files hold 6 significant digits, so T and g_init each carry a relative rounding error below 5e-6.
GAIN_TOLERANCE = 1e-5


def run(profile: Profile) -> str:
    """Write ``check_data.json``; a bad verdict is written, not raised."""
    folder = profile.folder
    expectations = [
        *_data_counts(profile, MetricFile(folder / "dataset.json")),
        *_text_norm(MetricFile(folder / "text_norm.json")),
        *_encoder_norm(MetricFile(folder / "encoder_norm.json")),
        *_language_reference(profile, MetricFile(folder / "language_reference.json")),
    ]
    return write_verdicts(folder / "check_data.json", expectations)


def _expect(
    name: str,
    what: str,
    observed: float | None,
    low: float | None = None,
    high: float | None = None,
    strict: bool = False,
) -> Expectation:
    return Expectation("data", name, "data", what, observed, low, high, strict)


def _data_counts(profile: Profile, dataset: MetricFile) -> list[Expectation]:
    expectations = []
    for stage in ("stage1", "stage2"):
        kept, dropped = dataset.number(stage, "kept"), dataset.number(stage, "dropped")
        read = dataset.number(stage, "read")
        # Nothing read is nothing kept, which the first expectation reports.
        share = dropped / read if dropped is not None and read else dropped
        expectations += [
            _expect(f"{stage}_records", f"number of {stage} records kept", kept, low=0, strict=True),
            _expect(
                f"{stage}_dropped",
                f"share of {stage} records dropped",
                share,
                high=profile.dataset.max_dropped_share,
            ),
        ]
    return expectations + _visual_sizes(profile, dataset)


def _visual_sizes(profile: Profile, dataset: MetricFile) -> list[Expectation]:
    """Sizes of the visual benchmarks that the data set holds; lmms-eval's own are fetched when they are first run."""
    sizes = dataset.mapping("benchmarks")
    local = profile.dataset.synthetic is not None
    return [
        _items(task, dataset.number("benchmarks", task) if task in sizes else 0.0, profile.check.min_visual_items)
        for task in profile.evaluate.visual_tasks
        if local or task in sizes
    ]


def _items(task: str, count: float | None, minimum: int) -> Expectation:
    return _expect(f"{task}_items", f"number of items of benchmark {task}", count, low=minimum)


def _text_norm(text_norm: MetricFile) -> list[Expectation]:
    target, width = text_norm.number("T"), text_norm.number("hidden_size")
    rows = text_norm.number("rows")
    gain = text_norm.number("g_init")
    share = gain * math.sqrt(width) / target if gain is not None and width and target else None
    return [
        _expect("text_norm", "T, the mean norm of the text embeddings,", target, low=0, strict=True),
        # Reported rather than bounded: unused rows are common, but with nothing else there would be no T.
        _expect("zero_rows", "number of all-zero text embeddings", text_norm.number("zero_rows"), 0, _less(rows)),
        _expect("initial_gain", "g_init as a share of T/sqrt(D)", share, 1 - GAIN_TOLERANCE, 1 + GAIN_TOLERANCE),
    ]


def _less(rows: float | None) -> float | None:
    return None if rows is None else rows - 1


def _encoder_norm(encoder_norm: MetricFile) -> list[Expectation]:
    what = "mean norm of the vision tower's tokens at the selected layer"
    return [_expect("encoder_norm", what, encoder_norm.number("selected", "mean"), low=0, strict=True)]


def _language_reference(profile: Profile, reference: MetricFile) -> list[Expectation]:
    """Size of each text benchmark, and whether it can show that training has made the language model worse."""
    expectations = []
    for task in profile.evaluate.text_tasks:
        chance = reference.number("tasks", task, "chance")
        expectations += [
            _items(task, reference.number("tasks", task, "items"), profile.check.min_text_items),
            _expect(
                f"{task}_accuracy",
                f"the untouched language model's accuracy on {task}",
                reference.number("tasks", task, "accuracy"),
                # A task without a chance level (a generated answer) has to be above nothing but its margin.
                low=(chance or 0.0) + profile.check.text_above_chance,
                high=profile.check.text_at_most,
            ),
        ]
    return expectations


if __name__ == "__main__":
    stage_main(run)
