"""What the paper's profiles fetch, tiny: a hub cache, LLaVA's records and images, and two benchmarks of lmms-eval.

Everything has the real layout, file names and structure; only dimensions and contents are small and made up.
"""

import json
from pathlib import Path
from typing import Any

REPOSITORIES = {
    "llama32_3b": "meta-llama/Llama-3.2-3B-Instruct",
    "qwen25_7b": "Qwen/Qwen2.5-7B-Instruct",
}
SIGLIP = "google/siglip-so400m-patch14-384"
IMAGE_SIZE = 56  # 4 x 4 patches of 14

LLAMA_SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ date_string }}\n\n{{ system }}<|eot_id|>"
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DIMENSIONS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_hub_cache(cache: Path, profile: str, revisions: dict[str, str]) -> None:
    """The snapshots that ``profile`` pins, as the hub's client leaves them in its cache."""
    write_siglip(_snapshot(cache, SIGLIP, revisions["vision"]))
    folder = _snapshot(cache, REPOSITORIES[profile], revisions["language"])
    (write_llama if profile == "llama32_3b" else write_qwen)(folder)


def _snapshot(cache: Path, repository: str, revision: str) -> Path:
    folder = cache / f"models--{repository.replace('/', '--')}" / "snapshots" / revision
    folder.mkdir(parents=True)
    return folder


def write_siglip(folder: Path) -> None:
    """An image-text pair with both towers, as it is published, and its image processor."""
    import torch
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel, SiglipTextConfig, SiglipVisionConfig

    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
    }
    torch.manual_seed(1)
    config = SiglipConfig(
        text_config=SiglipTextConfig(**small, vocab_size=64, bos_token_id=62, eos_token_id=63).to_dict(),
        vision_config=SiglipVisionConfig(**small, image_size=IMAGE_SIZE, patch_size=14).to_dict(),
    )
    SiglipModel(config).save_pretrained(folder)
    SiglipImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}).save_pretrained(folder)


def write_llama(folder: Path) -> None:
    """A Llama 3.2: bfloat16, tied embeddings, scaled rotary embeddings, no pad token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(LLAMA_SPECIAL, LLAMA_TEMPLATE, bos_token=LLAMA_SPECIAL[0], eos_token=LLAMA_SPECIAL[-1])
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        **DIMENSIONS,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=131072,
        rope_parameters=rope,
        tie_word_embeddings=True,
    )
    torch.manual_seed(2)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="50KB")
    tokenizer.save_pretrained(folder)


def write_qwen(folder: Path) -> None:
    """A Qwen2.5: bfloat16, an output matrix of its own, more embedding rows than tokens, in several files."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer(QWEN_SPECIAL, QWEN_TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    config = Qwen2Config(
        **DIMENSIONS,
        vocab_size=len(tokenizer) + 13,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="50KB")
    tokenizer.save_pretrained(folder)


def _tokenizer(special: list[str], template: str, **tokens: str) -> Any:
    """A byte-level BPE without merges, with the model family's special tokens and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, additional_special_tokens=special, clean_up_tokenization_spaces=False, **tokens
    )
    tokenizer.chat_template = template
    return tokenizer


def write_llava(root: Path, stage1: int, stage2: int) -> None:
    """Captions and two-turn conversations about a few images, at the places that params.yaml names."""
    pretrain = root / "data" / "sources" / "LLaVA-Pretrain"
    captions = [
        {
            "id": f"{i:09d}",
            "image": _image(pretrain / "images", i),
            "conversations": _turns(("Describe it.", "A card.")),
        }
        for i in range(stage1)
    ]
    (pretrain / "blip_laion_cc_sbu_558k.json").write_text(json.dumps(captions))
    instruct = root / "data" / "sources" / "LLaVA-NeXT-Data"
    turns = _turns(("What is this?", "A card."), ("Is it red?", "No."))
    records = [{"id": str(i), "image": _image(instruct / "images", i), "conversations": turns} for i in range(stage2)]
    (instruct / "llava_next_data.json").write_text(json.dumps(records))


def _turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    turns = []
    for number, (question, answer) in enumerate(pairs):
        turns.append({"from": "human", "value": f"<image>\n{question}" if number == 0 else question})
        turns.append({"from": "gpt", "value": answer})
    return turns


def _image(folder: Path, number: int) -> str:
    """One of eight images, written once; its path below ``folder``."""
    place = Path(f"{number % 8:05d}") / "card.jpg"
    if not (folder / place).exists():
        (folder / place).parent.mkdir(parents=True)
        card(number % 8).save(folder / place)
    return place.as_posix()


def card(number: int) -> Any:
    """An image of its own for each of eight numbers."""
    from PIL import Image

    return Image.new("RGB", (70, 50), tuple(40 + 175 * (number >> bit & 1) for bit in range(3)))


def write_benchmarks(root: Path) -> None:
    """POPE and HellaSwag with the columns that lmms-eval's tasks read; ``datasets`` takes a folder before the hub."""
    import datasets

    questions = [
        {
            "id": str(i),
            "question_id": str(i),
            "question": f"Is there a number {i} in the image?",
            "answer": "yes" if i % 2 else "no",
            "image_source": f"card_{i}",
            "image": card(i),
            "category": "adversarial",
        }
        for i in range(2)
    ]
    _write_parquet(datasets.Dataset.from_list(questions), root / "lmms-lab-encoder" / "POPE" / "data", "test")
    sentences = [
        {
            "ind": i,
            "activity_label": "Counting",
            "ctx_a": f"Somebody counts to {i}.",
            "ctx_b": "then",
            "endings": [f"says {i + step}." for step in range(4)],
            "label": str(i % 4),
        }
        for i in range(8)
    ]
    for split in ("train", "validation"):
        _write_parquet(datasets.Dataset.from_list(sentences), root / "hellaswag" / "data", split)


def _write_parquet(table: Any, folder: Path, split: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
