"""An aligner behind the projector of a model of any family. Copied into checkpoints: torch and transformers alone.

The aligner is a child of the projector called ``aligner_norm`` (a name that transformers.Trainer exempts from weight
decay) and works through a forward hook, so that no parameter of the model changes its name.
"""

from typing import Any

from torch import Tensor, nn
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from normalign.norms.aligner import Aligner, build_aligner

NAME = "aligner_norm"
HANDLE = "aligner_handle"
RECORD = "normalign"  # the field of config.json that says what was attached


def insert(model: nn.Module, record: dict[str, Any]) -> Aligner:
    """Put the aligner that ``record`` describes behind the projector at ``record["projector"]``."""
    projector = model.get_submodule(record["projector"])
    aligner = build_aligner(record["settings"], record["width"], record["target"]).float()
    aligner.__dict__["_is_hf_initialized"] = True  # transformers sets the weight of anything called LayerNorm to 1
    projector.add_module(NAME, aligner)
    setattr(projector, HANDLE, projector.register_forward_hook(_align))
    return aligner


def remove(model: nn.Module, record: dict[str, Any]) -> None:
    """Undo :func:`insert`; the projector's own weights stay as they are."""
    projector = model.get_submodule(record["projector"])
    getattr(projector, HANDLE).remove()
    delattr(projector, HANDLE)
    delattr(projector, NAME)


def _align(projector: nn.Module, _inputs: Any, output: Any) -> Any:
    aligner = projector.get_submodule(NAME)
    if isinstance(output, Tensor):
        return aligner(output)
    output.last_hidden_state = aligner(output.last_hidden_state)  # Molmo2's adapter answers in a structure
    return output


class Aligned(nn.Module):
    """Put before a model class of transformers: the same model with the aligner that its configuration describes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        kept: Any = getattr(cls, "_keep_in_fp32_modules_strict", None)
        cls._keep_in_fp32_modules_strict = {*(kept or ()), NAME}  # type: ignore[attr-defined]

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        insert(self, getattr(config, RECORD))


def register(aligned: type, original: type) -> None:
    """Let the checkpoints of ``aligned`` be read as those of ``original``: the same renamings of stored weights."""
    for new, old in (
        (aligned.__name__, original.__name__),
        (aligned.config_class.model_type, original.config_class.model_type),  # type: ignore[attr-defined]
    ):
        mapping = get_checkpoint_conversion_mapping(old)
        if mapping is not None:
            register_checkpoint_conversion_mapping(new, mapping, overwrite=True)
