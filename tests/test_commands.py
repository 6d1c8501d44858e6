"""The `normalign` command."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from normalign.cli import app
from normalign.settings import load_profile

ROOT = Path(__file__).parents[1]


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "params.yaml"


def test_profile_use_changes_the_profile_line_and_nothing_else(params: Path) -> None:
    params.write_text(params.read_text().replace("profile: smol", "profile: smol  # kept", 1))
    before = params.read_text()
    result = CliRunner().invoke(app, ["profile", "use", "ci"])
    assert result.exit_code == 0, result.output
    assert params.read_text() == before.replace("profile: smol  # kept", "profile: ci  # kept")
    assert load_profile().name == "ci"
    assert [path.name for path in params.parent.iterdir()] == ["params.yaml"]


def test_profile_use_of_an_unknown_name_names_the_nearest_and_changes_nothing(params: Path) -> None:
    before = params.read_text()
    result = CliRunner().invoke(app, ["profile", "use", "smoll"])
    assert result.exit_code == 1
    assert "smoll" in result.output and "did you mean 'smol'" in result.output
    assert params.read_text() == before


def test_profile_use_refuses_a_file_in_which_the_line_cannot_be_found(params: Path) -> None:
    params.write_text('"profile": smol\n' + params.read_text().replace("profile: smol\n", "", 1))
    result = CliRunner().invoke(app, ["profile", "use", "ci"])
    assert result.exit_code == 1
    assert "expected one line 'profile: NAME'" in result.output


def test_outside_a_project_the_error_says_where_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["profile", "use", "ci"])
    assert result.exit_code == 1
    assert "run from the project's root" in result.output
