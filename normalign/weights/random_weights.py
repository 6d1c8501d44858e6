"""Weights drawn from a fixed seed, with a byte-level tokenizer: the whole pipeline without a download."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SEED = 20251208
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def random_vision(config: dict[str, Any], out: Path) -> None:
    """A vision tower from ``config`` (transformers' fields, with ``model_type``), and its image processor."""
    import torch
    from transformers import AutoModel, SiglipImageProcessor

    built = _config(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        AutoModel.from_config(built, dtype=torch.float32, trust_remote_code=False).save_pretrained(out)
    size = {"height": built.image_size, "width": built.image_size}
    SiglipImageProcessor(size=size).save_pretrained(out)


def random_language(config: dict[str, Any], out: Path) -> None:
    """A causal language model made from ``config``, and a tokenizer with one token per byte."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    built = _config(
        {
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        | config
    )
    if built.vocab_size < len(tokenizer):
        raise ValueError(
            f"weights.language.config: vocab_size is {built.vocab_size}, the byte-level tokenizer has "
            f"{len(tokenizer)} tokens; leave it out or set at least that"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(built, dtype=torch.float32, trust_remote_code=False)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """A tokenizer of 256 byte tokens (ids 3 to 258) after the three ChatML special tokens (ids 0 to 2)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def _config(config: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    fields = dict(config)
    model_type = fields.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"weights source random:, config.model_type is {model_type!r}; set a model type of transformers, "
            "such as siglip_vision_model or llama"
        )
    return AutoConfig.for_model(model_type, **fields)
