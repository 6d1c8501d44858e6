"""Routing of tokens to experts, per modality (SCIENCE §3; TA).

A mixture's experts and router are found by their shapes: experts are a list of modules or weights stacked along the
first axis; the router is the module beside them whose weight has one row per expert.

Shape suffixes: B samples, L length, D width, N tokens, E experts, K experts chosen per token.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normalign.diagnosis.capture import first_tensor
from normalign.diagnosis.layers import MODALITIES, Masks
from normalign.diagnosis.tokens import exact


@dataclass(frozen=True)
class Mixture:
    """A mixture-of-experts block of decoder layer ``layer``."""

    layer: int
    router: nn.Module
    experts: nn.Module
    count: int
    top_k: int


def find_mixtures(layers: Sequence[nn.Module]) -> list[Mixture]:
    """The mixtures of decoder layers, at most one per layer."""
    found = (_find_mixture(index, layer) for index, layer in enumerate(layers))
    return [mixture for mixture in found if mixture is not None]


def _find_mixture(index: int, layer: nn.Module) -> Mixture | None:
    for block in layer.modules():
        for experts in block.children():
            count = _expert_count(experts)
            if count < 2:
                continue
            for router in block.children():
                weight = getattr(router, "weight", None)
                if router is not experts and isinstance(weight, Tensor) and weight.ndim == 2 and len(weight) == count:
                    return Mixture(index, router, experts, count, _top_k(router, block))
    return None


def _expert_count(experts: nn.Module) -> int:
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    return next((len(p) for p in experts.parameters(recurse=False) if p.ndim == 3), 0)


def _top_k(router: nn.Module, block: nn.Module) -> int:
    """How many experts a token is sent to; 1 if neither the router, the block nor their configuration says."""
    for owner in (router, block, getattr(router, "config", None), getattr(block, "config", None)):
        for name in ("top_k", "num_experts_per_tok"):
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return 1


@dataclass
class _Tally:
    tokens: int = 0
    entropy: float = 0.0
    chosen_E: Tensor | None = None


@dataclass
class RoutingStatistics:
    """Accumulates, per mixture and modality, the router's entropy and how often each expert is chosen."""

    mixtures: list[Mixture]
    tallies: dict[str, list[_Tally]] = field(init=False)

    def __post_init__(self) -> None:
        self.tallies = {modality: [_Tally() for _ in self.mixtures] for modality in MODALITIES}

    @contextmanager
    def watching(self, masks: Masks) -> Iterator[None]:
        """Count what the routers do in the forward passes made meanwhile, on batches with these ``masks``."""
        with ExitStack() as stack:
            for number, mixture in enumerate(self.mixtures):
                watch = _RouterWatch(self, number, mixture, masks)
                for handle in watch.attach():
                    stack.callback(handle.remove)
            yield

    def add(self, number: int, logits_NE: Tensor, chosen_NK: Tensor, masks: Masks) -> None:
        """Take a batch's router logits and chosen experts, N being all positions of the batch."""
        share_NE = exact(logits_NE).softmax(-1)
        entropy_N = torch.special.entr(share_NE).sum(-1)
        for modality in MODALITIES:
            at_N = masks.flat[modality].to(share_NE.device)
            tally = self.tallies[modality][number]
            tally.tokens += len(at_N)
            tally.entropy += entropy_N[at_N].sum().item()
            chosen_E = (
                torch.bincount(chosen_NK.to(share_NE.device)[at_N].flatten(), minlength=logits_NE.shape[1])
                .double()
                .cpu()
            )
            tally.chosen_E = chosen_E if tally.chosen_E is None else tally.chosen_E + chosen_E

    def summary(self) -> dict[str, Any] | None:
        """Per modality and mixture layer: ``softmax_entropy`` and ``utilisation_entropy`` in nats, ``load`` (E,).

        The first is a token's mean entropy over experts; the second that of ``load``, the share of all choices that
        fell on each expert, which shows a collapse that the first hides (TA). None for a model without mixtures.
        """
        if not self.mixtures:
            return None
        first = self.mixtures[0]
        return {
            "experts": first.count,
            "top_k": first.top_k,
            "layers": [mixture.layer for mixture in self.mixtures],
            **{modality: _figures(self.tallies[modality]) for modality in MODALITIES},
        }


def _figures(tallies: list[_Tally]) -> dict[str, list[Any]]:
    loads = [None if t.chosen_E is None else t.chosen_E / t.chosen_E.sum().clamp_min(1) for t in tallies]
    return {
        "softmax_entropy": [t.entropy / t.tokens if t.tokens else None for t in tallies],
        "utilisation_entropy": [None if load is None else torch.special.entr(load).sum().item() for load in loads],
        "load": [None if load is None else load.tolist() for load in loads],
    }


class _RouterWatch:
    """One forward pass of a mixture: the router's input gives the logits; who was chosen is told by its output, by
    what the experts are given, or, where neither holds indices, by the largest logits."""

    def __init__(self, statistics: RoutingStatistics, number: int, mixture: Mixture, masks: Masks) -> None:
        self.statistics, self.number, self.mixture, self.masks = statistics, number, mixture, masks
        self.logits_NE: Tensor | None = None

    def attach(self) -> list[Any]:
        return [
            self.mixture.router.register_forward_hook(self._routed, with_kwargs=True),
            self.mixture.experts.register_forward_pre_hook(self._given, with_kwargs=True),
        ]

    def _routed(self, router: Any, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        states = first_tensor(inputs)
        states = first_tensor(keywords) if states is None else states
        if states is None:
            return
        bias = getattr(router, "bias", None)
        states_ND = states.detach().flatten(0, -2).float()
        bias_E = bias.float() if isinstance(bias, Tensor) else None
        self.logits_NE = functional.linear(states_ND, router.weight.float(), bias_E)
        chosen = _indices(output)
        if chosen is None and isinstance(self.mixture.experts, nn.ModuleList):  # a list is never called itself
            chosen = self.logits_NE.topk(self.mixture.top_k, dim=-1).indices
        self._count(chosen)

    def _given(self, _experts: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self.logits_NE is not None:
            chosen = _indices((*inputs, *keywords.values()))
            self._count(self.logits_NE.topk(self.mixture.top_k, dim=-1).indices if chosen is None else chosen)

    def _count(self, chosen: Tensor | None) -> None:
        if chosen is None or self.logits_NE is None:
            return
        logits_NE, self.logits_NE = self.logits_NE, None
        if len(logits_NE) != self.masks.visual_BL.numel():
            raise ValueError(
                f"the router of decoder layer {self.mixture.layer} saw {len(logits_NE)} tokens of "
                f"{self.masks.visual_BL.numel()}; which are visual cannot be told"
            )
        self.statistics.add(self.number, logits_NE, chosen.flatten(0, -2), self.masks)


def _indices(value: Any) -> Tensor | None:
    """The tensor of chosen experts (…, K) among a module's inputs or outputs: the one of whole numbers."""
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, Tensor) and each.ndim >= 2 and each.dtype in (torch.int64, torch.int32):
            return each
    return None
