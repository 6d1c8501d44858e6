"""A local folder laid out like a hub snapshot: taken as it is, or its vision tower cut out of it."""

import fnmatch
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from normalign.files import read_json
from normalign.weights.hub import PATTERNS
from normalign.weights.safetensors_file import (
    DTYPES,
    checkpoint_files,
    copy_tensors,
    link_or_copy,
    read_headers,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOWER = "vision_model."
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def take_language(folder: Path, out: Path) -> None:
    """Link the language model in ``folder`` into ``out``, with its tokenizer.

    Raises:
        FileNotFoundError: a file that the language model needs is missing.
        ValueError: this transformers does not know the model type.
    """
    load_config(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise FileNotFoundError(f"{folder}: no tokenizer (none of {', '.join(TOKENIZER_FILES)}); add it")
    _link_checkpoint(folder, out)


def take_vision(folder: Path, out: Path) -> None:
    """Link the vision tower in ``folder`` into ``out``; of an image-text pair, cut it out tensor by tensor.

    Raises:
        FileNotFoundError: config, weights or preprocessor_config.json is missing.
        ValueError: transformers does not know the model type, or the pair holds no vision tower.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    config = load_config(folder)
    if not (folder / "preprocessor_config.json").is_file():
        raise FileNotFoundError(f"{folder / 'preprocessor_config.json'} is missing; add the image processor's file")
    tower = getattr(config, "vision_config", None)
    if tower is None:
        _link_checkpoint(folder, out)
        return
    tensors = {
        name.removeprefix(TOWER): tensor for name, tensor in read_headers(folder).items() if name.startswith(TOWER)
    }
    if not tensors:
        raise ValueError(f"{folder}: no tensor begins with {TOWER}; use a SigLIP, SigLIP 2 or CLIP checkpoint")
    _link_checkpoint(folder, out, weights=False)
    copy_tensors(tensors, out / "model.safetensors")
    tower.architectures = [MODEL_MAPPING_NAMES[tower.model_type]]
    tower.dtype = DTYPES[next(iter(tensors.values())).dtype]
    tower.save_pretrained(out)


def load_config(folder: Path) -> "PretrainedConfig":
    """The configuration in ``folder``, of transformers' own class; code in the folder is never run."""
    from transformers import CONFIG_MAPPING, AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; the folder must be laid out like a hub snapshot")
    model_type = read_json(path).get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{path}: model_type {model_type!r} is unknown to this transformers, and code from a checkpoint "
            "is never run; install a transformers release that has it"
        )
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _link_checkpoint(folder: Path, out: Path, weights: bool = True) -> None:
    """Link the safetensors files, unless ``weights`` is false, and copy the small files."""
    for path in sorted(folder.iterdir()):
        small = not path.name.endswith((".safetensors", ".safetensors.index.json"))
        if small and path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in PATTERNS):
            shutil.copyfile(path, out / path.name)
    if not weights:
        return
    for path in checkpoint_files(folder):
        link_or_copy(path, out / path.name)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shutil.copyfile(index, out / index.name)
