"""What lowers a run's memory: activations that are computed again, and frozen weights in half precision."""

import functools

import torch
from torch.utils.checkpoint import checkpoint

from normalign.training.optim import TrainableTable
from normalign.vlm.model import NormalignForConditionalGeneration, vision_layers


def recompute_layers(model: NormalignForConditionalGeneration) -> None:
    """Gradient checkpointing: every transformer layer keeps its input alone and runs again in the backward pass.

    Layers are wrapped here because transformers does so only in training mode, and frozen ones are in evaluation mode.
    The non-reentrant kind runs each gradient hook once, and gives frozen embeddings before trained tokens no trouble.
    """
    for layer in (*vision_layers(model.model.vision_tower), *model.model.language_model.layers):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def halve_frozen(table: TrainableTable) -> None:
    """Store the frozen vision tower and language model in bfloat16, as autocast uses them.

    Autocast keeps no cast of a frozen weight, so that it would cast all of them again in every pass.
    """
    for row in table.rows:
        if row.module in ("vision", "language") and row.learning_rate is None:
            for parameter in row.parameters.values():
                parameter.data = parameter.data.to(torch.bfloat16)
