"""Layer statistics of visual and text tokens in one forward pass (SCIENCE §3; UB §4, §5.3.3; TA).

The decoder layers are hooked, because the last hidden state that transformers returns is after the final norm.

Shape suffixes: B samples, L length, D width, H heads, N tokens of one modality.
"""

from typing import Any

import torch
from torch import Tensor, nn

from normalign.norms.rank import effective_rank
from normalign.norms.statistics import angle_degrees, cosine, language_sinks, summarise_norms, sync_gap

MODALITIES = ("visual", "text")
FIRST_LAYERS = 8


class LayerProbe:
    """Catches the residual stream before and after every decoder layer, and each layer's attention and MLP outputs."""

    def __init__(self, language_model: Any) -> None:
        self.layers: Any = language_model.layers
        self.states: list[Tensor] = []
        self.attention: list[Tensor] = []
        self.mlp: list[Tensor] = []
        self._handles: list[Any] = []

    def __enter__(self) -> "LayerProbe":
        self.states, self.attention, self.mlp = [], [], []
        self._handles = [self.layers[0].register_forward_pre_hook(self._input, with_kwargs=True)]
        for layer in self.layers:
            self._handles.append(layer.register_forward_hook(_keep(self.states)))
            self._handles.append(layer.self_attn.register_forward_hook(_keep(self.attention)))
            self._handles.append(layer.mlp.register_forward_hook(_keep(self.mlp)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _input(self, _module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.states.append((inputs[0] if inputs else keywords["hidden_states"]).detach())


def _keep(store: list[Tensor]) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        store.append((output[0] if isinstance(output, tuple) else output).detach())

    return hook


class LayerStatistics:
    """Accumulates, over samples, what is needed per layer and modality; ``summary`` gives the figures.

    Norms, cosines and update sizes are kept per token (a scalar each); the states themselves are kept only for
    ``rank_tokens`` tokens per modality, equally many of both, for the effective rank.
    """

    def __init__(self, depth: int, rank_tokens: int = 256) -> None:
        self.depth = depth
        self.rank_tokens = rank_tokens
        self.norms: dict[str, list[list[Tensor]]] = {m: [[] for _ in range(depth + 1)] for m in MODALITIES}
        self.cosines: dict[str, list[list[Tensor]]] = {m: [[] for _ in range(depth)] for m in MODALITIES}
        self.updates: dict[str, dict[str, list[list[Tensor]]]] = {
            part: {m: [[] for _ in range(depth)] for m in MODALITIES} for part in ("all", "attention", "mlp")
        }
        self.samples: dict[str, list[list[Tensor]]] = {m: [[] for _ in range(depth + 1)] for m in MODALITIES}

    def add(self, probe: LayerProbe, masks_BL: dict[str, Tensor]) -> None:
        """Take one probed forward pass; ``masks_BL`` says which positions are visual and which text (padding: none)."""
        for modality, mask_BL in masks_BL.items():
            states = [state[mask_BL] for state in probe.states]
            for layer, state_ND in enumerate(states):
                self.norms[modality][layer].append(state_ND.float().norm(dim=-1))
                self.samples[modality][layer].append(state_ND)
            for layer in range(self.depth):
                before, after = states[layer].double(), states[layer + 1].double()
                size = before.norm(dim=-1).clamp_min(1e-12)
                ordinary = ~(self._sinks(before) | self._sinks(after))
                self.cosines[modality][layer].append(cosine(before, after)[ordinary])
                self.updates["all"][modality][layer].append((after - before).norm(dim=-1) / size)
                for part, outputs in (("attention", probe.attention), ("mlp", probe.mlp)):
                    update = outputs[layer][mask_BL].double().norm(dim=-1) / size
                    self.updates[part][modality][layer].append(update)

    @staticmethod
    def _sinks(state_ND: Tensor) -> Tensor:
        """Sink tokens hardly turn at all; they are counted, and left out of the cosines."""
        return language_sinks(state_ND.norm(dim=-1))

    def summary(self) -> dict[str, Any]:
        """``layers`` per modality and ``sync_gap``; medians of angles and updates, so that sinks do not decide them."""
        layers = {modality: self._modality(modality) for modality in MODALITIES}
        visual, text = layers["visual"]["cosine"], layers["text"]["cosine"]
        gaps = {"all": sync_gap(visual, text), f"first{FIRST_LAYERS}": sync_gap(visual, text, FIRST_LAYERS)}
        return {"layers": layers, "sync_gap": gaps}

    def _modality(self, modality: str) -> dict[str, list[Any]]:
        norms = [torch.cat(n) for n in self.norms[modality]]
        summaries = [summarise_norms(n, language_sinks(n)) for n in norms]
        cosines = [torch.cat(c).mean() for c in self.cosines[modality]]
        return {
            "norm_mean": [s["mean"] for s in summaries],
            "norm_median": [s["median"] for s in summaries],
            "norm_without_sinks": [s["mean_without_sinks"] for s in summaries],
            "sinks": [s["sinks"]["count"] for s in summaries],
            "cosine": [c.item() for c in cosines],
            "angle": [angle_degrees(torch.cat(c)).mean().item() for c in self.cosines[modality]],
            "relative_update": self._median("all", modality),
            "relative_update_attention": self._median("attention", modality),
            "relative_update_mlp": self._median("mlp", modality),
            "effective_rank": self._ranks(modality),
        }

    def _median(self, part: str, modality: str) -> list[float]:
        return [torch.cat(updates).median().item() for updates in self.updates[part][modality]]

    def _ranks(self, modality: str) -> list[float]:
        """Effective rank per hidden state, over equally many tokens of both modalities, evenly chosen."""
        available = min(sum(len(t) for t in self.samples[m][0]) for m in MODALITIES)
        wanted = min(available, self.rank_tokens)
        ranks = []
        for states in self.samples[modality]:
            tokens_ND = torch.cat(states)
            chosen = torch.arange(wanted, device=tokens_ND.device) * len(tokens_ND) // wanted
            ranks.append(effective_rank(tokens_ND[chosen]))
        return ranks
