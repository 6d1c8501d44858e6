"""The paper's profiles: refused at once where they cannot run, and whole on tiny stand-ins of what they fetch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .paper import IMAGE_SIZE, REPOSITORIES, write_benchmarks, write_hub_cache, write_llava

pytestmark = pytest.mark.slow

UNREACHABLE = "http://127.0.0.1:9"
VARIANTS = ["baseline", "norm_gwc"]


def shrink(document: dict[str, Any], name: str) -> None:
    """All that a stand-in needs of params.yaml: no accelerator, small images, less data, knowledge of nothing.

    Sources and revisions, places of the data, learning rates, batch sizes, epochs, feature layer, conversations as they
    are and every other setting stay as published.
    """
    document["run"] = VARIANTS
    profile = document["profiles"][name]
    profile["compute"] = {"device": "cpu", "min_devices": 1, "threads": 1, "precision": "fp32"}
    profile["model"]["image_size"] = IMAGE_SIZE
    profile["evaluate"].update(visual_tasks=["pope"], text_tasks=["hellaswag"])
    profile["encoder_norm"]["images"] = 8
    profile["probe"].update(samples=4, attention_items=1)
    profile["check"].update(text_above_chance=-1.0, min_text_items=8, images_matter=False)


@pytest.fixture(scope="module", params=list(REPOSITORIES))
def paper(
    request: pytest.FixtureRequest, new_tree: Callable[[str], Any], tmp_path_factory: Any
) -> tuple[str, Any, str]:
    """(profile, the project after a whole run of it, what the run said)."""
    name = request.param
    tree = new_tree(name)
    tree.edit(lambda document: shrink(document, name))
    cache = tmp_path_factory.mktemp("hub")
    weights = tree.settings()["profiles"][name]["weights"]
    write_hub_cache(cache, name, {part: weights[part]["revision"] for part in ("vision", "language")})
    write_llava(tree.root, stage1=2 * 256, stage2=2 * 128)
    write_benchmarks(tree.root)
    output = tree.run_in_one_process(
        "",
        HF_HUB_CACHE=str(cache),
        HF_HUB_OFFLINE="1",
        HF_DATASETS_CACHE=str(cache / "datasets"),
        CUDA_VISIBLE_DEVICES="",
    )
    return name, tree, output


def read(tree: Any, name: str, file: str) -> Any:
    return json.loads((tree.root / "data" / name / file).read_text())


def test_a_paper_profile_runs_from_pinned_weights_to_registry_and_report(paper: tuple[str, Any, str]) -> None:
    name, tree, _ = paper
    language = read(tree, name, "weights.json")["language"]
    assert language["source"] == f"hub:{REPOSITORIES[name]}"
    assert language["class"] == ("LlamaForCausalLM" if name == "llama32_3b" else "Qwen2ForCausalLM")
    assert language["dtype"] == "bfloat16"
    assert read(tree, name, "weights.json")["vision"]["class"] == "SiglipVisionModel"
    for variant in VARIANTS:
        assert read(tree, name, f"results/{variant}/check.json")["passed"] is True
        assert read(tree, name, f"gates/{variant}.json")["passed"] is True
        assert variant in (tree.root / "data" / name / "report" / "index.html").read_text()
    assert tree.registered() == VARIANTS


def test_training_follows_the_protocol_of_the_paper(paper: tuple[str, Any, str]) -> None:
    name, tree, _ = paper
    norms = read(tree, name, "encoder_norm.json")
    assert (norms["feature_layer"], norms["feature_norm"], norms["tokens_per_image"]) == (-2, False, 16)
    for stage, batch, rate in (("stage1", 256, 1e-3), ("stage2", 128, 1e-5)):
        lines = (tree.root / f"data/{name}/results/norm_gwc/{stage}.csv").read_text().splitlines()
        rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
        assert [int(row["samples"]) for row in rows] == [batch] * 2
        assert max(float(row["lr_aligner"]) for row in rows) == pytest.approx(rate)
    # The target norm is T; random layers this small leave nothing else to expect.
    points = read(tree, name, "results/norm_gwc/probe.json")["points"]
    assert points["init"]["ratio"] == pytest.approx(1.0, rel=1e-3)


def test_lmms_evals_own_tasks_are_scored_item_by_item(paper: tuple[str, Any, str]) -> None:
    name, tree, _ = paper
    tasks = read(tree, name, "results/norm_gwc/evaluation.json")["tasks"]
    assert (tasks["pope"]["items"], tasks["pope"]["images"], tasks["pope"]["chance"]) == (2, 2, None)
    assert (tasks["hellaswag"]["items"], tasks["hellaswag"]["chance"]) == (8, 0.25)
    verdicts = {v["expectation"]: v for v in read(tree, name, "check_data.json")["verdicts"]}
    assert verdicts["hellaswag_items"]["observed"] == 8
    assert verdicts["hellaswag_accuracy"]["low"] == -0.75


@pytest.mark.parametrize("name", list(REPOSITORIES))
def test_a_paper_profile_that_cannot_run_here_is_refused_before_any_stage(
    new_tree: Callable[[str], Any], name: str
) -> None:
    tree = new_tree(name)
    status, output = tree.python(
        "-m",
        "flows.repro",
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="0",
        HF_HUB_CACHE=str(tree.root / "empty"),
        HF_ENDPOINT=UNREACHABLE,
    )
    assert status == 1
    assert f"profile {name!r} cannot run here" in output and "Traceback" not in output
    assert "needs 8 cuda device(s), this machine has 0" in output
    assert f"hub:{REPOSITORIES[name]}" in output and "cannot be fetched" in output
    assert not list(Path(tree.root, "data").glob("*"))
