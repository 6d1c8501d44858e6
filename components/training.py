"""What stages 1 and 2 share: samples from records, the work folder, the run, the per-step log."""

import contextlib
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
import transformers
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor

from components.common import image_root, use_threads, write_timings
from components.live import LiveCurves
from normalign.data.images import open_image
from normalign.data.llava import Records
from normalign.data.manifest import Dropped, count_dropped, explain_dropped
from normalign.files import NotWritten, read_json, write_text
from normalign.metrics import rounded
from normalign.norms.aligner import whole
from normalign.settings import ComputeSettings, Profile
from normalign.training.loop import Samples, train
from normalign.vlm.build import IMAGE_TOKEN
from normalign.vlm.chat import ChatFormat, Encoded, SampleDroppedError
from normalign.vlm.forward import Visual
from normalign.vlm.generate import pixels_of

if TYPE_CHECKING:
    from transformers import LlavaProcessor

    from normalign.vlm.model import NormalignForConditionalGeneration

ROOT = Path(__file__).parents[1]
# What dvc.yaml has both stages depend on, besides the stage's own module.
CODE = (
    "components/common.py",
    "components/training.py",
    "normalign/data/images.py",
    "normalign/data/llava.py",
    "normalign/norms",
    "normalign/vlm",
    "normalign/training",
)


@dataclass(frozen=True)
class Trained:
    """What a training stage ends with.

    ``lost``: samples that were dropped; ``state``: the model's whole state; ``main``: this process is to write it.
    """

    rows: list[dict[str, Any]]
    lost: int
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


