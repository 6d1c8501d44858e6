"""A tiny random model of every family, with its real processor on a byte-level tokenizer, and one sample for it.

Random weights from a fixed seed, float32, evaluation mode; width 32, three decoder layers, a few visual tokens.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast

import normalign.vlm.model  # noqa: F401  (registers normalign_llava)
from normalign.anatomy import inputs_of
from normalign.weights.random_weights import byte_tokenizer

WIDTH = 32
LAYERS = 3
PATCH = 14
SEED = 7
PROMPT = "What is this?"
TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 2 * PATCH,
    "patch_size": PATCH,
}
TEMPLATE = (
    "{{% for m in messages %}}<|im_start|>{{{{ m['role'] }}}}\n"
    "{{% for c in m['content'] %}}{{% if c['type'] == 'image' %}}{image}{{% else %}}{{{{ c['text'] }}}}{{% endif %}}"
    "{{% endfor %}}<|im_end|>\n{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
Tiny = tuple[Any, Any, dict[str, Any]]


def picture(width: int = 40, height: int = 30) -> Image.Image:
    """A picture of noise."""
    noise = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def tiny_vlm(family: str) -> Tiny:
    """(model, processor, inputs of one sample) of a family of ``FAMILIES``."""
    config, processor = _BUILDERS[family](family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
        for name, parameter in model.named_parameters():  # what some classes leave at zero would hide mistakes
            if parameter.dim() > 1 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)
            assert torch.isfinite(parameter).all(), name
    return model.eval(), processor, inputs_of(processor, picture(), PROMPT)


def tokenizer_with(*others: str, **special: str) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer with more special tokens, each of ``special`` an attribute by its name (and ``_id``)."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().backend_tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=special,
    )
    tokenizer.add_tokens(list(others), special_tokens=True)
    return tokenizer


def _config(family: str, text: dict[str, Any], vision: dict[str, Any], **fields: Any) -> Any:
    return CONFIG_MAPPING[family](text_config=text, vision_config=vision, tie_word_embeddings=False, **fields)


def _text(model_type: str, tokenizer: PreTrainedTokenizerFast, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, "vocab_size": len(tokenizer), **TEXT, **fields}


def _llava(family: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(image_token="<image>")
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.format(image="<image>"),
    )
    vision = {"model_type": "clip_vision_model", **VISION}
    fields = {"image_token_id": tokenizer.image_token_id, "image_seq_length": 4}
    return _config(family, _text("llama", tokenizer), vision, **fields), processor


_BUILDERS: dict[str, Callable[[str], tuple[Any, Any]]] = {"llava": _llava}
FAMILIES: tuple[str, ...] = tuple(_BUILDERS)
