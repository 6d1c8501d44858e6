"""What a run holds: settings, training curves, final metrics, provenance and plots."""

import dataclasses
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from normalign.metrics import MetricFile, is_finite, read_curves
from normalign.settings import Profile

STAGES = ("stage1", "stage2")
TRACKED_FILES = ("dvc.lock", "dvc.yaml", "params.yaml")
SOURCES = ("params.yaml", "dvc.yaml", "components", "normalign")
MODIFIED = "-modified"
METRICS_PER_CALL, PARAMS_PER_CALL = 1000, 100  # the most that log_batch takes
MAX_PARAM_CHARACTERS = 6000


def log_record(client: MlflowClient, run_id: str, profile: Profile, variant: str) -> None:
    """Log everything but the model to the run."""
    params = [Param(key, value[:MAX_PARAM_CHARACTERS]) for key, value in flat_settings(profile, variant).items()]
    for chunk in _chunks(params, PARAMS_PER_CALL):
        client.log_batch(run_id, params=chunk)
    now = int(time.time() * 1000)
    points = [
        *curve_points(profile, variant),
        *((key, v, 0) for key, v in final_metrics(profile, variant).items()),
    ]
    metrics = [Metric(key, value, now, step) for key, value, step in points]
    for chunk in _chunks(metrics, METRICS_PER_CALL):
        client.log_batch(run_id, metrics=chunk)
    _log_files(client, run_id, profile, variant)


def flat_settings(profile: Profile, variant: str) -> dict[str, str]:
    """Settings of the profile and the variant as dotted names; without the registry's, whose URI may hold a secret."""
    settings = dataclasses.asdict(profile)
    for key in ("name", "variants", "registry"):
        del settings[key]
    settings["variant"] = dataclasses.asdict(profile.variant(variant))
    return dict(_flat(settings, ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else key)
    else:
        yield path, str(list(value) if isinstance(value, tuple) else value)


def curve_points(profile: Profile, variant: str) -> Iterator[tuple[str, float, int]]:
    """(metric, value, step) of both training stages; cells that are empty or not finite are left out."""
    for stage in STAGES:
        curves = read_curves(profile.results(variant) / f"{stage}.csv")
        steps = curves.pop("step")
        for name, column in curves.items():
            for step, value in zip(steps, column, strict=True):
                if step is not None and value is not None and is_finite(value):
                    yield f"{stage}/{name}", value, int(step)


def final_metrics(profile: Profile, variant: str) -> dict[str, float]:
    """The variant's headline figures, as the stage ``check`` summed them up."""
    summary = MetricFile(profile.results(variant) / "summary.json")
    return {name: float(value) for name, value in summary.mapping().items()}


def provenance(profile: Profile) -> dict[str, str]:
    """Tags that say from which data, weights and commit a version came; the commit is left out where git has none."""
    weights = MetricFile(profile.folder / "weights.json")
    tags = {"data_fingerprint": str(MetricFile(profile.folder / "dataset.json").field("fingerprint"))}
    for part in ("vision", "language"):
        tags[f"{part}_weights"] = str(weights.field(part, "source"))
        tags[f"{part}_weights_sha256"] = str(weights.field(part, "sha256"))
    commit = git_commit()
    return tags | ({"git_commit": commit} if commit else {})


def git_commit() -> str | None:
    """The commit of the working copy, followed by MODIFIED where settings or code differ from it; None without git."""
    commit = _git("rev-parse", "HEAD")
    return commit and commit + (
        MODIFIED if _git("--no-optional-locks", "status", "--porcelain", "--", *SOURCES) else ""
    )


def _git(*arguments: str) -> str | None:
    """What git answers; None where it refuses or is not installed."""
    try:
        answer = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _log_files(client: MlflowClient, run_id: str, profile: Profile, variant: str) -> None:
    # The commit at run time precedes the lock that the run writes, so the files themselves are kept.
    for name in TRACKED_FILES:
        if Path(name).exists():
            client.log_artifact(run_id, name)
    client.log_artifacts(run_id, str(profile.results(variant)), "results")
    client.log_figure(run_id, draw_curves(profile, variant), "plots/curves.png")


def draw_curves(profile: Profile, variant: str) -> Any:
    """A matplotlib figure: training loss of both stages, then norm and cosine layer by layer after stage 2."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    loss, norm, cosine = figure.subplots(1, 3)
    for stage in STAGES:
        curves = read_curves(profile.results(variant) / f"{stage}.csv")
        loss.plot(curves["step"], curves["loss"], label=stage)
    layers = MetricFile(profile.results(variant) / "probe.json").mapping("points", "stage2", "layers")
    for modality in ("visual", "text"):
        norm.plot(layers[modality]["norm_median"], label=modality)
        cosine.plot(layers[modality]["cosine"], label=modality)
    norm.set_yscale("log")
    for axes, title, x in (
        (loss, "loss", "step"),
        (norm, "median norm", "layer"),
        (cosine, "cosine", "layer"),
    ):
        axes.set(title=f"{variant}: {title}", xlabel=x)
        axes.legend()
    return figure


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
