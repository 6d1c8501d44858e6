"""One forward pass over packed rows, with logits only where they are needed.

Shape suffixes: B rows, L row length, D width, P visual tokens per image, E vision width, N targets, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from normalign.vlm.model import NormalignForConditionalGeneration
from normalign.vlm.packing import Packed


@dataclass(frozen=True)
class Visual:
    """Images of a batch, in the order of its samples: pixels (B, 3, H, W) or cached features (B, P, E)."""

    pixels: Tensor | None = None
    features: Tensor | None = None

    def to(self, device: torch.device) -> "Visual":
        """The same on ``device``."""
        return Visual(
            None if self.pixels is None else self.pixels.to(device, non_blocking=True),
            None if self.features is None else self.features.to(device, non_blocking=True),
        )


class Loss(NamedTuple):
    """``total``: summed negative log-likelihood of ``targets`` tokens; ``norms``: mean token norm per interface."""

    total: Tensor
    targets: int
    norms: dict[str, float]


def hidden_states(model: NormalignForConditionalGeneration, packed: Packed, embeddings_BLD: Tensor) -> Tensor:
    """Final hidden states (B, L, D) of packed rows."""
    mask = packed.mask(embeddings_BLD.dtype)
    output = model.model.language_model(
        inputs_embeds=embeddings_BLD,
        attention_mask=mask,
        position_ids=packed.position_ids_BL,
        use_cache=False,
    )
    return output.last_hidden_state


def target_logits(model: NormalignForConditionalGeneration, packed: Packed, hidden_BLD: Tensor) -> Tensor:
    """Logits (N, V) of the positions that predict a target, and of no others."""
    return model.lm_head(hidden_BLD.flatten(0, 1)[packed.predictor_N])


class SupervisedLoss(nn.Module):
    """The model with its loss, as one module that accelerate can wrap.

    A batch without images still sends a zero-weighted dummy image through the vision side, so that every process takes
    part in every gradient exchange and the optimizer treats all batches alike.
    """

    def __init__(self, model: NormalignForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        self.norms: dict[str, float] = {}
        model.model.multi_modal_projector.aligner.register_forward_hook(self._watch)

    def _watch(self, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.norms = {"projector_output": _mean_norm(inputs[0]), "aligner_output": _mean_norm(output)}

    def forward(self, packed: Packed, visual: Visual) -> Loss:
        model = self.model.model
        features, real = self._features(visual)
        kept = {} if real else {name: b.clone() for name, b in model.multi_modal_projector.named_buffers()}
        visual_tokens = model.project(features)
        for name, value in kept.items():  # what an aligner stores for inference must not come from a dummy
            model.multi_modal_projector.get_buffer(name).copy_(value)
        norms = {"vision_output": _mean_norm(features), **self.norms} if real else {}
        embeddings = model.embed(packed.input_ids_BL, visual_tokens if real else None)
        is_text = (packed.input_ids_BL != model.config.image_token_index) & (packed.node_BL > 0)
        norms["text"] = _mean_norm(embeddings[is_text])
        hidden = hidden_states(self.model, packed, embeddings)
        logits = target_logits(self.model, packed, hidden).float()
        total = functional.cross_entropy(logits, packed.label_N, reduction="sum")
        if not real:
            total = total + 0.0 * visual_tokens.float().sum()
            if not torch.isfinite(total):  # through the blank, whose norms then say where
                norms |= {"vision_output": _mean_norm(features), **self.norms}
        return Loss(total, len(packed.label_N), norms)

    def _features(self, visual: Visual) -> tuple[Tensor, bool]:
        """Vision features (B, P, E), and whether they belong to real images."""
        model = self.model.model
        if visual.features is not None:
            return visual.features, True
        if visual.pixels is not None:
            return model.encode(visual.pixels), True
        size = round(model.config.image_seq_length**0.5) * model.config.vision_config.patch_size
        dummy = torch.zeros(1, 3, size, size, device=self.model.device, dtype=self.model.dtype)
        return model.encode(dummy), False


@torch.no_grad()
def _mean_norm(x: Tensor) -> float:
    return x.detach().float().norm(dim=-1).mean().item()
