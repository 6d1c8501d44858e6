"""Stage ``evaluate``: benchmarks through lmms-eval, every visual one also with the images shuffled between items."""

import tempfile
from pathlib import Path
from statistics import NormalDist
from typing import Any

from components import stage_main
from components.common import place, timed, use_threads
from components.evaluation import (
    PRIMARY_METRIC,
    Item,
    by_kind,
    chance_of,
    choose_hub_mode,
    clustered_error,
    clusters_of,
    mean,
    run_items,
    task_folders,
)
from normalign.files import atomic_directory, write_json, write_jsonl
from normalign.metrics import rounded
from normalign.settings import Profile


def run(profile: Profile, variant: str) -> str:
    """Write ``evaluation.json`` and the samples of every task."""
    choose_hub_mode(profile)
    use_threads(profile)
    from normalign.vlm.checkpoint import load
    from normalign.vlm.lmms_adapter import LmmsAdapter

    model, processor = load(profile.model_folder(variant, "stage2"))
    place(profile, model)
    adapter = LmmsAdapter(model, processor, profile.evaluate.batch_tokens, profile.evaluate.seed)
    visual, text = profile.evaluate.visual_tasks, profile.evaluate.text_tasks
    tasks: dict[str, Any] = {}
    pairs: dict[str, tuple[list[Item], list[Item]]] = {}
    confidence = profile.check.confidence
    with (
        tempfile.TemporaryDirectory() as temporary,
        atomic_directory(profile.folder / "samples" / variant) as samples,
        timed(f"evaluate-{variant}"),
    ):
        folders = task_folders(profile, visual + text, Path(temporary))
        for task in visual + text:
            matched = run_items(adapter, task, folders, shuffled=False)
            shuffled = run_items(adapter, task, folders, shuffled=True) if task in visual else None
            tasks[task] = _task_result(task, matched, shuffled, confidence)
            write_jsonl(samples / f"{task}.jsonl", _rows(matched, shuffled))
            if shuffled is not None:
                pairs[task] = matched, shuffled
            print(f"evaluate {variant}: {task} {tasks[task]['accuracy']:.3f}", flush=True)
    pooled = _pooled(pairs, confidence)
    write_json(profile.results(variant) / "evaluation.json", rounded({"tasks": tasks, "pooled_visual": pooled}))
    return (
        f"evaluate {variant}: visual {pooled['accuracy']:.3f} ± {pooled['stderr']:.3f} with their own images, "
        f"{pooled['shuffled_accuracy']:.3f} with shuffled ones"
    )


def _task_result(task: str, matched: list[Item], shuffled: list[Item] | None, confidence: float) -> dict[str, Any]:
    scores, clusters = [item.score for item in matched], clusters_of(matched)
    result: dict[str, Any] = {
        "kind": "text" if shuffled is None else "visual",
        "metric": PRIMARY_METRIC.get(task, "acc"),
        "items": len(matched),
        "images": len({item.image for item in matched if item.image}),
        "chance": chance_of(matched),
        "accuracy": mean(scores),
        "stderr": clustered_error(scores, clusters),
        "kinds": by_kind(matched),
    }
    if shuffled is not None:
        control = [item.score for item in shuffled]
        result["shuffled"] = {"accuracy": mean(control), "stderr": clustered_error(control, clusters)}
        result["matched_minus_shuffled"] = _difference(scores, control, clusters, confidence)
    return result


def _difference(a: list[float], b: list[float], clusters: list[str], confidence: float) -> dict[str, float]:
    """Paired difference of means with its interval, items clustered by image."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    difference, error = mean(differences), clustered_error(differences, clusters)
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * error
    return {"difference": difference, "stderr": error, "low": difference - half, "high": difference + half}


def _pooled(pairs: dict[str, tuple[list[Item], list[Item]]], confidence: float) -> dict[str, Any]:
    """All visual items together."""
    scores = [item.score for matched, _ in pairs.values() for item in matched]
    control = [item.score for _, shuffled in pairs.values() for item in shuffled]
    clusters = [f"{task} {c}" for task, (matched, _) in pairs.items() for c in clusters_of(matched)]
    difference = _difference(scores, control, clusters, confidence)
    return {
        "items": len(scores),
        "images": len(set(clusters)),
        "accuracy": mean(scores),
        "stderr": clustered_error(scores, clusters),
        "shuffled_accuracy": mean(control),
        "difference": difference["difference"],
        "difference_stderr": difference["stderr"],
        "low": difference["low"],
        "high": difference["high"],
        "confidence": confidence,
    }


def _rows(matched: list[Item], shuffled: list[Item] | None) -> list[dict[str, Any]]:
    rows = []
    for index, item in enumerate(matched):
        row = dict(item.__dict__)
        control = None if shuffled is None else shuffled[index]
        row["shuffled"] = (
            None if control is None else {"prediction": control.prediction, "score": control.score, "nll": control.nll}
        )
        rows.append(row)
    return rows


if __name__ == "__main__":
    stage_main(run)
