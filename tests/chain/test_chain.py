"""The whole chain of the profile ci through `python -m flows.repro`, in copies of the project."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow

VARIANTS = ("baseline", "norm", "norm_gwc")
ABLATIONS = ("norm_default_init", "global_scale", "token_rms")
PROFILE_METRICS = (
    "weights.json",
    "dataset.json",
    "text_norm.json",
    "encoder_norm.json",
    "language_reference.json",
    "check_data.json",
    "gates/data.json",
    "report/report.md",
    "report/curves.svg",
)
RESULTS = ("stage1.csv", "stage2.csv", "evaluation.json", "probe.json", "layers.csv", "check.json", "summary.json")


def tracked_outputs() -> set[str]:
    """Files below data/ci that git is to track: metrics, verdicts, gates and the Markdown report."""
    per_variant = {
        f"{place}" for v in VARIANTS for place in (f"gates/{v}.json", *(f"results/{v}/{r}" for r in RESULTS))
    }
    return {*PROFILE_METRICS, *per_variant}


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def metrics_of(root: Path) -> dict[str, bytes]:
    """The contents of the metric files that the stages up to `check` write, by path below the profile's folder."""
    data = root / "data" / "ci"
    names = [n for n in PROFILE_METRICS if "/" not in n] + [f"results/{v}/{r}" for v in VARIANTS for r in RESULTS]
    return {name: (data / name).read_bytes() for name in names}


def test_one_run_writes_every_metric_file_and_git_sees_nothing_else(chain: Any) -> None:
    seen = chain.git("status", "--porcelain", "--untracked-files=all").splitlines()
    changed = {line[3:].removeprefix("data/ci/") for line in seen if not line.endswith("/.gitignore")}
    changed.discard("data/.gitignore")
    assert changed == {"dvc.lock", *tracked_outputs()}
    for path in [
        *(chain.root / "data" / "ci").glob("*.json"),
        *(chain.root / "data" / "ci" / "results").rglob("*.json"),
    ]:
        json.loads(path.read_text(), parse_constant=no_constant)
    for name in VARIANTS:
        assert json.loads((chain.root / f"data/ci/results/{name}/check.json").read_text())["passed"] is True


def test_nothing_that_is_tracked_holds_a_path_of_this_machine(chain: Any) -> None:
    data = chain.root / "data" / "ci"
    for path in [chain.root / "dvc.lock", *(data / name for name in tracked_outputs()), data / "report" / "index.html"]:
        text = path.read_text()
        assert str(chain.root) not in text and str(Path.home()) + "/" not in text, path
        assert not re.search(r"path: /", text), path


def test_the_report_loads_nothing_from_elsewhere(chain: Any) -> None:
    page = (chain.root / "data/ci/report/index.html").read_text()
    references = re.findall(
        r"""(?:\b(?:src|href|action|poster|data)\s*=\s*["']?|url\(\s*["']?|@import\s+)([^"'\s>)]+)""", page
    )
    assert references
    assert {r for r in references if not r.startswith(("#", "data:"))} == set()
    for name in VARIANTS:
        assert name in page


def test_every_variant_is_registered_once_and_a_second_run_does_nothing(chain: Any) -> None:
    assert sorted(chain.registered()) == sorted(VARIANTS)
    before = {path: path.stat().st_mtime_ns for path in (chain.root / "data").rglob("*") if path.is_file()}
    lock = (chain.root / "dvc.lock").read_bytes()
    status, output = chain.repro()
    assert status == 0, output
    assert "3 of 30 stages to run" in output and "27 unchanged, 3 done" in output
    assert (chain.root / "state/logs/register.log").read_text().count("already registered") == len(VARIANTS)
    assert {path: path.stat().st_mtime_ns for path in (chain.root / "data").rglob("*") if path.is_file()} == before
    assert (chain.root / "dvc.lock").read_bytes() == lock
    assert sorted(chain.registered()) == sorted(VARIANTS)


@pytest.mark.parametrize("stage", ["stage1@ci-norm_gwc", "stage2@ci-norm_gwc"])
def test_a_stage_that_was_killed_before_dvc_noted_its_end_comes_to_the_same_bits_again(chain: Any, stage: str) -> None:
    lock = yaml.safe_load((chain.root / "dvc.lock").read_text())
    noted = lock["stages"].pop(stage)  # what a kill between a stage's end and DVC's note leaves: outputs, no entry
    (chain.root / "dvc.lock").write_text(yaml.safe_dump(lock, sort_keys=False))
    status, output = chain.python("-m", "dvc", "repro", "--single-item", "--no-run-cache", stage)
    assert status == 0 and "Running stage" in output, output
    assert yaml.safe_load((chain.root / "dvc.lock").read_text())["stages"][stage] == noted


