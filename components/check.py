"""Verdicts on one variant: losses, gradients, norm ratio, cosine sync, and whether images matter."""

import math

from components import stage_main
from components.expectations import Expectation, write_verdicts
from normalign.files import write_json
from normalign.headline import headline
from normalign.metrics import MetricFile, is_finite, read_curves, rounded
from normalign.settings import BASELINE, Profile

STAGES = ("stage1", "stage2")
POINTS = ("init", *STAGES)
# A curve's ends: this share of its steps and at least this many, but never more than half, so that they do not overlap.
WINDOW_SHARE, WINDOW_STEPS = 0.1, 3


def run(profile: Profile, variant: str) -> str:
    """Write the variant's ``check.json`` and its headline figures; a bad verdict is written, not raised."""
    profile.variant(variant)
    folder = profile.results(variant)
    probe = MetricFile(folder / "probe.json")
    expectations: list[Expectation] = []
    for stage in STAGES:
        expectations += _training(variant, stage, read_curves(folder / f"{stage}.csv"))
    expectations += _norm_ratio(profile, variant, probe)
    expectations += _cosine_sync(profile, variant, probe)
    expectations += _images_matter(profile, variant, MetricFile(folder / "evaluation.json"))
    write_json(folder / "summary.json", rounded(headline(profile, variant)))
    return write_verdicts(folder / "check.json", expectations)


def _training(variant: str, stage: str, curves: dict[str, list[float | None]]) -> list[Expectation]:
    losses = _column(curves, "loss", stage, variant)
    _column(curves, "grad_total", stage, variant)
    # A module that is frozen throughout has an empty column; grad_total never has.
    gradients = {
        name: column
        for name, column in curves.items()
        if name.startswith("grad_") and (name == "grad_total" or any(cell is not None for cell in column))
    }
    bad_losses = sum(not is_finite(loss) for loss in losses)
    bad_gradients = sum(not is_finite(cell) for column in gradients.values() for cell in column)
    first, last = _ends(losses)
    return [
        Expectation(variant, "loss_finite", stage, "number of losses that are not finite", bad_losses, high=0),
        Expectation(variant, "loss_falls", stage, "mean loss of the last steps", last, high=first, strict=True),
        Expectation(variant, "gradients_finite", stage, "number of gradient norms not finite", bad_gradients, high=0),
    ]


def _column(curves: dict[str, list[float | None]], name: str, stage: str, variant: str) -> list[float | None]:
    if name not in curves:
        raise ValueError(f"{stage}.csv of {variant} has no column {name!r}; run {stage} again")
    return curves[name]


def _ends(values: list[float | None]) -> tuple[float | None, float | None]:
    """Means of the first and of the last steps of a curve; None where a step is missing or not finite."""
    count = max(1, min(max(WINDOW_STEPS, math.ceil(WINDOW_SHARE * len(values))), len(values) // 2))
    return _mean(values[:count]), _mean(values[-count:])


def _mean(values: list[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if len(finite) == len(values) else None


def _norm_ratio(profile: Profile, variant: str, probe: MetricFile) -> list[Expectation]:
    """Visual norm / T at the language model's input, as a share of what the variant aims for (UB §5.1)."""
    intended = profile.variant(variant).intended_ratio
    if intended is None:
        return []
    expectations = []
    for point in POINTS:
        low, high = profile.check.ratio_at_init if point == "init" else profile.check.ratio_trained
        ratio = probe.number("points", point, "ratio")
        share = None if ratio is None else ratio / intended
        what = f"visual norm / T as a share of the intended {intended:g}"
        expectations.append(Expectation(variant, "norm_ratio", point, what, share, low, high))
    return expectations


def _cosine_sync(profile: Profile, variant: str, probe: MetricFile) -> list[Expectation]:
    """Visual and text tokens turn at more similar rates than in the baseline (UB §4), at every point.

    Asked only of variants that aim for T itself: another multiple is an imbalance by intention, and what it
    does to the gap is what such a variant is run to find out.
    """
    if variant == BASELINE or profile.variant(variant).intended_ratio != 1.0:
        return []
    baseline = MetricFile(profile.results(BASELINE) / "probe.json")
    what = "sync gap of the first 8 layers against the baseline's"
    keys = ("sync_gap", "first8")
    return [
        Expectation(
            variant,
            "cosine_sync",
            point,
            what,
            probe.number("points", point, *keys),
            high=_bound(baseline, "points", point, *keys),
            strict=True,
        )
        for point in POINTS
    ]


def _bound(metrics: MetricFile, *keys: str) -> float:
    value = metrics.number(*keys)
    if value is None:
        raise ValueError(f"{metrics.path}: field {'.'.join(keys)!r} is null, so nothing can be held against it")
    return value


def _images_matter(profile: Profile, variant: str, evaluation: MetricFile) -> list[Expectation]:
    """Matched images beat shuffled ones, pooled over the visual benchmarks and paired by item."""
    if not profile.check.images_matter:
        return []
    confidence = evaluation.number("pooled_visual", "confidence")
    what = f"lower end of the {confidence:.0%} interval of matched minus shuffled accuracy"
    low = evaluation.number("pooled_visual", "low")
    return [Expectation(variant, "images_matter", "evaluation", what, low, low=0, strict=True)]


if __name__ == "__main__":
    stage_main(run)
