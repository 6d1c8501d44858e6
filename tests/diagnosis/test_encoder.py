"""Norms of a vision tower's tokens, layer by layer."""

import functools
from typing import Any

import pytest
import torch

from normalign.diagnosis.encoder import EncoderNorms

from ..conftest import TOWERS, Tiny


@pytest.mark.parametrize("tower", TOWERS)
def test_every_hidden_state_over_all_batches_and_all_tokens_and_the_last_one_also_after_the_norm(
    tiny: Tiny, tower: str
) -> None:
    vision: Any = tiny.model(tower=tower).model.vision_tower
    batches = torch.randn(2, 3, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    norms = EncoderNorms(vision)
    expected: list[list[torch.Tensor]] = [[] for _ in range(3)]
    for pixels in batches:
        norms.add(functools.partial(vision, pixels))
        with torch.no_grad():
            states = vision(pixels, output_hidden_states=True).hidden_states
        for layer in range(3):
            expected[layer].append(states[layer].norm(dim=-1).flatten())
    summary = norms.summary()
    assert len(summary["layers"]) == 4
    for layer in range(3):
        values = torch.cat(expected[layer]).double()
        assert summary["layers"][layer]["mean"] == pytest.approx(values.mean().item(), rel=1e-6)
        assert summary["layers"][layer]["tokens"] == len(values)
    # Random weights: the final norm has gain 1 and bias 0, so every token leaves it at √E.
    assert summary["after_final_norm"]["mean"] == pytest.approx(4.0, rel=1e-3)
    assert summary["layers"][3]["mean"] != pytest.approx(4.0, rel=1e-3)
