"""Where a model's configuration is found: a file, the weights folder, the hub's cache, published dimensions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml

from normalign.files import read_json
from normalign.plan.architecture import LanguageModel, VisionTower, language_model, vision_tower
from normalign.settings import Profile, SourceSettings

Part = Literal["vision", "language"]
# The byte-level tokenizer of random weights (256 bytes, three special tokens) and the image placeholder.
RANDOM_VOCABULARY, RANDOM_TOKENS = 259, 260


@dataclass(frozen=True)
class Found:
    """A configuration, where it was found, and the embedding rows that the tokenizer needs (None: not known)."""

    config: Mapping[str, Any]
    where: str
    tokens: int | None


@cache
def published() -> dict[str, dict[str, Any]]:
    """Dimensions of named models and sizes of named data sets, as their authors publish them."""
    return yaml.safe_load((files("normalign.plan") / "published.yaml").read_text(encoding="utf-8"))


def models(
    profile: Profile, vision_file: Path | None = None, language_file: Path | None = None
) -> tuple[VisionTower, LanguageModel, list[str]]:
    """Both towers of a profile, and for each a line that says where its dimensions come from.

    Raises:
        ValueError: a configuration is found nowhere, or not understood.
    """
    vision = find(profile, "vision", vision_file)
    language = find(profile, "language", language_file)
    lines = [f"{part}: dimensions from {found.where}" for part, found in (("vision", vision), ("language", language))]
    if language.tokens is None:
        lines[1] += ", with two rows for added tokens assumed (there is no tokenizer to ask)"
    return (
        vision_tower(vision.config, vision.where),
        language_model(language.config, language.where, language.tokens),
        lines,
    )


def find(profile: Profile, part: Part, file: Path | None = None) -> Found:
    """The configuration of the vision tower or the language model of ``profile``.

    Raises:
        FileNotFoundError: it is found nowhere; says what to do.
        ValueError: the file is not JSON.
    """
    settings: SourceSettings = getattr(profile.weights, part)
    known = published()[part].get(settings.source)
    tokens = known.get("tokens") if known else None
    if file is not None:
        return Found(_read(file), str(file), tokenizer_tokens(file.parent))
    kind, _, place = settings.source.partition(":")
    folders = [profile.folder / "weights" / part, *([Path(place)] if kind == "folder" else [])]
    for folder in folders:
        if (folder / "config.json").is_file():
            return Found(_read(folder / "config.json"), str(folder / "config.json"), tokenizer_tokens(folder))
    if kind == "random":
        return Found({"vocab_size": RANDOM_VOCABULARY, **settings.config}, "params.yaml", RANDOM_TOKENS)
    if kind == "hub" and (cached := _cached(place, settings.revision)) is not None:
        return Found(_read(cached), f"the hub's cache ({settings.source})", tokenizer_tokens(cached.parent) or tokens)
    if known:
        return Found(known, f"published dimensions ({settings.source})", tokens)
    if kind == "hub" and (fetched := _fetched(place, settings.revision)) is not None:
        return Found(_read(fetched), settings.source, None)
    raise FileNotFoundError(
        f"weights.{part}: no config.json of {settings.source} in {' or '.join(map(str, folders))}, in the hub's cache, "
        f"on the hub or among the published dimensions; fetch the weights first, or give the file: "
        f"--{part}-config config.json"
    )


def tokenizer_tokens(folder: Path) -> int | None:
    """Embedding rows that the tokenizer in ``folder`` needs, with image placeholder and pad token; None without one."""
    if not (folder / "tokenizer.json").is_file():
        return None
    tokenizer = _read(folder / "tokenizer.json")
    tokens = set(tokenizer["model"]["vocab"]) | {token["content"] for token in tokenizer["added_tokens"]}
    file = folder / "tokenizer_config.json"
    config = _read(file) if file.is_file() else {}
    # Class defaults of the end token stand in no file; the model's own end is what the tokenizer then takes for it.
    pad, end = _text(config.get("pad_token")), _text(config.get("eos_token"))
    return len(tokens | {"<image>"}) + (1 if pad is None or pad == end else 0)


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def _cached(repository: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(found) if isinstance(found, str) else None


def _fetched(repository: str, revision: str | None) -> Path | None:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, "config.json", revision=revision, etag_timeout=5))
    except Exception:  # the hub's client, its HTTP library and the socket each have their own kinds
        return None
