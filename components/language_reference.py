"""Stage ``language_reference``: the text benchmarks on the untouched language model."""

import tempfile
from pathlib import Path
from typing import Any

from components import stage_main
from components.common import initial_model, place, use_threads
from components.evaluation import (
    chance_of,
    choose_hub_mode,
    clustered_error,
    clusters_of,
    mean,
    run_items,
    task_folders,
)
from normalign.files import write_json
from normalign.metrics import rounded
from normalign.settings import Profile


def run(profile: Profile) -> str:
    """Write ``language_reference.json``."""
    choose_hub_mode(profile)
    use_threads(profile)
    from normalign.vlm.lmms_adapter import LmmsAdapter

    model, processor = initial_model(profile, "baseline")
    place(profile, model)
    model.config.update({"normalign_system_prompt": profile.model.system_prompt})
    adapter = LmmsAdapter(model, processor, profile.evaluate.batch_tokens, profile.evaluate.seed)
    tasks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folders = task_folders(profile, profile.evaluate.text_tasks, Path(temporary))
        for task in profile.evaluate.text_tasks:
            items = run_items(adapter, task, folders, shuffled=False)
            scores = [item.score for item in items]
            tasks[task] = {
                "items": len(items),
                "chance": chance_of(items),
                "accuracy": mean(scores),
                "stderr": clustered_error(scores, clusters_of(items)),
            }
    write_json(profile.folder / "language_reference.json", rounded({"tasks": tasks}))
    return "language_reference: " + ", ".join(
        f"{task} {t['accuracy']:.3f} ± {t['stderr']:.3f}" for task, t in tasks.items()
    )


if __name__ == "__main__":
    stage_main(run)
