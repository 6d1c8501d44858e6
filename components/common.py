"""What several stages need: models from a profile, training samples, threads, timings. Heavy imports stay inside."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normalign.data.rows import embedded_images
from normalign.files import read_json, write_json
from normalign.settings import Profile

if TYPE_CHECKING:
    from transformers import LlavaProcessor

    from normalign.vlm.model import NormalignForConditionalGeneration

STATE = Path("state")


def use_threads(profile: Profile) -> None:
    """Pin threads and deterministic kernels: the same machine gives the same bits."""
    import torch

    torch.set_num_threads(profile.compute.threads)
    torch.use_deterministic_algorithms(True, warn_only=profile.compute.device != "cpu")


def image_root(profile: Profile, stage: str) -> Path:
    """Folder that the image paths of a training stage's records are relative to."""
    dataset = profile.folder / "dataset"
    if profile.dataset.llava is None:
        return dataset
    embedded = embedded_images(dataset, stage)
    return embedded if embedded.is_dir() else Path(getattr(profile.dataset.llava, f"{stage}_images") or "")


def initial_model(profile: Profile, variant: str) -> "tuple[NormalignForConditionalGeneration, LlavaProcessor]":
    """The variant's model before any training; the projector is the same for all variants."""
    from normalign.vlm.build import build_model, build_processor

    weights = profile.folder / "weights"
    processor = build_processor(weights, profile.model.image_size)
    model = build_model(
        weights,
        processor,
        image_size=profile.model.image_size,
        feature_layer=profile.model.feature_layer,
        feature_norm=profile.model.feature_norm,
        aligner=asdict(profile.variant(variant)),
        text_norm=read_json(profile.folder / "text_norm.json")["T"],
        seed=profile.stage1.seed,
    )
    use_attention(profile, model)
    return model, processor


def place(profile: Profile, model: "NormalignForConditionalGeneration") -> None:
    """Move a model that is not trained to the profile's device (accelerate places those that are)."""
    model.to(profile.compute.device)  # type: ignore[arg-type]  # transformers narrows torch's signature
    use_attention(profile, model)


def use_attention(profile: Profile, model: "NormalignForConditionalGeneration") -> None:
    """On a CPU and short sequences plain attention is faster than the fused one."""
    model.model.language_model.set_attn_implementation("eager" if profile.compute.device == "cpu" else "sdpa")


def after_stage1(profile: Profile, variant: str) -> "tuple[NormalignForConditionalGeneration, LlavaProcessor]":
    """The variant's model as stage 1 left it: initial weights with the trained projector and aligner."""
    from safetensors.torch import load_file

    model, processor = initial_model(profile, variant)
    trained = load_file(profile.model_folder(variant, "stage1") / "projector.safetensors")
    model.model.multi_modal_projector.load_state_dict(trained)
    return model, processor


def write_timings(name: str, seconds: float, **more: Any) -> None:
    """Timings go under ``state/``, which nothing tracks: they differ from run to run."""
    write_json(STATE / "timings" / f"{name}.json", {"seconds": round(seconds, 2), **more})


@contextlib.contextmanager
def timed(name: str) -> Iterator[dict[str, Any]]:
    """Time a stage; what the body puts into the yielded mapping is written beside the seconds."""
    start = time.perf_counter()
    more: dict[str, Any] = {}
    yield more
    write_timings(name, time.perf_counter() - start, **more)


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most ``count`` of ``items``, evenly spaced, in order."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]
