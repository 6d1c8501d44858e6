"""The whole probe on every family, against states kept by other hooks and computed in float64."""

from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch import Tensor

from normalign.anatomy import Anatomy, attention_of, find_anatomy, mlp_of
from normalign.diagnosis.probe import ModelProbe
from normalign.norms.theory import predict_angles, turning_directions

from ..anatomy.tiny import FAMILIES, picture, tiny_vlm
from . import reference

CURVES = ("norm_mean", "norm_median", "norm_without_sinks", "sinks", "cosine", "angle", "relative_update")


class Both:
    """A family's tiny model, probed once, and the same forward pass with everything kept."""

    def __init__(self, family: str) -> None:
        model, _, self.inputs = tiny_vlm(family)
        self.anatomy: Anatomy = find_anatomy(model)
        model.set_attn_implementation("sdpa")  # as models are loaded; the probe has to ask for weights itself
        self.probe = ModelProbe(self.anatomy)
        (self.look,) = self.probe.add(self.inputs)
        self.result = self.probe.result()
        self.kept = reference.Kept()
        halves = [(attention_of(layer), mlp_of(layer)) for layer in self.anatomy.layers]
        handles = reference.keep(self.kept, self.anatomy.layers, halves)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            self.output: Any = model(**self.inputs, use_cache=False, output_attentions=True)
        for handle in handles:
            handle.remove()
        self.visual = self.inputs["input_ids"] == self.anatomy.image_token_id

    def rows(self, states: list[Tensor], modality: str) -> Any:
        return reference.rows(states, [self.visual if modality == "visual" else ~self.visual])


@pytest.fixture(scope="module", params=FAMILIES)
def both(request: pytest.FixtureRequest) -> Both:
    return Both(request.param)


@pytest.mark.parametrize("modality", ["visual", "text"])
def test_curves_of_every_family_equal_those_of_full_states_in_float64(both: Both, modality: str) -> None:
    stores = (both.kept.before, both.kept.after, both.kept.attention, both.kept.mlp)
    expected = reference.statistics(*([both.rows(layer, modality) for layer in store] for store in stores))
    found = both.result["layers"][modality]
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)
    assert [len(found[name]) for name in ("norm_mean", "cosine", "effective_rank")] == [4, 3, 4]


def test_interfaces_of_every_family_are_told(both: Both) -> None:
    interface = both.result["interface"]
    for modality in ("visual", "text"):
        norms = np.linalg.norm(both.rows(both.kept.before[0], modality), axis=1)
        found = interface[f"{modality}_at_merge"]
        assert found["mean"] == pytest.approx(norms.mean(), rel=1e-6) and found["tokens"] == len(norms)
    assert all(interface[name]["mean"] > 0 for name in ("vision_output", "projector_input", "projector_output"))
    if both.result["family"] not in ("llava_next", "llava_onevision"):  # those add an embedding at each line's end
        assert interface["projector_output"]["tokens"] == interface["visual_at_merge"]["tokens"]
    assert ("visual_vocabulary" in interface) == both.result["visual_vocabulary"]
    if both.result["visual_vocabulary"]:
        table: Any = both.anatomy.projector.weight
        rows = np.linalg.norm(table.detach().double().numpy(), axis=1)
        assert interface["visual_vocabulary"]["mean"] == pytest.approx(rows.mean(), rel=1e-6)


def test_ratios_of_every_family_are_against_text_as_it_is_used(both: Both) -> None:
    result = both.result
    rows = np.linalg.norm(both.anatomy.embedding.weight.detach().double().numpy(), axis=1)
    assert result["T"] == pytest.approx(rows[rows > 0].mean(), rel=1e-6)
    assert result["T_as_used"] == pytest.approx(result["T"] * result["embedding_scale"])
    visual, text = (result["interface"][f"{m}_at_merge"]["mean"] for m in ("visual", "text"))
    assert result["ratio"] == pytest.approx(visual / result["T_as_used"])
    assert result["k_in_context"] == pytest.approx(visual / text)


