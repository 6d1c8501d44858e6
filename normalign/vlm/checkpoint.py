"""Saving and loading a trained model with its processor."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, LlavaProcessor

from normalign.vlm.chat import ChatFormat
from normalign.vlm.model import NormalignForConditionalGeneration

SYSTEM_PROMPT_KEY = "normalign_system_prompt"


def save(
    model: NormalignForConditionalGeneration,
    processor: LlavaProcessor,
    folder: Path,
    system_prompt: str | None,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write safetensors, config, processor and chat template to ``folder``, where evaluation reads them.

    Args:
        state: the model's whole state, where ``model`` itself holds only a shard of it.
    """
    model.config.update({SYSTEM_PROMPT_KEY: system_prompt})
    model.save_pretrained(folder, state_dict=state)
    processor.save_pretrained(folder)


def load(folder: Path) -> tuple[NormalignForConditionalGeneration, LlavaProcessor]:
    """The model, in float32 and evaluation mode, and its processor."""
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no checkpoint (config.json is missing)")
    model = NormalignForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = LlavaProcessor(
        image_processor=AutoImageProcessor.from_pretrained(folder),
        tokenizer=tokenizer,
        patch_size=model.config.vision_config.patch_size,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )
    return model.eval(), processor


def chat_format(model: NormalignForConditionalGeneration, processor: LlavaProcessor) -> ChatFormat:
    """The chat format that the checkpoint was trained with."""
    return ChatFormat(
        processor.tokenizer,
        model.config.image_seq_length,
        processor.image_token,
        getattr(model.config, SYSTEM_PROMPT_KEY, None),
    )
