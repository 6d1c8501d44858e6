"""Runs of a tiny DVC project through `python -m flows.repro`: what is run, what survives a failure and a kill."""

import shutil
import signal
from typing import Any

import pytest


def test_independent_stages_overlap_and_the_next_run_starts_only_one_register_process(pipeline: Any) -> None:
    status, output = pipeline.run("--workers", "2")
    assert status == 0, output
    assert "7 done" in output
    assert pipeline.times("started", "right") < pipeline.times("ended", "left")
    assert pipeline.times("started", "left") < pipeline.times("ended", "right")
    assert pipeline.times("ended", "root") < pipeline.times("started", "left")
    assert sorted((pipeline.root / "registered").read_text().splitlines()) == ["ci a", "ci b"]

    before = {path: path.read_text() for path in pipeline.root.glob("started/*")}
    status, output = pipeline.run()
    assert status == 0, output
    assert "2 of 7 stages to run" in output and "5 unchanged, 2 done" in output
    assert {path: path.read_text() for path in pipeline.root.glob("started/*")} == before
    assert (pipeline.root / "registered").read_text().splitlines()[2:] == ["ci a b"]


def test_a_failed_stage_stops_only_its_descendants_and_the_run_exits_non_zero(pipeline: Any) -> None:
    bad = pipeline.root / "left.bad"
    bad.touch()
    status, output = pipeline.run()
    assert status == 1
    assert pipeline.outs() == {"root", "right", "right_end"}
    assert "error: left is bad" in output and "state/logs/left.log" in output
    assert "failed: left\n" in output
    assert "skipped: left_end, register@ci-a, register@ci-b" in output

    bad.unlink()
    status, output = pipeline.run()
    assert status == 0, output
    assert "3 unchanged, 4 done" in output
    assert pipeline.outs() == {"root", "left", "right", "right_end"}


@pytest.mark.parametrize("killed", ["stage", "dvc", "driver"])
def test_kill_9_leaves_no_orphan_and_nothing_half_written_and_the_next_run_completes(pair: Any, killed: str) -> None:
    driver = pair.start("--workers", "2")
    pair.await_process("stage.py", "right")
    stage = pair.await_process("stage.py", "left")
    if killed == "driver":
        driver.kill()
        driver.communicate()
        assert pair.gone_within(10), pair.processes()
        assert pair.outs() == set()
    else:
        victim = stage if killed == "stage" else pair.await_process("dvc", "left")
        victim.kill()
        assert pair.gone_within(10, "left"), pair.processes()
        output, _ = driver.communicate(timeout=60)
        assert driver.returncode == 1, output
        assert pair.outs() == {"right"}
    status, output = pair.run()
    assert status == 0, output
    assert pair.outs() == {"left", "right"}
    assert not list(pair.root.glob("out/.*.part")), "a half-written file is left"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_every_process_and_says_that_the_next_run_goes_on(pair: Any, sent: signal.Signals) -> None:
    driver = pair.start()
    pair.await_process("stage.py", "left")
    driver.send_signal(sent)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130, output
    assert "the next `make repro` goes on" in output and "FAILED" not in output
    assert pair.processes() == []
    assert pair.outs() == set()


def test_a_second_run_in_one_checkout_is_refused_and_names_the_first(pair: Any) -> None:
    driver = pair.start()
    pair.await_process("stage.py", "left")
    status, output = pair.run()
    assert status == 1
    assert f"process {driver.pid} already runs this checkout" in output
    driver.terminate()
    driver.communicate(timeout=60)


def test_outputs_that_are_only_missing_here_are_counted_with_what_dvc_pull_could_spare(pair: Any) -> None:
    assert pair.run()[0] == 0
    shutil.rmtree(pair.root / ".dvc" / "cache")
    for name in ("left", "right"):
        (pair.root / "out" / f"{name}.txt").unlink()
    driver = pair.start()
    pair.await_process("dvc", "left")
    driver.terminate()
    output, _ = driver.communicate(timeout=60)
    assert "dvc.lock knows the outputs of 2 stages that are not here" in output
    assert "no DVC remote is configured" in output


def test_a_broken_dvc_file_is_reported_without_a_traceback(pair: Any) -> None:
    (pair.root / "dvc.yaml").write_text("stages: [")
    status, output = pair.run()
    assert status == 1
    assert "error:" in output and "dvc.yaml" in output and "Traceback" not in output
