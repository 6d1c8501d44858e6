"""Everything that is measured in one forward pass of any vision-language model (SCIENCE §3).

Shape suffixes: B samples, L length, H heads, N tokens.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor

from normalign.anatomy import Anatomy, visual_mask
from normalign.diagnosis.attention import AttentionStatistics, LastLook
from normalign.diagnosis.capture import layer_parts, watch_attention, watch_layers
from normalign.diagnosis.interface import InterfaceNorms
from normalign.diagnosis.layers import LayerStatistics, Masks
from normalign.diagnosis.routing import RoutingStatistics, find_mixtures
from normalign.diagnosis.tokens import exact, token_norms
from normalign.embeddings.statistics import text_norm_statistics

ATTENTION_BYTES = 1 << 30  # of one layer's attention weights; above, attention is not measured on that batch
ROWS_AT_ONCE = 16384


class ModelProbe:
    """Measures a model over any number of batches; one forward pass each, without the output matrix."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.parts = layer_parts(anatomy.layers)
        self.samples = 0
        self.layers = LayerStatistics(len(anatomy.layers), anatomy.width)
        self.attention = AttentionStatistics(len(anatomy.layers))
        self.interface = InterfaceNorms(anatomy)
        self.routing = RoutingStatistics(find_mixtures(anatomy.layers))
        self.attention_reason = "the model's attention returned no weights"

    @torch.no_grad()
    def add(self, inputs: Mapping[str, Any]) -> list[LastLook]:
        """Run the model on a batch of processor outputs and measure it; returns where each sample's last token looks.

        Args:
            inputs: what the model's forward takes; ``input_ids`` (B, L), and ``attention_mask`` where there is padding.

        Raises:
            ValueError: a sample without visual tokens.
        """
        masks = self._masks(inputs)
        looks = [LastLook() for _ in range(len(masks.visual_BL))]

        def look(layer: int, weights_BHLL: Tensor) -> None:
            self.attention.add(layer, weights_BHLL, masks)
            for sample, weights_HLL in enumerate(weights_BHLL):
                looks[sample].add(layer, weights_HLL, masks.visual_BL[sample], masks.text_BL[sample])

        moved = {key: self._moved(value) for key, value in inputs.items()}
        with ExitStack() as stack:
            if self._weights_returned(*masks.visual_BL.shape):
                stack.enter_context(watch_attention(self.anatomy.layers, look))
            stack.enter_context(watch_layers(self.parts, lambda step: self.layers.add(step, masks)))
            stack.enter_context(self.interface.watching(masks))
            stack.enter_context(self.routing.watching(masks))
            self.anatomy.core(**moved, use_cache=False)
        self.samples += len(looks)
        return looks

    def _moved(self, value: Any) -> Any:
        """An input where the model takes it (of an offloaded one: where it computes), in the model's precision."""
        if not isinstance(value, Tensor):
            return value
        model: Any = self.anatomy.model
        devices = (parameter.device for parameter in model.parameters())
        device = next((device for device in devices if device.type != "meta"), torch.device("cpu"))
        return value.to(device, model.dtype) if value.is_floating_point() else value.to(device)

    def _masks(self, inputs: Mapping[str, Any]) -> Masks:
        input_ids_BL: Tensor = inputs["input_ids"]
        visual_BL = visual_mask(self.anatomy, input_ids_BL)
        if not visual_BL.any(dim=1).all():
            raise ValueError(
                f"a sample has no visual token (id {self.anatomy.image_token_id}) in its input_ids; "
                "the processor put no image placeholder there"
            )
        padding_BL = inputs.get("attention_mask")
        text_BL = ~visual_BL if padding_BL is None else ~visual_BL & padding_BL.bool()
        return Masks(visual_BL, text_BL)

    def _weights_returned(self, samples: int, length: int) -> bool:
        """Choose the attention implementation for a batch: weights exist only in the plain one, if they fit."""
        language: Any = self.anatomy.language
        heads = int(getattr(language.config, "num_attention_heads", 1))
        fits = samples * heads * length**2 * 4 <= ATTENTION_BYTES
        if not fits:
            self.attention_reason = (
                f"the attention weights of {length} tokens and {heads} heads exceed {ATTENTION_BYTES >> 20} MiB a layer"
            )
        if hasattr(language, "set_attn_implementation"):
            language.set_attn_implementation("eager" if fits else "sdpa")
        return fits

    def result(self, base_text_norm: float | None = None) -> dict[str, Any]:
        """All figures so far, as one JSON-like mapping.

        Args:
            base_text_norm: T of the language model that this one was made from.

        Raises:
            ValueError: nothing was measured, or a modality had no tokens.
        """
        anatomy = self.anatomy
        text_norm = embedding_text_norm(anatomy)
        visual, text = self.interface.mean("visual_at_merge"), self.interface.mean("text_at_merge")
        summary = self.layers.summary()
        interface = self.interface.summary()
        attention = self.attention.summary()
        return {
            "family": anatomy.family,
            "width": anatomy.width,
            "T": text_norm,
            "T_as_used": text_norm * anatomy.embedding_scale,
            "embedding_scale": anatomy.embedding_scale,
            "base_T": base_text_norm,
            "counts": {
                "samples": self.samples,
                "visual_tokens": interface["visual_at_merge"]["tokens"],
                "text_tokens": interface["text_at_merge"]["tokens"],
            },
            "interface": interface,
            "ratio": visual / (text_norm * anatomy.embedding_scale),
            "k_in_context": visual / text,
            **summary,
            "attention": attention,
            **({"attention_reason": self.attention_reason} if attention is None else {}),
            "routing": self.routing.summary(),
            "injected_layers": list(anatomy.injected_layers),
            "visual_vocabulary": anatomy.visual_vocabulary,
            "theory": self.layers.theory(),
        }


def embedding_text_norm(anatomy: Anatomy) -> float:
    """T of the model as its embedding is stored: mean norm of the non-zero rows (UB §5.1)."""
    with align_module_device(anatomy.embedding):  # where it is offloaded, its weights come for the while
        table_VD = anatomy.embedding.weight.detach()
        norms = [token_norms(exact(rows_ND)).cpu() for rows_ND in table_VD.split(ROWS_AT_ONCE)]
    return float(text_norm_statistics(torch.cat(norms).numpy(), anatomy.width)["T"])
