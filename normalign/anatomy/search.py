"""Finding the language model and the vision tower among a model's modules.

Shape suffixes: none, no tensors here.
"""

from typing import Any

from torch import nn

from normalign.anatomy.modules import UnknownStructureError, block_list, common, inside, path_of
from normalign.anatomy.source import children_used


def find_language(model: nn.Module) -> tuple[str, nn.Embedding]:
    """Path of the text decoder, and its input embedding.

    The decoder is the innermost module that holds the input embedding and, as its own child, a list of layers.
    """
    embedding = input_embedding(model)
    path = path_of(model, embedding)
    while path:
        path = path.rpartition(".")[0]
        if block_list(model.get_submodule(path), direct=True) is not None:
            return path, embedding
    raise UnknownStructureError(
        f"{type(model).__name__}: found no list of decoder layers around the input embedding; "
        "name the text decoder with --language PATH"
    )


def embedding_in(language: nn.Module) -> nn.Embedding:
    """The input embedding of a decoder that a person named: the table with the most rows in it."""
    tables = [module for module in language.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        raise UnknownStructureError("--language: the module holds no embedding table; name the text decoder itself")
    return max(tables, key=lambda table: table.num_embeddings)


def input_embedding(model: nn.Module) -> nn.Embedding:
    """What the model calls its input embedding; else the table with the most rows."""
    try:
        found = model.get_input_embeddings()  # type: ignore[operator]  # PreTrainedModel's, where it is one
    except (AttributeError, NotImplementedError, TypeError):
        found = None
    return found if isinstance(found, nn.Embedding) else embedding_in(model)


def find_tower(model: nn.Module, language: str | None) -> str:
    """Path of the vision tower: the outermost module fed by pixels, with blocks, that is no part of the language model.

    Without a language model (None) it can be the model itself.

    Fed by pixels is what its class says (its inputs' modalities, its main input) or whose configuration is a vision
    configuration within the model's.
    """
    vision_configs = _vision_configs(getattr(model, "config", None))
    found: list[str] = []
    for path, module in model.named_modules():
        apart = language is None or not (inside(path, language) or inside(language, path))
        new = not any(inside(path, outer) for outer in found)
        if apart and new and _takes_pixels(module, vision_configs) and block_list(module) is not None:
            found.append(path)
    if not found:
        raise UnknownStructureError(
            f"{type(model).__name__}: found no vision tower (a module with blocks that takes pixels). A text-only "
            "model has none (`normalign text-norm` measures those); if this one has, name it with --tower PATH"
        )
    if language is None:
        return found[0]
    used = _used_for_images(model, common(found[0], language))
    named = [path for path in found if path.split(".")[-1] in used]
    return (named or found)[0]


def _takes_pixels(module: nn.Module, vision_configs: tuple[type, ...]) -> bool:
    kind = type(module)
    modalities = getattr(kind, "input_modalities", ())
    modalities = (modalities,) if isinstance(modalities, str) else tuple(modalities or ())
    if "image" in modalities and "text" not in modalities:
        return True
    if str(getattr(kind, "main_input_name", "")).startswith("pixel_values") and "text" not in modalities:
        return True
    return bool(vision_configs) and isinstance(getattr(module, "config", None), vision_configs)


def _vision_configs(config: Any) -> tuple[type, ...]:
    kinds = [
        type(value)
        for name, value in vars(config or object).items()
        if ("vision" in name or "visual" in name or "vit" in name) and hasattr(value, "to_dict")
    ]
    return tuple(kind for kind in kinds if kind.__name__ != "PreTrainedConfig")


def _used_for_images(model: nn.Module, core: str) -> list[str]:
    module = model.get_submodule(core)
    return children_used(module, "get_image_features") or children_used(module, "forward")
