"""Training the tiny model on the tiny conversations."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import LlavaProcessor

from normalign.training.loop import Samples, train
from normalign.training.options import TrainingOptions
from normalign.vlm.chat import Encoded
from normalign.vlm.forward import Visual
from normalign.vlm.model import NormalignForConditionalGeneration

from ..vlm.helpers import encoded, visual_of

STAGE1 = {"projector": 1e-3, "aligner": 1e-3}
STAGE2 = {"vision": 2e-4, "projector": 1e-3, "aligner": 1e-3, "language": 1e-3}
OPTIONS = TrainingOptions(
    learning_rate=STAGE2,
    global_batch=2,
    micro_batch=1,
    epochs=2,
    warmup_ratio=0.2,
    weight_decay=0.0,
    betas=(0.9, 0.999),
    eps=1e-8,
    clip_norm=1.0,
    clip_per_module=False,
    gradient_checkpointing=False,
    seed=42,
    per_turn=True,
    pack=True,
    checkpoint_minutes=1e9,
)


def options(**changes: Any) -> TrainingOptions:
    """``OPTIONS`` with changes: six samples, two a step, two epochs, so six steps."""
    return dataclasses.replace(OPTIONS, **changes)


def samples_of(
    model: NormalignForConditionalGeneration, processor: LlavaProcessor, chosen: TrainingOptions = OPTIONS
) -> Samples:
    """The conversations as training data."""
    items = encoded(model, processor, per_turn=chosen.per_turn)

    def visual(samples: Sequence[Encoded]) -> Visual:
        return visual_of(processor, samples)

    return Samples(len(items), items.__getitem__, visual)


def run(
    model: NormalignForConditionalGeneration,
    samples: Samples,
    chosen: TrainingOptions,
    work: Path,
) -> list[dict[str, Any]]:
    """Train in place on the CPU."""
    return train(model, samples, chosen, accelerator=Accelerator(cpu=True), pad_id=0, work=work, description="test")
