"""The synthetic benchmarks as lmms-eval tasks: definitions are written when they are needed, beside their data."""

from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from normalign.data.images import open_image

MAX_PIXELS = 100_000_000

_UTILS = '''"""Written by normalign.data.tasks."""

from normalign.data.tasks import images_of

ROOT = {root!r}


def doc_to_visual(doc):
    return images_of(doc, ROOT)
'''


def images_of(document: dict[str, Any], root: str) -> list[Image.Image]:
    """The document's image, if it has one."""
    return [open_image(document["image"], Path(root), MAX_PIXELS)] if document["image"] else []


def write_tasks(dataset: Path, names: tuple[str, ...], folder: Path) -> None:
    """Write one multiple-choice task definition per benchmark file ``dataset/benchmarks/<name>.jsonl`` to ``folder``.

    Options are scored by likelihood as the answer to the question; lmms-eval's metric is ``acc``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "utils.py").write_text(_UTILS.format(root=str(dataset.resolve())), encoding="utf-8")
    for name in names:
        definition = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str((dataset / "benchmarks" / f"{name}.jsonl").resolve())}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        text = yaml.safe_dump(definition, sort_keys=False)
        visual = "doc_to_visual: !function utils.doc_to_visual\n"
        (folder / f"{name}.yaml").write_text(text + visual, encoding="utf-8")


def is_local(dataset: Path, name: str) -> bool:
    """Whether ``name`` is one of the data set's own benchmarks."""
    return (dataset / "benchmarks" / f"{name}.jsonl").exists()
