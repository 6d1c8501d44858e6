"""What forward multiplies embeddings by, and the text part of a configuration."""

from pathlib import Path
from typing import Any

import pytest

from normalign.embeddings.config import text_config
from normalign.embeddings.measure import measure_text_norm
from normalign.embeddings.source import find_embedding

from .helpers import NAME, ROWS, T, checkpoint

ROOT_OF_WIDTH = 4.0  # of 16
SCALES: list[tuple[dict[str, Any], float]] = [
    ({"model_type": "llama"}, 1.0),
    ({"model_type": "gemma"}, ROOT_OF_WIDTH),
    ({"model_type": "gemma3_text"}, ROOT_OF_WIDTH),
    ({"model_type": "gemma3", "text_config": {"hidden_size": 16}}, ROOT_OF_WIDTH),
    ({"model_type": "paligemma", "text_config": {"model_type": "gemma2"}}, ROOT_OF_WIDTH),
    ({"model_type": "colpali", "vlm_config": {"text_config": {"model_type": "gemma"}}}, ROOT_OF_WIDTH),
    ({"model_type": "llava", "text_config": {"model_type": "granite", "embedding_multiplier": 12}}, 12.0),
    ({"model_type": "minicpm3", "scale_emb": 12}, 12.0),
    ({"model_type": "kosmos-2", "text_config": {"scale_embedding": True}}, ROOT_OF_WIDTH),
    ({"model_type": "bart", "scale_embedding": False}, 1.0),
    ({"model_type": "afmoe", "mup_enabled": True}, ROOT_OF_WIDTH),
    ({"model_type": "afmoe", "mup_enabled": False}, 1.0),
    ({"model_type": "granite", "embedding_multiplier": float("nan")}, 1.0),
    ({}, 1.0),
]


@pytest.mark.parametrize(("config", "scale"), SCALES)
def test_the_factor_of_forward_is_read_from_the_configuration(config: dict[str, Any], scale: float) -> None:
    assert text_config(config).scale(16) == scale


def test_the_target_norm_is_given_as_stored_and_as_used(tmp_path: Path) -> None:
    result = measure_text_norm(find_embedding(str(checkpoint(tmp_path, {NAME: ROWS}, {"model_type": "gemma2"}))))
    assert result["T"] == pytest.approx(T)
    assert result["T_as_used"] == pytest.approx(T * 2**0.5)
    assert result["g_init_as_used"] == pytest.approx(T)
    assert result["embedding_scale"] == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    ("config", "width", "vocabulary"),
    [
        ({"hidden_size": 8, "vocab_size": 9}, 8, 9),
        ({"n_embd": 8, "vocab_size": 9}, 8, 9),
        (
            {
                "hidden_size": 99,
                "text_config": {"hidden_size": 8, "vocab_size": 9},
                "vision_config": {"hidden_size": 7},
            },
            8,
            9,
        ),
        ({"vocab_size": 9, "llm_config": {"d_model": 8}}, 8, 9),
        ({"thinker_config": {"text_config": {"hidden_size": 8, "vocab_size": 9}}, "hidden_size": 99}, 8, 9),
        ({"text_config": None, "hidden_size": "8", "vocab_size": True}, None, None),
    ],
)
def test_sizes_are_those_of_the_innermost_text_part(
    config: dict[str, Any], width: int | None, vocabulary: int | None
) -> None:
    found = text_config(config)
    assert (found.width, found.vocabulary) == (width, vocabulary)
