"""What can be known to fail before anything is run: missing accelerators, data, and sources that cannot be fetched."""

import os
import subprocess
import sys
from pathlib import Path

from normalign.settings import Profile, SettingsError, SourceSettings

_COUNT_DEVICES = {
    "cuda": "import torch; print(torch.cuda.device_count())",
    "mps": "import torch; print(int(torch.backends.mps.is_available()))",
}
_TIMEOUT_SECONDS = 5.0


def check(profile: Profile) -> None:
    """Refuse a profile that cannot run on this machine.

    Raises:
        SettingsError: says what is missing and what to do about it, all of it at once.
    """
    problems = _hardware_problems(profile) + _data_problems(profile)
    if not (profile.folder / "weights").exists():
        for part in ("vision", "language"):
            problems += _source_problems(f"weights.{part}", getattr(profile.weights, part))
    if problems:
        lines = "\n  - ".join(problems)
        raise SettingsError(
            f"profile {profile.name!r} cannot run here:\n  - {lines}\n"
            "Run it on a machine that has what is missing, or choose another profile: normalign profile use smol"
        )


def _hardware_problems(profile: Profile) -> list[str]:
    compute = profile.compute
    if compute.device == "cpu":
        return []
    # In a process of its own: this one goes on without torch, and without a context on a device.
    command = [sys.executable, "-c", _COUNT_DEVICES[compute.device]]
    counted = subprocess.run(command, capture_output=True, text=True, check=True)
    found = int(counted.stdout.split()[-1])
    if found >= compute.min_devices:
        return []
    return [f"compute: it needs {compute.min_devices} {compute.device} device(s), this machine has {found}"]


def _data_problems(profile: Profile) -> list[str]:
    llava = profile.dataset.llava
    if llava is None:
        return []
    from normalign.data.rows import embeds_images
    from normalign.data.synthetic import BENCHMARKS

    wanted: dict[str, str | None] = {}
    for stage in ("stage1", "stage2"):
        source = Path(getattr(llava, f"{stage}_json"))
        wanted[f"{stage}_json"] = str(source)
        if not (source.exists() and embeds_images(source)):
            wanted[f"{stage}_images"] = getattr(llava, f"{stage}_images")
    problems = [
        f"dataset.llava.{key}: {path or 'null'} is not there"
        for key, path in wanted.items()
        if path is None or not Path(path).exists()
    ]
    generated = [task for task in profile.evaluate.visual_tasks + profile.evaluate.text_tasks if task in BENCHMARKS]
    if generated:
        problems.append(
            f"evaluate: benchmarks {', '.join(generated)} exist in generated data only, and dataset.synthetic is null; "
            "name tasks of lmms-eval in evaluate.visual_tasks and evaluate.text_tasks"
        )
    return problems + _task_problems(profile, set(generated))


def _task_problems(profile: Profile, generated: set[str]) -> list[str]:
    """Benchmarks that lmms-eval does not have: without this they would be missed after training alone."""
    from components.evaluation import builtin_folder

    problems = []
    for task in profile.evaluate.visual_tasks + profile.evaluate.text_tasks:
        if task not in generated:
            try:
                builtin_folder(task)
            except ValueError as error:
                problems.append(str(error))
    return problems


def _source_problems(key: str, settings: SourceSettings) -> list[str]:
    kind, _, name = settings.source.partition(":")
    if kind != "hub":
        return []
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json", revision=settings.revision), str):
        return []
    where = f"{key}: {settings.source} at revision {settings.revision} is not in the hub cache"
    if constants.HF_HUB_OFFLINE:
        return [f"{where}, and HF_HUB_OFFLINE is set: unset it, or fetch the snapshot first"]
    try:
        url = hf_hub_url(name, "config.json", revision=settings.revision)
        get_hf_file_metadata(url, timeout=float(os.environ.get("HF_HUB_ETAG_TIMEOUT", _TIMEOUT_SECONDS)))
    except Exception as error:  # the hub's client, its HTTP library and the socket each have their own kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return [f"{where} and cannot be fetched ({reason}); a gated model needs its licence accepted and HF_TOKEN"]
    return []
