"""What the hooks hand over, and that they keep nothing."""

import weakref

import pytest
import torch

from normalign.diagnosis.capture import LayerParts, LayerStep, layer_parts, watch_attention, watch_layers
from normalign.diagnosis.layers import LayerStatistics, Masks

from ..conftest import Tiny
from . import reference

DEPTH = 3


def run(tiny: Tiny, x_BLD: torch.Tensor) -> tuple[list[LayerStep], torch.Tensor, reference.Kept]:
    """Steps of a forward pass, its last hidden state, and what hooks of the test's own kept."""
    language = tiny.model().model.language_model
    steps: list[LayerStep] = []
    kept = reference.Kept()
    handles = reference.keep(kept, language.layers, [(layer.self_attn, layer.mlp) for layer in language.layers])
    with torch.no_grad(), watch_layers(layer_parts(language.layers), steps.append):
        output = language(inputs_embeds=x_BLD, use_cache=False).last_hidden_state
    for handle in handles:
        handle.remove()
    return steps, output, kept


@pytest.fixture(scope="module")
def x_BLD() -> torch.Tensor:  # noqa: N802 (a tensor's name)
    return torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))


def test_fault_13_the_last_state_is_before_the_final_norm(tiny: Tiny, x_BLD: torch.Tensor) -> None:
    steps, output, _ = run(tiny, x_BLD)
    language = tiny.model().model.language_model
    assert [step.index for step in steps] == list(range(DEPTH)) and torch.equal(steps[0].before_BLD, x_BLD)
    assert not torch.allclose(steps[-1].after_BLD, output)
    with torch.no_grad():
        torch.testing.assert_close(language.norm(steps[-1].after_BLD), output)


def test_a_step_holds_the_layers_own_states_and_the_norms_of_its_halves(tiny: Tiny, x_BLD: torch.Tensor) -> None:
    steps, _, kept = run(tiny, x_BLD)
    for index, step in enumerate(steps):
        assert torch.equal(step.before_BLD, kept.before[index][0]) and torch.equal(step.after_BLD, kept.after[index][0])
        for found, added in ((step.attention_BL, kept.attention[index][0]), (step.mlp_BL, kept.mlp[index][0])):
            assert found is not None
            torch.testing.assert_close(found, added.norm(dim=-1))


class _Layer(torch.nn.Module):
    """Adds its halves ``share`` times, and ``other`` times a third thing."""

    def __init__(self, share: float, other: float) -> None:
        super().__init__()
        self.attention, self.mlp, self.third = (torch.nn.Linear(32, 32) for _ in range(3))
        self.share, self.other = share, other

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        y_BLD = x_BLD + self.attention(x_BLD) * self.share
        return y_BLD + self.mlp(y_BLD) * self.share + self.third(x_BLD) * self.other


@pytest.mark.parametrize(("share", "other"), [(1.0, 0.0), (0.22, 0.0), (1.0, 0.5)])
def test_norms_of_halves_are_of_what_is_added_and_unknown_where_they_are_not_all(
    x_BLD: torch.Tensor, share: float, other: float
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layer = _Layer(share, other)
    steps: list[LayerStep] = []
    with torch.no_grad(), watch_layers([LayerParts(layer, layer.attention, layer.mlp)], steps.append):
        layer(x_BLD)
    (step,) = steps
    if other:
        assert step.attention_BL is None and step.mlp_BL is None
        return
    attention_BLD = layer.attention(x_BLD) * share
    assert step.attention_BL is not None and step.mlp_BL is not None
    torch.testing.assert_close(step.attention_BL, attention_BLD.norm(dim=-1), rtol=1e-5, atol=1e-6)
    mlp_BLD = step.after_BLD - x_BLD - attention_BLD
    torch.testing.assert_close(step.mlp_BL, mlp_BLD.norm(dim=-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_weights_come_layer_by_layer_from_plain_attention_only(
    tiny: Tiny, x_BLD: torch.Tensor, implementation: str
) -> None:
    language = tiny.model().model.language_model
    language.set_attn_implementation(implementation)
    alive: list[weakref.ref[torch.Tensor]] = []

    def take(_layer: int, weights_BHLL: torch.Tensor) -> None:
        assert weights_BHLL.shape == (2, 4, 8, 8)
        torch.testing.assert_close(weights_BHLL.sum(-1), torch.ones(2, 4, 8))
        assert all(reference() is None for reference in alive), "an earlier layer's weights are still alive"
        alive.append(weakref.ref(weights_BHLL))

    with torch.no_grad(), watch_attention(language.layers, take):
        language(inputs_embeds=x_BLD, use_cache=False)
    assert len(alive) == (DEPTH if implementation == "eager" else 0)


def test_at_most_two_layers_states_are_alive_at_a_time(tiny: Tiny, x_BLD: torch.Tensor) -> None:
    language = tiny.model().model.language_model
    statistics = LayerStatistics(DEPTH, 32)
    visual = torch.zeros(2, 8, dtype=torch.bool)
    visual[:, 1:4] = True
    masks = Masks(visual, ~visual)
    storages: list[weakref.ref[torch.UntypedStorage]] = []

    def take(step: LayerStep) -> None:
        statistics.add(step, masks)
        storages.append(weakref.ref(step.after_BLD.untyped_storage()))
        gone = [reference() is None for reference in storages[:-2]]
        assert all(gone), f"states of layers {[i for i, g in enumerate(gone) if not g]} are kept"

    with torch.no_grad(), watch_layers(layer_parts(language.layers), take):
        language(inputs_embeds=x_BLD, use_cache=False)
    assert len(storages) == DEPTH


def test_no_hook_is_left_behind_also_after_an_error(tiny: Tiny, x_BLD: torch.Tensor) -> None:
    language = tiny.model().model.language_model
    seen: list[LayerStep] = []
    with pytest.raises(RuntimeError, match="stop"), watch_layers(layer_parts(language.layers), seen.append):
        raise RuntimeError("stop")
    with torch.no_grad():
        language(inputs_embeds=x_BLD, use_cache=False)
    assert not seen
    for module in language.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
