"""params.yaml: what it says is checked, and what it says about the paper is the paper's protocol."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from normalign.settings import SettingsError, load_profile, read_params, variants_to_run

ROOT = Path(__file__).parents[1]
PARAMS = ROOT / "params.yaml"
FILE = yaml.safe_load(PARAMS.read_text(encoding="utf-8"))
PROFILES = ("ci", "smol", "llama32_3b", "qwen25_7b")

PILLOW_LIMIT = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # twice what it warns of is refused


@pytest.fixture
def document() -> dict[str, Any]:
    """What params.yaml says of the profile ci, merge keys and anchors resolved, to be changed."""
    copied: dict[str, Any] = json.loads(json.dumps(FILE))  # unlike a deep copy, nothing in it is shared
    del copied["templates"], copied["profiles"]["qwen25_7b"], copied["profiles"]["smol"]
    return copied


def load(document: dict[str, Any], folder: Path, profile: str = "ci") -> Any:
    """The profile after writing ``document``."""
    path = folder / "params.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_profile(profile, path)


def change(document: dict[str, Any], keys: str, value: Any) -> None:
    """Set the value under dotted ``keys``."""
    *above, last = keys.split(".")
    for key in above:
        document = document[key]
    document[int(last) if isinstance(document, list) else last] = value


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_loads_and_knows_its_name_and_folder(name: str) -> None:
    profile = load_profile(name, PARAMS)
    assert profile.name == name and profile.folder == Path("data") / name
    assert set(variants_to_run(PARAMS)) <= set(profile.variants)
    assert profile.results("norm") == Path("data") / name / "results" / "norm"
    assert profile.model_folder("norm", "stage1") == Path("data") / name / "models" / "norm" / "stage1"


def test_no_name_means_the_profile_that_params_picks() -> None:
    assert load_profile(None, PARAMS) == load_profile(read_params(PARAMS)["profile"], PARAMS)


def test_the_profiles_are_the_ones_tested_here() -> None:
    assert set(read_params(PARAMS)["profiles"]) == set(PROFILES)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("varients", "unknown key 'varients'; did you mean 'variants'?"),
        ("variants.norm.alinger", "variants.norm: unknown key 'alinger'; did you mean 'aligner'?"),
        ("profiles.ci.stage3", "profiles.ci: unknown key 'stage3'; did you mean 'stage"),
        ("profiles.ci.variants", "profiles.ci: unknown key 'variants'"),
        ("profiles.ci.compute.thread", "profiles.ci.compute: unknown key 'thread'; did you mean 'threads'?"),
        ("profiles.ci.weights.vison", "profiles.ci.weights: unknown key 'vison'; did you mean 'vision'?"),
        ("profiles.ci.weights.vision.sorce", "profiles.ci.weights.vision: unknown key 'sorce'; did you mean 'source'?"),
        ("profiles.ci.model.image_sise", "profiles.ci.model: unknown key 'image_sise'; did you mean 'image_size'?"),
        (
            "profiles.ci.dataset.synthetic.sead",
            "profiles.ci.dataset.synthetic: unknown key 'sead'; did you mean 'seed'",
        ),
        ("profiles.ci.stage1.warmup", "profiles.ci.stage1: unknown key 'warmup'; did you mean 'warmup_ratio'?"),
        ("profiles.ci.stage2.learning_rate.visoin", "stage2.learning_rate: unknown module 'visoin'"),
        ("profiles.ci.check.confidance", "profiles.ci.check: unknown key 'confidance'; did you mean 'confidence'?"),
    ],
)
def test_an_unknown_key_is_refused_at_every_level_with_the_nearest_name(
    document: dict[str, Any], tmp_path: Path, keys: str, message: str
) -> None:
    change(document, keys, 1)
    with pytest.raises(SettingsError) as error:
        load(document, tmp_path)
    assert message in str(error.value) and str(error.value).startswith(str(tmp_path / "params.yaml"))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        ("profiles.ci.compute.threads", "2", "profiles.ci.compute.threads: expected int, got '2'"),
        ("profiles.ci.compute.threads", True, "profiles.ci.compute.threads: expected int, got True"),
        ("profiles.ci.compute.threads", 1.5, "profiles.ci.compute.threads: expected int, got 1.5"),
        ("profiles.ci.compute.device", "gpu", "profiles.ci.compute.device: 'gpu' is not allowed"),
        ("profiles.ci.stage1.eps", "1e-8", "stage1.eps: expected float, got '1e-8' (YAML reads 1e-3 as text"),
        (
            "profiles.ci.stage1.learning_rate.aligner",
            "1e-3",
            "stage1.learning_rate.aligner: expected float, got '1e-3'",
        ),
        ("profiles.ci.stage1.betas", [0.9], "profiles.ci.stage1.betas: expected a list of 2, got [0.9]"),
        ("profiles.ci.stage1.pack", 1, "profiles.ci.stage1.pack: expected bool, got 1"),
        ("profiles.ci.stage1.learning_rate", [1], "profiles.ci.stage1.learning_rate: expected a mapping, got [1]"),
        ("profiles.ci.evaluate.visual_tasks", "pope", "profiles.ci.evaluate.visual_tasks: expected a list, got 'pope'"),
        ("profiles.ci.evaluate.visual_tasks", [1], "profiles.ci.evaluate.visual_tasks[0]: expected str, got 1"),
        ("profiles.ci.model", None, "profiles.ci.model: expected a mapping, got None"),
        ("profiles.ci", None, "profiles.ci: expected a mapping, got None"),
        ("profiles", [], "profiles: expected dict, got []"),
        ("run", None, "run: expected list, got None"),
        ("run", ["nrom"], "run: no variant 'nrom'; did you mean 'norm'?"),
        ("variants.norm.aligner", "layer_norm", "variants.norm.aligner: 'layer_norm' is not allowed; did you mean"),
        ("variants.norm.gwc", "yes", "variants.norm.gwc: expected bool, got 'yes'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_path(
    document: dict[str, Any], tmp_path: Path, keys: str, value: Any, message: str
) -> None:
    change(document, keys, value)
    with pytest.raises(SettingsError) as error:
        load(document, tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        ("learning_rate", {}, "learning_rate: no module is named"),
        ("learning_rate", {"vision": 0.0}, "learning_rate.vision: expected a finite number above 0, got 0.0; leave"),
        ("micro_batch", 0, "micro_batch: expected at least 1, got 0"),
        ("micro_batch", 5, "micro_batch: expected at most global_batch (4), got 5"),
        ("epochs", -1, "epochs: expected at least 1, got -1"),
        ("clip_norm", 0.0, "clip_norm: expected a finite number above 0, got 0.0"),
    ],
)
def test_training_options_that_cannot_train_are_refused(
    document: dict[str, Any], tmp_path: Path, keys: str, value: Any, message: str
) -> None:
    document["profiles"]["ci"]["stage1"][keys] = value
    with pytest.raises(SettingsError) as error:
        load(document, tmp_path)
    assert f"profiles.ci.stage1.{message}" in str(error.value)


@pytest.mark.parametrize("module", ["vision", "language"])
def test_stage_1_trains_only_what_it_hands_on(document: dict[str, Any], tmp_path: Path, module: str) -> None:
    document["profiles"]["ci"]["stage1"]["learning_rate"][module] = 1e-3
    with pytest.raises(SettingsError, match=f"ci.stage1.learning_rate: .*training of '{module}' would be lost"):
        load(document, tmp_path)


def numbers(document: dict[str, Any], kind: type, above: str = "") -> dict[str, str]:
    """Where numbers of ``kind`` stand: each place's dotted keys, and the part of them that a refusal is to name."""
    found: dict[str, str] = {}
    for key, value in document.items():
        keys = f"{above}{key}"
        if key == "config":  # the weights' own
            continue
        if isinstance(value, dict):
            found |= numbers(value, kind, f"{keys}.")
        elif isinstance(value, list):
            found |= {f"{keys}.{i}": keys for i, item in enumerate(value) if type(item) is kind}
        elif type(value) is kind:
            found[keys] = keys
    return found


