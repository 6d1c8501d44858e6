"""Routing to experts: how mixtures are found, and figures computed by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from normalign.diagnosis.layers import Masks
from normalign.diagnosis.routing import RoutingStatistics, find_mixtures

VISUAL = torch.tensor([[True, True, False, False]])
EVENLY = math.log(2)


class Router(nn.Module):
    """Tells which experts it chose, as routers of transformers do."""

    def __init__(self, experts: int, width: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.zeros(experts, width))

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE = x_ND @ self.weight.T
        weights_NK, chosen_NK = logits_NE.topk(self.top_k, dim=-1)
        return logits_NE, weights_NK, chosen_NK


class Stacked(nn.Module):
    """Experts whose weights are stacked along the first axis."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(experts, width, width))

    def forward(self, x_ND: Tensor, chosen_NK: Tensor) -> Tensor:
        assert len(x_ND) == len(chosen_NK)
        return x_ND


class Block(nn.Module):
    """A mixture of one kind or another."""

    def __init__(self, kind: str, experts: int = 4, width: int = 4, top_k: int = 1) -> None:
        super().__init__()
        self.kind, self.top_k = kind, top_k
        self.gate = nn.Linear(width, experts, bias=kind == "list") if kind != "tells" else Router(experts, width, top_k)
        self.experts: nn.Module = Stacked(experts, width)
        if kind == "list":
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_ND = x_BLD.flatten(0, 1)
        found = self.gate(x_ND)
        if self.kind == "list":
            return x_BLD
        chosen_NK = found[2] if self.kind == "tells" else 3 - found.topk(self.top_k, dim=-1).indices
        return self.experts(x_ND, chosen_NK).reshape(x_BLD.shape)


class Layer(nn.Module):
    """A decoder layer, as far as routing goes, with a linear map as tall as there are experts."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.key, self.mlp = nn.Linear(4, 4), block

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD + self.mlp(x_BLD)


def routed(block: Block, x_BLD: Tensor, visual: Tensor = VISUAL, text: Tensor = ~VISUAL) -> RoutingStatistics:
    with torch.no_grad():
        for parameter in block.gate.parameters():
            parameter.zero_()
        block.gate.weight.copy_(torch.eye(4) * 50)
    layers = nn.ModuleList([Layer(nn.Linear(4, 4)), Layer(block)])
    statistics = RoutingStatistics(find_mixtures(list(layers)))
    with torch.no_grad(), statistics.watching(Masks(visual, text)):
        for layer in layers:
            layer(x_BLD)
    return statistics


@pytest.mark.parametrize("kind", ["tells", "list"])
def test_load_and_entropies_are_those_computed_by_hand(kind: str) -> None:
    # Both visual tokens go to expert 2, the text to 0 and 1; the last text token wavers between 0 and 1.
    x = torch.tensor([[[0.0, 0, 1, 0], [0.0, 0, 1, 0], [1.0, 0, 0, 0], [0.49, 0.5, 0, 0]]])
    block = Block(kind)
    summary = routed(block, x).summary()
    assert summary is not None
    assert (summary["experts"], summary["top_k"], summary["layers"]) == (4, 1, [1])
    assert summary["visual"]["load"] == [[0.0, 0.0, 1.0, 0.0]] and summary["text"]["load"] == [[0.5, 0.5, 0.0, 0.0]]
    assert summary["visual"]["utilisation_entropy"] == [0.0]
    assert summary["text"]["utilisation_entropy"] == [pytest.approx(EVENLY)]
    p = 1 / (1 + math.exp(0.5))  # logits 24.5 and 25; the others are 0
    wavering = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    assert summary["visual"]["softmax_entropy"] == [pytest.approx(0.0, abs=1e-9)]
    assert summary["text"]["softmax_entropy"] == [pytest.approx(wavering / 2, rel=1e-5)]


def test_a_collapse_shows_in_the_load_although_every_token_wavers() -> None:
    x = torch.tensor([[[0.0, 0.0, 0.02, 0.0]] * 2 + [[0.02, 0.0, 0.0, 0.0], [0.0, 0.02, 0.0, 0.0]]])
    summary = routed(Block("tells"), x).summary()
    assert summary is not None
    assert summary["visual"]["softmax_entropy"][0] > 0.9 * math.log(4) and summary["visual"]["utilisation_entropy"] == [
        0.0
    ]


def test_what_the_experts_are_given_counts_where_the_router_tells_logits_only() -> None:
    x = torch.tensor([[[0.0, 0, 1, 0], [0.0, 0, 1, 0], [1.0, 0, 0, 0], [1.0, 0, 0, 0]]])
    summary = routed(Block("given"), x).summary()  # gives 3 - the largest
    assert summary is not None
    assert summary["visual"]["load"] == [[0.0, 1.0, 0.0, 0.0]] and summary["text"]["load"] == [[0.0, 0.0, 0.0, 1.0]]


def test_padding_is_routed_but_not_counted_and_batches_add_up() -> None:
    x = torch.tensor([[[0.0, 0, 1, 0], [0.0, 0, 1, 0], [1.0, 0, 0, 0], [0.0, 1, 0, 0]]])
    text = torch.tensor([[False, False, True, False]])  # the last position is padding
    summary = routed(Block("tells"), x, VISUAL, text).summary()
    assert summary is not None and summary["text"]["load"] == [[1.0, 0.0, 0.0, 0.0]]
    twice = routed(Block("tells"), x.expand(2, -1, -1), VISUAL.expand(2, -1), text.expand(2, -1)).summary()
    assert twice is not None and twice["text"]["load"] == summary["text"]["load"]


def test_a_model_without_mixtures_has_no_routing() -> None:
    layers = nn.ModuleList([Layer(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))])
    assert RoutingStatistics(find_mixtures(list(layers))).summary() is None


def test_a_router_that_sees_other_tokens_is_an_error_in_words() -> None:
    block = Block("tells")
    statistics = RoutingStatistics(find_mixtures([Layer(block)]))
    with (
        torch.no_grad(),
        statistics.watching(Masks(VISUAL, ~VISUAL)),
        pytest.raises(ValueError, match="saw 3 tokens of 4"),
    ):
        block(torch.zeros(1, 3, 4))
