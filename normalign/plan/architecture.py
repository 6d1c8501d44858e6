"""The shape of a model and its number of parameters, from configurations.

Every count equals that of the module which transformers builds (a test compares them).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VISION_TYPES = ("siglip_vision_model", "clip_vision_model", "dinov2")
LANGUAGE_TYPES = ("llama", "qwen2")


@dataclass(frozen=True)
class VisionTower:
    """A vision transformer; ``embedding``, ``layer``, ``final_norm`` and ``other`` count parameters.

    ``other`` are those that visual tokens never depend on: a pooling head, a mask token. ``leading`` tokens come before
    the patches. ``scales``: vectors that scale a layer's branches (DINOv2's LayerScale).
    """

    width: int
    hidden: int
    layers: int
    heads: int
    patch: int
    leading: int
    scales: int
    embedding: int
    layer: int
    final_norm: int
    other: int

    @property
    def parameters(self) -> int:
        return self.embedding + self.layers * self.layer + self.final_norm + self.other

    def layers_used(self, feature_layer: int) -> int:
        """Number of layers that features from ``feature_layer`` (1 is the first, -1 the last) depend on."""
        used = feature_layer if feature_layer > 0 else feature_layer + self.layers + 1
        if not 1 <= used <= self.layers:
            raise ValueError(f"model.feature_layer is {feature_layer}; the tower has layers 1 to {self.layers}")
        return used

    def unused(self, feature_layer: int, feature_norm: bool) -> int:
        """Parameters that the features do not depend on, and that therefore never train."""
        behind = (self.layers - self.layers_used(feature_layer)) * self.layer
        return behind + self.other + (0 if feature_norm else self.final_norm)

    def patches(self, image_size: int) -> int:
        """Visual tokens of a square image; pixels beyond a whole number of patches are not seen (384 = 27 x 14 + 6)."""
        if image_size < self.patch:
            raise ValueError(f"model.image_size is {image_size}, less than the patch size {self.patch}")
        return (image_size // self.patch) ** 2


@dataclass(frozen=True)
class LanguageModel:
    """A decoder; ``layer`` counts the parameters of one layer. ``vocabulary`` includes the rows ``added`` to it."""

    width: int
    hidden: int
    layers: int
    heads: int
    head_width: int
    vocabulary: int
    added: int
    tied: bool
    layer: int
    layer_class: str

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding, and of the head again."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.width + self.embedding * (1 if self.tied else 2)


class _Fields:
    """A configuration's fields, with errors that name the file and the field."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def number(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None:
            value = default
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]  # a square, written as height and width
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{self.where}: {name} is {value!r}; a whole number above 0 is needed")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.config.get(name, default))

    def kind(self, known: tuple[str, ...]) -> str:
        found = self.config.get("model_type")
        if found not in known:
            raise ValueError(f"{self.where}: no estimate for model_type {found!r}; known: {', '.join(known)}")
        return found


def vision_tower(config: Mapping[str, Any], where: str) -> VisionTower:
    """The tower that ``config`` (read from ``where``) describes; of an image-text pair, its vision part.

    Raises:
        ValueError: an unknown model type, or a dimension is missing.
    """
    config = config.get("vision_config") or config
    fields = _Fields(config, where)
    kind = fields.kind(VISION_TYPES)
    width, layers = fields.number("hidden_size"), fields.number("num_hidden_layers")
    patch, channels = fields.number("patch_size"), fields.number("num_channels", 3)
    if kind == "dinov2":
        if fields.flag("use_swiglu_ffn", False):
            raise ValueError(f"{where}: no estimate for use_swiglu_ffn: true (DINOv2-giant)")
        hidden = int(width * fields.number("mlp_ratio", 4))
    else:
        hidden = fields.number("intermediate_size")
    leading = 0 if kind == "siglip_vision_model" else 1
    positions = (fields.number("image_size") // patch) ** 2 + leading
    patch_bias = 0 if kind == "clip_vision_model" else width
    mlp = 2 * width * hidden + hidden + width
    scales = 2 if kind == "dinov2" else 0
    query_bias = 3 * width if kind != "dinov2" or fields.flag("qkv_bias", True) else 0
    attention = 4 * width * width + query_bias + width
    before = 2 * width if kind == "clip_vision_model" else 0  # CLIP has a norm before the first layer
    other = 0
    if kind == "siglip_vision_model" and fields.flag("vision_use_head", True):
        other = width + (4 * width * width + 4 * width) + 2 * width + mlp
    if kind == "dinov2" and fields.flag("use_mask_token", True):
        other = width
    return VisionTower(
        width=width,
        hidden=hidden,
        layers=layers,
        heads=fields.number("num_attention_heads"),
        patch=patch,
        leading=leading,
        scales=scales,
        embedding=channels * patch * patch * width + patch_bias + positions * width + leading * width + before,
        layer=attention + mlp + 4 * width + scales * width,
        final_norm=2 * width,
        other=other,
    )


def language_model(config: Mapping[str, Any], where: str, tokens: int | None) -> LanguageModel:
    """The decoder that ``config`` (read from ``where``) describes.

    Args:
        tokens: embedding rows that the tokenizer needs; None: two more than the configuration has.

    Raises:
        ValueError: an unknown model type, or a dimension is missing.
    """
    fields = _Fields(config, where)
    kind = fields.kind(LANGUAGE_TYPES)
    width, hidden, heads = (fields.number(n) for n in ("hidden_size", "intermediate_size", "num_attention_heads"))
    keys = fields.number("num_key_value_heads", heads)
    head_width = fields.number("head_dim", width // heads)
    stored = fields.number("vocab_size")
    vocabulary = max(stored, stored + 2 if tokens is None else tokens)
    queries, shared = heads * head_width, keys * head_width
    attention = 2 * width * queries + 2 * width * shared
    if kind == "qwen2":
        attention += queries + 2 * shared
    elif fields.flag("attention_bias", False):
        attention += queries + 2 * shared + width
    mlp = 3 * width * hidden
    if kind == "llama" and fields.flag("mlp_bias", False):
        mlp += 2 * hidden + width
    return LanguageModel(
        width=width,
        hidden=hidden,
        layers=fields.number("num_hidden_layers"),
        heads=heads,
        head_width=head_width,
        vocabulary=vocabulary,
        added=vocabulary - stored,
        tied=fields.flag("tie_word_embeddings", False),
        layer=attention + mlp + 2 * width,
        layer_class={"llama": "LlamaDecoderLayer", "qwen2": "Qwen2DecoderLayer"}[kind],
    )


def projector_parameters(vision_width: int, width: int) -> tuple[int, int]:
    """Parameters of the projector's two linear layers."""
    return vision_width * width + width, width * width + width