@pytest.fixture(scope="module")
def again(chain: Any, new_tree: Callable[[str], Any]) -> Any:
    """Everything up to the report a second time, elsewhere, without DVC, and with every variant that there is."""
    tree = new_tree("ci")
    tree.edit(lambda document: document.update(run=list(document["variants"])))
    before_gates = ("weights", "dataset", "text_norm", "encoder_norm", "language_reference", "check_data", "gate_data")
    per_variant = ("features", "stage1", "stage2", "evaluate", "probe", "check", "report")
    tree.run_in_one_process(*(f"{stage}@" for stage in before_gates + per_variant))
    return tree


def test_another_run_in_another_folder_writes_the_same_bytes(chain: Any, again: Any) -> None:
    first, second = metrics_of(chain.root), metrics_of(again.root)
    assert {name for name in first if first[name] != second[name]} == set()


@pytest.mark.parametrize("variant", ABLATIONS)
def test_an_ablation_that_run_names_goes_through_every_stage(again: Any, variant: str) -> None:
    folder = again.root / "data" / "ci" / "results" / variant
    for name in RESULTS:
        assert (folder / name).stat().st_size > 0
    assert json.loads((folder / "check.json").read_text())["passed"] is True
    points = json.loads((folder / "probe.json").read_text())["points"]
    if variant == "norm_default_init":  # LayerNorm's own gain of 1: norm √D, with D = 64
        norm = points["init"]["interface"]["aligner_output"]["mean"]
        assert norm == pytest.approx(8.0, rel=1e-3)
    else:
        assert points["init"]["ratio"] == pytest.approx(1.0, rel=1e-3)
    assert variant in (again.root / "data" / "ci" / "report" / "index.html").read_text()


def trained_share(chain: Any, variant: str) -> float:
    """The variant's largest visual norm / T after training, as its verdicts give it."""
    verdicts = json.loads((chain.root / f"data/ci/results/{variant}/check.json").read_text())["verdicts"]
    return float(max(v["observed"] for v in verdicts if v["expectation"] == "norm_ratio" and v["point"] != "init"))


def test_a_gate_stops_one_variant_while_its_siblings_and_the_report_go_on(chain: Any) -> None:
    params = (chain.root / "params.yaml").read_text()
    verdicts = (chain.root / "data/ci/results/norm/check.json").read_bytes()
    shares = {name: trained_share(chain, name) for name in VARIANTS[1:]}
    good, bad = sorted(shares, key=lambda name: shares[name])
    between = (shares[good] + shares[bad]) / 2  # the bound that only one of them breaks
    chain.edit(lambda document: document["profiles"]["ci"]["check"].update(ratio_trained=[0.5, between]))
    before = chain.registered()

    status, output = chain.repro()
    assert status == 1
    assert f"failed: gate@ci-{bad}\n" in output and f"skipped: register@ci-{bad}\n" in output
    assert f"gate of {bad} in profile ci is closed" in output
    assert chain.registered().count(bad) == before.count(bad)
    assert not (chain.root / f"data/ci/gates/{bad}.json").exists()
    assert (chain.root / f"data/ci/gates/{good}.json").exists()
    assert f"{bad} failed" in (chain.root / "data/ci/report/index.html").read_text()

    (chain.root / "params.yaml").write_text(params)
    status, output = chain.repro()
    assert status == 0, output
    assert (chain.root / f"data/ci/gates/{bad}.json").exists()
    assert (chain.root / "data/ci/results/norm/check.json").read_bytes() == verdicts
    assert chain.registered().count(bad) == before.count(bad)  # the same results are the same version
    assert f"{bad} failed" not in (chain.root / "data/ci/report/index.html").read_text()


@pytest.mark.parametrize("with_git", [True, False], ids=["git", "no git"])
def test_a_fresh_checkout_of_finished_results_only_registers_them(chain: Any, tmp_path: Path, with_git: bool) -> None:
    if chain.git("status", "--porcelain"):
        chain.commit()
    clone = type(chain)(tmp_path / "clone")
    clone.root.mkdir()
    clone.git("clone", "--quiet", str(chain.root), ".")
    if not with_git:
        shutil.rmtree(clone.root / ".git")
        (clone.root / ".dvc" / "config.local").write_text("[core]\n    no_scm = true\n")
    place = {"DVC_SITE_CACHE_DIR": str(clone.root / "state" / "dvc")}
    for command in (("cache", "dir", "--local", str(chain.root / ".dvc" / "cache")), ("checkout",)):
        status, output = clone.python("-m", "dvc", *command, **place)
        assert status == 0, output
    status, output = clone.repro()
    assert status == 0, output
    assert "3 of 30 stages to run" in output
    assert sorted(clone.registered()) == sorted(VARIANTS)
