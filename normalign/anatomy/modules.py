"""Moving among the modules of a model: paths, wrappers, and lists of transformer blocks.

Shape suffixes: none, no tensors here.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn


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


def path_between(outer: str, inner: str) -> Iterable[str]:
    """Paths of the modules from ``outer`` down to the one that holds ``inner``."""
    parts = inner.split(".")
    start = len(outer.split(".")) if outer else 0
    return [".".join(parts[:end]) for end in range(start, len(parts))]


def final_norm(tower: nn.Module) -> nn.Module | None:
    """The normalisation after a vision tower's last block: the last one beside the blocks, or beside what holds them.

    None where there is none (Qwen2-VL).
    """
    blocks = block_list(tower)
    if blocks is None:
        return None
    path = path_of(tower, blocks)
    for container in reversed([*path_between("", path)]):
        children = dict(tower.get_submodule(container).named_children())
        names = list(children)
        holder = path.removeprefix(f"{container}." if container else "").split(".")[0]
        behind = names[names.index(holder) + 1 :]
        norms = [name for name in behind if "norm" in type(children[name]).__name__.lower()]
        if norms:
            return children[norms[-1]]
    return None
