"""The parts of a vision-language model, and where its visual tokens stand.

Shape suffixes: B batch, L sequence length, N tokens, D width of the language model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normalign.anatomy.modules import UnknownStructureError, at, block_list, common, unwrap
from normalign.anatomy.projector import find_projector
from normalign.anatomy.scale import embedding_scale
from normalign.anatomy.search import embedding_in, find_language, find_tower
from normalign.anatomy.source import written_at

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
    model = unwrap(model)
    config: Any = getattr(model, "config", None)
    _refuse_other_kinds(config, type(model).__name__)
    if language is None:
        language, embedding = find_language(model)
    else:
        embedding = embedding_in(at(model, language, "--language")[1])
    language, decoder = at(model, language, "--language")
    tower, vision = at(model, find_tower(model, language) if tower is None else tower, "--tower")
    core = common(tower, language)
    if projector is None:
        projector = find_projector(model, core, tower, language, embedding.embedding_dim)
    projector, last = at(model, projector, "--projector")
    layers = _blocks(decoder, f"--language {language}", direct=True)
    image_token = _image_token(model, config) if image_token_id is None else image_token_id
    return Anatomy(
        model=model,
        family=str(getattr(config, "model_type", "")),
        core=model.get_submodule(core),
        tower_path=tower,
        tower=vision,
        tower_layers=_blocks(vision, f"--tower {tower}"),
        projector_path=projector,
        projector=last,
        language_path=language,
        language=decoder,
        layers=layers,
        embedding=embedding,
        embedding_scale=embedding_scale(decoder, embedding, layers[0], avoid=image_token),
        width=embedding.embedding_dim,
        image_token_id=image_token,
        injected_layers=_injected_layers(vision, config, len(layers)),
        visual_vocabulary=isinstance(last, nn.Embedding),
    )


def _refuse_other_kinds(config: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnknownStructureError(
            f"{name} is an encoder-decoder: its visual tokens do not enter a decoder's residual stream"
        )
    if getattr(getattr(config, "text_config", None), "cross_attention_layers", None):
        raise UnknownStructureError(
            f"{name}: its decoder looks at images by cross-attention; its sequence has no visual tokens"
        )


def _blocks(module: nn.Module, option: str, *, direct: bool = False) -> tuple[nn.Module, ...]:
    found = block_list(module, direct=direct)
    if found is None:
        raise UnknownStructureError(f"{option}: {type(module).__name__} has no list of transformer blocks")
    return tuple(map(unwrap, found))


def visual_mask(anatomy: Anatomy, input_ids_BL: Tensor) -> Tensor:
    """Which positions (B, L) hold visual tokens once text embeddings and visual tokens are merged."""
    return input_ids_BL == anatomy.image_token_id


def _image_token(model: nn.Module, config: Any) -> int:
    for field in IMAGE_TOKEN_FIELDS:
        value = getattr(config, field, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    in_code = set(written_at(model, "forward"))
    if len(in_code) == 1:
        return in_code.pop()
    raise UnknownStructureError(
        f"{type(model).__name__}: its configuration has no id of the image placeholder (none of "
        f"{', '.join(IMAGE_TOKEN_FIELDS)}); give it with --image-token-id ID. A model that compares images with texts, "
        "like CLIP, has none: `normalign encoder-norm` measures its tower"
    )


def _injected_layers(tower: Any, config: Any, depth: int) -> tuple[int, ...]:
    """Qwen3-VL's deepstack: the features of the n-th listed tower block are added after the n-th decoder layer."""
    owners = (tower, getattr(tower, "config", None), config)
    taken = next((found for o in owners if (found := getattr(o, "deepstack_visual_indexes", None))), ())
    return tuple(range(min(len(taken), depth)))
