"""ONNX and GGUF converters, against models whose weights are known."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, Dinov2Config, Dinov2Model, LlamaConfig
from transformers import LlamaForCausalLM as Llama

from normalign.settings import SourceSettings
from normalign.weights import fetch_language, fetch_vision
from normalign.weights.gguf_llama import check_against_source, interleave_rotary
from normalign.weights.random_weights import SPECIAL_TOKENS, byte_tokenizer

from .conftest import contents, make_wheel

LINEAR = ("query", "key", "value", "dense", "fc1", "fc2")


def write_graph(stored: dict[str, torch.Tensor], path: Path) -> None:
    """``stored`` as torch's exporter lays a DINOv2 out: anonymous transposed Linears, split positions, a decoder."""
    nodes, arrays = [], []

    def constant(name: str, value: torch.Tensor) -> str:
        arrays.append(onnx.numpy_helper.from_array(value.contiguous().numpy(), name))
        return name

    def node(kind: str, where: str, *inputs: str) -> None:
        nodes.append(onnx.helper.make_node(kind, list(inputs), [f"{where}_output_0"], name=where))

    for count, (name, value) in enumerate(stored.items()):
        where = "/backbone/" + name.rpartition(".")[0].replace(".", "/")
        if name == "embeddings.position_embeddings":
            node("Reshape", f"{where}/Reshape_1", constant("onnx::Reshape_8", value[:, 1:]), "shape")
            node("Concat", f"{where}/Concat_6", constant("onnx::Concat_7", value[:, :1]), "x")
        elif name.endswith(".weight") and name.split(".")[-2] in LINEAR:
            node("MatMul", f"{where}/MatMul", "x", constant(f"onnx::MatMul_{100 + count}", value.T))
        else:
            node("Add", f"{where}/Add", "x", constant(f"backbone.{name}", value))
    node("MatMul", "/decoder/head/MatMul", "x", constant("onnx::MatMul_9", torch.ones(2, 2)))
    node("Add", "/decoder/head/Add", "x", constant("decoder.head.bias", torch.ones(2)))
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "main", [], [], arrays)), path)


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, torch.Tensor]]:
    """A small DINOv2 with every parameter distinct, and its tensors under their names on disk."""
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("dinov2")
    torch.manual_seed(5)
    config = Dinov2Config(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=3, image_size=42, patch_size=14
    )
    config.use_mask_token = False
    model = Dinov2Model(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


def wheel_source(folder: Path, name: str, member: str, data: bytes) -> SourceSettings:
    """Settings for a wheel that holds ``data`` and lies in the cache already."""
    cache = folder / "state" / "wheels"
    cache.mkdir(parents=True)
    _, digest = make_wheel(cache, name, {f"{name}/{member}": data})
    return SourceSettings(f"wheel:{name}==1.0", None, digest, {})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dinov2_out_of_onnx_is_the_model_that_went_in(dinov2: Any, project: Path) -> None:
    model, stored = dinov2
    write_graph(stored, project / "m.onnx")
    settings = wheel_source(project, "tiny_vit", "m.onnx", (project / "m.onnx").read_bytes())
    told = fetch_vision(settings, project / "out")
    assert fetch_vision(settings, project / "twice") == told
    assert contents(project / "out") == contents(project / "twice")
    assert contents(project / "out")["LICENSE"] == b"do what you like\n"
    converted = AutoModel.from_pretrained(project / "out").eval()
    assert converted.config.image_size == 42
    pixels = torch.rand(1, 3, 28, 28)  # another size than the grid's: positions are interpolated
    with torch.no_grad():
        assert torch.equal(converted(pixels).last_hidden_state, model(pixels).last_hidden_state)
    assert told["class"] == "Dinov2Model"
    assert told["parameters"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("encoder.layer.1.attention.attention.key.weight", None, "missing keys"),
        ("encoder.layer.1.norm1.bias", torch.ones(64), "mismatched keys"),
        ("encoder.layer.1.norm9.bias", torch.ones(128), "unexpected keys"),
        ("embeddings.position_embeddings", None, "no position table"),
        ("encoder.layer.0.mlp.fc1.weight", None, "no tensor for encoder.layer.0.mlp.fc1.weight"),
    ],
)
def test_a_graph_with_a_wrong_tensor_is_refused(
    dinov2: Any, project: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    stored = dict(dinov2[1])
    stored.pop(name, None)
    write_graph(stored if value is None else stored | {name: value}, project / "m.onnx")
    settings = wheel_source(project, "tiny_vit", "m.onnx", (project / "m.onnx").read_bytes())
    with pytest.raises(ValueError, match=message):
        fetch_vision(settings, project / "out")
    assert not (project / "out").exists()


def write_gguf(model: Llama, path: Path, template: str | None) -> None:
    """``model`` as llama.cpp stores it: rotary rows interleaved, the matrices of the first layer in Q8_0."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    key_heads = config.num_key_value_heads or config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = byte_tokenizer().get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(vocabulary, key=lambda token: vocabulary[token]), "Ġt"])
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * 257)
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template:
        writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else key_heads
            value = interleave_rotary(value, heads)
        array = value.numpy().astype(np.float32)
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        if "layers.0" in name and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def llama() -> Llama:
    torch.manual_seed(6)
    return Llama(
        LlamaConfig(
            vocab_size=260,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    ).eval()


def test_interleaving_puts_the_two_rows_that_are_rotated_together_side_by_side() -> None:
    rows = torch.arange(8.0)[:, None]  # two heads of width 4; within a head, rows i and i + 2 form a pair
    assert interleave_rotary(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] }}"])
def test_a_llama_out_of_gguf_is_the_model_that_went_in(llama: Llama, project: Path, template: str | None) -> None:
    write_gguf(llama, project / "m.gguf", template)
    settings = wheel_source(project, "tiny_llama", "m.gguf", (project / "m.gguf").read_bytes())
    told = fetch_language(settings, project / "out")
    assert fetch_language(settings, project / "twice") == told
    assert contents(project / "out") == contents(project / "twice")
    converted = AutoModelForCausalLM.from_pretrained(project / "out").eval()
    assert not hasattr(converted.config, "quantization_config")
    for name, value in llama.state_dict().items():
        other = converted.state_dict()[name]
        # Q8_0 keeps 8 bits of the largest value in a block; what was stored as float32 is exact.
        tolerance = value.abs().max() / 127 if "layers.0" in name and value.ndim == 2 else 0
        assert (other - value).abs().max() <= tolerance, name
    tokenizer = AutoTokenizer.from_pretrained(project / "out")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == ("hi" if template else "<|im_start|>user\nhi<|im_end|>\n")
    assert told["dtype"] == "float32"


def test_a_converted_tensor_that_differs_from_the_gguf_is_refused(llama: Llama, project: Path) -> None:
    write_gguf(llama, project / "m.gguf", None)  # in Q8_0, which the original is not
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.weight differs"):
        check_against_source(project / "m.gguf", llama)