class DroppedSamples:
    """Records that could not be encoded, by reason; kept in the work folder, so that a resumed run knows them all.

    Every process notes its own in a file of its own.
    """

    def __init__(self, work: Path, process: int) -> None:
        self.folder, self.file = work, work / f"dropped-{process}.jsonl"

    def note(self, index: int, record_id: str, error: SampleDroppedError) -> None:
        """Add the record at ``index``; if it comes up again in another epoch it is still one.

        Raises:
            NotWritten: there is no space or no permission.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as handle:
                # The line break comes first: whatever a kill cut short spoils no other line.
                handle.write(f"\n{json.dumps([index, record_id, error.reason, str(error)])}")
        except OSError as failed:
            raise NotWritten(self.file, f"{failed.strerror}; free disk space or mend its permissions") from failed

    def by_reason(self) -> dict[str, Dropped]:
        """Counts and the ids of the first few, of all processes that write to this folder."""
        noted: dict[int, tuple[str, str, str]] = {}
        for file in sorted(self.folder.glob("dropped-*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    index, record_id, reason, message = json.loads(line)
                    noted[index] = (reason, record_id, message)
        dropped: dict[str, Dropped] = {}
        for _, described in sorted(noted.items()):
            count_dropped(dropped, *described)
        return dict(sorted(dropped.items()))

    def require_share(self, stage: str, lost: int, total: int, allowed: float) -> None:
        """Refuse a run that trained on too little of its data.

        Raises:
            ValueError: more than the share ``allowed`` of ``total`` samples is ``lost``; names reasons and records.
        """
        if lost <= allowed * total:
            return
        raise ValueError(
            f"{stage}: {lost} of {total} samples could not be trained on; dataset.max_dropped_share allows "
            f"{allowed:.1%}. Reasons: {explain_dropped(self.by_reason())}. Raise model.max_tokens, mend the data, or "
            "raise the bound"
        )


def samples_of(
    profile: Profile,
    stage: str,
    processor: "LlavaProcessor",
    image_tokens: int,
    cache: FeatureCache | None,
    dropped: DroppedSamples,
) -> Samples:
    """The stage's records as training samples; features come from ``cache`` where it has them.

    A record that cannot be encoded is noted in ``dropped``; the run stops with the step after which they are more than
    ``dataset.max_dropped_share`` of all that will ever be asked for.
    """
    options = getattr(profile, stage)
    records = Records(profile.folder / "dataset" / f"{stage}.jsonl")
    root = image_root(profile, stage)
    chat = ChatFormat(processor.tokenizer, image_tokens, IMAGE_TOKEN, profile.model.system_prompt)
    planned, allowed = len(records) * options.epochs, profile.dataset.max_dropped_share

    def encode(index: int) -> Encoded:
        record = records[index]
        turns = [(turn.question, turn.answer) for turn in record.turns]
        try:
            return chat.encode(
                record.id, turns, record.image, per_turn=options.per_turn, max_tokens=profile.model.max_tokens
            )
        except SampleDroppedError as error:
            dropped.note(index, record.id, error)
            raise

    def visual(encoded: Sequence[Encoded]) -> Visual:
        paths = [sample.image for sample in encoded if sample.image is not None]
        if not paths:
            return Visual()
        features = cache.get(paths) if cache is not None else None
        if features is not None:
            return Visual(features=features)
        return Visual(pixels=pixels_of(processor, [open_image(p, root, profile.dataset.max_pixels) for p in paths]))

    def check_lost(lost: int) -> None:
        dropped.require_share(stage, lost, planned, allowed)

    return Samples(len(records), encode, visual, check_lost)


def accelerator_for(compute: ComputeSettings) -> Accelerator:
    """The accelerator of this process, on the device and at the precision of ``compute``.

    Raises:
        ValueError: this machine offers another device; accelerate by itself would take it without a word.
    """
    accelerator = Accelerator(
        cpu=compute.device == "cpu", mixed_precision="bf16" if compute.precision == "bf16" else "no"
    )
    if accelerator.device.type != compute.device:
        raise ValueError(
            f"compute.device: the profile is for {compute.device!r}, but training would run on "
            f"{accelerator.device.type!r}; run it on a machine with {compute.device!r}, or change the setting"
        )
    return accelerator


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
    accelerator = accelerator_for(profile.compute)
    work = work_folder(profile, stage, variant)
    dropped = DroppedSamples(work, accelerator.process_index)
    start = time.perf_counter()
    samples = samples_of(profile, stage, processor, model.config.image_seq_length, cache, dropped)
    curves = LiveCurves(profile.name, stage, variant, work)
    rows = train(
        model,
        samples,
        getattr(profile, stage),
        accelerator=accelerator,
        pad_id=processor.tokenizer.pad_token_id,
        work=work,
        description=f"{stage} {variant}",
        saves_frozen=stage != "stage1",
        watch=curves,
    )
    curves.close()
    planned = samples.count * getattr(profile, stage).epochs
    lost = planned - sum(row["samples"] for row in rows)
    state = {}
    for name, value in model.state_dict().items():
        full = whole(value)  # every process takes part, the main one keeps it
        if accelerator.is_main_process:
            state[name] = full.cpu()
    if accelerator.is_main_process:
        write_log(profile.results(variant) / f"{stage}.csv", rows)
        seconds = time.perf_counter() - start
        tokens = sum(row["supervised_tokens"] for row in rows)
        write_timings(f"{stage}-{variant}", seconds, supervised_tokens_per_second=round(tokens / seconds, 2))
        if lost:
            print(f"{stage} {variant}: records not trained on: {explain_dropped(dropped.by_reason())}", flush=True)
    return Trained(rows, lost, state, accelerator.is_main_process)


def work_folder(profile: Profile, stage: str, variant: str) -> Path:
    """Where a stage keeps what it resumes from: one folder per settings, inputs and code; a change starts afresh."""
    inputs: dict[str, Any] = {
        "code": code_digest(stage),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "options": asdict(getattr(profile, stage)),
        "model": asdict(profile.model),
        "compute": asdict(profile.compute),
        "variant": asdict(profile.variant(variant)),
        "weights": read_json(profile.folder / "weights.json"),
        "dataset": read_json(profile.folder / "dataset.json"),
        "text_norm": read_json(profile.folder / "text_norm.json"),
    }
    if stage == "stage1":
        inputs["features"] = read_json(profile.folder / "features" / "index.json")["cached"]
    if stage == "stage2":
        projector = profile.model_folder(variant, "stage1") / "projector.safetensors"
        inputs["stage1"] = hashlib.sha256(projector.read_bytes()).hexdigest()
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
    return Path("work") / profile.name / stage / variant / digest


def code_digest(stage: str) -> str:
    """SHA-256 over the code whose change has DVC run ``stage`` again."""
    digest = hashlib.sha256()
    for path in (ROOT / name for name in (f"components/{stage}.py", *CODE)):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(ROOT).as_posix()}\0{file.read_text(encoding='utf-8')}\0".encode())
    return digest.hexdigest()


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


def summary(stage: str, variant: str, trained: Trained) -> str:
    """The stage's closing line."""
    rows = trained.rows
    lost = f", {trained.lost} samples dropped" if trained.lost else ""
    return (
        f"{stage} {variant}: {len(rows)} steps{lost}, loss {rows[0]['loss']:.3f} → {rows[-1]['loss']:.3f}, "
        f"visual tokens at norm {rows[-1]['norm_aligner_output'] or float('nan'):.2f}"
    )
