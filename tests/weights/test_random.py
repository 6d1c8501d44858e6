"""Random weights: deterministic, loadable, with a tokenizer of bytes."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer

from normalign.weights import fetch_language, fetch_vision
from normalign.weights.random_weights import byte_tokenizer

from .conftest import LLAMA, RANDOM_LANGUAGE, RANDOM_VISION, contents

TOKENIZER = byte_tokenizer()


def test_two_runs_are_byte_identical_and_leave_the_callers_random_state_alone(tmp_path: Path) -> None:
    for fetch, settings in ((fetch_vision, RANDOM_VISION), (fetch_language, RANDOM_LANGUAGE)):
        torch.manual_seed(3)
        first = fetch(settings, tmp_path / "first")
        drawn = torch.rand(1)
        assert fetch(settings, tmp_path / "second") == first
        assert contents(tmp_path / "first") == contents(tmp_path / "second")
        torch.manual_seed(3)
        assert torch.equal(drawn, torch.rand(1))


def test_vision_tower_loads_and_reads_what_its_processor_makes(tmp_path: Path) -> None:
    told = fetch_vision(RANDOM_VISION, tmp_path / "v")
    model = AutoModel.from_pretrained(tmp_path / "v").eval()
    processor = AutoImageProcessor.from_pretrained(tmp_path / "v")
    pixels = processor(torch.zeros(3, 50, 40, dtype=torch.uint8), return_tensors="pt")["pixel_values"]
    assert model(pixels).last_hidden_state.shape == (1, 4, 16)  # (28 / 14)^2 patches, no CLS
    assert told["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert (told["class"], told["dtype"]) == ("SiglipVisionModel", "float32")


def test_language_model_loads_and_knows_the_tokenizers_special_tokens(tmp_path: Path) -> None:
    told = fetch_language(RANDOM_LANGUAGE, tmp_path / "l")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "l")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "l")
    assert len(tokenizer) == model.config.vocab_size == 259
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, tokenizer.convert_tokens_to_ids("a"), 2]
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 0)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    turns = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    # Tied: the embedding is stored and counted once.
    assert told["parameters"] == sum(parameter.numel() for parameter in model.parameters())


@given(st.text(st.characters(blacklist_categories=["Cs"]), max_size=40))
def test_byte_tokenizer_gives_any_text_back_one_token_per_byte(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text
    assert len(ids) == len(text.encode()) or "<|" in text


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path) -> None:
    settings = dataclasses.replace(RANDOM_LANGUAGE, config=LLAMA | {"vocab_size": 100})
    with pytest.raises(ValueError, match=r"vocab_size is 100.*259 tokens"):
        fetch_language(settings, tmp_path / "l")


def test_a_config_without_known_model_type_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model_type is 'lama'"):
        fetch_language(dataclasses.replace(RANDOM_LANGUAGE, config={"model_type": "lama"}), tmp_path / "l")
    assert list(tmp_path.iterdir()) == []
