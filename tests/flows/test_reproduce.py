"""The Prefect flow on a tiny DVC project, without a server."""

import sqlite3
from typing import Any

import pytest

from flows.reproduce import artifact_key, metric_rows, throttled


@pytest.mark.slow
def test_the_flow_runs_each_stage_as_a_task_with_logs_and_metric_tables(pipeline: Any) -> None:
    (pipeline.root / "right.bad").touch()
    status, output = pipeline.run(module="flows.reproduce")
    assert status == 1, output
    assert "failed: right; skipped: right_end" in output
    assert pipeline.outs() == {"root", "left"}
    assert pipeline.processes() == []

    with sqlite3.connect(pipeline.root / "state" / "prefect" / "prefect.db") as database:
        states = dict(database.execute("select name, state_type from task_run"))
        logs = [text for (text,) in database.execute("select message from log")]
        tables = dict(database.execute("select key, data from artifact where type = 'table'"))
    assert states == {
        **dict.fromkeys(["root", "left", "left_end", "register@ci-a", "register@ci-b"], "COMPLETED"),
        "right": "FAILED",
    }
    assert "Running stage 'left':" in logs and "error: right is bad" in logs
    assert "loss.last" in tables["left-end"] and "0.5" in tables["left-end"]

    (pipeline.root / "right.bad").unlink()
    status, output = pipeline.run(module="flows.reproduce")
    assert status == 0 and '{"unchanged": 3, "done": 3, "failed": 0, "skipped": 0}' in output, output


def test_nested_metrics_become_rows_named_by_their_path() -> None:
    metrics = {"passed": True, "points": {"init": {"ratio": 1.5}}, "curve": [1, 2], "T": None}
    assert metric_rows(metrics) == [
        {"metric": "passed", "value": True},
        {"metric": "points.init.ratio", "value": 1.5},
        {"metric": "T", "value": None},
    ]


def test_an_artifact_key_has_lower_case_letters_digits_and_dashes_only() -> None:
    assert artifact_key("stage1@smol-norm_gwc") == "stage1-smol-norm-gwc"


def test_progress_lines_are_thinned_out_and_all_others_are_logged() -> None:
    lines: list[str] = []
    write = throttled(lines.append)
    for text in ("Running", "step 1/9 loss 2.0", "step 2/9 loss 1.9", "step 3/9 loss 1.8", "stage1: done"):
        write(text)
    assert lines == ["Running", "step 1/9 loss 2.0", "stage1: done"]
