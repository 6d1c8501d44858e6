"""What a decoder multiplies its text embeddings by, measured by running it up to its first layer.

Shape suffixes: N tokens, D width.
"""

from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

SAMPLE_TOKENS = 16
ALIGNED = 0.999  # cosine above which the first layer's input is the embedding times a number


class _ReachedError(Exception):
    """Raised by the hook on the first decoder layer, to go no further."""


@torch.no_grad()
def embedding_scale(language: nn.Module, embedding: nn.Embedding, first_layer: nn.Module, avoid: int = -1) -> float:
    """The factor between rows of ``embedding`` and the input of ``first_layer``: √D for Gemma, 1.0 for most.

    A few tokens run through ``language`` up to its first layer. Where something else is added there, such as learned
    positions, or the decoder cannot be run on its own, the factor is 1.0.

    Args:
        avoid: an id that is not used: the image placeholder.
    """
    ids_N = torch.linspace(1, embedding.num_embeddings - 1, SAMPLE_TOKENS).long().unique()
    ids_N = ids_N[ids_N != avoid]
    with align_module_device(embedding):  # weights that accelerate has moved away are brought back
        stored_ND = embedding.weight[ids_N.to(embedding.weight.device)].double().cpu()
        device = embedding.weight.device
    arriving_ND = _first_input(language, first_layer, ids_N.to(device)[None])
    if arriving_ND is None or arriving_ND.shape != stored_ND.shape:
        return 1.0
    product, size = (arriving_ND * stored_ND).sum(), stored_ND.square().sum()
    if size == 0 or product / (size.sqrt() * arriving_ND.norm()) < ALIGNED:
        return 1.0
    scale = (product / size).item()
    return 1.0 if abs(scale - 1.0) < 1e-3 else scale


def _first_input(language: nn.Module, first_layer: nn.Module, ids_BN: Tensor) -> Tensor | None:
    caught: list[Tensor] = []

    def catch(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        caught.append(inputs[0] if inputs else keywords["hidden_states"])
        raise _ReachedError

    handle = first_layer.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code does not see hooks
            language(input_ids=ids_BN, use_cache=False)
    except _ReachedError:
        return caught[0][0].double().cpu()
    except (RuntimeError, TypeError, ValueError, AttributeError):  # a decoder that needs more than token ids
        return None
    finally:
        handle.remove()
    return None
