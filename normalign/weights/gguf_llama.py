"""A Llama model out of a quantised GGUF file, as float32 safetensors with a transformers tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING

from normalign.weights.random_weights import CHATML

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SINGLE_TOKENS = ("<|im_start|>", "<|im_end|>")
# Spaces in a row, line breaks, accents, other scripts, digits: what a broken tokenizer loses first.
ROUND_TRIP = "Two  spaces,\n\na naïve café: 日本 🙂 x = 3.14;\tend"


def convert(gguf_file: Path, out: Path) -> None:
    """Write the model in ``gguf_file`` to ``out``: dequantised float32 safetensors, configuration, tokenizer.

    Raises:
        ValueError: a converted tensor differs from the source, or the tokenizer does not give text back.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"gguf_file": gguf_file.name, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **source
    )
    # The weights are plain float32 now; saved, these would make transformers look for a GGUF file again.
    vars(model).pop("hf_quantizer", None)
    vars(model.config).pop("quantization_config", None)
    check_against_source(gguf_file, model)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, **source)
    tokenizer.chat_template = tokenizer.chat_template or CHATML
    tokenizer.model_max_length = model.config.max_position_embeddings
    check_tokenizer(gguf_file, tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def check_against_source(gguf_file: Path, model: "PreTrainedModel") -> None:
    """Dequantise embeddings, norm, and the first and last layer with the gguf package; all must be equal."""
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    config, state = model.config, model.state_dict()
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf_file).tensors}
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for layer in sorted({0, config.num_hidden_layers - 1}):
        for theirs, ours in (("attn_q", "self_attn.q_proj"), ("attn_k", "self_attn.k_proj")):
            names[f"blk.{layer}.{theirs}.weight"] = f"model.layers.{layer}.{ours}.weight"
        names[f"blk.{layer}.ffn_down.weight"] = f"model.layers.{layer}.mlp.down_proj.weight"
    for theirs, ours in names.items():
        expected = dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        value = state[ours]
        if "attn_q" in theirs:
            value = interleave_rotary(value, config.num_attention_heads)
        elif "attn_k" in theirs:
            value = interleave_rotary(value, config.num_key_value_heads)
        if not np.array_equal(value.numpy(), expected):
            raise ValueError(f"{gguf_file.name}: {ours} differs from the file's {theirs} after conversion")


def interleave_rotary(weight: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Rows of a query or key projection in llama.cpp's order: within a head, rows i and i + width/2 adjacent.

    transformers rotates the halves of a head against each other, llama.cpp each row against its neighbour.
    """
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def check_tokenizer(gguf_file: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Text comes back unchanged, and the ChatML marks are one token each."""
    back = tokenizer.decode(tokenizer.encode(ROUND_TRIP, add_special_tokens=False))
    if back != ROUND_TRIP:
        raise ValueError(f"{gguf_file.name}: its tokenizer turns {ROUND_TRIP!r} into {back!r}")
    for token in SINGLE_TOKENS:
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(f"{gguf_file.name}: its tokenizer splits {token!r} into {len(ids)} tokens")
