"""Row norms are those of the stored values in float64, whatever the type and however the rows fall into blocks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from normalign.embeddings import rows as rows_module
from normalign.embeddings.ranges import BLOCK
from normalign.embeddings.source import local_embedding

from .helpers import NAME, checkpoint

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_every_stored_type_equal_those_of_its_values_in_float64(tmp_path: Path, dtype: torch.dtype) -> None:
    rows_ND = torch.randn(70, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows_ND[0] = torch.finfo(dtype).max if dtype != torch.float64 else 1e150
    rows_ND[1] = torch.finfo(dtype).smallest_normal if dtype != torch.float64 else 1e-150
    norms_N = local_embedding(checkpoint(tmp_path, {NAME: rows_ND})).row_norms()
    np.testing.assert_allclose(norms_N, rows_ND.double().norm(dim=-1).numpy(), rtol=1e-13)


@pytest.mark.parametrize("block", [1, 8, 24, 40, 1 << 20])
def test_norms_do_not_depend_on_the_block(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_ND = torch.randn(7, 2, generator=torch.Generator().manual_seed(1))
    embedding = local_embedding(checkpoint(tmp_path, {"before": torch.ones(3), NAME: rows_ND, "z": torch.ones(5)}))
    monkeypatch.setattr(rows_module, "BLOCK", block)
    read: list[int] = []
    norms_N = embedding.row_norms(read.append)
    np.testing.assert_allclose(norms_N, rows_ND.double().norm(dim=-1).numpy(), rtol=1e-14)
    assert sum(read) == embedding.size == 7 * 2 * 4


def test_more_rows_than_one_block_holds(tmp_path: Path) -> None:
    width = 16
    rows_ND = torch.randn(BLOCK // (4 * width) * 2 + 37, width, generator=torch.Generator().manual_seed(2))
    norms_N = local_embedding(checkpoint(tmp_path, {NAME: rows_ND})).row_norms()
    np.testing.assert_allclose(norms_N, np.linalg.norm(rows_ND.double().numpy(), axis=1), rtol=1e-13)