def test_attention_of_every_family_equals_that_of_all_matrices_kept(both: Both) -> None:
    at = both.visual[0].nonzero().max() + 1
    mass = []
    for layer, weights in enumerate(both.output.attentions):
        to_image = weights[0][:, at:][:, :, both.visual[0]].double()
        mass.append(to_image.sum(-1).mean().item())
        share = to_image / to_image.sum(-1, keepdim=True)
        entropy = -(share * share.log()).nan_to_num().sum(-1).mean().item()
        assert both.result["attention"]["mass"][layer] == pytest.approx(mass[-1], rel=1e-5)
        assert both.result["attention"]["entropy"][layer] == pytest.approx(entropy, rel=1e-5)
    last = [w[0, :, -1, both.visual[0]].sum(-1).mean().item() for w in both.output.attentions]
    assert both.look.layer == last.index(max(last))


def test_theory_of_every_family_is_that_of_its_own_updates(both: Both) -> None:
    theory = both.result["theory"]
    size, angle, norm = [], [], []
    for layer in range(len(both.anatomy.layers)):
        before, after = both.kept.before[layer], both.kept.after[layer]
        directions = {}
        for modality in ("visual", "text"):
            b, a = (torch.from_numpy(both.rows(states, modality)) for states in (before, after))
            directions[modality] = turning_directions(b, a)
            if modality == "visual":
                norm.append(b.norm(dim=-1).mean().item())
                continue
            update = a - b
            size.append(update.norm(dim=-1).mean().item())
            cosine = (update * b).sum(-1) / update.norm(dim=-1) / b.norm(dim=-1)
            angle.append(torch.rad2deg(torch.arccos(cosine)).mean().item())
        pairs = directions["visual"] @ directions["text"].T
        assert theory["rho"][layer] == pytest.approx(pairs.mean().item(), rel=1e-5, abs=1e-6)
    assert theory["angle_predicted"] == pytest.approx(predict_angles(size, angle, norm), rel=1e-5)
    assert theory["angle_measured"] == both.result["layers"]["visual"]["angle"]


def test_only_mixtures_have_routing_and_only_deepstack_is_injected(both: Both) -> None:
    result = both.result
    assert (result["routing"] is not None) == (result["family"] == "kimi_k25")
    assert result["injected_layers"] == ([0, 1] if result["family"] == "qwen3_vl" else [])
    if result["routing"] is not None:
        assert result["routing"]["layers"] == [1, 2]
        for modality in ("visual", "text"):
            assert [sum(load) for load in result["routing"][modality]["load"]] == pytest.approx([1.0, 1.0])


def batched(processor: Any, numbers: list[int], side: str) -> dict[str, Any]:
    processor.tokenizer.padding_side = side
    texts = ["<image>" + "x" * (3 + 5 * number) for number in numbers]
    images = [picture(30 + number, 40) for number in numbers]
    return dict(processor(images=images, text=texts, padding=True, return_tensors="pt"))


@pytest.mark.parametrize("side", ["left", "right"])
def test_batch_size_order_and_padding_side_change_nothing_in_a_model(side: str) -> None:
    model, processor, _ = tiny_vlm("llava")
    singly, together = (ModelProbe(find_anatomy(model)) for _ in range(2))
    for number in range(4):
        singly.add(batched(processor, [number], side))
    looks = together.add(batched(processor, [3, 0, 2], side)) + together.add(batched(processor, [1], side))
    assert len(looks) == 4 and all(look.layer is not None for look in looks)
    one, other = singly.result(), together.result()
    assert one["counts"] == other["counts"]
    for path in (["layers", "visual"], ["layers", "text"], ["attention"], ["theory"], ["interface", "visual_at_merge"]):
        a, b = one, other
        for key in path:
            a, b = a[key], b[key]
        for name, values in a.items():
            if name != "sinks":
                np.testing.assert_allclose(b[name], values, rtol=2e-4, atol=1e-6, err_msg=f"{path} {name}")


