"""What a checkpoint's own code computes when a model is made, and its files do not hold.

Shape suffixes: none, tensors are only copied.
"""

import copy
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers.initialization import no_init_weights


@torch.no_grad()
def restore_buffers(model: Any) -> None:
    """Give ``model`` the buffers that are in no file, such as rotary frequencies, as its class computes them.

    from_pretrained makes a model without memory first and gives it memory later. Transformers' own classes then compute
    such buffers once more; those of a checkpoint's own code keep whatever lay in that memory, and no error says so.
    """
    lost = dict(model.named_non_persistent_buffers())
    if not lost:
        return
    with no_init_weights(), init_empty_weights(include_buffers=False):
        again = type(model)(copy.deepcopy(model.config))
    for name, buffer in again.named_non_persistent_buffers():
        if name in lost:
            lost[name].copy_(buffer)
