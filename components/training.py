"""What stages 1 and 2 share: samples from records, the work folder, the run, the per-step log."""

import csv
import hashlib
import io
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor

from components.common import image_root, use_threads, write_timings
from normalign.data.images import open_image
from normalign.data.llava import load_records
from normalign.files import read_json, write_text
from normalign.metrics import rounded
from normalign.norms.aligner import whole
from normalign.settings import Profile
from normalign.training.loop import Samples, train
from normalign.vlm.build import IMAGE_TOKEN
from normalign.vlm.chat import ChatFormat, Encoded
from normalign.vlm.forward import Visual
from normalign.vlm.generate import pixels_of

if TYPE_CHECKING:
    from transformers import LlavaProcessor

    from normalign.vlm.model import NormalignForConditionalGeneration


@dataclass(frozen=True)
class Trained:
    """What a training stage ends with. ``state``: the model's whole state; ``main``: this process is to write it."""

    rows: list[dict[str, Any]]
    state: dict[str, Tensor]
    main: bool


class FeatureCache:
    """Cached vision features by image path; empty when the stage ``features`` was over its budget."""

    def __init__(self, folder: Path) -> None:
        index = read_json(folder / "index.json")
        self.rows = {path: row for row, path in enumerate(index["images"])}
        self.tensors = safe_open(folder / "features.safetensors", framework="pt") if index["cached"] else None

    def get(self, paths: Sequence[str]) -> torch.Tensor | None:
        """Features (B, P, E) of ``paths``, or None when nothing is cached."""
        if self.tensors is None:
            return None
        rows = self.tensors.get_slice("features")
        return torch.cat([rows[self.rows[path] : self.rows[path] + 1] for path in paths])


def samples_of(
    profile: Profile,
    stage: str,
    processor: "LlavaProcessor",
    image_tokens: int,
    cache: FeatureCache | None,
) -> Samples:
    """The stage's records as training samples; features come from ``cache`` where it has them."""
    options = getattr(profile, stage)
    records = load_records(profile.folder / "dataset" / f"{stage}.jsonl")
    root = image_root(profile, stage)
    chat = ChatFormat(processor.tokenizer, image_tokens, IMAGE_TOKEN, profile.model.system_prompt)

    def encode(index: int) -> Encoded:
        record = records[index]
        turns = [(turn.question, turn.answer) for turn in record.turns]
        return chat.encode(
            record.id, turns, record.image, per_turn=options.per_turn, max_tokens=profile.model.max_tokens
        )

    def visual(encoded: Sequence[Encoded]) -> Visual:
        paths = [sample.image for sample in encoded if sample.image is not None]
        if not paths:
            return Visual()
        features = cache.get(paths) if cache is not None else None
        if features is not None:
            return Visual(features=features)
        return Visual(pixels=pixels_of(processor, [open_image(p, root, profile.dataset.max_pixels) for p in paths]))

    return Samples(len(records), encode, visual)


def run_stage(
    profile: Profile,
    stage: str,
    variant: str,
    model: "NormalignForConditionalGeneration",
    processor: "LlavaProcessor",
    cache: FeatureCache | None,
) -> "Trained":
    """Train ``model`` in place and write the per-step log; an interrupted run of the same settings goes on.

    Started by ``accelerate launch``, every process of the run calls this; only the main one writes.
    """
    use_threads(profile)
    compute = profile.compute
    accelerator = Accelerator(
        cpu=compute.device == "cpu", mixed_precision="bf16" if compute.precision == "bf16" else "no"
    )
    work = work_folder(profile, stage, variant)
    start = time.perf_counter()
    rows = train(
        model,
        samples_of(profile, stage, processor, model.config.image_seq_length, cache),
        getattr(profile, stage),
        accelerator=accelerator,
        pad_id=processor.tokenizer.pad_token_id,
        work=work,
        description=f"{stage} {variant}",
    )
    state = {name: whole(value) for name, value in model.state_dict().items()}
    if accelerator.is_main_process:
        write_log(profile.results(variant) / f"{stage}.csv", rows)
        seconds = time.perf_counter() - start
        tokens = sum(row["supervised_tokens"] for row in rows)
        write_timings(f"{stage}-{variant}", seconds, supervised_tokens_per_second=round(tokens / seconds, 2))
    return Trained(rows, state, accelerator.is_main_process)


def work_folder(profile: Profile, stage: str, variant: str) -> Path:
    """Where a stage keeps what it resumes from: one folder per settings and inputs, so that a change starts afresh."""
    inputs: dict[str, Any] = {
        "options": asdict(getattr(profile, stage)),
        "model": asdict(profile.model),
        "compute": asdict(profile.compute),
        "variant": asdict(profile.variant(variant)),
        "weights": read_json(profile.folder / "weights.json"),
        "dataset": read_json(profile.folder / "dataset.json"),
    }
    if stage == "stage2":
        projector = profile.model_folder(variant, "stage1") / "projector.safetensors"
        inputs["stage1"] = hashlib.sha256(projector.read_bytes()).hexdigest()
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return Path("work") / profile.name / stage / variant / digest


def clear_work(profile: Profile, stage: str, variant: str) -> None:
    """Remove the stage's checkpoints, once its result is written."""
    shutil.rmtree(Path("work") / profile.name / stage / variant, ignore_errors=True)


def write_log(path: Path, rows: list[dict[str, Any]]) -> None:
    """One CSV line per optimizer step; frozen modules and absent gains leave their cells empty."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: "" if value is None else rounded(value) for key, value in row.items()})
    write_text(path, buffer.getvalue())


def summary(stage: str, variant: str, rows: list[dict[str, Any]]) -> str:
    """The stage's closing line."""
    dropped = sum(row["dropped"] for row in rows)
    lost = f", {dropped} samples too long for max_tokens" if dropped else ""
    return (
        f"{stage} {variant}: {len(rows)} steps{lost}, loss {rows[0]['loss']:.3f} → {rows[-1]['loss']:.3f}, "
        f"visual tokens at norm {rows[-1]['norm_aligner_output'] or float('nan'):.2f}"
    )
