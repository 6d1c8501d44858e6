"""What lets an attached checkpoint load without this package: our modules, flattened, and entries in config.json."""

import importlib
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from normalign.attach import aligned
from normalign.attach.aligned import RECORD, Aligned, register

MODELING = "modeling_normalign"
AUTO_CLASSES = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM")
CHANGED = ("model_type", "architectures", "auto_map")  # fields of config.json that naming our classes takes
_IMPORT = re.compile(r"^from (normalign(?:\.\w+)+) import ", re.MULTILINE)
_REGISTRATION = re.compile(r"^Auto\w+\.register\(.*\)\n", re.MULTILINE)  # a copy must not stand in for this package's


class Saving(Aligned):
    """In this package only: ``save_pretrained`` writes the modules too, as transformers does for code from a folder."""

    def save_pretrained(self, save_directory: Any, *args: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, *args, is_main_process=is_main_process, **kwargs)  # type: ignore[misc]
        if is_main_process:
            original = type(self).__bases__[-1]
            for name, text in code_files(original, original.config_class).items():  # type: ignore[attr-defined]
                (Path(save_directory) / name).write_text(text, encoding="utf-8")
            for file in _files_of_own_code(original):
                shutil.copyfile(file, Path(save_directory) / Path(file).name)


def model_name(original: type) -> str:
    """The name of the class that stands for ``original`` with an aligner."""
    return f"Aligned{original.__name__}"


def aligned_type(model_type: str) -> str:
    """The ``model_type`` of an attached model: one that transformers has no class for, so that it never loads without
    its aligner."""
    return f"aligned_{model_type}"


def become_aligned(model: Any, record: dict[str, Any]) -> None:
    """Change the class of ``model`` and of its configuration so that what is saved comes back with its aligner."""
    original, configuration = type(model), type(model.config)

    def as_before(config: Any, **fields: Any) -> None:  # see _modeling
        configuration.__init__(config, **fields)

    config_fields = {"model_type": aligned_type(configuration.model_type), "__init__": as_before, "_auto_class": None}
    config_class = type(model_name(configuration), (configuration,), config_fields)
    model_fields = {"config_class": config_class, "_auto_class": None}  # with one, the code saved would be of this file
    model_class = type(model_name(original), (Saving, original), model_fields)
    register(model_class, original)
    auto_map = getattr(model.config, "auto_map", None)
    model.__class__, model.config.__class__ = model_class, config_class
    record["original"] = {"model_type": configuration.model_type, "architectures": [original.__name__]}
    if auto_map is not None:
        record["original"]["auto_map"] = auto_map
    model.config.update({RECORD: record, "auto_map": auto_map_of(auto_map, original, configuration)})


def become_plain(model: Any) -> None:
    """Undo :func:`become_aligned`, also for a model that was loaded with the code of its checkpoint."""
    record = getattr(model.config, RECORD)
    model.__class__ = type(model).__bases__[-1]
    model.config.__class__ = type(model.config).__bases__[-1]
    delattr(model.config, RECORD)
    delattr(model.config, "auto_map")
    if "auto_map" in record["original"]:
        model.config.auto_map = record["original"]["auto_map"]


def auto_map_of(before: dict[str, Any] | None, original: type, configuration: type) -> dict[str, Any]:
    """config.json's ``auto_map``: ``before``, and our two classes wherever the original ones could be loaded from."""
    ours = f"{MODELING}.{model_name(original)}"
    elsewhere = [auto for auto, place in (before or {}).items() if str(place).split(".")[-1] == original.__name__]
    return {
        **(before or {}),
        "AutoConfig": f"{MODELING}.{model_name(configuration)}",
        **dict.fromkeys((*AUTO_CLASSES, *elsewhere), ours),
    }


def aligned_config(config: dict[str, Any], record: dict[str, Any], original: type, configuration: type) -> dict:
    """config.json of an attached checkpoint, from the original's; :func:`plain_config` undoes it."""
    before = {name: config[name] for name in CHANGED if name in config}
    return config | {
        "model_type": aligned_type(config["model_type"]),
        "architectures": [model_name(original)],
        "auto_map": auto_map_of(config.get("auto_map"), original, configuration),
        RECORD: {**record, "original": before},
    }


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as it was before the aligner."""
    before = config[RECORD].get("original", {name: config[name] for name in CHANGED if name in config})
    kept = {name: value for name, value in config.items() if name != RECORD and (name not in CHANGED or name in before)}
    return kept | before


def code_files(original: type, configuration: type) -> dict[str, str]:
    """Name and text of every module that an attached checkpoint of class ``original`` holds."""
    pending, files = [aligned.__name__], {}
    bases = []
    for base in (original, configuration):
        place = base.__module__
        if place.startswith("normalign."):
            pending.append(place)
            place = "." + _flat(place)
        elif place.startswith("transformers_modules."):  # code that came with the checkpoint: it lies beside ours
            place = "." + place.rsplit(".", 1)[-1]
        bases.append(f"from {place} import {base.__name__}")
    while pending:
        name = pending.pop()
        if f"{_flat(name)}.py" in files:
            continue
        source = importlib.import_module(name).__file__
        assert source is not None
        text = Path(source).read_text(encoding="utf-8")
        flat = _IMPORT.sub(lambda match: f"from .{_flat(match[1])} import ", text)
        files[f"{_flat(name)}.py"] = _REGISTRATION.sub("", flat)
        pending += _IMPORT.findall(text)
    files[f"{MODELING}.py"] = _modeling(original, configuration, bases)
    return files


def _files_of_own_code(original: type) -> list[str]:
    """The files of the code that came with the checkpoint of class ``original``; none for a class of transformers."""
    if not original.__module__.startswith("transformers_modules."):
        return []
    file = inspect.getfile(original)
    return [file, *get_relative_import_files(file)]


def _flat(module: str) -> str:
    return module.replace(".", "_")


def _modeling(original: type, configuration: type, bases: list[str]) -> str:
    model_type = json.dumps(aligned_type(configuration.model_type))  # type: ignore[attr-defined]
    imports = "\n".join(sorted([*bases, f"from .{_flat(aligned.__name__)} import Aligned, register"]))
    return f'''"""{original.__name__} with an aligner behind its projector; config.json says which.

Written by `normalign attach`; `normalign detach` takes the aligner out again. Needs transformers from 5.24 on.
"""

{imports}


class {model_name(configuration)}({configuration.__name__}):
    model_type = {model_type}

    def __init__(self, **fields):  # transformers gives a configuration without one another than its parent's
        super().__init__(**fields)


class {model_name(original)}(Aligned, {original.__name__}):
    config_class = {model_name(configuration)}


register({model_name(original)}, {original.__name__})
'''
