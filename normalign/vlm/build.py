"""Assembling a model from a vision tower's folder and a language model's folder."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlavaProcessor,
    PreTrainedTokenizerBase,
)

from normalign.vlm.model import AlignedProjector, NormalignConfig, NormalignForConditionalGeneration, grid_of

IMAGE_TOKEN = "<image>"
PAD_TOKEN = "<|pad|>"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The language model's tokenizer with an image placeholder and a pad token that is not the end of a turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        raise ValueError(f"{folder}: the tokenizer has no chat template; an instruction-tuned model is needed")
    tokenizer.add_tokens([IMAGE_TOKEN], special_tokens=True)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    return tokenizer


def load_image_processor(folder: Path, image_size: int) -> Any:
    """The vision tower's image processor, set to resize to a square of ``image_size`` without cropping."""
    size = {"height": image_size, "width": image_size}
    return AutoImageProcessor.from_pretrained(folder, size=size, crop_size=size, do_center_crop=False)


def build_processor(weights: Path, image_size: int) -> LlavaProcessor:
    """Tokenizer and image processor of a weights folder (``vision/`` and ``language/``) as one processor."""
    config = AutoConfig.from_pretrained(weights / "vision")
    tokenizer = load_tokenizer(weights / "language")
    return LlavaProcessor(
        image_processor=load_image_processor(weights / "vision", image_size),
        tokenizer=tokenizer,
        patch_size=config.patch_size,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )


def build_model(
    weights: Path,
    processor: LlavaProcessor,
    *,
    image_size: int,
    feature_layer: int,
    feature_norm: bool,
    aligner: dict[str, Any],
    text_norm: float,
    seed: int,
) -> NormalignForConditionalGeneration:
    """Vision tower and language model from ``weights``, with a new projector and aligner between them.

    The projector's weights depend on ``seed`` alone, so every variant starts from the same ones. The embedding gains a
    zero row for each token the processor added (image placeholder, pad).

    Args:
        weights: folder with ``vision/`` and ``language/``.
        aligner: a variant's fields.
        text_norm: T.
    """
    vision = AutoModel.from_pretrained(weights / "vision", dtype=torch.float32)
    language = AutoModelForCausalLM.from_pretrained(weights / "language", dtype=torch.float32)
    extend_embeddings(language, len(processor.tokenizer))
    config = NormalignConfig(
        vision_config=vision.config.to_dict(),
        text_config=language.config.to_dict(),
        image_token_index=processor.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        vision_feature_layer=feature_layer,
        vision_feature_select_strategy="full",
        feature_norm=feature_norm,
        aligner=aligner,
        text_norm=text_norm,
    )
    config.image_seq_length = grid_of(config, image_size) ** 2
    config.tie_word_embeddings = bool(language.config.tie_word_embeddings)
    with torch.device("meta"):
        model = NormalignForConditionalGeneration(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        projector = AlignedProjector(config)
    model.model.vision_tower = vision
    model.model.language_model = language.model
    model.model.multi_modal_projector = projector
    model.lm_head = language.lm_head
    model.generation_config = language.generation_config
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    model.generation_config.do_sample = False
    return model.eval()


def extend_embeddings(language: Any, tokens: int) -> None:
    """Grow the language model's vocabulary to ``tokens`` rows, the new ones zero; never shrink it."""
    old = language.get_input_embeddings().weight.shape[0]
    if tokens <= old:
        return
    language.resize_token_embeddings(tokens, mean_resizing=False)
    with torch.no_grad():
        language.get_input_embeddings().weight[old:] = 0
        language.get_output_embeddings().weight[old:] = 0
