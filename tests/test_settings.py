"""params.yaml: what it says is checked, and what it says about the paper is the paper's protocol."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from normalign.settings import SettingsError, load_profile, read_params, variants_to_run

ROOT = Path(__file__).parents[1]
PARAMS = ROOT / "params.yaml"
PROFILES = ("ci", "smol", "llama32_3b", "qwen25_7b")


@pytest.fixture
def document() -> dict[str, Any]:
    """params.yaml as it is, merge keys resolved, to be changed."""
    return copy.deepcopy(yaml.safe_load(PARAMS.read_text(encoding="utf-8")))


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
    document[last] = value


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
        ("learning_rate", {"vision": 0.0}, "learning_rate.vision: 0.0 is not above 0"),
        ("micro_batch", 0, "micro_batch: 0 is not above 0"),
        ("epochs", -1, "epochs: -1 is not above 0"),
        ("clip_norm", 0.0, "clip_norm: 0.0 is not above 0"),
    ],
)
def test_training_options_that_cannot_train_are_refused(
    document: dict[str, Any], tmp_path: Path, keys: str, value: Any, message: str
) -> None:
    document["profiles"]["ci"]["stage1"][keys] = value
    with pytest.raises(SettingsError) as error:
        load(document, tmp_path)
    assert f"profiles.ci.stage1.{message}" in str(error.value)


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
