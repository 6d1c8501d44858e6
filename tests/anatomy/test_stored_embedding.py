"""The embedding read from a saved checkpoint of every family is the one that the live model uses, scale and all."""

from pathlib import Path

import numpy as np
import pytest

from normalign.anatomy import find_anatomy
from normalign.embeddings.source import find_embedding

from .tiny import Tiny


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_norms_and_scale_read_from_the_folder_are_the_models(vlm: Tiny, shard: str, tmp_path: Path) -> None:
    model = vlm[0]
    model.save_pretrained(tmp_path, max_shard_size=shard)
    stored = find_embedding(str(tmp_path))
    anatomy = find_anatomy(model)
    expected = anatomy.embedding.weight.detach().double().norm(dim=-1).numpy()
    np.testing.assert_allclose(stored.row_norms(), expected, rtol=1e-12)
    assert stored.width == anatomy.width
    assert stored.scale == pytest.approx(anatomy.embedding_scale, rel=1e-6)
