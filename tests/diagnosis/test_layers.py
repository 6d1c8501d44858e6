"""Layer statistics: what the probe catches, and the figures made of it."""

import numpy as np
import pytest
import torch

from normalign.diagnosis.layers import LayerProbe, LayerStatistics
from normalign.norms.rank import effective_rank

from ..conftest import Tiny

DEPTH = 3


def run(tiny: Tiny) -> tuple[LayerProbe, torch.Tensor, torch.Tensor]:
    """A probed forward pass over two rows of eight tokens; its last hidden state and the inputs."""
    language = tiny.model().model.language_model
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), LayerProbe(language) as probe:
        output = language(inputs_embeds=x, use_cache=False).last_hidden_state
    return probe, output, x


def test_fault_13_the_probes_last_state_is_before_the_final_norm(tiny: Tiny) -> None:
    probe, output, x = run(tiny)
    language = tiny.model().model.language_model
    assert len(probe.states) == DEPTH + 1 and torch.equal(probe.states[0], x)
    assert not torch.allclose(probe.states[-1], output)
    with torch.no_grad():
        torch.testing.assert_close(language.norm(probe.states[-1]), output)


def test_attention_and_mlp_outputs_add_up_to_the_update_of_every_layer(tiny: Tiny) -> None:
    probe, _, _ = run(tiny)
    for layer in range(DEPTH):
        update = probe.attention[layer] + probe.mlp[layer]
        torch.testing.assert_close(probe.states[layer] + update, probe.states[layer + 1], rtol=1e-4, atol=1e-5)


def test_no_hook_is_left_behind(tiny: Tiny) -> None:
    language = tiny.model().model.language_model
    with LayerProbe(language) as probe:
        pass
    with torch.no_grad():
        language(inputs_embeds=torch.randn(1, 2, 32), use_cache=False)
    assert probe.states == []


def test_the_summary_equals_numpy_per_layer_and_modality(tiny: Tiny) -> None:
    probe, _, _ = run(tiny)
    visual = torch.zeros(2, 8, dtype=torch.bool)
    visual[:, 1:5] = True
    text = torch.zeros_like(visual)
    text[:, 5:7] = True  # the first and last positions belong to neither, as padding does
    statistics = LayerStatistics(DEPTH)
    statistics.add(probe, {"visual": visual, "text": text})
    result = statistics.summary()
    gaps = []
    for layer in range(DEPTH):
        mean_cosine = {}
        for name, mask in (("visual", visual), ("text", text)):
            before, after = (probe.states[i][mask].double().numpy() for i in (layer, layer + 1))
            size = np.linalg.norm(before, axis=1)
            cosine = (before * after).sum(1) / size / np.linalg.norm(after, axis=1)
            found = result["layers"][name]
            assert found["norm_mean"][layer] == pytest.approx(size.mean(), rel=1e-6)
            assert found["norm_median"][layer] == pytest.approx(np.median(size), rel=1e-6)
            assert found["cosine"][layer] == pytest.approx(cosine.mean(), rel=1e-6)
            assert found["angle"][layer] == pytest.approx(np.degrees(np.arccos(cosine)).mean(), rel=1e-6)
            updates = np.sort(np.linalg.norm(after - before, axis=1) / size)
            assert updates[0] <= found["relative_update"][layer] <= updates[-1]
            mean_cosine[name] = cosine.mean()
        gaps.append(abs(mean_cosine["visual"] - mean_cosine["text"]))
    assert result["sync_gap"]["all"] == pytest.approx(np.mean(gaps), rel=1e-6)
    assert result["sync_gap"]["first8"] == result["sync_gap"]["all"]
    assert result["layers"]["text"]["effective_rank"][0] == pytest.approx(effective_rank(probe.states[0][text]))
    # Ranks are over equally many tokens: four text tokens, so four of the eight visual ones.
    chosen = probe.states[0][visual][::2]
    assert result["layers"]["visual"]["effective_rank"][0] == pytest.approx(effective_rank(chosen))


def test_a_sink_is_counted_and_left_out_of_the_cosines() -> None:
    probe = object.__new__(LayerProbe)
    ordinary = torch.eye(4)
    sink = torch.tensor([[0.0, 0.0, 0.0, 100.0]])
    before, after = torch.cat([ordinary, sink])[None], torch.cat([ordinary.roll(1, 1), sink])[None]
    probe.states, probe.attention, probe.mlp = [before, after], [after - before], [torch.zeros_like(before)]
    statistics = LayerStatistics(1)
    everything = torch.ones(1, 5, dtype=torch.bool)
    statistics.add(probe, {"visual": everything, "text": everything})
    visual = statistics.summary()["layers"]["visual"]
    assert visual["sinks"] == [1, 1] and visual["cosine"] == [0.0] and visual["angle"] == [90.0]
    assert visual["norm_without_sinks"] == [1.0, 1.0] and visual["norm_mean"] == [pytest.approx(104 / 5)] * 2
    assert visual["relative_update_attention"] == [pytest.approx(2**0.5)]
    assert visual["relative_update_mlp"] == [0.0]
