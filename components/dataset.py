"""Stage ``dataset``: generates or reads training data and benchmarks, keeps the records that pass."""

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from components import stage_main
from normalign.data.llava import read_llava
from normalign.data.manifest import Manifest, Tally, require_kept
from normalign.data.rows import embedded_images, embeds_images
from normalign.data.synthetic import BENCHMARKS, load_benchmark, write_dataset
from normalign.files import atomic_directory, write_json, write_jsonl
from normalign.settings import DatasetSettings, Profile


def run(profile: Profile) -> str:
    """Write ``data/<profile>/dataset/`` and ``dataset.json``; the summary tells what was dropped and why."""
    folder = profile.folder / "dataset"
    with atomic_directory(folder) as temporary:
        if profile.dataset.synthetic is not None:
            write_dataset(profile.dataset.synthetic, temporary)
        manifests = {
            stage: _prepare(stage, source, images, profile.dataset, temporary)
            for stage, (source, images) in _sources(profile.dataset, temporary).items()
        }
        metrics = _metrics(manifests, temporary)
    write_json(profile.folder / "dataset.json", metrics)
    items = ", ".join(f"{name} {count}" for name, count in metrics["benchmarks"].items()) or "none of its own"
    parts = [f"{stage}: {manifest.summary()}, {manifest.turns} turns" for stage, manifest in manifests.items()]
    return f"dataset {profile.name}: {'; '.join(parts)}; benchmark items: {items}"


def _sources(settings: DatasetSettings, generated: Path) -> dict[str, tuple[Path, Path]]:
    """Per stage the LLaVA data and the image root."""
    if settings.llava is None:
        return {stage: (generated / f"{stage}.json", generated) for stage in ("stage1", "stage2")}
    llava = settings.llava
    return {
        "stage1": (Path(llava.stage1_json), Path(llava.stage1_images)),
        "stage2": (Path(llava.stage2_json), Path(llava.stage2_images)),
    }


def _prepare(stage: str, source: Path, images: Path, settings: DatasetSettings, folder: Path) -> Manifest:
    if embeds_images(source):
        images = embedded_images(folder, stage)
        images.mkdir(parents=True)
    tally = Tally(images)
    records = tally.kept(read_llava(source, images, settings.max_pixels))
    write_jsonl(folder / f"{stage}.jsonl", (record.to_json() for record in records))
    manifest = tally.manifest()
    require_kept(manifest, settings.max_dropped_share, source)
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
    return {**stages, "benchmarks": items, "fingerprint": digest.hexdigest()}


if __name__ == "__main__":
    stage_main(run)
