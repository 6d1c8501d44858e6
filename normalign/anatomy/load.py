"""Loading a vision-language model from a folder, and making one sample for it.

Shape suffixes: none, tensors are only handed on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedTokenizerBase,
    dynamic_module_utils,
)

from normalign.anatomy.buffers import restore_buffers
from normalign.anatomy.own_inputs import METHOD, OwnInputs, makes_own_inputs
from normalign.files import read_json

REMOTE_VLMS = ("AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModelForCausalLM")


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
    return model.eval(), _processor(folder, model, trust_remote_code=trust_remote_code)


def _processor(folder: Path, model: Any, *, trust_remote_code: bool) -> Any:
    """What makes samples for ``model``: the processor in the folder, or a method of the model's own code."""
    try:
        found = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # as of damaged configurations
        advice = "; the folder must hold the tokenizer and the processor's files beside the weights"
        if isinstance(error, ImportError):
            missing = (error.name or "").split(".")[0]  # code of a checkpoint asks for what transformers has no more
            advice = _age_of_code(model.config) if missing == "transformers" else "; install the package that it names"
        raise ValueError(f"{folder}: its processor cannot be loaded ({first_line(error)}){advice}") from error
    if not isinstance(found, PreTrainedTokenizerBase):
        return found
    if makes_own_inputs(model):
        return OwnInputs(model, found)
    raise ValueError(
        f"{folder}: it has a tokenizer and no processor that takes images (preprocessor_config.json names none), and "
        f"{type(model).__name__} makes no inputs itself; measure it in Python, with inputs made as its authors do"
    )


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
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(_untrusted(folder)) from error
        hint = "" if trust_remote_code else "; a model with code of its own is loaded with --trust-remote-code"
        raise ValueError(f"{folder}/config.json cannot be used: {first_line(error)}{hint}") from error


def _untrusted(folder: Path) -> str:
    kind = read_json(folder / "config.json").get("model_type")
    return (
        f"{folder}: model type {kind!r} brings its own code (config.json, auto_map), which is not run unasked; allow "
        "it with --trust-remote-code if you trust the .py files in the folder"
    )


def is_vlm(config: Any) -> bool:
    """Whether transformers (or this package) has a vision-language model with a configuration of this kind."""
    return type(config) in AutoModelForImageTextToText._model_mapping


def load_weights(kind: Any, folder: Path, config: Any, *, dtype: Any, trust_remote_code: bool) -> Any:
    """The model of the auto class ``kind``, complete: weights that are not in the folder are not made up.

    Raises:
        ValueError: the weights cannot be read, or some are missing.
    """
    try:
        config = _as_its_class_knows(config, kind, folder)
        options = {"config": config, "trust_remote_code": trust_remote_code, "local_files_only": True}
        with _unprompted():
            model, report = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
            if type(model).__module__.startswith("transformers_modules."):  # where transformers puts such code
                restore_buffers(model)
    except Exception as error:  # as above, and what damaged weights raise
        own_code = trust_remote_code and getattr(config, "auto_map", None)
        hint = _age_of_code(config) if own_code else ""
        raise ValueError(f"{folder}: the model cannot be loaded: {first_line(error)}{hint}") from error
    missing = sorted(name for name in report["missing_keys"] if not _is_head(name))
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} weights of {type(model).__name__} are not in the checkpoint (such as "
            f"{missing[0]}); copy the folder again, whole"
        )
    return model


@contextmanager
def _unprompted() -> Iterator[None]:
    """Whether code may run is settled by now: a checkpoint's own code that loads its tokenizer must not ask again."""
    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # refused at once, and not after a question
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


def _as_its_class_knows(config: Any, kind: Any, folder: Path) -> Any:
    """``config`` as an object of the class that the checkpoint's own model class reads it with.

    Of a folder's code transformers imports one copy with the configuration and another with the model, and a model
    that registers classes of its copy does not find those of the other.
    """
    own = getattr(kind, "config_class", None)
    if own is None or isinstance(config, own):
        return config
    return own.from_pretrained(folder, local_files_only=True)


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
    for name in (*REMOTE_VLMS, "AutoModel"):
        if name in remote and trust_remote_code:
            return _own_class(remote[name], folder, config)
    if remote and not trust_remote_code:
        raise ValueError(_untrusted(folder))
    name = config.model_type
    raise ValueError(
        f"{folder}: model type {name!r} is no vision-language model that transformers can load (a text-only model or a "
        "vision tower?); `normalign text-norm` measures text embeddings, `normalign encoder-norm` vision towers"
    )


def _own_class(reference: str, folder: Path, config: Any) -> Any:
    """The class ``file.Class`` of the code in ``folder``."""
    try:
        return dynamic_module_utils.get_class_from_dynamic_module(reference, folder)
    except Exception as error:  # running someone's module raises whatever it stumbles over
        hint = _age_of_code(config)
        raise ValueError(f"{folder}: its own code ({reference}) cannot be used: {first_line(error)}{hint}") from error


def _age_of_code(config: Any) -> str:
    """What to do about an error in a checkpoint's own code: it often calls what later releases do not have."""
    written = getattr(config, "transformers_version", None)
    if written is None or written == transformers.__version__:
        return ""
    return (
        f"; its code was saved with transformers {written} (config.json, transformers_version) and runs here under "
        f"{transformers.__version__}: take newer code from its authors, or correct the .py files in the folder"
    )


def first_line(error: BaseException) -> str:
    """What an error of a library says, without the rest of its explanation."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)  # that is the key alone
    first, *others = text.strip().splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def inputs_of(processor: Any, image: Image.Image, prompt: str) -> dict[str, Any]:
    """One sample: a user's turn with ``image`` and ``prompt``, as the model's forward takes it (batch of one).

    In the processor's chat template; without one that shows the image, the image placeholder and then the text.

    Raises:
        ValueError: the processor made no sample with an image in any of these ways.
    """
    if isinstance(processor, OwnInputs):
        try:
            return processor.sample(image, prompt)
        except Exception as error:  # code of a checkpoint fails in its own ways
            name = type(processor.model).__name__
            raise ValueError(f"{name}.{METHOD} made no sample with an image: {first_line(error)}") from error
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
