"""The text embedding is found in checkpoints of every layout, and nothing else is taken for it."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normalign.embeddings.measure import measure_text_norm
from normalign.embeddings.source import find_embedding

from .helpers import NAME, NORMS, ROWS, T, checkpoint, sharded

OTHER = ROWS * 100  # of the text embedding's own shape: told apart by name alone
# Name of the text embedding; beside it, tensors of the same shape that are not.
LAYOUTS = {
    "llama": (NAME, ["lm_head.weight", "model.layers.0.self_attn.q_proj.weight"]),
    "gpt2": ("wte.weight", ["wpe.weight"]),
    "gpt2_with_head": ("transformer.wte.weight", ["transformer.wpe.weight", "lm_head.weight"]),
    "llada": ("model.transformer.wte.weight", ["model.transformer.ff_out.weight"]),
    "bloom": ("word_embeddings.weight", ["word_embeddings_layernorm.weight"]),
    "falcon": ("transformer.word_embeddings.weight", []),
    "bert": ("bert.embeddings.word_embeddings.weight", ["bert.embeddings.token_type_embeddings.weight"]),
    "internlm2": ("model.tok_embeddings.weight", ["output.weight"]),
    "mistral": ("tok_embeddings.weight", ["output.weight"]),
    "neox": ("gpt_neox.embed_in.weight", ["embed_out.weight"]),
    "mamba": ("backbone.embeddings.weight", ["lm_head.weight"]),
    "opt": ("model.decoder.embed_tokens.weight", ["model.decoder.embed_positions.weight"]),
    "t5": ("shared.weight", ["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]),
    "llava": ("language_model.model.embed_tokens.weight", ["vision_tower.embeddings.position_embedding.weight"]),
    "qwen3_vl": ("model.language_model.embed_tokens.weight", ["model.visual.pos_embed.weight"]),
    "smolvlm": ("model.text_model.embed_tokens.weight", ["model.vision_model.embeddings.position_embedding.weight"]),
    "clip": ("text_model.embeddings.token_embedding.weight", ["text_model.embeddings.position_embedding.weight"]),
    "ovis2": ("model.language_model.embed_tokens.weight", ["model.visual_embeddings_table.weight"]),
    "ovis": ("llm.model.embed_tokens.weight", ["vte.weight"]),
    "phi3_v": ("model.embed_tokens.weight", ["model.vision_embed_tokens.wte.weight"]),
    "gemma3n": (
        "model.language_model.embed_tokens.weight",
        ["model.language_model.embed_tokens_per_layer.weight", "model.embed_vision.embedding.weight"],
    ),
    "blip2": ("language_model.model.decoder.embed_tokens.weight", ["qformer.embeddings.word_embeddings.weight"]),
    "chameleon": ("model.embed_tokens.weight", ["model.vqmodel.quantize.embedding.weight"]),
    "omni": ("thinker.model.embed_tokens.weight", ["talker.model.embed_tokens.weight", "thinker.visual.x.weight"]),
    "deepseek_v3": (NAME, ["model.layers.61.embed_tokens.weight", "model.layers.61.shared_head.head.weight"]),
    "tied_head_alone": ("lm_head.weight", ["model.norm.weight"]),
    "vlm_tied_head_alone": ("language_model.lm_head.weight", ["vision_model.embeddings.position_embedding.weight"]),
}
CONFIG = {"vocab_size": 4, "hidden_size": 2}


def norms(model: Path) -> list[float]:
    return find_embedding(str(model)).row_norms().tolist()


def renamed(name: str, others: list[str]) -> dict[str, Tensor]:
    return {name: ROWS, **dict.fromkeys(others, OTHER)}


@pytest.mark.parametrize("config", [None, CONFIG, {"text_config": CONFIG}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_text_embedding(tmp_path: Path, layout: str, config: dict[str, Any] | None) -> None:
    name, others = LAYOUTS[layout]
    assert norms(checkpoint(tmp_path, renamed(name, others), config)) == NORMS
    assert list(find_embedding(str(tmp_path)).tensors) == [name]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_a_sharded_checkpoint_only_the_embeddings_shard_is_needed(tmp_path: Path, layout: str) -> None:
    name, others = LAYOUTS[layout]
    if layout != "deepseek_v3":  # two candidates: the shapes of both are looked at
        assert norms(sharded(tmp_path, [{name: ROWS}], missing=tuple(others))) == NORMS


def test_an_unknown_name_is_found_by_the_shape_in_the_configuration(tmp_path: Path) -> None:
    tensors = {"net.my_embedder.weight": ROWS, "net.other_embedder.weight": torch.ones(9, 2), "out.weight": OTHER}
    assert norms(checkpoint(tmp_path, tensors, CONFIG)) == NORMS
    with pytest.raises(ValueError, match="no tensor is named like a text embedding"):
        find_embedding(str(checkpoint(tmp_path / "silent", tensors)))


def test_an_embedding_below_a_word_for_pictures_is_found_by_its_shape(tmp_path: Path) -> None:
    tensors = {"visual_bert.embeddings.word_embeddings.weight": ROWS}
    assert norms(checkpoint(tmp_path, tensors, CONFIG)) == NORMS


@pytest.mark.parametrize(
    ("config", "expected"),
    [({"vocab_size": 4, "hidden_size": 2}, 4), ({"vocab_size": 3, "hidden_size": 3}, 5), ({"hidden_size": 3}, 5)],
)
def test_the_configuration_decides_between_several(tmp_path: Path, config: dict[str, int], expected: int) -> None:
    tensors = {"a.embed_tokens.weight": ROWS, "b.embed_tokens.weight": torch.ones(5, 3)}
    assert len(norms(checkpoint(tmp_path, tensors, config))) == expected


def test_several_that_nothing_tells_apart_are_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, {"a.embed_tokens.weight": ROWS, "b.embed_tokens.weight": OTHER})
    with pytest.raises(ValueError, match=r"a\.embed_tokens\.weight, b\.embed_tokens\.weight may be.*config\.json"):
        find_embedding(str(tmp_path))


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_matrix_alone_counts_only_if_it_is_tied(tmp_path: Path, tied: bool) -> None:
    checkpoint(tmp_path, {"lm_head.weight": ROWS}, {"tie_word_embeddings": tied})
    if tied:
        assert norms(tmp_path) == NORMS
    else:
        with pytest.raises(ValueError, match="not tied"):
            find_embedding(str(tmp_path))


@pytest.mark.parametrize(
    ("base", "added"),
    [
        ("model.transformer.wte.embedding", "model.transformer.wte.new_embedding"),
        ("model.embed_tokens.weight", "model.embed_tokens.additional_embedding.weight"),
    ],
)
def test_rows_of_added_tokens_in_a_tensor_of_their_own_count(tmp_path: Path, base: str, added: str) -> None:
    tensors = {base: ROWS, added: torch.tensor([[0.0, 7.0]])}
    assert norms(checkpoint(tmp_path / "one", tensors, CONFIG)) == [*NORMS, 7.0]
    assert norms(sharded(tmp_path / "two", [{name: tensor} for name, tensor in tensors.items()])) == [*NORMS, 7.0]


@pytest.mark.parametrize("padding", [0, 3])
def test_resized_and_padded_vocabularies_keep_the_target_norm(tmp_path: Path, padding: int) -> None:
    padded = torch.cat([ROWS, torch.zeros(padding, 2)])
    result = measure_text_norm(find_embedding(str(checkpoint(tmp_path, {NAME: padded}, CONFIG))))
    assert result["T"] == pytest.approx(T)
    assert (result["rows"], result["zero_rows"], result["vocab_size"]) == (4 + padding, 1 + padding, 4)


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors"])
def test_a_file_and_a_folder_with_one_file_give_the_same(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, {NAME: ROWS}, {"model_type": "gemma", **CONFIG})
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    checkpoint(tmp_path / "adapter", {"base.lora_A.weight": OTHER})
    (tmp_path / "adapter" / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    for model in (tmp_path, tmp_path / name):
        found = find_embedding(str(model))
        assert found.row_norms().tolist() == NORMS
        assert found.scale == pytest.approx(2**0.5)


def damaged(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def header_of(shape: list[Any], offsets: list[Any], dtype: Any = "F32") -> bytes:
    """A file with one tensor of 32 bytes."""
    header = json.dumps({NAME: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(32)


@pytest.mark.parametrize("cut", [0, 4, 40, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    whole = (checkpoint(tmp_path, {NAME: ROWS}) / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"model\.safetensors.*fetch it again"):
        find_embedding(str(damaged(tmp_path, whole[:cut])))


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 538090408\n",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a":null',
        struct.pack("<Q", 31) + b'{"wte.weight":{"dtype":"F32"}}  ',
        struct.pack("<Q", 1 << 40) + b"{}",
        header_of([4.0, 2], [0, 32]),
        header_of([-4, -2], [0, 32]),
        header_of([4, 2], [0, 32.0]),
        header_of([4, 2], [0, 32], ["F32"]),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        find_embedding(str(damaged(tmp_path, content)))


def test_bytes_that_do_not_fill_the_shape_are_refused(tmp_path: Path) -> None:
    header = json.dumps({NAME: {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 16]}}).encode()
    with pytest.raises(ValueError, match="16 bytes for shape"):
        find_embedding(str(damaged(tmp_path, struct.pack("<Q", len(header)) + header + bytes(16))))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_that_are_not_finite_are_counted(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    rows = ROWS.to(dtype, copy=True)
    rows[1:3, 0] = value
    with pytest.raises(ValueError, match="2 embedding rows are not finite"):
        measure_text_norm(find_embedding(str(checkpoint(tmp_path, {NAME: rows}))))


@pytest.mark.parametrize(
    "tensors",
    [
        {NAME: ROWS.to(torch.int8), "model.embed_tokens.SCB": torch.ones(4)},
        {NAME: ROWS.to(torch.uint8).reshape(-1, 1), f"{NAME}.absmax": torch.ones(4)},
        {NAME: ROWS.to(torch.float8_e4m3fn), f"{NAME}_scale": torch.ones(4)},
        {"model.embed_tokens.qweight": ROWS.to(torch.int32), "lm_head.weight": OTHER},
    ],
)
def test_quantised_embeddings_are_refused_as_such(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="stored quantised"):
        find_embedding(str(checkpoint(tmp_path, tensors)))


def test_a_vision_tower_has_no_text_embedding(tmp_path: Path) -> None:
    tensors = dict.fromkeys(("embeddings.position_embeddings.weight", "encoder.layer.0.attention.query.weight"), OTHER)
    with pytest.raises(ValueError, match="no tensor is named like a text embedding"):
        find_embedding(str(checkpoint(tmp_path, tensors, {"hidden_size": 2})))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no weights"),
        ({"pytorch_model.bin": b"x"}, r"pytorch_model\.bin only, and pickled files are never read"),
        ({"a.safetensors": b"", "b.safetensors": b""}, r"2 \.safetensors files and no model\.safetensors\.index"),
        ({"a.gguf": b"", "b.gguf": b""}, r"2 \.gguf files"),
        ({"model.safetensors.index.json": b"{"}, "not valid JSON"),
        ({"model.safetensors.index.json": b"[]"}, "not a JSON object"),
        ({"model.safetensors.index.json": b"{}"}, "no weight_map"),
        ({"model.safetensors.index.json": b'{"weight_map": {"wte.weight": "../x"}}'}, "not a plain file name"),
        ({"model.safetensors.index.json": b'{"weight_map": {"wte.weight": "x"}}'}, "x is missing"),
        ({"config.json": b"\xff", "model.safetensors": b""}, "config.json is not valid JSON"),
    ],
)
def test_a_folder_that_cannot_be_read_says_why(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=message):
        find_embedding(str(tmp_path))


def test_an_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path, [{NAME: ROWS}, {"b": ROWS}])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NAME: "model-1.safetensors"}}))
    with pytest.raises(ValueError, match=r"is in model-1\.safetensors, where it is not"):
        find_embedding(str(tmp_path))


@pytest.mark.parametrize("model", ["no/such/path", "/no/such", "org/x.safetensors", "x.gguf", "name", "a/b@"])
def test_a_path_that_is_not_there_is_named(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{model}: no such file or folder"):
        find_embedding(model)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"neither a folder nor a \.safetensors or \.gguf file"):
        find_embedding(str(tmp_path / "weights.bin"))
