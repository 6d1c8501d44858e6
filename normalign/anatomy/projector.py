"""Finding the projector, the module that makes visual tokens out of the vision tower's features.

Shape suffixes: none, no tensors here.
"""

from collections.abc import Iterable

from torch import nn

from normalign.anatomy.modules import UnknownStructureError, block_list, inside, path_between, path_of
from normalign.anatomy.search import input_embedding
from normalign.anatomy.source import children_used


def find_projector(model: nn.Module, core: str, tower: str, language: str, width: int) -> str:
    """Path of the module that makes visual tokens: the last on the vision path whose output is ``width`` wide.

    Looked for beside the tower first, from the core inwards, then inside the tower, behind its blocks. Where several
    could be it, the source of ``get_image_features`` (or else of ``forward``) says which comes last.
    """
    blocks = block_list(model.get_submodule(tower))
    inner = tower if blocks is None else path_of(model, blocks)
    vocabulary = input_embedding(model).num_embeddings
    for container in path_between(core, inner):
        module = model.get_submodule(container)
        able = [
            name
            for name, child in module.named_children()
            if not _holds(_join(container, name), (inner, language, tower))
            and _sees(child)
            and can_output(child, width, vocabulary)
        ]
        holder = inner.removeprefix(f"{container}." if container else "").split(".")[0]
        for method in ("get_image_features", "forward"):
            order = children_used(module, method)
            behind = order[order.index(holder) :] if holder in order else order
            used = [name for name in behind if name in able]
            if used:
                return _entry(model, _join(container, used[-1]))
        if able and not children_used(module, "forward"):  # there is no source to read
            return _entry(model, _join(container, able[-1]))
    raise UnknownStructureError(
        f"{type(model).__name__}: found no projector, a module behind the vision tower {tower!r} whose output is "
        f"{width} wide; name it with --projector PATH"
    )


def _join(container: str, name: str) -> str:
    return f"{container}.{name}" if container else name


def _holds(path: str, others: Iterable[str]) -> bool:
    return any(inside(other, path) for other in others)


def _sees(module: nn.Module) -> bool:
    """False for parts whose class says that they take other modalities than images, such as an audio tower."""
    modalities = getattr(type(module), "input_modalities", None)
    return not modalities or "image" in modalities


def _entry(model: nn.Module, path: str) -> str:
    """A list of modules is not called itself: its last entry is."""
    module = model.get_submodule(path)
    return f"{path}.{len(module) - 1}" if isinstance(module, nn.ModuleList) else path


def can_output(module: nn.Module, width: int, vocabulary: int) -> bool:
    """Whether something in ``module`` makes vectors ``width`` wide (and it is not the language model's head)."""
    for part in module.modules():
        outputs = getattr(part, "out_features", None) or getattr(part, "out_channels", None)
        if isinstance(part, nn.Embedding):
            outputs = part.embedding_dim
        if outputs == width:
            return True
        if part is module and outputs == vocabulary:
            return False
        if any(parameter.dim() == 2 and width in parameter.shape for parameter in part.parameters(recurse=False)):
            return True
    return False
