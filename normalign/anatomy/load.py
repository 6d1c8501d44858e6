"""Loading a vision-language model from a folder, and making one sample for it.

Shape suffixes: none, tensors are only handed on.
"""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.dynamic_module_utils import get_class_from_dynamic_module

_REMOTE_CLASSES = ("AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModelForCausalLM", "AutoModel")


def load_vlm(folder: Path, *, trust_remote_code: bool = False) -> tuple[Any, Any]:
    """The model in float32 (quantised ones as they are), in evaluation mode, and its processor.

    Nothing is fetched: what is not in the folder is missing.

    Raises:
        ValueError: there is no checkpoint, it is no vision-language model, or it cannot be loaded; the message says
            what to do.
    """
    config = read_config(folder, trust_remote_code=trust_remote_code)
    kind = model_class(config, folder, trust_remote_code=trust_remote_code)
    quantised = getattr(config, "quantization_config", None) is not None
    dtype = "auto" if quantised else torch.float32
    model = load_weights(kind, folder, config, dtype=dtype, trust_remote_code=trust_remote_code)
    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # as of damaged configurations
        advice = "the folder must hold the tokenizer and the processor's files beside the weights"
        if isinstance(error, ImportError):
            advice = "install the package that it names"
        raise ValueError(f"{folder}: its processor cannot be loaded ({first_line(error)}); {advice}") from error
    return model.eval(), processor


def read_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration of the checkpoint in ``folder``.

    Raises:
        ValueError: no folder, no config.json, or a model type that transformers does not know.
    """
    import normalign.vlm.model  # noqa: F401  (registers this package's own model type)

    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a checkpoint (config.json and safetensors)")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no checkpoint (config.json is missing)")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # damaged configurations make a library raise whatever it stumbles over
        hint = "" if trust_remote_code else "; a model with code of its own is loaded with --trust-remote-code"
        raise ValueError(f"{folder}/config.json cannot be used: {first_line(error)}{hint}") from error


def is_vlm(config: Any) -> bool:
    """Whether transformers (or this package) has a vision-language model with a configuration of this kind."""
    return type(config) in AutoModelForImageTextToText._model_mapping


def load_weights(kind: Any, folder: Path, config: Any, *, dtype: Any, trust_remote_code: bool) -> Any:
    """The model of the auto class ``kind``, complete: weights that are not in the folder are not made up.

    Raises:
        ValueError: the weights cannot be read, or some are missing.
    """
    options = {"config": config, "trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        model, report = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    except Exception as error:  # as above, and what damaged weights raise
        raise ValueError(f"{folder}: the model cannot be loaded: {first_line(error)}") from error
    missing = sorted(name for name in report["missing_keys"] if not _is_head(name))
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} weights of {type(model).__name__} are not in the checkpoint (such as "
            f"{missing[0]}); copy the folder again, whole"
        )
    return model


def _is_head(name: str) -> bool:
    """Pooling and classification heads, which no token depends on; checkpoints of towers come with and without."""
    return any(part in ("head", "pooler", "classifier") for part in name.split("."))


def model_class(config: Any, folder: Path, *, trust_remote_code: bool) -> Any:
    """The auto class, or the checkpoint's own class, that loads a vision-language model with this configuration.

    Raises:
        ValueError: none does, or only code that comes with the checkpoint.
    """
    if is_vlm(config):
        return AutoModelForImageTextToText
    remote = getattr(config, "auto_map", None) or {}
    for name in _REMOTE_CLASSES:
        if name in remote and trust_remote_code:
            return get_class_from_dynamic_module(remote[name], folder)
    name = config.model_type
    if remote and not trust_remote_code:
        raise ValueError(
            f"{folder}: model type {name!r} brings its own code; allow it with --trust-remote-code if you trust it"
        )
    raise ValueError(
        f"{folder}: model type {name!r} is no vision-language model that transformers can load (a text-only model or a "
        "vision tower?); `normalign text-norm` measures text embeddings, `normalign encoder-norm` vision towers"
    )


def first_line(error: BaseException) -> str:
    """What an error of a library says, without the rest of its explanation."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def inputs_of(processor: Any, image: Image.Image, prompt: str) -> dict[str, Any]:
    """One sample: a user's turn with ``image`` and ``prompt``, as the model's forward takes it (batch of one).

    In the processor's chat template; without one that shows the image, the image placeholder and then the text.

    Raises:
        ValueError: the processor made no sample with an image in any of these ways.
    """
    failures: list[BaseException] = []
    for marker in _markers(processor):
        for way in (_templated, _templated_text, _plain):
            try:
                inputs = dict(way(processor, image, prompt, marker))
            except Exception as error:  # templates fail in their own ways: the next way is tried
                failures.append(error)
                continue
            if any("pixel" in name for name in inputs):
                inputs.pop("labels", None)  # some processors add them
                return inputs
    reason = f": {first_line(failures[-1])}" if failures else ""
    raise ValueError(f"{type(processor).__name__}: it made no sample with an image{reason}")


def _markers(processor: Any) -> list[str]:
    """What stands for an image in a text: where a token begins the image (Gemma 3), that one; else the placeholder."""
    found = [getattr(processor, name, None) for name in ("boi_token", "image_token")]
    return [str(marker) for marker in found if marker] or ["<image>"]


def _templated(processor: Any, image: Image.Image, prompt: str, marker: str) -> Any:
    content = [{"type": "image", "image": image}, {"type": "text", "text": prompt}]
    messages = [{"role": "user", "content": content}]
    if marker not in processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True):
        raise ValueError("the chat template leaves the image out")
    return processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )


def _templated_text(processor: Any, image: Image.Image, prompt: str, marker: str) -> Any:
    """For templates of a language model, which know texts only."""
    source = processor if getattr(processor, "chat_template", None) else processor.tokenizer
    messages = [{"role": "user", "content": f"{marker}\n{prompt}"}]
    text = source.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if marker not in text:
        raise ValueError("the chat template leaves the image out")
    return processor(images=[image], text=text, return_tensors="pt")


def _plain(processor: Any, image: Image.Image, prompt: str, marker: str) -> Any:
    return processor(images=[image], text=f"{marker}\n{prompt}", return_tensors="pt")
