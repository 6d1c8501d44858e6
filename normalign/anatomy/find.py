"""The parts of a vision-language model, and where its visual tokens stand.

Shape suffixes: B batch, L sequence length, N tokens, D width of the language model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normalign.anatomy import search
from normalign.anatomy.scale import embedding_scale
from normalign.anatomy.search import UnknownStructureError

IMAGE_TOKEN_FIELDS = (
    "image_token_id",
    "image_token_index",
    "image_patch_id",
    "media_placeholder_token_id",
    "img_context_token_id",
    "im_patch_token_id",
)


@dataclass(frozen=True)
class Anatomy:
    """Where the parts of a vision-language model are; modules are the live ones of ``model``."""

    model: nn.Module
    """What was passed in, out of torch.compile's wrapper."""
    family: str
    """``config.model_type``."""
    core: nn.Module
    """The module whose forward merges visual tokens into text embeddings (usually ``model.model``)."""
    tower_path: str
    tower: nn.Module
    tower_layers: Sequence[nn.Module]
    projector_path: str
    projector: nn.Module
    """The last module of the vision path whose output is ``width`` wide."""
    language_path: str
    language: nn.Module
    """The text decoder, without its output matrix."""
    layers: Sequence[nn.Module]
    embedding: nn.Embedding
    embedding_scale: float
    """What forward multiplies text embeddings by (Gemma: √D), 1.0 elsewhere."""
    width: int
    image_token_id: int
    injected_layers: tuple[int, ...]
    """Decoder layers after which visual features are added once more (Qwen3-VL), else none."""
    visual_vocabulary: bool
    """Visual tokens are mixtures of the rows of a visual embedding table (Ovis)."""


def find_anatomy(
    model: nn.Module,
    *,
    projector: str | None = None,
    tower: str | None = None,
    language: str | None = None,
    image_token_id: int | None = None,
) -> Anatomy:
    """Find the parts of ``model`` from its structure and configuration.

    Args:
        projector, tower, language: dotted paths that replace what would be found.
        image_token_id: id of the placeholder that visual tokens replace, where the configuration does not tell.

    Raises:
        UnknownStructureError: a part could not be found; the message says which option supplies it.
    """
    model = search.unwrap(model)
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UnknownStructureError(
            f"{type(model).__name__} is an encoder-decoder: its visual tokens do not enter a decoder's residual stream"
        )
    if getattr(getattr(config, "text_config", None), "cross_attention_layers", None):
        raise UnknownStructureError(
            f"{type(model).__name__}: its decoder looks at images by cross-attention; its sequence has no visual tokens"
        )
    if language is None:
        language, embedding = search.find_language(model)
    else:
        embedding = search.embedding_in(search.at(model, language, "--language")[1])
    if tower is None:
        tower = search.find_tower(model, language)
    language, decoder = search.at(model, language, "--language")
    tower, vision = search.at(model, tower, "--tower")
    core = search.common(tower, language)
    width = embedding.embedding_dim
    if projector is None:
        projector = search.find_projector(model, core, tower, language, width)
    projector, last = search.at(model, projector, "--projector")
    layers, blocks = search.block_list(decoder, direct=True), search.block_list(vision)
    if layers is None:
        raise UnknownStructureError(f"--language {language}: the module has no list of decoder layers of its own")
    if blocks is None:
        raise UnknownStructureError(f"--tower {tower}: the module has no list of blocks")
    image_token = _image_token(config, type(model).__name__) if image_token_id is None else image_token_id
    return Anatomy(
        model=model,
        family=str(getattr(config, "model_type", "")),
        core=model.get_submodule(core),
        tower_path=tower,
        tower=vision,
        tower_layers=tuple(map(search.unwrap, blocks)),
        projector_path=projector,
        projector=last,
        language_path=language,
        language=decoder,
        layers=tuple(map(search.unwrap, layers)),
        embedding=embedding,
        embedding_scale=embedding_scale(decoder, embedding, search.unwrap(layers[0]), avoid=image_token),
        width=width,
        image_token_id=image_token,
        injected_layers=_injected_layers(vision, config, len(layers)),
        visual_vocabulary=isinstance(last, nn.Embedding),
    )


def visual_mask(anatomy: Anatomy, input_ids_BL: Tensor) -> Tensor:
    """Which positions (B, L) hold visual tokens once text embeddings and visual tokens are merged."""
    return input_ids_BL == anatomy.image_token_id


def _image_token(config: Any, name: str) -> int:
    for field in IMAGE_TOKEN_FIELDS:
        value = getattr(config, field, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise UnknownStructureError(
        f"{name}: its configuration has no id of the image placeholder (none of {', '.join(IMAGE_TOKEN_FIELDS)}); "
        "give it with --image-token-id ID. A model that compares images with texts, like CLIP, has none: "
        "`normalign encoder-norm` measures its tower"
    )


def _injected_layers(tower: Any, config: Any, depth: int) -> tuple[int, ...]:
    """Qwen3-VL's deepstack: the features of the n-th listed tower block are added after the n-th decoder layer."""
    owners = (tower, getattr(tower, "config", None), config)
    taken = next((found for o in owners if (found := getattr(o, "deepstack_visual_indexes", None))), ())
    return tuple(range(min(len(taken), depth)))
