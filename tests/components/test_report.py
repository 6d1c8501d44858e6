"""The stage `report` and the command that shows its outcome."""

import importlib.util
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from components.report import run
from normalign.cli import app
from normalign.files import write_text
from normalign.settings import load_profile

ROOT = Path(__file__).parents[2]
TABLES = "## Norms\n\n### Norms at every interface\n\n| Variant | Median |\n| :--- | ---: |\n| norm_gwc | 3.20 |\n"


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the metric files of a finished run, as the working directory."""
    spec = importlib.util.spec_from_file_location("made_up_run", ROOT / "tests" / "report" / "conftest.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_stage_writes_exactly_its_three_outputs_and_the_same_bytes_again(finished: Path) -> None:
    folder = finished / "data" / "smol" / "report"
    summary = run(load_profile("smol"))
    assert summary == "report on 3 variants: data/smol/report/index.html"
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(first) == ["curves.svg", "index.html", "report.md"]
    run(load_profile("smol"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first


def test_stage_lists_every_folder_it_reads_among_its_dependencies() -> None:
    import yaml

    stage = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]["report"]
    read = ["weights.json", "dataset.json", "text_norm.json", "encoder_norm.json", "language_reference.json"]
    read += ["check_data.json", "results", "samples", "attention"]
    assert {f"data/${{item.profile}}/{name}" for name in read} <= set(stage["deps"])


def test_command_prints_the_tables_and_where_the_page_is(finished: Path) -> None:
    write_text(finished / "data/smol/report/report.md", TABLES)
    write_text(finished / "data/smol/report/index.html", "<p>page</p>")
    result = CliRunner().invoke(app, ["report"], env={**os.environ, "COLUMNS": "160"})
    assert result.exit_code == 0
    assert "Norms at every interface" in result.output and "norm_gwc" in result.output
    assert f"Page: {(finished / 'data/smol/report/index.html').as_uri()}" in result.output


def test_command_says_what_to_do_when_there_is_no_report_or_profile(finished: Path) -> None:
    result = CliRunner().invoke(app, ["report"])
    assert result.exit_code == 1 and "make repro" in result.output
    result = CliRunner().invoke(app, ["report", "--profile", "smoll"])
    assert result.exit_code == 1 and "did you mean 'smol'?" in result.output


def test_command_shows_tables_even_without_the_page_of_a_fresh_clone(finished: Path) -> None:
    write_text(finished / "data/smol/report/report.md", TABLES)
    result = CliRunner().invoke(app, ["report"])
    assert result.exit_code == 0 and "`make repro` brings it" in result.output
