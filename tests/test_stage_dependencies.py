"""What a stage computes with is a dependency of it in dvc.yaml, so that a change runs it again."""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
STAGES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
# Read, write, count and report; no figure depends on how.
PLUMBING = {
    "normalign/files",
    "normalign/settings",
    "normalign/metrics",
    "normalign/headline",
    "normalign/data/rows",
    "normalign/data/manifest",
    "components/live",
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_the_code_that_its_components_import(stage: str) -> None:
    code = [dependency for dependency in STAGES[stage]["deps"] if not dependency.startswith("data/")]
    components = [ROOT / path for path in code if path.startswith("components/")]
    assert components
    nodes = [node for path in components for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    ours = {name.replace(".", "/") for name in imported if name.startswith(("normalign.", "components."))}
    missing = {
        name for name in ours - PLUMBING if not any(f"{name}.py" == d or f"{name}/".startswith(f"{d}/") for d in code)
    }
    assert not missing, f"stage {stage} in dvc.yaml: add these to deps"


@pytest.mark.parametrize("stage", STAGES)
def test_dependencies_on_code_are_there(stage: str) -> None:
    code = [dependency for dependency in STAGES[stage]["deps"] if not dependency.startswith("data/")]
    assert all((ROOT / path).exists() for path in code)
