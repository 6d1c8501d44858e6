"""What ``evaluate`` and ``language_reference`` share: running a task and turning its samples into scores."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normalign.data.tasks import is_local, write_tasks
from normalign.settings import Profile

if TYPE_CHECKING:
    from normalign.vlm.lmms_adapter import LmmsAdapter

# Primary metric of lmms-eval's own tasks; ours are all `acc`.
PRIMARY_METRIC = {
    "mmbench_en_dev_static": "gpt_eval_score",
    "mmstar": "average",
    "pope": "pope_accuracy",
    "seedbench_2_plus": "seedbench_2_plus_all",
    "ocrbench": "ocrbench_accuracy",
    "scienceqa_img": "exact_match",
    "ai2d": "exact_match",
    "hellaswag": "acc_norm",
    "mmlu": "acc",
}


@dataclass(frozen=True)
class Item:
    """One scored item. ``image``: key that items with the same image share; ``score`` in [0, 1]."""

    id: str
    kind: str
    image: str | None
    question: str
    choices: list[str]
    answer: Any
    prediction: Any
    score: float
    nll: list[float]


def choose_hub_mode(profile: Profile) -> None:
    """Keep the hub out of it when every task is local; call before anything imports a hub library.

    Otherwise even a local task would wait for name look-ups that fail.
    """
    dataset = profile.folder / "dataset"
    tasks = profile.evaluate.visual_tasks + profile.evaluate.text_tasks
    if all(is_local(dataset, task) for task in tasks):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def task_folders(profile: Profile, tasks: tuple[str, ...], temporary: Path) -> list[Path]:
    """Folders with the tasks' definitions: ours are written to ``temporary``, lmms-eval's own are looked up."""
    dataset = profile.folder / "dataset"
    local = tuple(task for task in tasks if is_local(dataset, task))
    folders = [builtin_folder(task) for task in tasks if task not in local]
    if local:
        write_tasks(dataset, local, temporary)
        folders.append(temporary)
    return folders


def builtin_folder(task: str) -> Path:
    """The folder of lmms-eval that defines ``task``.

    Raises:
        ValueError: lmms-eval has no such task.
    """
    import lmms_eval

    root = Path(lmms_eval.__file__).parent / "tasks"
    wanted = re.compile(rf"^(task|group):\s*[\"']?{re.escape(task)}[\"']?\s*$", re.MULTILINE)
    for file in sorted(root.rglob("*.yaml")):
        if wanted.search(file.read_text(encoding="utf-8", errors="replace")):
            return file.parent
    raise ValueError(f"evaluate: no task {task!r} in lmms-eval, and no benchmark of that name in the data set")


def run_items(adapter: "LmmsAdapter", task: str, folders: list[Path], shuffled: bool) -> list[Item]:
    """The task's items with their scores, in document order."""
    from normalign.vlm.lmms_adapter import run_task

    adapter.shuffled = shuffled
    samples = run_task(adapter, task, folders)
    metric = PRIMARY_METRIC.get(task, "acc")
    return [_item(sample, metric, adapter.image_keys[sample["task"], sample["doc_id"]]) for sample in samples]


def _item(sample: dict[str, Any], metric: str, image: str | None) -> Item:
    doc = sample["doc"]
    nll = [round(float(r[0]), 5) for r in sample["filtered_resps"] if isinstance(r, list | tuple)]
    choices = list(doc["choices"]) if isinstance(doc.get("choices"), list) else []
    prediction = choices[nll.index(min(nll))] if nll and len(nll) == len(choices) else sample["filtered_resps"][0]
    answer = choices[doc["answer"]] if choices and isinstance(doc.get("answer"), int) else sample["target"]
    return Item(
        id=str(doc.get("id", sample["doc_id"])),
        kind=str(doc.get("kind", "all")),
        image=doc.get("image") if isinstance(doc.get("image"), str) else image,
        question=str(doc.get("question", "")),
        choices=choices,
        answer=answer,
        prediction=prediction,
        score=_score(sample, metric),
        nll=nll,
    )


def _score(sample: dict[str, Any], metric: str) -> float:
    """An item's score: the task's primary metric, which some tasks wrap into a mapping with a ``score``."""
    value = sample.get(metric)
    if isinstance(value, dict):
        value = value.get("score")
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise ValueError(f"item {sample['doc_id']}: metric {metric!r} gave {sample.get(metric)!r}, not a score per item")


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def clustered_error(values: list[float], clusters: list[str]) -> float:
    """Standard error of the mean of ``values`` when items of one cluster (an image) are not independent.

    Sums deviations per cluster, squares, and adds up (the sandwich estimator for a mean, with the small-sample factor
    G/(G−1)); with one item a cluster it is the ordinary standard error.
    """
    centre = mean(values)
    sums: dict[str, float] = {}
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + value - centre
    groups = len(sums)
    if groups < 2:
        return float("nan")
    return math.sqrt(groups / (groups - 1) * sum(s * s for s in sums.values())) / len(values)


def chance_of(items: list[Item]) -> float | None:
    """Expected score of guessing among the options; None where there are no options."""
    if not all(item.choices for item in items):
        return None
    return mean([1 / len(item.choices) for item in items])


def by_kind(items: list[Item]) -> dict[str, Any]:
    """Number of items and mean score per kind."""
    kinds = sorted({item.kind for item in items})
    return {
        kind: {"items": len(chosen), "accuracy": mean([item.score for item in chosen])}
        for kind in kinds
        for chosen in [[item for item in items if item.kind == kind]]
    }


def clusters_of(items: list[Item]) -> list[str]:
    """What items are clustered by: their image, or themselves."""
    return [item.image or f"item {item.id}" for item in items]
