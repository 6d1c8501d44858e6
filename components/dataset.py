"""Stage ``dataset``: generates or reads training data and benchmarks, keeps the records that pass."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from components import stage_main
from normalign.data.llava import read_llava
from normalign.data.manifest import Manifest, Tally, require_kept
from normalign.data.rows import embedded_images, embeds_images
from normalign.data.synthetic import BENCHMARKS, load_benchmark, write_dataset
from normalign.files import atomic_directory, write_json, write_lines
from normalign.settings import DatasetSettings, Profile


@dataclass(frozen=True)
class _Source:
    """One stage's LLaVA data and image root, what the user knows them by, and what to do if they will not do."""

    rows: Path
    images: Path | None
    name: str
    remedy: str


def run(profile: Profile) -> str:
    """Write ``data/<profile>/dataset/`` and ``dataset.json``; the summary tells what was dropped and why."""
    folder = profile.folder / "dataset"
    with atomic_directory(folder) as temporary:
        if profile.dataset.synthetic is not None:
            write_dataset(profile.dataset.synthetic, temporary)
        manifests = {
            stage: _prepare(stage, source, profile.dataset, temporary)
            for stage, source in _sources(profile.dataset, temporary).items()
        }
        metrics = _metrics(manifests, temporary)
    write_json(profile.folder / "dataset.json", metrics)
    items = ", ".join(f"{name} {count}" for name, count in metrics["benchmarks"].items()) or "none of its own"
    parts = [f"{stage}: {manifest.summary()}, {manifest.turns} turns" for stage, manifest in manifests.items()]
    return f"dataset {profile.name}: {'; '.join(parts)}; benchmark items: {items}"


def _sources(settings: DatasetSettings, generated: Path) -> dict[str, _Source]:
    if settings.llava is None:
        return {stage: _generated(stage, settings, generated) for stage in ("stage1", "stage2")}
    llava = settings.llava
    return {
        "stage1": _published("stage1", llava.stage1_json, llava.stage1_images),
        "stage2": _published("stage2", llava.stage2_json, llava.stage2_images),
    }


def _generated(stage: str, settings: DatasetSettings, folder: Path) -> _Source:
    images = getattr(settings.synthetic, f"{stage}_images")
    remedy = (
        f"change dataset.synthetic.{stage}_images ({images}), dataset.synthetic.image_size or "
        f"dataset.max_pixels ({settings.max_pixels})"
    )
    return _Source(folder / f"{stage}.json", folder, f"the generated {stage} data", remedy)


def _published(stage: str, rows: str, images: str | None) -> _Source:
    setting = f"dataset.llava.{stage}_json"
    return _Source(
        Path(rows),
        None if images is None else Path(images),
        f"{rows} ({setting})",
        f"name other data in {setting} or mend these",
    )


def _prepare(stage: str, source: _Source, settings: DatasetSettings, folder: Path) -> Manifest:
    if not source.rows.exists():
        raise FileNotFoundError(f"{source.name} does not exist; put the data there or correct the setting")
    images = source.images
    if embeds_images(source.rows):
        images = embedded_images(folder, stage)
        images.mkdir(parents=True)
    elif images is None or not images.is_dir():
        setting = f"dataset.llava.{stage}_images"
        raise FileNotFoundError(
            f"{images or 'null'} ({setting}) is not a folder; put the images there or correct the setting"
        )
    tally = Tally(images)
    write_lines(folder / f"{stage}.jsonl", tally.lines(read_llava(source.rows, images, settings.max_pixels)))
    manifest = tally.manifest()
    require_kept(manifest, settings.max_dropped_share, source.name, source.remedy)
    return manifest


def _metrics(manifests: dict[str, Manifest], folder: Path) -> dict[str, Any]:
    digest = hashlib.sha256("".join(manifest.fingerprint for manifest in manifests.values()).encode())
    items: dict[str, int] = {}
    for name in BENCHMARKS:
        path = folder / "benchmarks" / f"{name}.jsonl"
        if path.exists():
            items[name] = len(load_benchmark(path))
            digest.update(path.read_bytes())
    stages = {stage: asdict(manifest) for stage, manifest in manifests.items()}
    for dropped in (entry for stage in stages.values() for entry in stage["dropped_by_reason"].values()):
        del dropped["message"]  # a decoder's words, which may differ between machines
    return {**stages, "benchmarks": items, "fingerprint": digest.hexdigest()}


if __name__ == "__main__":
    stage_main(run)
