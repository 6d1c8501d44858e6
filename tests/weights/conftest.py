"""Settings and small checkpoints that the tests of the weights share."""

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from normalign.settings import SourceSettings

TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
RANDOM_VISION = SourceSettings("random:", None, None, {"model_type": "siglip_vision_model", **TOWER})
RANDOM_LANGUAGE = SourceSettings("random:", None, None, LLAMA)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def make_wheel(folder: Path, name: str, members: dict[str, bytes]) -> tuple[Path, str]:
    """A wheel of version 1.0 that pip accepts, and its SHA-256."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/LICENSE", "do what you like\n")
        archive.writestr(f"{info}/RECORD", "")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="session")
def siglip_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole SigLIP (text tower too) as the hub keeps it, in two shards."""
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    folder = tmp_path_factory.mktemp("siglip")
    text = {key: value for key, value in TOWER.items() if key not in ("image_size", "patch_size")}
    special = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(1)
    model = SiglipModel(SiglipConfig(vision_config=TOWER, text_config=text | special))
    model.save_pretrained(folder, max_shard_size="40KB")
    SiglipImageProcessor(size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder
