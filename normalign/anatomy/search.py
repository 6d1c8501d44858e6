"""Finding the language model, the vision tower and the projector among a model's modules.

Shape suffixes: D width of the language model, E width of the vision tower.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from normalign.anatomy.source import children_used


class UnknownStructureError(ValueError):
    """A part of a model could not be found; the message says which, and which option supplies it."""


def unwrap(module: Any) -> Any:
    """The module that ``torch.compile`` or a data-parallel wrapper holds."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = module.module
        if inner is None:
            return module
        module = inner


def at(model: nn.Module, path: str, option: str) -> tuple[str, Any]:
    """The sub-module at ``path``, out of a compiled module's wrapper, and its own path.

    Raises:
        UnknownStructureError: there is none; the message names the option and what lies nearby.
    """
    module = model
    for part in path.split(".") if path else []:
        children = dict(module.named_children())
        if part not in children:
            here = ", ".join(children) or "nothing"
            raise UnknownStructureError(
                f"{option} {path}: {type(model).__name__} has no such module; beside {part!r} there would be {here}"
            )
        module = children[part]
    inner = unwrap(module)
    return (path if inner is module else path_of(model, inner)), inner


def path_of(model: nn.Module, module: nn.Module) -> str:
    """The dotted path of ``module`` in ``model``."""
    return next(name for name, found in model.named_modules() if found is module)


def inside(path: str, outer: str) -> bool:
    """Whether the module at ``path`` is the one at ``outer`` or lies in it."""
    return outer == "" or path == outer or path.startswith(outer + ".")


def common(a: str, b: str) -> str:
    """The path of the deepest module that holds both."""
    shared: list[str] = []
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            break
        shared.append(x)
    return ".".join(shared)


def parameters_in(module: nn.Module) -> int:
    """Number of parameters, of quantised ones the stored elements."""
    return sum(parameter.numel() for parameter in module.parameters())


def block_list(module: nn.Module, *, direct: bool = False) -> nn.ModuleList | None:
    """The list of transformer blocks in ``module``.

    Of several lists: the one of the blocks that the module's class names as makers of hidden states, the one as long as
    the configuration says, the one with the most parameters, in this order.

    Args:
        direct: only lists that are children of ``module`` itself.
    """
    lists = [
        found
        for found in (module.children() if direct else module.modules())
        if isinstance(found, nn.ModuleList) and len(found) and all(parameters_in(block) for block in found)
    ]
    config = getattr(module, "config", None)
    depths = [getattr(config, name, None) for name in ("num_hidden_layers", "depth", "num_layers")]
    makers = _makers_of_hidden_states(module)

    def fitness(found: nn.ModuleList) -> tuple[bool, bool, int]:
        return isinstance(unwrap(found[0]), makers), len(found) in depths, parameters_in(found)

    return max(lists, key=fitness, default=None)  # of nested ones the outer: max keeps the first of equals


def _makers_of_hidden_states(module: nn.Module) -> tuple[type, ...]:
    recorded = (getattr(module, "_can_record_outputs", None) or {}).get("hidden_states")
    recorded = recorded if isinstance(recorded, list | tuple) else [recorded]
    classes = [getattr(entry, "target_class", entry) for entry in recorded]
    return tuple(kind for kind in classes if isinstance(kind, type))


def find_language(model: nn.Module) -> tuple[str, nn.Embedding]:
    """Path of the text decoder, and its input embedding.

    The decoder is the innermost module that holds the input embedding and, as its own child, a list of layers.
    """
    embedding = _input_embedding(model)
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


def _input_embedding(model: nn.Module) -> nn.Embedding:
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


def find_projector(model: nn.Module, core: str, tower: str, language: str, width: int) -> str:
    """Path of the module that makes visual tokens: the last on the vision path whose output is ``width`` wide.

    Looked for beside the tower first, from the core inwards, then inside the tower, behind its blocks. Where several
    could be it, the source of ``get_image_features`` (or else of ``forward``) says which comes last.
    """
    blocks = block_list(model.get_submodule(tower))
    inner = tower if blocks is None else path_of(model, blocks)
    vocabulary = _input_embedding(model).num_embeddings
    for container in _path_between(core, inner):
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


def _path_between(outer: str, inner: str) -> Iterable[str]:
    """Paths of the modules from ``outer`` down to the one that holds ``inner``."""
    parts = inner.split(".")
    start = len(outer.split(".")) if outer else 0
    return [".".join(parts[:end]) for end in range(start, len(parts))]


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


def final_norm(tower: nn.Module) -> nn.Module | None:
    """The normalisation after a vision tower's last block: the last one beside the blocks, or beside what holds them.

    None where there is none (Qwen2-VL).
    """
    blocks = block_list(tower)
    if blocks is None:
        return None
    path = path_of(tower, blocks)
    for container in reversed([*_path_between("", path)]):
        children = dict(tower.get_submodule(container).named_children())
        names = list(children)
        holder = path.removeprefix(f"{container}." if container else "").split(".")[0]
        behind = names[names.index(holder) + 1 :]
        norms = [name for name in behind if "norm" in type(children[name]).__name__.lower()]
        if norms:
            return children[norms[-1]]
    return None
