"""Registering: once per result, also when cut short, and the model loads back and answers."""

import base64
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
import yaml
from dvc.repo import Repo
from mlflow.tracking import MlflowClient
from PIL import Image

from components import register
from normalign.commands.compare import compare
from normalign.files import read_json, write_json
from normalign.registry import versions
from normalign.registry.fingerprint import fingerprint, folder_md5, model_md5
from normalign.registry.lookup import already_registered
from normalign.registry.record import MODIFIED, git_commit
from normalign.registry.store import open_registry
from normalign.settings import RegistrySettings

ROOT = Path(__file__).parents[2]
NAME = "normalign-ci"


def run_register(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "components.register", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def client_of(results: Any) -> MlflowClient:
    return open_registry(results.profile.registry)


def aliases(client: MlflowClient) -> dict[str, str]:
    return {alias: str(version) for alias, version in client.get_registered_model(NAME).aliases.items()}


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry without entries: setting one up takes seconds, copying it none."""
    path = tmp_path_factory.mktemp("registry") / "mlflow.db"
    with contextlib.chdir(path.parent):
        open_registry(RegistrySettings(tracking_uri=f"sqlite:///{path}", artifacts="artifacts"))
    return path


@pytest.fixture
def registered(results: Any, empty_database: Path) -> Any:
    """Results in a working copy whose registry has been set up."""
    Path("state").mkdir()
    shutil.copy(empty_database, "state/mlflow.db")
    return results


def test_the_same_results_are_registered_once_and_new_ones_get_a_new_version(registered: Any) -> None:
    profile = registered.profile
    assert register.run(profile, "baseline", "norm").splitlines() == [
        f"baseline: registered as version 1 of {NAME}",
        f"norm: registered as version 2 of {NAME}",
    ]
    assert register.run(profile, "norm") == f"norm: already registered as version 2 of {NAME}"
    probe = read_json(profile.results("baseline") / "probe.json")
    probe["points"]["stage2"]["ratio"] = 11.0
    write_json(profile.results("baseline") / "probe.json", probe)
    assert register.run(profile, "baseline") == f"baseline: registered as version 3 of {NAME}"
    client = client_of(registered)
    # The alias names the newest version; nothing but an explicit command makes a champion.
    assert aliases(client) == {"challenger": "3"}


def test_a_version_holds_settings_curves_metrics_files_and_provenance(registered: Any) -> None:
    profile = registered.profile
    for name in ("dvc.yaml", "dvc.lock"):
        Path(name).write_text("stages: {}\n")
    register.run(profile, "norm")
    client = client_of(registered)
    (version,) = versions.versions_of(client, NAME)
    run = client.get_run(str(version.run_id))
    assert run.info.status == "FINISHED"
    assert run.data.params["variant.aligner"] == "layernorm"
    assert run.data.params["stage2.learning_rate.vision"] == str(profile.stage2.learning_rate["vision"])
    assert not [key for key in run.data.params if key.startswith("registry")]
    metrics = run.data.metrics
    assert (metrics["ratio/stage2"], metrics["visual/accuracy"], metrics["text/accuracy"]) == (1.0, 0.7, 0.5)
    losses = client.get_metric_history(run.info.run_id, "stage1/loss")
    assert [(m.step, m.value) for m in losses] == [(step, 4 - step / 20) for step in range(1, 21)]
    # The vision tower is frozen in stage 1: its column is empty.
    assert "stage2/grad_vision" in metrics
    assert "stage1/grad_vision" not in metrics
    files = {f.path for folder in (None, "results", "plots") for f in client.list_artifacts(run.info.run_id, folder)}
    assert {"dvc.lock", "dvc.yaml", "params.yaml", "results/probe.json", "plots/curves.png"} <= files
    tags = version.tags
    assert (tags["variant"], tags["data_fingerprint"], tags["vision_weights_sha256"]) == ("norm", "d47a", "beef")
    assert tags["dvc_md5"] == folder_md5(profile.model_folder("norm", "stage2"))
    assert "git_commit" not in tags  # the working copy of this test is outside git


def test_a_commit_is_named_as_modified_where_settings_or_code_differ_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert git_commit() is None
    files = [tmp_path / name for name in ("params.yaml", "normalign/norms/gwc.py", "dvc.lock")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("before")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", *command], check=True)
    commit = git_commit()
    assert commit is not None and len(commit) == 40
    for file, differs in zip(files, (True, True, False), strict=True):  # the lock is what a run itself writes
        file.write_text("after")
        assert git_commit() == commit + (MODIFIED if differs else ""), file
        file.write_text("before")


def test_the_md5_of_a_model_is_dvcs_own_and_is_read_from_the_lock(results: Any) -> None:
    profile = results.profile
    folder = profile.model_folder("norm", "stage2")
    computed = folder_md5(folder)
    Repo.init(no_scm=True).add(str(folder))
    assert yaml.safe_load(folder.with_suffix(".dvc").read_text())["outs"][0]["md5"] == computed
    lock = {"stages": {"stage2@ci-norm": {"outs": [{"path": folder.as_posix(), "md5": "feed.dir"}]}}}
    Path("dvc.lock").write_text(yaml.safe_dump(lock))
    assert model_md5(profile, "norm") == "feed.dir"
    assert model_md5(profile, "norm_gwc") == folder_md5(profile.model_folder("norm_gwc", "stage2"))


def test_two_registrations_at_once_into_a_fresh_registry_both_succeed(results: Any) -> None:
    processes = [run_register("ci", variant) for variant in ("baseline", "norm")]
    for process in processes:
        _, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors
    found = versions.versions_of(client_of(results), NAME)
    assert {v.tags["variant"] for v in found} == {"baseline", "norm"}
    assert aliases(client_of(results)) == {"challenger": "2"}


def test_a_registration_killed_half_way_leaves_no_version_and_is_cleaned_up(registered: Any) -> None:
    killed_after_the_model = textwrap.dedent(
        """
        import os, signal
        from components import register
        from normalign.registry import versions
        from normalign.settings import load_profile

        versions.ensure_registered_model = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        register.run(load_profile("ci"), "norm")
        """
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run([sys.executable, "-c", killed_after_the_model], env=environment, check=False)
    assert process.returncode == -signal.SIGKILL
    client = client_of(registered)
    assert versions.versions_of(client, NAME) == []
    (experiment,) = (e.experiment_id for e in client.search_experiments() if e.name == NAME)
    (abandoned,) = client.search_runs([experiment])
    (model,) = client.search_logged_models([experiment])
    assert register.run(registered.profile, "norm") == f"norm: registered as version 1 of {NAME}"
    (run,) = client.search_runs([experiment])
    assert run.info.run_id != abandoned.info.run_id
    for uri in (model.artifact_location, abandoned.info.artifact_uri):
        assert not Path(uri.removeprefix("file://")).exists()


def test_weights_above_the_limit_are_registered_by_path_and_md5_without_a_copy(
    registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "MAX_COPIED_BYTES", 10)
    register.run(registered.profile, "norm")
    client = client_of(registered)
    (version,) = versions.versions_of(client, NAME)
    (model,) = client.search_logged_models([client.get_run(str(version.run_id)).info.experiment_id])
    assert model.tags["dvc_path"] == "data/ci/models/norm/stage2"
    assert model.tags["dvc_md5"] == version.tags["dvc_md5"]
    assert not list(Path("state/mlflow-artifacts").rglob("weights.bin"))


def test_missing_results_are_named(registered: Any) -> None:
    with pytest.raises(ValueError, match=r"results/token_rms holds no metric files"):
        register.run(registered.profile, "token_rms")
    with pytest.raises(ValueError, match="no variant named"):
        register.run(registered.profile)


def test_fingerprints_differ_between_variants_and_follow_every_metric_file(results: Any) -> None:
    profile = results.profile
    before = fingerprint(profile, "norm")
    assert before == fingerprint(profile, "norm")
    assert before != fingerprint(profile, "norm_gwc")
    for path in sorted(profile.results("norm").iterdir()):
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        assert fingerprint(profile, "norm") != before
        path.write_bytes(content)
    assert fingerprint(profile, "norm") == before


def test_compare_shows_every_version_with_its_figures(registered: Any, capsys: pytest.CaptureFixture[str]) -> None:
    compare("ci")
    assert "Nothing is registered as normalign-ci yet" in capsys.readouterr().out
    register.run(registered.profile, "baseline", "norm")
    capsys.readouterr()
    compare("ci")
    lines = capsys.readouterr().out.splitlines()
    (baseline,) = [line for line in lines if " baseline " in line]
    (norm,) = [line for line in lines if " norm " in line and "challenger" in line]
    assert baseline.split()[:9] == ["1", "baseline", "12.00", "0.2000", "70.0", "±", "2.0", "50.0", "50.0"]
    assert norm.split()[:5] == ["2", "norm", "challenger", "1.00", "0.0500"]


def test_a_registered_model_loads_back_and_answers_about_an_image(registered: Any) -> None:
    from components import common, text_norm, weights
    from normalign.vlm.checkpoint import save
    from normalign.vlm.generate import answer

    profile = registered.profile
    weights.run(profile)
    text_norm.run(profile)
    model, processor = common.initial_model(profile, "norm")
    save(model, processor, profile.model_folder("norm", "stage2"), profile.model.system_prompt)
    register.run(profile, "norm")
    picture = Image.new("RGB", (56, 56), (200, 30, 30))
    picture.save("red.png")
    question = "What is the colour?"
    encoded = base64.b64encode(Path("red.png").read_bytes()).decode()
    frame = pd.DataFrame({"image": ["red.png", encoded, None], "question": [question] * 3})
    loaded = mlflow.pyfunc.load_model(f"models:/{NAME}@challenger")
    expected = [answer(model, processor, image, question) for image in (picture, picture, None)]
    assert loaded.predict(frame) == expected


def test_the_quick_look_up_says_what_mlflow_says_and_never_yes_without_it(registered: Any) -> None:
    profile, client = registered.profile, client_of(registered)
    assert already_registered(profile, ("baseline",)) is None, "there is no version yet"
    assert "registered as version 1" in versions.register(client, profile, "baseline")
    assert already_registered(profile, ("baseline",)) == [versions.register(client, profile, "baseline")]
    assert already_registered(profile, ("baseline", "norm")) is None, "one of them is not registered"
    versions.register(client, profile, "norm")
    assert already_registered(profile, ("baseline", "norm")) == [
        versions.register(client, profile, variant) for variant in ("baseline", "norm")
    ]
    write_json(profile.results("norm") / "summary.json", {"ratio/init": 2.0})
    assert already_registered(profile, ("norm",)) is None, "new results are another version"
    client.delete_model_version("normalign-ci", "1")
    assert already_registered(profile, ("baseline",)) is None, "a deleted version does not count"
    client.delete_registered_model_alias("normalign-ci", "challenger")
    assert already_registered(profile, ("norm",)) is None, "an alias that is missing is put right by MLflow"


def _no_database(path: Path) -> None:
    path.write_text("no database " * 100)


def _foreign_schema(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'f00000000000'")


def _broken_table(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE registered_models RENAME COLUMN name TO other")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [_no_database, _foreign_schema, _broken_table, _folder])
def test_a_registry_that_cannot_be_used_says_so_in_a_sentence(registered: Any, spoil: Callable[[Path], None]) -> None:
    spoil(Path("state/mlflow.db"))
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"^registry: [^\n]*$"):
        register.run(registered.profile, "norm")
    assert time.monotonic() - began < 20, "MLflow tries to connect for minutes"


def test_an_experiment_deleted_by_hand_is_restored(registered: Any) -> None:
    client = client_of(registered)
    register.run(registered.profile, "norm")
    found = client.get_experiment_by_name(NAME)
    assert found is not None
    client.delete_experiment(found.experiment_id)
    assert register.run(registered.profile, "baseline") == f"baseline: registered as version 2 of {NAME}"
    assert client.get_experiment(found.experiment_id).lifecycle_stage == "active"
