"""What a stage says at its end."""

import shutil
import sys
from pathlib import Path

import pytest

from components import stage_main

PARAMS = Path(__file__).parents[2] / "params.yaml"


@pytest.mark.parametrize(("rank", "said"), [(None, "done: ci\n"), ("0", "done: ci\n"), ("1", "")])
def test_of_several_processes_one_prints_the_summary(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str | None,
    said: str,
) -> None:
    shutil.copy(PARAMS, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["stage", "ci"])
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    stage_main(lambda profile: f"done: {profile.name}")
    assert capsys.readouterr().out == said
