"""A model large enough that its layers outweigh the rest, with random weights."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from normalign.plan.architecture import LanguageModel, VisionTower, language_model, vision_tower
from normalign.settings import ModelSettings, Profile, load_profile
from normalign.training.options import TrainingOptions

ROOT = Path(__file__).parents[2]
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
LANGUAGE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
STAGE1 = {"projector": 1e-3, "aligner": 1e-3}
STAGE2 = {"vision": 1e-3, "projector": 1e-3, "aligner": 1e-3, "language": 1e-3}
SETTINGS = ModelSettings(image_size=56, feature_layer=-1, feature_norm=True, max_tokens=512, system_prompt=None)


@dataclasses.dataclass(frozen=True)
class Shaped:
    """Folders of weights, and the shapes that the estimate sees."""

    folder: Path
    vision: VisionTower
    language: LanguageModel


@pytest.fixture(scope="session")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Shaped:
    from normalign.weights.random_weights import random_language, random_vision

    folder = tmp_path_factory.mktemp("shaped")
    random_vision(VISION, folder / "vision")
    random_language(LANGUAGE, folder / "language")
    return Shaped(folder, vision_tower(VISION, "test"), language_model(LANGUAGE, "test", tokens=260))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with params.yaml alone, as the working directory: nothing was run yet."""
    (tmp_path / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(profile: Profile, rates: dict[str, float]) -> TrainingOptions:
    """A stage of ``profile`` with other learning rates."""
    return dataclasses.replace(profile.stage2, learning_rate=rates)


def profile_at(name: str) -> Profile:
    """A profile of the repository's params.yaml."""
    return load_profile(name, ROOT / "params.yaml")
