"""Checkpoints of tiny models, saved once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Saved = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def code_of_checkpoints(modules_cache: Path) -> None:
    """Attached checkpoints bring code: it is copied to a folder of the tests."""


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of a family's tiny model; in bfloat16, or in shards, where that is asked for."""
    import torch

    from tests.anatomy.tiny import tiny_vlm

    root = tmp_path_factory.mktemp("saved")

    def folder(family: str, *, dtype: str = "float32", sharded: bool = False) -> Path:
        place = root / f"{family}-{dtype}-{sharded}"
        if not place.exists():
            model, processor, _ = tiny_vlm(family)
            model.to(getattr(torch, dtype)).save_pretrained(place, max_shard_size="60KB" if sharded else "1GB")
            processor.save_pretrained(place)
        return place

    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images and one file that is none."""
    from tests.anatomy.tiny import picture

    folder = tmp_path_factory.mktemp("pictures")
    for side in (30, 41, 52):
        picture(side, 30).save(folder / f"{side}.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder
