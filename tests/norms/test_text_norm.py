"""T, the mean norm of the non-zero embedding rows (UB §5.1), and that nothing but the embedding is read."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from normalign.norms.text_norm import ROWS_AT_ONCE, find_embedding, read_row_norms, text_norm_statistics

ROWS = torch.tensor([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0], [0.0, 2.0]])  # norms 5, 0, 10, 2
NAME = "model.embed_tokens.weight"


def sharded(folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """A checkpoint in two shards, of which only the embedding's exists."""
    save_file({NAME: ROWS.to(dtype)}, folder / "model-00001-of-00002.safetensors")
    weight_map = {NAME: "model-00001-of-00002.safetensors", "model.norm.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_statistics_of_a_shard_equal_hand_values_though_the_other_shard_is_missing(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    sharded(tmp_path, dtype)
    norms, width = read_row_norms(*find_embedding(tmp_path))
    assert norms.tolist() == [5.0, 0.0, 10.0, 2.0]
    result = text_norm_statistics(norms, width)
    assert result["T"] == pytest.approx(17 / 3)
    assert result["std"] == pytest.approx(math.sqrt((25 + 100 + 4) / 3 - (17 / 3) ** 2))
    assert (result["median"], result["rows"], result["zero_rows"], result["hidden_size"]) == (5.0, 4, 1, 2)
    assert result["g_init"] == pytest.approx(17 / 3 / math.sqrt(2))
    assert result["percentiles"]["25"] == pytest.approx(3.5)


def test_one_file_is_read_in_blocks_and_equals_numpy(tmp_path: Path) -> None:
    rows = torch.randn(ROWS_AT_ONCE + 37, 4, generator=torch.Generator().manual_seed(0))
    save_file({NAME: rows, "lm_head.weight": rows * 2}, tmp_path / "model.safetensors")
    norms, _ = read_row_norms(*find_embedding(tmp_path))
    np.testing.assert_allclose(norms, np.linalg.norm(rows.double().numpy(), axis=1), rtol=1e-12)


@pytest.mark.parametrize("names", [["lm_head.weight"], ["a.embed_tokens.weight", "b.embed_tokens.weight"]])
def test_none_or_several_embeddings_are_refused_by_name(tmp_path: Path, names: list[str]) -> None:
    save_file({name: ROWS.clone() for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="none" if len(names) == 1 else "a.embed_tokens.weight"):
        find_embedding(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        find_embedding(tmp_path)


@pytest.mark.parametrize(("norms", "message"), [([0.0, 0.0], "every row"), ([1.0, math.nan], "1 embedding rows")])
def test_untrained_or_broken_embeddings_are_refused(norms: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text_norm_statistics(np.array(norms), 2)
