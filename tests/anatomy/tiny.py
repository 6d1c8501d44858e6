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
        for parameter in model.parameters():  # some classes draw so small weights that nothing is left after a few
            if parameter.dim() > 1 and parameter.std() < 0.1:
                torch.nn.init.normal_(parameter, std=0.2)
    inputs = inputs_of(processor, picture(), PROMPT)
    return model.eval(), processor, inputs


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
    kind: Any = CONFIG_MAPPING[family]
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=False, **fields)


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
    fields: dict[str, Any] = {"image_token_index": tokenizer.image_token_id, "image_seq_length": 4}
    if family == "normalign_llava":
        fields |= {"aligner": {"aligner": "layernorm", "gwc": False}, "text_norm": 0.5, "feature_norm": True}
    return _config(family, _text("llama", tokenizer), vision, **fields), processor


PINPOINTS = [[28, 28], [28, 56], [56, 28]]


def _llava_next(family: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(image_token="<image>")
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=PINPOINTS
    )
    processor = transformers.LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.format(image="<image>"),
    )
    vision = {"model_type": "clip_vision_model", **VISION}
    fields = {"image_token_index": tokenizer.image_token_id, "image_grid_pinpoints": PINPOINTS}
    return _config(family, _text("mistral", tokenizer), vision, **fields), processor


def _llava_onevision(family: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(image_token="<image>", video_token="<video>")
    images = transformers.LlavaOnevisionImageProcessor(size={"height": 28, "width": 28}, image_grid_pinpoints=PINPOINTS)
    processor = transformers.LlavaOnevisionProcessor(
        images,
        tokenizer,
        video_processor=transformers.LlavaOnevisionVideoProcessor(),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE.format(image="<image>"),
    )
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **VISION}
    fields = {
        "image_token_index": tokenizer.image_token_id,
        "video_token_index": tokenizer.video_token_id,
        "image_grid_pinpoints": PINPOINTS,
    }
    return _config(family, _text("qwen2", tokenizer), vision, **fields), processor


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}


def _qwen_vl(family: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(**QWEN_TOKENS)
    size = {"shortest_edge": 56 * 56, "longest_edge": 84 * 84}
    images = transformers.Qwen2VLImageProcessor(size=size, patch_size=PATCH)
    kinds = {
        "qwen2_vl": (transformers.Qwen2VLProcessor, transformers.Qwen2VLVideoProcessor),
        "qwen2_5_vl": (transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor),
        "qwen3_vl": (transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor),
    }
    processor_kind, video_kind = kinds[family]
    template = TEMPLATE.format(image="<|vision_start|><|image_pad|><|vision_end|>")
    processor = processor_kind(images, tokenizer, video_processor=video_kind(), chat_template=template)
    vision: dict[str, Any] = {"depth": 3, "hidden_size": 24, "num_heads": 2, "patch_size": PATCH}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 24, "hidden_size": WIDTH, "mlp_ratio": 2}
    else:
        vision |= {"out_hidden_size": WIDTH, "intermediate_size": 48}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    if family == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in QWEN_TOKENS}
    return _config(family, _text(f"{family}_text", tokenizer, rope_parameters=MROPE), vision, **ids), processor


def _internvl(family: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    images = transformers.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, max_patches=2)
    processor = transformers.InternVLProcessor(
        images,
        tokenizer,
        video_processor=transformers.InternVLVideoProcessor(),
        image_seq_length=4,
        chat_template=TEMPLATE.format(image="<IMG_CONTEXT>"),
    )
    vision = VISION | {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [PATCH, PATCH]}
    fields = {"image_token_id": tokenizer.context_image_token_id, "image_seq_length": 4}
    return _config(family, _text("qwen2", tokenizer), vision, **fields), processor


def _idefics3(family: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(
        "<end_of_utterance>",
        "<global-img>",
        *(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)),
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )
    sizes: dict[str, Any] = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    template = TEMPLATE.format(image="<image>")
    options: dict[str, Any] = {"image_seq_len": 4, "chat_template": template}
    processor: Any
    if family == "smolvlm":
        videos = transformers.SmolVLMVideoProcessor(**sizes)
        processor = transformers.SmolVLMProcessor(
            transformers.SmolVLMImageProcessor(**sizes), tokenizer, videos, **options
        )
    else:
        processor = transformers.Idefics3Processor(transformers.Idefics3ImageProcessor(**sizes), tokenizer, **options)
    vision = VISION | {"image_size": 56}
    fields = {"image_token_id": tokenizer.image_token_id, "scale_factor": 2, "pad_token_id": 0}
    return _config(family, _text("llama", tokenizer), vision, **fields), processor


