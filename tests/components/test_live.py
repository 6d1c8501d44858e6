"""Live curves: every step once in the file; a server that fails or does not answer never stops a stage."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from components.live import LAST_SECONDS, LiveCurves


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def rows(count: int) -> list[dict[str, Any]]:
    """Log rows with a measured and an absent value."""
    return [{"step": step, "loss": 1.0 / step, "gain_l2": None} for step in range(1, count + 1)]


def written() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("state/live/ci-stage1-norm.jsonl").read_text().splitlines()]


def test_every_step_stands_in_the_file_once_also_after_an_interruption(tmp_path: Path) -> None:
    first = LiveCurves("ci", "stage1", "norm", tmp_path / "work")
    for count in (1, 2, 3):
        first(rows(count))
    assert written() == rows(3)
    resumed = LiveCurves("ci", "stage1", "norm", tmp_path / "work")
    resumed(rows(2))  # the checkpoint was behind the file
    resumed(rows(3))
    resumed.close()
    assert written() == rows(3)


def test_a_file_that_cannot_be_written_is_said_once_and_made_good_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = LiveCurves("ci", "stage1", "norm", tmp_path / "work")
    curves(rows(1))
    folder, file = Path("state/live"), Path("state/live/ci-stage1-norm.jsonl")
    file.unlink()
    file.symlink_to("/dev/full")
    curves(rows(2))
    file.unlink()
    folder.rmdir()
    folder.touch()
    curves(rows(3))
    printed = capsys.readouterr().err
    assert printed.count("training goes on") == 1 and str(file) in printed and "No space left" in printed
    folder.unlink()
    curves(rows(4))
    assert written() == rows(4)


def test_a_server_gets_every_step_and_a_resumed_stage_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    address = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    for count in (2, 4):
        curves = LiveCurves("ci", "stage1", "norm", tmp_path / "work")
        curves(rows(count))
        assert curves.sender is not None
        curves.sender.rows.put(None)
        curves.sender.join(120)  # a first database takes long on a busy machine
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("ci live")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("stage1 norm", "FINISHED")
    history = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "loss")}
    assert history == {row["step"]: row["loss"] for row in rows(4)}
    assert "gain_l2" not in run.data.metrics


def test_a_process_that_never_reports_opens_no_run_and_no_address_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:secret@127.0.0.1:9")
    silent = LiveCurves("ci", "stage1", "norm", tmp_path / "work")
    silent.close()
    assert silent.sender is None and list(tmp_path.iterdir()) == []
    curves = LiveCurves("ci", "stage1", "norm", tmp_path / "work")
    curves(rows(1))
    curves.close()
    printed = capsys.readouterr().err
    assert "training goes on" in printed and "secret" not in printed


@pytest.mark.parametrize("answers", [False, True], ids=["nothing listens", "never answers"])
def test_a_server_that_cannot_be_reached_costs_the_stage_seconds_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answers: bool
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:
            listener.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{listener.getsockname()[1]}")
        curves = LiveCurves("ci", "stage1", "norm", tmp_path / "work")
        start = time.monotonic()
        curves(rows(3))
        assert time.monotonic() - start < 1
        curves.close()
        assert time.monotonic() - start < LAST_SECONDS + 5
    assert written() == rows(3)
    if not answers:
        assert "training goes on" in capsys.readouterr().err
