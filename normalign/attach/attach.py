"""Attaching an aligner to a live model of any family, and taking it off again."""

import math
import warnings
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from normalign.anatomy import Anatomy, find_anatomy
from normalign.attach.aligned import RECORD, insert, remove
from normalign.attach.merge import Merge, merge_of, text_norm_as_used
from normalign.attach.remote_code import become_aligned, become_plain
from normalign.norms.aligner import NoAligner
from normalign.settings import nearest

ALIGNERS = ("layernorm", "global_scale", "token_rms")
MULTIPLES = (1e-6, 1e6)  # beyond, a float32 norm of visual tokens has no digits left beside the others
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Attachment:
    """What is to be attached: the ``record`` kept in config.json, ``notes`` on this family for a person, and what lies
    between the aligner and the first decoder layer."""

    record: dict[str, Any]
    notes: tuple[str, ...]
    merge: Merge


def attach_aligner(
    model: Model,
    aligner: str = "layernorm",
    gwc: bool = False,
    multiple: float = 1.0,
    text_norm: float | None = None,
    **parts: Any,
) -> Model:
    """Insert an aligner behind the projector of a vision-language model of transformers, in place; returns ``model``.

    The target is ``multiple`` x T at the first decoder layer, T being that of the model's own language model as its
    forward uses it (UB §5.1, SCIENCE: Gemma scales its embeddings). The model's outputs change, so it has to be
    trained now. ``model.save_pretrained(folder)`` writes a checkpoint that plain transformers loads with
    ``trust_remote_code=True``. The gain is float32 whatever the model's type, and transformers.Trainer exempts it from
    weight decay.

    Args:
        aligner: ``layernorm``, ``global_scale`` (untrained, its evaluation needs ``calibrate`` first) or ``token_rms``.
        gwc: compensate the gradient for the small gain (layernorm only; UB §5.1).
        multiple: target norm over T.
        text_norm: T as used by forward, where the model's own is not wanted.
        parts: ``projector``, ``tower``, ``language``, ``image_token_id``, where they are not found by themselves; see
            :func:`normalign.anatomy.find_anatomy`.

    Raises:
        ValueError: the model has an aligner already, or the settings contradict each other.
        normalign.anatomy.UnknownStructureError: a part of the model could not be found.
    """
    anatomy = find_anatomy(model, **parts)
    if anatomy.model is not model:
        raise ValueError(f"{type(model).__name__} wraps the model: attach first, then compile or parallelise it")
    attachment = plan_attachment(anatomy, aligner, gwc=gwc, multiple=multiple, text_norm=text_norm)
    for note in attachment.notes:
        warnings.warn(note, stacklevel=2)
    put(anatomy, attachment)
    return model


def detach_aligner(model: Model) -> Model:
    """Take the aligner off again, in place; returns ``model``. The weights of everything else stay as they are.

    Raises:
        ValueError: the model has no attached aligner.
    """
    record = getattr(getattr(model, "config", None), RECORD, None)
    if record is None or "scale" in record:
        raise ValueError(
            f"{type(model).__name__} has no attached aligner in it"
            + ("; its factor was folded into the projector: use `normalign detach` on the folder" if record else "")
        )
    remove(model, record)
    become_plain(model)
    return model


def check_settings(aligner: str, *, gwc: bool, multiple: float) -> None:
    """Raise ValueError where the settings contradict each other, before any model is looked at."""
    if aligner not in ALIGNERS:
        raise ValueError(f"aligner is {aligner!r}{nearest(aligner, ALIGNERS)}")
    if gwc and aligner != "layernorm":
        raise ValueError(f"gwc compensates for a LayerNorm's gain, which {aligner} has not; leave it out")
    smallest, largest = MULTIPLES
    if not smallest <= multiple <= largest:  # nor is NaN between them
        raise ValueError(f"multiple is {multiple}; give a number from {smallest:g} to {largest:g}")


def plan_attachment(
    anatomy: Anatomy, aligner: str, *, gwc: bool, multiple: float, text_norm: float | None = None
) -> Attachment:
    """Check the settings and work out the aligner's target; changes nothing.

    Raises:
        ValueError: see :func:`attach_aligner`.
    """
    check_settings(aligner, gwc=gwc, multiple=multiple)
    refuse_attached(anatomy)
    if any(parameter.is_meta for parameter in (anatomy.embedding.weight, *anatomy.projector.parameters())):
        raise ValueError("the text embedding or the projector is offloaded; load the model without a device_map")
    T = text_norm_as_used(anatomy) if text_norm is None else text_norm
    if not (math.isfinite(T) and T > 0):
        raise ValueError(f"text_norm is {T}; give a number above 0")
    merge = merge_of(anatomy)
    target = merge.target_for(multiple * T)
    record = {
        "settings": {"aligner": aligner} | ({"gwc": gwc} if aligner == "layernorm" else {}),
        "multiple": multiple,
        "text_norm": T,
        "norm_at_merge": merge.norm_of(target),
        "target": target,
        "width": anatomy.width,
        "projector": anatomy.projector_path,
    }
    return Attachment(record, tuple(_notes(anatomy, record)), merge)


def put(anatomy: Anatomy, attachment: Attachment) -> None:
    """Insert what was planned into the live model."""
    place = next(anatomy.projector.parameters()).device
    insert(anatomy.model, attachment.record).to(place).train(anatomy.projector.training)
    become_aligned(anatomy.model, attachment.record)


def refuse_attached(anatomy: Anatomy) -> None:
    """Raise ValueError if the model has an aligner behind its projector."""
    if getattr(getattr(anatomy.model, "config", None), RECORD, None) is not None:
        raise ValueError("the model has an attached aligner already; detach that first")
    for name, module in anatomy.projector.named_modules():
        if hasattr(module, "gain_statistics") and not isinstance(module, NoAligner):
            raise ValueError(
                f"{anatomy.projector_path}.{name} is an aligner ({type(module).__name__}); a second one is refused. It "
                "belongs to a model of the pipeline: train another variant (params.yaml, variants) instead"
            )


def _notes(anatomy: Anatomy, record: dict[str, Any]) -> list[str]:
    notes = []
    if anatomy.injected_layers:
        after = ", ".join(str(layer) for layer in anatomy.injected_layers)
        notes.append(
            f"visual features are added to the residual stream once more after decoder layers {after}; these are "
            "updates, not tokens, so T is no target for them: they pass no aligner, and from there on visual tokens "
            "have the norm that the model gives them"
        )
    if any(name.rpartition(".")[2] == "image_newline" for name, _ in anatomy.model.named_parameters()):
        notes.append(
            "the token that ends each row of image tokens (image_newline) is a parameter of its own and no output of "
            "the projector: it passes no aligner"
        )
    if anatomy.visual_vocabulary:
        notes.append(
            "visual tokens are mixtures of a visual vocabulary. The paper found no asymmetry in such a model although "
            "its norms differ (UB, RQ4): look at `normalign probe` first. global_scale keeps them mixtures (it scales "
            "the table); layernorm and token_rms do not. Visual indicator tokens come from the same table and are "
            "aligned too"
        )
    wanted = record["multiple"] * record["text_norm"]
    if record["norm_at_merge"] > 1.001 * wanted:
        notes.append(
            "this family adds visual tokens to something that is long itself (the placeholder's embedding): aligned "
            f"tokens enter the first decoder layer at norm {record['norm_at_merge']:.3g}, not {wanted:.3g}"
        )
    return notes
