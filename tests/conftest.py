"""A tiny vision-language model with random weights, for every test that needs one."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here looks anything up

if TYPE_CHECKING:
    from transformers import LlavaProcessor

    from normalign.vlm.model import NormalignForConditionalGeneration

TEXT_NORM = 0.5
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
TOWERS = ("siglip_vision_model", "clip_vision_model", "dinov2")


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Weights folders (``vision/`` and ``language/``) per vision tower, and models built from them."""

    folders: dict[str, Path]

    def processor(self, tower: str = "siglip_vision_model", image_size: int = 28) -> "LlavaProcessor":
        """The processor of a new model."""
        from normalign.vlm.build import build_processor

        return build_processor(self.folders[tower], image_size)

    def model(
        self,
        aligner: dict[str, Any] | None = None,
        *,
        tower: str = "siglip_vision_model",
        image_size: int = 28,
        feature_layer: int = -1,
        feature_norm: bool = True,
        seed: int = 3,
    ) -> "NormalignForConditionalGeneration":
        """A new model; its aligner is LayerNorm with GWC unless told otherwise."""
        from normalign.vlm.build import build_model

        return build_model(
            self.folders[tower],
            self.processor(tower, image_size),
            image_size=image_size,
            feature_layer=feature_layer,
            feature_norm=feature_norm,
            aligner={"aligner": "layernorm", "gwc": True} if aligner is None else aligner,
            text_norm=TEXT_NORM,
            seed=seed,
        )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Tiny SigLIP, CLIP and DINOv2 towers before one tiny Llama; and that Llama with an output matrix of its own."""
    from normalign.weights.random_weights import random_language, random_vision

    root = tmp_path_factory.mktemp("tiny")
    random_language(LLAMA, root / "tied")
    random_language(LLAMA | {"tie_word_embeddings": False}, root / "untied")
    folders = {}
    for name in TOWERS:
        folders[name] = root / name
        random_vision({"model_type": name, **TOWER}, root / name / "vision")
        (root / name / "language").symlink_to(root / "tied")
    folders["untied"] = root / "siglip_untied"
    folders["untied"].mkdir()
    (folders["untied"] / "vision").symlink_to(root / TOWERS[0] / "vision")
    (folders["untied"] / "language").symlink_to(root / "untied")
    return Tiny(folders)


@pytest.fixture(scope="session")
def modules_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where transformers copies the code of checkpoints to: not into the user's own cache, and one for all tests.

    Its folder is a package, which Python imports once.
    """
    from transformers import dynamic_module_utils

    cache = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
        patch.setattr(sys, "path", [*sys.path])
        yield cache