def _gemma3(family: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(
        image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>"
    )
    images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    processor = transformers.Gemma3Processor(
        images, tokenizer, chat_template=TEMPLATE.format(image="<start_of_image>"), image_seq_length=4
    )
    vision = VISION | {"model_type": "siglip_vision_model", "image_size": 56, "vision_use_head": False}
    text = _text("gemma3_text", tokenizer, sliding_window=1024)
    fields = {
        "image_token_index": tokenizer.image_token_id,
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
        "mm_tokens_per_image": 4,
    }
    return _config(family, text, vision, **fields), processor


def _paligemma(family: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(image_token="<image>")
    images: Any = transformers.SiglipImageProcessor(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    processor = transformers.PaliGemmaProcessor(images, tokenizer)
    vision = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": WIDTH}
    fields = {"image_token_index": tokenizer.image_token_id, "projection_dim": WIDTH, "hidden_size": WIDTH}
    return _config(family, _text("gemma", tokenizer), vision, **fields), processor


GLM_TOKENS = {"image_token": "<|image|>", "video_token": "<|video|>"}
GLM_BOUNDS = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}


def _glm4v(family: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(*GLM_BOUNDS.values(), **GLM_TOKENS)
    size = {"shortest_edge": 56 * 56 * 2, "longest_edge": 84 * 84 * 2}
    kinds: dict[str, tuple[Any, Any, Any]] = {
        "glm4v": (transformers.Glm4vProcessor, transformers.Glm4vImageProcessor, transformers.Glm4vVideoProcessor),
        "glm46v": (transformers.Glm46VProcessor, transformers.Glm46VImageProcessor, transformers.Glm46VVideoProcessor),
    }
    processor_kind, image_kind, video_kind = kinds[family]
    template = TEMPLATE.format(image="<|begin_of_image|><|image|><|end_of_image|>")
    processor = processor_kind(
        image_kind(size=size, patch_size=PATCH), tokenizer, video_processor=video_kind(), chat_template=template
    )
    vision = {
        "model_type": "glm4v_vision",
        "depth": 3,
        "hidden_size": 24,
        "num_heads": 2,
        "image_size": 56,
        "patch_size": PATCH,
        "out_hidden_size": WIDTH,
        "intermediate_size": 48,
    }
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in GLM_BOUNDS.items()}
    ids |= {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in GLM_TOKENS}
    rope = MROPE | {"partial_rotary_factor": 1.0}
    return _config(family, _text("glm4v_text", tokenizer, rope_parameters=rope), vision, **ids), processor


def _kimi_k25(family: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(
        "<|media_begin|>",
        "<|media_end|>",
        image_token="<|media_pad|>",
        video_token="<|kimi_k25_video_placeholder|>",
    )
    images = transformers.Kimi_K25ImageProcessor(size={"max_height": 56, "max_width": 56}, patch_size=PATCH)
    processor = transformers.Kimi_K25Processor(
        images,
        tokenizer,
        video_processor=transformers.Kimi_K25VideoProcessor(),
        chat_template=TEMPLATE.format(image="<|media_begin|><|media_pad|><|media_end|>"),
    )
    text = _text("deepseek_v3", tokenizer) | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 4,
    }
    vision = {name: VISION[name] for name in VISION if name != "image_size"} | {"pos_emb_height": 8, "pos_emb_width": 8}
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in ("image_token", "video_token")}
    return _config(family, text, vision, projection_hidden_size=24, **ids), processor


OVIS_TOKENS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


def _ovis2(family: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(*OVIS_TOKENS, "<IMG_ATOM>", image_token="<image>")
    images = transformers.Ovis2ImageProcessor(size={"height": 28, "width": 28})
    processor = transformers.Ovis2Processor(
        images, tokenizer, chat_template=TEMPLATE.format(image="<image>"), image_seq_length=4
    )
    vision = VISION | {"vocab_size": 40, "hidden_stride": 1, "num_visual_indicator_tokens": 5}
    fields = {
        "image_token_id": tokenizer.convert_tokens_to_ids("<IMG_ATOM>"),
        "visual_indicator_token_ids": tokenizer.convert_tokens_to_ids(list(OVIS_TOKENS)),
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
    }
    return _config(family, _text("qwen2", tokenizer), vision, **fields), processor


MOLMO_TOKENS = {
    "image_start_token_id": "<im_start>",
    "low_res_image_start_token_id": "<low_res_im_start>",
    "image_end_token_id": "<im_end>",
    "image_patch_id": "<im_patch>",
    "frame_start_token_id": "<frame_start>",
    "frame_end_token_id": "<frame_end>",
}


def _molmo2(family: str) -> tuple[Any, Any]:
    tokenizer = tokenizer_with(
        *MOLMO_TOKENS.values(), "<im_col>", "<im_low>", image_token="<|image|>", video_token="<|video|>"
    )
    images = transformers.Molmo2ImageProcessor(
        size={"height": 56, "width": 56}, max_crops=2, overlap_margins=[1, 1], patch_size=PATCH
    )
    processor = transformers.Molmo2Processor(
        images,
        transformers.Molmo2VideoProcessor(),
        tokenizer,
        chat_template=TEMPLATE.format(image="<|image|>"),
    )
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12}
    vision = VISION | heads | {"image_size": [56, 56], "num_position_embeddings": 16}
    adapter = heads | {
        "hidden_size": 24,
        "intermediate_size": 48,
        "text_hidden_size": WIDTH,
        "vision_feature_layer": [-1, -2],
    }
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in MOLMO_TOKENS.items()}
    text = _text("molmo2_text", tokenizer, additional_vocab_size=8)
    return _config(family, text, vision, adapter_config=adapter, **ids), processor


_BUILDERS: dict[str, Callable[[str], tuple[Any, Any]]] = {
    "llava": _llava,
    "normalign_llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "qwen2_vl": _qwen_vl,
    "qwen2_5_vl": _qwen_vl,
    "qwen3_vl": _qwen_vl,
    "internvl": _internvl,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "glm4v": _glm4v,
    "glm46v": _glm4v,
    "kimi_k25": _kimi_k25,
    "ovis2": _ovis2,
    "molmo2": _molmo2,
}
FAMILIES: tuple[str, ...] = tuple(_BUILDERS)
