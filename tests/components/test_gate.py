"""The gate as DVC runs it: a process that ends with 1 and leaves no file unless every verdict is good."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components import gate
from normalign.files import write_json

ROOT = Path(__file__).parents[2]


def verdict(name: str, passed: bool) -> dict[str, Any]:
    return {"passed": passed, "message": f"norm: {name} at init: ratio is 9, must be at most 1.25"}


def write_verdicts(results: Any, *verdicts: dict[str, Any]) -> None:
    write_json(results.profile.results("norm") / "check.json", {"passed": True, "verdicts": list(verdicts)})


def run_gate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "components.gate", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_bad_verdicts_end_with_1_all_messages_and_no_gate_file(results: Any) -> None:
    gate_file = results.profile.folder / "gates" / "norm.json"
    write_verdicts(results, verdict("norm_ratio", True))
    assert run_gate("ci", "norm").returncode == 0
    assert gate_file.exists()
    write_verdicts(results, verdict("norm_ratio", False), verdict("cosine_sync", True), verdict("loss_falls", False))
    closed = run_gate("ci", "norm")
    assert closed.returncode == 1
    assert "2 of 3 expectations do not hold" in closed.stderr
    assert "norm: norm_ratio at init: ratio is 9, must be at most 1.25" in closed.stderr
    assert "norm: loss_falls" in closed.stderr
    assert "cosine_sync" not in closed.stderr
    assert not gate_file.exists()


@pytest.mark.parametrize("document", [{}, {"verdicts": []}, {"verdicts": [{"passed": True}]}, {"verdicts": {}}, []])
def test_verdicts_that_are_absent_or_malformed_do_not_open_the_gate(results: Any, document: Any) -> None:
    write_json(results.profile.results("norm") / "check.json", document)
    with pytest.raises(ValueError, match="'verdicts' is not a list of verdicts"):
        gate.run(results.profile, "norm")
    assert not (results.profile.folder / "gates" / "norm.json").exists()


def test_a_missing_verdict_file_is_named(results: Any) -> None:
    with pytest.raises(ValueError, match=r"check_data\.json is missing"):
        gate.run(results.profile)


def test_the_gate_imports_nothing_heavy() -> None:
    code = "import sys, components.gate; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    assert not {"torch", "numpy", "pandas", "great_expectations", "mlflow"} & set(loaded)
