"""Norms of a vision tower's tokens, layer by layer (UB §4, RQ1).

Shape suffixes: B images, L tokens, E vision width, N tokens of all images.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normalign.norms.statistics import summarise_norms, vision_sinks
from normalign.vlm.model import final_norm, vision_layers


class EncoderNorms:
    """Collects token norms of every hidden state of a vision tower over any number of batches."""

    def __init__(self, tower: nn.Module) -> None:
        self.tower = tower
        self.layers = vision_layers(tower)
        self.norms: list[list[Tensor]] = [[] for _ in range(len(self.layers) + 1)]
        self.after: list[Tensor] = []

    @torch.no_grad()
    def add(self, forward: Callable[[], Any]) -> None:
        """Run ``forward``, which must run the tower once, and keep the norms of all its tokens."""
        handles = [self.layers[0].register_forward_pre_hook(self._input, with_kwargs=True)]
        handles += [layer.register_forward_hook(self._catch(i + 1)) for i, layer in enumerate(self.layers)]
        try:
            forward()
        finally:
            for handle in handles:
                handle.remove()

    def _input(self, _module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        hidden_BLE = inputs[0] if inputs else keywords["hidden_states"]
        self.norms[0].append(hidden_BLE.float().norm(dim=-1).flatten())

    def _catch(self, index: int) -> Callable[..., None]:
        def catch(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden_BLE = output[0] if isinstance(output, tuple) else output
            self.norms[index].append(hidden_BLE.float().norm(dim=-1).flatten())
            if index == len(self.layers):
                self.after.append(final_norm(self.tower)(hidden_BLE).float().norm(dim=-1).flatten())

        return catch

    def summary(self) -> dict[str, Any]:
        """``layers``: a summary per hidden state before the final norm; ``after_final_norm``: the last, behind it."""
        layers_N = [torch.cat(norms) for norms in self.norms]
        after_N = torch.cat(self.after)
        return {
            "layers": [summarise_norms(n, vision_sinks(n)) for n in layers_N],
            "after_final_norm": summarise_norms(after_N, vision_sinks(after_N)),
        }
