"""Norms of a vision tower's tokens, layer by layer (UB §4, RQ1).

Shape suffixes: B images, L tokens, E vision width, N tokens of all images.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normalign.anatomy.modules import block_list, final_norm
from normalign.norms.statistics import summarise_norms, vision_sinks


class EncoderNorms:
    """Collects token norms of every hidden state of a vision tower over any number of batches.

    Raises:
        ValueError: the tower has no list of blocks.
    """

    def __init__(self, tower: nn.Module) -> None:
        layers = block_list(tower)
        if layers is None:
            raise ValueError(f"{type(tower).__name__}: found no list of transformer blocks")
        self.layers = layers
        self.final_norm = final_norm(tower)
        self.norms: list[list[Tensor]] = [[] for _ in range(len(self.layers) + 1)]
        self.after: list[Tensor] = []
        self.entered: tuple[int, ...] = ()  # shape of what the first block was given

    @torch.no_grad()
    def add(self, forward: Callable[[], Any]) -> None:
        """Run ``forward``, which must run the tower once, and keep the norms of all its tokens.

        Raises:
            ValueError: the tower's blocks do not hand on the tokens they were given.
        """
        handles = [self.layers[0].register_forward_pre_hook(self._input, with_kwargs=True)]
        handles += [layer.register_forward_hook(self._catch(i + 1)) for i, layer in enumerate(self.layers)]
        try:
            forward()
        finally:
            for handle in handles:
                handle.remove()

    def _input(self, _module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        hidden_BLE = inputs[0] if inputs else keywords["hidden_states"]
        self.entered = tuple(hidden_BLE.shape)
        self.norms[0].append(hidden_BLE.float().norm(dim=-1).flatten().cpu())

    def _catch(self, index: int) -> Callable[..., None]:
        def catch(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden_BLE = output[0] if isinstance(output, tuple) else output
            if tuple(hidden_BLE.shape) != self.entered:  # tokens are merged on the way (Swin), or there are none
                raise ValueError(
                    f"block {index} makes {tuple(hidden_BLE.shape)} of {self.entered}, so its tokens cannot be "
                    "followed; only towers that keep their tokens are measured"
                )
            self.norms[index].append(hidden_BLE.float().norm(dim=-1).flatten().cpu())
            if index == len(self.layers) and self.final_norm is not None:
                self.after.append(self.final_norm(hidden_BLE).float().norm(dim=-1).flatten().cpu())

        return catch

    def summary(self) -> dict[str, Any]:
        """``layers``: a summary per hidden state before the final norm; ``after_final_norm``: the last, behind it."""
        after = self.after_final_norm()
        return {
            "layers": [summarise_norms(n, vision_sinks(n)) for n in self.hidden_states()],
            "after_final_norm": None if after is None else summarise_norms(after, vision_sinks(after)),
        }

    def hidden_states(self) -> list[Tensor]:
        """Norms (N,) of all tokens per hidden state: what enters the first block, then each block's output."""
        return [torch.cat(norms) for norms in self.norms]

    def after_final_norm(self) -> Tensor | None:
        """Norms (N,) of all tokens behind the tower's final norm; None where it has none."""
        return torch.cat(self.after) if self.after else None
