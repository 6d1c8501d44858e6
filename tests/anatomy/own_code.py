"""Checkpoints that bring their own code, written in the way of older releases: two families no library knows.

``tiles``: a tower that returns a list with a tensor for each image, and a projector that takes it. ``soft``: visual
tokens are mixtures of the rows of a table, the placeholder's id is in the code alone. Neither has a processor: the
model's class makes inputs. Patches have 4 x 4 pixels, each four make a visual token.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, dynamic_module_utils

from tests.anatomy.tiny import TEMPLATE, tokenizer_with

WIDTH = 16
LAYERS = 2

CONFIGURATION = """
from transformers import AutoConfig, LlamaConfig, PretrainedConfig


class EyeConfig(PretrainedConfig):
    model_type = "own_eye"

    def __init__(self, hidden_size=12, num_hidden_layers=2, hidden_stride=2, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.hidden_stride = hidden_stride


class OwnConfig(PretrainedConfig):
    def __init__(self, vision_config=None, text_config=None, **kwargs):
        self.vision_config = EyeConfig(**(vision_config or {}))
        self.text_config = LlamaConfig(**(text_config or {}))
        super().__init__(**kwargs)


class TilesConfig(OwnConfig):
    model_type = "own_tiles"

    def __init__(self, media_placeholder_token_id=None, **kwargs):
        self.media_placeholder_token_id = media_placeholder_token_id
        super().__init__(**kwargs)


class SoftConfig(OwnConfig):
    model_type = "own_soft"

    def __init__(self, visual_vocab_size=24, **kwargs):
        self.visual_vocab_size = visual_vocab_size
        super().__init__(**kwargs)


AutoConfig.register("own_eye", EyeConfig)
"""

MODELING = '''
import numpy as np
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_own import EyeConfig, SoftConfig, TilesConfig

ATOM = -7
MARKS = [-8, -9]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Linear(width, width)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Eye(PreTrainedModel):
    config_class = EyeConfig
    main_input_name = "pixel_values"

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Linear(48, config.hidden_size)
        self.blocks = nn.ModuleList([Block(config.hidden_size) for _ in range(config.num_hidden_layers)])
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, config.hidden_size), persistent=False)
        self.post_init()

    def forward(self, pixel_values, grid_hws):
        hidden = self.embed(pixel_values) + self.shift
        for block in self.blocks:
            hidden = block(hidden)
        images = hidden.split((grid_hws[:, 0] * grid_hws[:, 1]).tolist())
        return [image.reshape(-1, 4, hidden.shape[-1]) for image in images]


class Projector(nn.Module):
    def __init__(self, features, width):
        super().__init__()
        self.linear_1 = nn.Linear(4 * features, 4 * features)
        self.linear_2 = nn.Linear(4 * features, width)

    def forward(self, images):
        hidden = torch.cat(images, dim=0).flatten(1)
        return self.linear_2(nn.functional.gelu(self.linear_1(hidden)))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        q, k, v = self.qkv(hidden_states)[:, None].chunk(3, dim=-1)
        length = q.shape[-2]
        scores = q @ k.transpose(-1, -2) + torch.full((length, length), -1e9).triu(1).to(q)
        weights = scores.softmax(-1)
        return self.out((weights @ v)[:, 0]), weights if output_attentions else None


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.self_attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.input_norm = nn.LayerNorm(width)
        self.mlp_norm = nn.LayerNorm(width)

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        residual = hidden_states
        hidden_states, weights = self.self_attn(
            hidden_states=self.input_norm(hidden_states),
            attention_mask=attention_mask,
            output_attentions=output_attentions,
        )
        hidden_states = residual + hidden_states
        return (hidden_states + self.mlp(self.mlp_norm(hidden_states)),)


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config.hidden_size) for _ in range(config.num_hidden_layers)])
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, use_cache=True):
        if use_cache:
            raise AttributeError("type object 'DynamicCache' has no attribute 'from_legacy_cache'")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = hidden * self.scale
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=attention_mask, output_attentions=False)[0]
        return hidden


class MakesInputs:
    """A turn of one picture, cut into patches, and a text."""

    def preprocess_inputs(self, messages, min_pixels=64):
        image, text = messages[0]["content"][0]["image"], messages[0]["content"][1]["text"]
        picture = np.asarray(image.convert("RGB").resize((8 * (image.width // 16), 16)), dtype=np.float32) / 255
        rows, columns = picture.shape[0] // 4, picture.shape[1] // 4
        patches = picture.reshape(rows // 2, 2, 4, columns // 2, 2, 4, 3).transpose(0, 3, 1, 4, 2, 5, 6)
        pixel_values = torch.from_numpy(patches.reshape(rows * columns, 48).copy())
        grid_hws = torch.tensor([[rows, columns]])
        words = self.text_tokenizer(text, add_special_tokens=False).input_ids
        ids = [1, *self.around([self.placeholder()] * (rows * columns // 4)), *words]
        input_ids = torch.tensor([ids])
        return input_ids, pixel_values, grid_hws


class TilesForConditionalGeneration(MakesInputs, PreTrainedModel):
    config_class = TilesConfig

    def __init__(self, config):
        super().__init__(config)
        self.text_tokenizer = AutoTokenizer.from_pretrained(config.name_or_path)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        width = config.text_config.hidden_size
        self.multi_modal_projector = Projector(config.vision_config.hidden_size, width)
        self.language_model = Decoder(config.text_config)
        self.lm_head = nn.Linear(width, config.text_config.vocab_size, bias=False)
        self.post_init()

    def placeholder(self):
        return self.config.media_placeholder_token_id

    def around(self, tokens):
        return tokens

    def get_input_embeddings(self):
        return self.language_model.embed_tokens

    def _image_features(self, pixel_values, grid_hws):
        images = self.vision_tower(pixel_values, grid_hws)
        return self.multi_modal_projector(images)

    def forward(self, input_ids, attention_mask=None, pixel_values=None, grid_hws=None, use_cache=True):
        embeds = self.language_model.embed_tokens(input_ids)
        embeds[input_ids == self.config.media_placeholder_token_id] = self._image_features(pixel_values, grid_hws)
        hidden = self.language_model(inputs_embeds=embeds, attention_mask=attention_mask, use_cache=use_cache)
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))


class Table(nn.Embedding):
    def forward(self, tokens):
        return tokens @ self.weight if tokens.is_floating_point() else super().forward(tokens)


class VisualTokenizer(nn.Module):
    def __init__(self, vit, rows):
        super().__init__()
        self.vit = vit
        self.head = nn.Linear(4 * vit.config.hidden_size, rows)

    def forward(self, pixel_values, grid_hws):
        return self.head(torch.cat(self.vit(pixel_values, grid_hws)).flatten(1)).softmax(-1)


class SoftForCausalLM(MakesInputs, PreTrainedModel):
    config_class = SoftConfig

    def __init__(self, config):
        super().__init__(config)
        self.text_tokenizer = AutoTokenizer.from_pretrained(config.name_or_path)
        self.llm = AutoModelForCausalLM.from_config(config.text_config)
        self.visual_tokenizer = VisualTokenizer(AutoModel.from_config(config.vision_config), config.visual_vocab_size)
        self.vte = Table(config.visual_vocab_size, config.text_config.hidden_size)
        self.register_buffer("marks", torch.arange(config.visual_vocab_size - 2, config.visual_vocab_size), False)
        self.post_init()

    def placeholder(self):
        return ATOM

    def around(self, tokens):
        return [MARKS[0], *tokens, MARKS[1]]

    def forward(self, input_ids, attention_mask, pixel_values, grid_hws, **kwargs):
        embeds = self.merge(input_ids, pixel_values, grid_hws)
        return self.llm(inputs_embeds=embeds, attention_mask=attention_mask, **kwargs)

    def merge(self, input_ids, pixel_values, grid_hws):
        embeds = self.llm.get_input_embeddings()(input_ids.masked_fill(input_ids < 0, 0))
        for mark, embed in zip(MARKS, self.vte(self.marks)):
            embeds[input_ids == mark] = embed
        embeds[input_ids == ATOM] = self.vte(self.visual_tokenizer(pixel_values, grid_hws))
        return embeds


AutoModel.register(EyeConfig, Eye)
'''
CLASSES = {"tiles": "TilesForConditionalGeneration", "soft": "SoftForCausalLM"}


def own_checkpoint(folder: Path, kind: str, **fields: Any) -> Any:
    """Write the checkpoint of a tiny random model of ``kind`` to ``folder``; returns the model, made without loading.

    Args:
        fields: more fields of config.json.
    """
    folder.mkdir(parents=True)
    (folder / "configuration_own.py").write_text(CONFIGURATION, encoding="utf-8")
    (folder / "modeling_own.py").write_text(MODELING, encoding="utf-8")
    tokenizer = tokenizer_with("<image>", chat_template=TEMPLATE.format(image="<image>"))
    tokenizer.save_pretrained(folder)
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "vocab_size": len(tokenizer),
    }
    model = f"modeling_own.{CLASSES[kind]}"
    config = {
        "model_type": f"own_{kind}",
        "auto_map": {
            "AutoConfig": f"configuration_own.{kind.capitalize()}Config",
            "AutoModel": model,
            "AutoModelForCausalLM": model,
        },
        "text_config": text,
        "transformers_version": "4.50.0",
        **fields,
    }
    if kind == "tiles":
        config["media_placeholder_token_id"] = tokenizer.convert_tokens_to_ids("<image>")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    made = _made(folder, model)
    save_file(made.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return made


def _made(folder: Path, reference: str) -> Any:
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    kind: Any = dynamic_module_utils.get_class_from_dynamic_module(reference, folder)
    config = kind.config_class.from_pretrained(folder)
    config.name_or_path = folder
    with torch.random.fork_rng(devices=[]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0)  # no question when it loads its tokenizer
        torch.manual_seed(3)
        model = kind(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()
