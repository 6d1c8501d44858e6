"""normalign: measures, fixes and proves norm imbalance in vision-language models."""

from importlib import import_module
from typing import Any

_PUBLIC = dict.fromkeys(("NormWatch", "attach_aligner", "detach_aligner"), "normalign.attach")

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Public names come from where they are when they are asked for: importing the package alone imports no torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'normalign' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
