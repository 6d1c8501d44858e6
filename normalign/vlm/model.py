"""A LLaVA model whose projector ends in an aligner.

Shape suffixes: B batch, P visual tokens per image, L sequence length, D width of the language model, E width of the
vision tower.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.llava.modeling_llava import LlavaModel, LlavaMultiModalProjector

from normalign.norms.aligner import Aligner, build_aligner

FINAL_NORM_NAMES = ("layernorm", "post_layernorm", "vision_model.post_layernorm", "norm")


class NormalignConfig(LlavaConfig):
    """LLaVA's configuration and: ``aligner`` (a variant's fields), ``text_norm`` (T), ``feature_norm``."""

    model_type = "normalign_llava"

    aligner: dict | None = None
    text_norm: float = 1.0
    feature_norm: bool = False

    # Sub-configurations are objects once the constructor has run; the parent also allows mappings.
    vision_config: Any = None
    text_config: Any = None
    vision_feature_layer: int = -2


class AlignedProjector(LlavaMultiModalProjector):
    """LLaVA's two-layer projector, then the aligner: features (..., E) to visual tokens (..., D)."""

    def __init__(self, config: NormalignConfig) -> None:
        super().__init__(config)
        self.aligner: Aligner = build_aligner(
            config.aligner or {"aligner": "none"}, config.text_config.hidden_size, config.text_norm
        )

    def forward(self, image_features: Tensor) -> Tensor:
        return self.aligner(super().forward(image_features))


def vision_layers(tower: Any) -> nn.ModuleList:
    """The transformer layers of a vision tower, found by their number.

    Raises:
        ValueError: no list of ``config.num_hidden_layers`` modules in the tower.
    """
    depth = tower.config.num_hidden_layers
    for module in tower.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ValueError(f"{type(tower).__name__}: found no list of {depth} transformer layers")


def final_norm(tower: nn.Module) -> nn.Module:
    """The normalisation after a vision tower's last layer."""
    for name in FINAL_NORM_NAMES:
        try:
            return tower.get_submodule(name)
        except AttributeError:
            continue
    raise ValueError(f"{type(tower).__name__}: found no final norm; set feature_norm to false")


def grid_of(config: NormalignConfig, image_size: int) -> int:
    """Visual tokens along one side of a square image; what is left over at its edge is not seen (384 = 27 · 14 + 6).

    Raises:
        ValueError: the image is smaller than a patch.
    """
    patch = config.vision_config.patch_size
    if image_size < patch:
        raise ValueError(f"model.image_size is {image_size}, smaller than the vision tower's patches of {patch} pixels")
    return image_size // patch