def assert_refused(document: dict[str, Any], folder: Path, keys: str, named: str, value: Any) -> None:
    change(document, keys, value)
    with pytest.raises(SettingsError) as error:
        load(document, folder)
    assert f"{named}: expected " in str(error.value) and str(value) in str(error.value)


READ = {"variants": FILE["variants"], "profiles": {"ci": FILE["profiles"]["ci"]}}
FLOATS, INTEGERS = numbers(READ, float), numbers(READ, int)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -2.0])
@pytest.mark.parametrize("keys", FLOATS)
def test_no_number_may_be_nan_or_infinite_or_far_below_zero(
    document: dict[str, Any], tmp_path: Path, keys: str, value: float
) -> None:
    assert_refused(document, tmp_path, keys, FLOATS[keys], value)


@pytest.mark.parametrize("keys", [keys for keys in INTEGERS if not keys.endswith("feature_layer")])
def test_no_whole_number_may_be_below_zero(document: dict[str, Any], tmp_path: Path, keys: str) -> None:
    assert_refused(document, tmp_path, keys, INTEGERS[keys], -1)


@pytest.mark.parametrize(
    ("keys", "just_refused", "just_allowed"),
    [
        *((f"profiles.ci.compute.{key}", [0], [1]) for key in ("threads", "min_devices")),
        *((f"profiles.ci.model.{key}", [0], [1]) for key in ("image_size", "max_tokens")),
        *(
            (f"profiles.ci.dataset.synthetic.{key}", [0], [1])
            for key in FILE["profiles"]["ci"]["dataset"]["synthetic"]
            if key not in ("seed", "image_size")
        ),
        ("profiles.ci.dataset.synthetic.image_size", [7], [8]),
        ("profiles.ci.dataset.max_pixels", [0, PILLOW_LIMIT + 1], [1, PILLOW_LIMIT]),
        ("profiles.ci.dataset.max_dropped_share", [-0.01, 1.01], [0, 1]),
        ("profiles.ci.encoder_norm.images", [0], [1]),
        ("profiles.ci.features.budget_gb", [-0.01], [0]),
        ("profiles.ci.evaluate.batch_tokens", [0], [1]),
        ("profiles.ci.evaluate.visual_tasks", [[], ["choice", "choice"]], [["choice"], ["choice", "reading"]]),
        ("profiles.ci.evaluate.text_tasks", [[], ["text", "text"]], [["text"], ["text", "mmlu"]]),
        ("profiles.ci.probe.samples", [0], [1]),
        ("profiles.ci.probe.attention_items", [-1], [0]),
        *(
            (f"profiles.ci.check.ratio_{point}", [[1, 1], [2, 1], [0, 1]], [[0.1, 0.2]])
            for point in ("at_init", "trained")
        ),
        ("profiles.ci.check.confidence", [0, 1], [0.01, 0.99]),
        ("profiles.ci.check.text_above_chance", [-1.01, 1.01], [-1, 1]),
        ("profiles.ci.check.text_at_most", [-0.01, 1.01], [0, 1]),
        *((f"profiles.ci.check.min_{kind}_items", [-1], [0]) for kind in ("visual", "text")),
        *(
            (f"profiles.ci.{section}.seed", [-1, 2**32], [0, 2**32 - 1])
            for section in ("dataset.synthetic", "stage1", "evaluate", "probe")
        ),
        ("profiles.ci.stage1.global_batch", [0, 1], [2]),
        ("profiles.ci.stage1.micro_batch", [0, 5], [1, 4]),
        ("profiles.ci.stage1.epochs", [0], [1]),
        ("profiles.ci.stage1.learning_rate.aligner", [0], [1e-9]),
        ("profiles.ci.stage1.warmup_ratio", [-0.01, 1.01], [0, 1]),
        ("profiles.ci.stage1.weight_decay", [-0.01], [0]),
        ("profiles.ci.stage1.betas", [[1, 0], [0, 1], [-0.1, 0]], [[0, 0], [0.999, 0.999]]),
        ("profiles.ci.stage1.eps", [0], [1e-12]),
        ("profiles.ci.stage1.clip_norm", [0], [1e-9]),
        ("profiles.ci.stage1.checkpoint_minutes", [-0.01], [0]),
        ("variants.norm.multiple", [0], [0.01]),
        ("variants.norm_gwc.gwc_limit", [0.99, math.nan, math.inf], [None, 1]),
        ("variants.norm.gwc_limit", [3.0], [None]),
    ],
)
def test_a_value_is_allowed_up_to_its_bounds_and_refused_beyond(
    document: dict[str, Any], tmp_path: Path, keys: str, just_refused: list[Any], just_allowed: list[Any]
) -> None:
    for value in just_allowed:
        change(document, keys, value)
        load(document, tmp_path)
    for value in just_refused:
        change(document, keys, value)
        with pytest.raises(SettingsError) as error:
            load(document, tmp_path)
        above, _, last = keys.rpartition(".")
        # Of two settings that contradict each other one is named, with the value of both.
        named = "micro_batch" if (last, value) == ("global_batch", 1) else last
        assert f"{above}.{named}: expected " in str(error.value)
        assert all(str(item) in str(error.value) for item in (value if isinstance(value, list) else [value]))