def test_planted_norms_are_found_and_layers_that_do_nothing_turn_nothing() -> None:
    model, _, inputs = tiny_vlm("llava")
    anatomy = find_anatomy(model)
    with torch.no_grad():
        rows = anatomy.embedding.weight
        rows.div_(rows.norm(dim=-1, keepdim=True).clamp_min(1e-9)).mul_(0.5)
        rows[7] = 0  # a padded vocabulary's row does not count
        layers: Any = anatomy.layers
        for layer in layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        last: Any = anatomy.projector.linear_2
        last.weight.zero_()
        last.bias.copy_(torch.full((32,), 20 / 32**0.5))
    probe = ModelProbe(anatomy)
    probe.add(inputs)
    result = probe.result()
    assert result["T"] == pytest.approx(0.5, rel=1e-6) and result["ratio"] == pytest.approx(40, rel=1e-6)
    assert result["k_in_context"] == pytest.approx(40, rel=1e-6)
    for modality, norm in (("visual", 20.0), ("text", 0.5)):
        layers = result["layers"][modality]
        assert layers["norm_mean"] == pytest.approx([norm] * 4, rel=1e-6)
        assert layers["cosine"] == [1.0] * 3 and layers["angle"] == [0.0] * 3
        assert layers["relative_update"] == layers["relative_update_mlp"] == [0.0] * 3
    assert result["layers"]["visual"]["effective_rank"] == pytest.approx([1.0] * 4, abs=1e-4)
    assert result["sync_gap"] == {"all": 0.0, "first8": 0.0}


def test_an_offloaded_model_gives_the_same() -> None:
    model, _, inputs = tiny_vlm("llava")
    plain, offloaded = ModelProbe(find_anatomy(model)), ModelProbe(find_anatomy(model))
    plain.add(inputs)
    expected = plain.result()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    offloaded.add(inputs)
    assert offloaded.result() == expected


def test_a_model_in_bfloat16_is_measured_on_its_own_states_without_losing_more() -> None:
    model, _, inputs = tiny_vlm("llava")
    model.bfloat16()
    anatomy = find_anatomy(model)
    kept = reference.Kept()
    halves = [(attention_of(layer), mlp_of(layer)) for layer in anatomy.layers]
    handles = reference.keep(kept, anatomy.layers, halves)
    probe = ModelProbe(anatomy)
    probe.add(inputs)
    for handle in handles:
        handle.remove()
    visual = [inputs["input_ids"] == anatomy.image_token_id]
    stores = (kept.before, kept.after, kept.attention, kept.mlp)
    expected = reference.statistics(*([reference.rows(layer, visual) for layer in store] for store in stores))
    for name, values in expected.items():
        np.testing.assert_allclose(probe.result()["layers"]["visual"][name], values, rtol=1e-5, err_msg=name)


def test_attention_that_would_not_fit_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normalign.diagnosis.probe.ATTENTION_BYTES", 1000)
    model, _, inputs = tiny_vlm("llava")
    probe = ModelProbe(find_anatomy(model))
    (look,) = probe.add(inputs)
    result = probe.result()
    assert result["attention"] is None and "36 tokens" in result["attention_reason"] and look.layer is None
    assert result["layers"]["visual"]["cosine"]


def test_a_sample_without_image_tokens_is_an_error_in_words() -> None:
    model, processor, _ = tiny_vlm("llava")
    with pytest.raises(ValueError, match="no visual token"):
        ModelProbe(find_anatomy(model)).add(dict(processor(text="no image", return_tensors="pt")))


def test_no_hook_is_left_behind() -> None:
    model, _, inputs = tiny_vlm("kimi_k25")
    probe = ModelProbe(find_anatomy(model))
    probe.add(inputs)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
