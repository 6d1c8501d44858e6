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


@pytest.mark.parametrize("arguments", [[], ["ci", "norm", "more"]])
def test_missing_and_superfluous_arguments_get_the_usage(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    from components import stage1

    monkeypatch.setattr(sys, "argv", ["components/stage1.py", *arguments])
    with pytest.raises(SystemExit, match=r"usage: python -m components\.stage1 PROFILE VARIANT$"):
        stage_main(stage1.run)
