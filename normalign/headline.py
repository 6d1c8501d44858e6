"""A variant's headline figures, from its metric files."""

from normalign.metrics import MetricFile
from normalign.settings import Profile

POINTS = ("init", "stage1", "stage2")


def headline(profile: Profile, variant: str) -> dict[str, float]:
    """Ratios and sync gaps by point of training, accuracies pooled and by task; a figure that is not there is left out.

    These names are what ``dvc metrics``, the registry and the closing table show.
    """
    probe = MetricFile(profile.results(variant) / "probe.json")
    evaluation = MetricFile(profile.results(variant) / "evaluation.json")
    metrics: dict[str, float | None] = {}
    for point in POINTS:
        metrics[f"ratio/{point}"] = probe.number("points", point, "ratio")
        metrics[f"k_in_context/{point}"] = probe.number("points", point, "k_in_context")
        for layers in ("all", "first8"):
            metrics[f"sync_gap_{layers}/{point}"] = probe.number("points", point, "sync_gap", layers)
    for name in ("accuracy", "stderr", "shuffled_accuracy", "difference", "difference_stderr", "low", "high"):
        metrics[f"visual/{name}"] = evaluation.number("pooled_visual", name)
    for task in evaluation.mapping("tasks"):
        for name in ("accuracy", "stderr"):
            metrics[f"{task}/{name}"] = evaluation.number("tasks", task, name)
    metrics["text/accuracy"] = _text_accuracy(evaluation)
    return {name: value for name, value in metrics.items() if value is not None}


def _text_accuracy(evaluation: MetricFile) -> float | None:
    """Accuracy over the items of all text tasks; None without any."""
    items, right = 0.0, 0.0
    for task in evaluation.mapping("tasks"):
        count, accuracy = (evaluation.number("tasks", task, name) for name in ("items", "accuracy"))
        if evaluation.field("tasks", task, "kind") == "text" and count and accuracy is not None:
            items, right = items + count, right + count * accuracy
    return right / items if items else None