class NormalignModel(LlavaModel):
    """LLaVA without the language-model head, its projector replaced by one that ends in an aligner."""

    config_class = NormalignConfig

    def __init__(self, config: NormalignConfig) -> None:
        super().__init__(config)
        self.multi_modal_projector = AlignedProjector(config)

    config: NormalignConfig

    def encode(self, pixel_values: Tensor) -> Tensor:
        """Vision tower's patch features (B, P, E) of images (B, 3, H, W), from the configured layer.

        Layers are hooked: what transformers returns as the last hidden state is after the final norm in some towers and
        before it in others. Leading tokens that are not patches (CLS, registers) are dropped: their number is what the
        tower emits beyond the grid.
        """
        tower, index = self.vision_tower, self.config.vision_feature_layer
        layers = vision_layers(tower)
        if not 1 <= (index if index > 0 else index + len(layers) + 1) <= len(layers):
            raise ValueError(
                f"model.feature_layer is {index}; the tower has layers 1 to {len(layers)} (-1 is the last)"
            )
        caught: list[Tensor] = []

        def catch(_module: nn.Module, _inputs: Any, output: Any) -> None:
            caught.append(output[0] if isinstance(output, tuple) else output)

        handle = layers[index if index < 0 else index - 1].register_forward_hook(catch)
        try:
            tower(pixel_values, **self._position_arguments(pixel_values))
        finally:
            handle.remove()
        features = final_norm(tower)(caught[0]) if self.config.feature_norm else caught[0]
        patches = grid_of(self.config, pixel_values.shape[-1]) ** 2
        extra = features.shape[1] - patches
        if extra < 0:
            raise ValueError(f"the vision tower gave {features.shape[1]} tokens for a grid of {patches} patches")
        return features[:, extra:]

    def unused_vision_parameters(self) -> set[str]:
        """Names (within the vision tower) of parameters that visual tokens do not depend on.

        Layers behind the feature layer, a pooling head, mask tokens: found by walking the graph of one blank image.
        """
        size = round(self.config.image_seq_length**0.5) * self.config.vision_config.patch_size
        parameters = dict(self.vision_tower.named_parameters())
        wanted = {name: p.requires_grad for name, p in parameters.items()}
        self.vision_tower.requires_grad_(True)
        with torch.enable_grad():
            features = self.encode(torch.zeros(1, 3, size, size, device=self.device, dtype=self.dtype))
        for name, parameter in parameters.items():
            parameter.requires_grad_(wanted[name])
        pending, seen, leaves = [features.grad_fn], set(), set()
        while pending:
            node: Any = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaves.add(id(getattr(node, "variable", None)))
            pending += [following for following, _ in node.next_functions]
        return {name for name, parameter in parameters.items() if id(parameter) not in leaves}

    def _position_arguments(self, pixel_values: Tensor) -> dict[str, bool]:
        """SigLIP and CLIP interpolate their position grid only when told to; DINOv2 always does."""
        resized = pixel_values.shape[-1] != self.vision_tower.config.image_size
        return {"interpolate_pos_encoding": True} if resized and self.vision_tower.config.model_type != "dinov2" else {}

    def project(self, features: Tensor) -> Tensor:
        """Visual tokens (B, P, D) from vision features (B, P, E): projector, then aligner."""
        return self.multi_modal_projector(features)

    def embed(self, input_ids: Tensor, visual_tokens: Tensor | None) -> Tensor:
        """Input embeddings (B, L, D): text embeddings with the image placeholders replaced by ``visual_tokens``.

        Raises:
            ValueError: the number of placeholders is not the number of visual tokens.
        """
        embeddings = self.get_input_embeddings()(input_ids)
        placeholders = input_ids == self.config.image_token_index
        count = int(placeholders.sum())
        available = 0 if visual_tokens is None else visual_tokens.shape[0] * visual_tokens.shape[1]
        if count != available:
            raise ValueError(f"{count} image placeholders in the text, {available} visual tokens to put there")
        if visual_tokens is None:
            return embeddings
        return embeddings.masked_scatter(placeholders.unsqueeze(-1), visual_tokens.to(embeddings.dtype))

    def get_image_features(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        visual_tokens = self.project(self.encode(pixel_values))
        return BaseModelOutputWithPooling(pooler_output=list(visual_tokens))  # type: ignore[arg-type]  # as LLaVA does


class NormalignForConditionalGeneration(LlavaForConditionalGeneration):
    """The model that is trained, evaluated and saved. ``forward`` and ``generate`` are LLaVA's own."""

    config_class = NormalignConfig
    config: NormalignConfig

    def __init__(self, config: NormalignConfig) -> None:
        super(LlavaForConditionalGeneration, self).__init__(config)
        self.model = NormalignModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        # transformers sets the weight of anything called LayerNorm to 1, which would undo the aligner's gain.
        if not isinstance(module, Aligner):
            super()._init_weights(module)


AutoConfig.register(NormalignConfig.model_type, NormalignConfig)
AutoModel.register(NormalignConfig, NormalignModel)
AutoModelForImageTextToText.register(NormalignConfig, NormalignForConditionalGeneration)

MODULE_PATHS = {
    "vision": "model.vision_tower",
    "projector": "model.multi_modal_projector",
    "aligner": "model.multi_modal_projector.aligner",
    "language": "model.language_model",
}


def module_of(parameter: str) -> str:
    """Which of vision, projector, aligner, language a parameter's full name belongs to.

    Raises:
        ValueError: the name belongs to none of them.
    """
    if parameter.startswith("lm_head."):
        return "language"
    for module in ("aligner", "projector", "vision", "language"):
        if parameter.startswith(MODULE_PATHS[module] + "."):
            return module
    raise ValueError(f"parameter {parameter} belongs to no known module")