@pytest.mark.parametrize("aligner", ["none", "global_scale", "token_rms"])
def test_only_a_layernorm_compensates_gradients(document: dict[str, Any], tmp_path: Path, aligner: str) -> None:
    document["variants"]["norm_gwc"] = {"aligner": aligner, "gwc": True}
    with pytest.raises(SettingsError, match=rf"variants\.norm_gwc\.gwc: only aligner 'layernorm' .* not '{aligner}'"):
        load(document, tmp_path)


@pytest.mark.parametrize("kind", ["variants", "profiles"])
@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../a", "-a", "a b", "a; touch pwned", "$(a)", "`a`", "a'", "a\n", "ä", "a@b", 1, None],
)
def test_a_name_that_a_path_or_a_shell_could_take_for_something_else_is_refused(
    document: dict[str, Any], tmp_path: Path, kind: str, name: Any
) -> None:
    document[kind][name] = document[kind][{"variants": "norm", "profiles": "ci"}[kind]]
    with pytest.raises(SettingsError) as error:
        load(document, tmp_path)
    assert f"{kind}: {name!r} is no name; rename it" in str(error.value)


@pytest.mark.parametrize("name", ["a", "7b", "norm_2", "llama3.2-3B", "A.-_"])
def test_letters_digits_and_a_few_signs_make_a_name(document: dict[str, Any], tmp_path: Path, name: str) -> None:
    document["variants"][name] = document["variants"]["norm"]
    document["profiles"][name] = document["profiles"]["ci"]
    document["run"].append(name)
    assert load(document, tmp_path, name).name == name
    assert name in variants_to_run(tmp_path / "params.yaml")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ([], "run: 'baseline' is not in []; add it, the other variants are compared with it"),
        (["norm"], "run: 'baseline' is not in ['norm']; add it"),
        (["baseline", "norm", "norm"], "run: 'norm' is listed twice; keep one of them"),
        (["baseline", ["norm"]], "run[1]: expected the name of a variant, got ['norm']"),
        (["baseline", {"norm": 1}], "run[1]: expected the name of a variant, got {'norm': 1}"),
        (["baseline", 1], "run[1]: expected the name of a variant, got 1"),
        ([None, "baseline"], "run[0]: expected the name of a variant, got None"),
    ],
)
@pytest.mark.parametrize("read", [load_profile, variants_to_run])
def test_what_runs_is_a_list_of_different_variants_with_the_baseline(
    document: dict[str, Any], tmp_path: Path, run: Any, message: str, read: Any
) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(document | {"run": run}), encoding="utf-8")
    with pytest.raises(SettingsError) as error:
        read(**{"path": path})
    assert str(error.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profile: ci\nrun: []\nprofile: smol\n", "line 3: key 'profile' is already set in line 1; keep one"),
        ("profiles: {ci: {model: 1, 'model': 1}}\n", "line 1: key 'model' is already set in line 1"),
        ("variants:\n  norm: {}\n\n  norm: {}\n", "line 4: key 'norm' is already set in line 2"),
        ("templates: [&a {x: 1}, {<<: *a, x: 2,\n y: 1, x: 3}]\n", "line 2: key 'x' is already set in line 1"),
        ("templates: [&a {x: 1}, {<<: *a,\n <<: *a}]\n", "line 2: key '<<' is already set in line 1"),
    ],
)
def test_a_key_that_is_set_twice_is_refused_with_both_lines(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as error:
        read_params(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_merge_keys_mean_what_they_mean_in_plain_yaml() -> None:
    assert read_params(PARAMS) == FILE


def test_a_params_file_that_is_no_readable_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"^{re.escape(str(tmp_path))} cannot be read: Is a directory"):
        read_params(tmp_path)
    path = tmp_path / "params.yaml"
    for content, message in {
        "profile: ä".encode("latin-1"): "is not UTF-8 text",
        b"profile: \0": "is not valid YAML",
        b"profile: 2026-13-01": "is not valid YAML",
        b"- a": "expected a mapping",
    }.items():
        path.write_bytes(content)
        with pytest.raises(SettingsError) as error:
            read_params(path)
        assert str(error.value).startswith(str(path)) and message in str(error.value)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps the device of the first Accelerator in a process for all later ones."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("device", ["cuda", "mps"])
@pytest.mark.usefixtures("fresh_accelerate")
def test_a_profile_for_an_accelerator_does_not_train_on_another_device(device: Any) -> None:
    import torch

    from components.training import accelerator_for

    if getattr(torch, device).is_available():
        pytest.skip(f"this machine has a {device} device")
    with pytest.raises(ValueError, match=f"compute.device: the profile is for '{device}', but training would run on"):
        accelerator_for(dataclasses.replace(load_profile("ci", PARAMS).compute, device=device))


@pytest.mark.parametrize("keys", ["profile", "profiles.ci.stage1", "profiles.ci.stage1.seed", "variants.norm.aligner"])
def test_a_missing_key_is_named(document: dict[str, Any], tmp_path: Path, keys: str) -> None:
    *above, last = keys.split(".")
    mapping = document
    for key in above:
        mapping = mapping[key]
    del mapping[last]
    with pytest.raises(SettingsError, match=f"missing key '{last}'; add it"):
        load(document, tmp_path)


def test_an_integer_is_a_number_and_becomes_a_float(document: dict[str, Any], tmp_path: Path) -> None:
    document["profiles"]["ci"]["stage1"]["clip_norm"] = 2
    value = load(document, tmp_path).stage1.clip_norm
    assert value == 2.0 and isinstance(value, float)


@pytest.mark.parametrize("both", [True, False])
def test_exactly_one_kind_of_data_set_is_wanted(document: dict[str, Any], tmp_path: Path, both: bool) -> None:
    dataset = document["profiles"]["ci"]["dataset"]
    if both:
        dataset["llava"] = document["profiles"]["llama32_3b"]["dataset"]["llava"]
    else:
        dataset["synthetic"] = None
    with pytest.raises(SettingsError, match=r"profiles\.ci\.dataset\.synthetic: exactly one of it and 'llava'"):
        load(document, tmp_path)


def test_an_unknown_profile_or_variant_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no profile 'smoll'; did you mean 'smol'"):
        load_profile("smoll", PARAMS)
    with pytest.raises(SettingsError, match="no variant 'norm_gcw'; did you mean 'norm_gwc'"):
        load_profile("ci", PARAMS).variant("norm_gcw")
    with pytest.raises(SettingsError, match="not found; run from the project's root"):
        load_profile("ci", tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_text("a: [")
    with pytest.raises(SettingsError, match="not valid YAML"):
        load_profile("ci", tmp_path / "params.yaml")


@pytest.mark.parametrize(
    ("variant", "ratio", "gwc"),
    [
        ("baseline", None, False),
        ("norm", 1.0, False),
        ("norm_gwc", 1.0, True),
        ("norm_default_init", None, False),
        ("global_scale", 1.0, False),
        ("token_rms", 1.0, False),
    ],
)
def test_variants_aim_at_the_norm_they_are_named_for(variant: str, ratio: float | None, gwc: bool) -> None:
    settings = load_profile("ci", PARAMS).variant(variant)
    assert settings.intended_ratio == ratio and settings.gwc == gwc


def test_a_multiple_is_the_intended_ratio(document: dict[str, Any], tmp_path: Path) -> None:
    document["variants"]["twice"] = {"aligner": "token_rms", "multiple": 2}
    assert load(document, tmp_path).variant("twice").intended_ratio == 2.0


@pytest.mark.parametrize(
    ("name", "language"),
    [("llama32_3b", "hub:meta-llama/Llama-3.2-3B-Instruct"), ("qwen25_7b", "hub:Qwen/Qwen2.5-7B-Instruct")],
)
def test_paper_profiles_carry_the_papers_protocol(name: str, language: str) -> None:
    profile = load_profile(name, PARAMS)
    assert profile.weights.vision.source == "hub:google/siglip-so400m-patch14-384"
    assert profile.weights.language.source == language
    for source in (profile.weights.vision, profile.weights.language):
        assert source.revision is not None and len(source.revision) == 40
    assert profile.model.image_size == 384
    assert profile.stage1.learning_rate == {"projector": 1e-3, "aligner": 1e-3}
    assert profile.stage2.learning_rate["language"] == 1e-5
    assert profile.stage2.learning_rate["vision"] == 2e-6
    assert profile.stage2.learning_rate.keys() == {"vision", "projector", "aligner", "language"}
    assert (profile.stage1.global_batch, profile.stage1.micro_batch) == (256, 2)
    assert (profile.stage2.global_batch, profile.stage2.micro_batch) == (128, 1)
    for stage in (profile.stage1, profile.stage2):
        assert (stage.epochs, stage.warmup_ratio, stage.weight_decay, stage.seed) == (1, 0.03, 0.0, 42)
        assert not stage.per_turn and not stage.pack
    visual = {"mmbench_en_dev_static", "mmstar", "pope", "seedbench_2_plus", "ocrbench", "scienceqa_img", "ai2d"}
    assert set(profile.evaluate.visual_tasks) == visual
    assert set(profile.evaluate.text_tasks) == {"hellaswag", "mmlu"}
