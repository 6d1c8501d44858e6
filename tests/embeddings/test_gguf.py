"""The embedding in a GGUF file, against the gguf package's own reading of the whole tensor."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from normalign.embeddings import rows as rows_module
from normalign.embeddings.source import find_embedding

WIDTH = 256  # a multiple of every type's block
ROWS = np.random.default_rng(0).normal(size=(37, WIDTH)).astype(np.float32)
QUANTISED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16"]


def write(path: Path, data: npt.NDArray[Any], kind: GGMLQuantizationType, architecture: str = "llama") -> Path:
    """A model of three tensors and a vocabulary, as llama.cpp's converter lays it out."""
    writer = GGUFWriter(path, architecture)
    writer.add_embedding_length(WIDTH)
    writer.add_vocab_size(len(ROWS))
    writer.add_token_list([f"token {number}" for number in range(300)])
    writer.add_token_scores([0.5] * 300)
    writer.add_string("tokenizer.chat_template", "é" * 3000)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_tensor("blk.0.attn_q.weight", np.ones((3, 32), np.float32))
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    writer.add_tensor("output.weight", np.ones((5, WIDTH), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("block", [1, 1 << 20])
@pytest.mark.parametrize("name", QUANTISED)
def test_norms_are_those_of_the_dequantised_rows(
    tmp_path: Path, name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "BLOCK", block)
    kind = GGMLQuantizationType[name]
    data = quantize(ROWS, kind)
    found = find_embedding(str(write(tmp_path / "m.gguf", data, kind)))
    expected = np.linalg.norm(dequantize(data, kind).astype(np.float64), axis=1)
    np.testing.assert_allclose(found.row_norms(), expected, rtol=1e-13)
    assert (found.dtype, found.width, found.config.vocabulary, found.scale) == (name, WIDTH, len(ROWS), 1.0)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_which_the_package_only_decodes_give_the_norms_of_their_rows(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "BLOCK", 1000)
    kind = GGMLQuantizationType[name]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    size = (len(ROWS), WIDTH // block * block_bytes)
    data = np.random.default_rng(1).integers(0, 64, size, dtype=np.uint8)  # no scale among them is infinite
    expected = np.linalg.norm(dequantize(data, kind).astype(np.float64), axis=1)
    found = find_embedding(str(write(tmp_path / "m.gguf", data, kind)))
    np.testing.assert_allclose(found.row_norms(), expected, rtol=1e-13)
    assert expected.min() > 0 and found.dtype == name


def test_plain_float32_and_a_folder_with_one_model(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", ROWS, GGMLQuantizationType.F32)
    (tmp_path / "mmproj-m.gguf").write_bytes(b"")
    found = find_embedding(str(tmp_path))
    np.testing.assert_allclose(found.row_norms(), np.linalg.norm(ROWS.astype(np.float64), axis=1), rtol=1e-13)


def test_gemma_is_scaled_by_the_root_of_its_width(tmp_path: Path) -> None:
    assert find_embedding(str(write(tmp_path / "g.gguf", ROWS, GGMLQuantizationType.F32, "gemma3"))).scale == 16.0


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", ROWS, GGMLQuantizationType.F32).read_bytes()
    end = whole.rindex(ROWS.tobytes()) + ROWS.nbytes
    for size in [0, 3, 7, 20, *range(30, 9000, 97), end - 1]:
        (tmp_path / "m.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"m\.gguf"):
            find_embedding(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"GGML" + bytes(40), "not a GGUF file"), (b"GGUF" + bytes(40), "version 0 is not read")],
)
def test_what_is_no_readable_gguf_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        find_embedding(str(tmp_path / "m.gguf"))


def test_a_projector_alone_has_no_text_embedding(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", ROWS, GGMLQuantizationType.F32)
    path.write_bytes(path.read_bytes().replace(b"token_embd.weight", b"vision_em.weight.", 1))
    with pytest.raises(ValueError, match=r"holds no token_embd\.weight"):
        find_embedding(str(path))
