"""Imports run downwards only, and the library's core runs where only torch, transformers and accelerate are."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the bottom up; modules of one layer may import each other.
LAYERS = (
    ("normalign.files", "normalign.embeddings"),
    ("normalign.norms",),
    ("normalign.vlm",),
    ("normalign.anatomy",),
    ("normalign.training",),
    ("normalign.settings",),
    tuple(
        f"normalign.{name}"
        for name in ("metrics", "headline", "diagnosis", "data", "weights", "report", "registry", "plan", "attach")
    ),
    ("normalign.commands", "normalign.cli", "normalign.__main__"),
    ("components",),
    ("flows",),
)
PIPELINE = ("dvc", "prefect", "mlflow", "great_expectations", "lmms_eval")
CORE = ("norms", "vlm", "training", "attach")
SOURCES = sorted(path for top in ("normalign", "components", "flows") for path in (ROOT / top).rglob("*.py"))


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(name: str) -> int | None:
    """The layer a module lies in; None for anything that is not ours."""
    for number, members in enumerate(LAYERS):
        if any(name == member or name.startswith(member + ".") for member in members):
            return number
    return None


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_no_module_imports_from_a_layer_above_its_own(path: Path) -> None:
    own = layer(module_name(path))
    if own is None:
        assert module_name(path) == "normalign", f"{path}: which layer is it in?"
        own = 0
    for name in imports(path):
        other = layer(name)
        assert other is None or other <= own, f"{module_name(path)} imports {name}, which lies above it"


@pytest.mark.parametrize("package", CORE)
def test_the_core_names_no_pipeline_tool(package: str) -> None:
    for path in sorted((ROOT / "normalign" / package).rglob("*.py")):
        if path.name == "lmms_adapter.py":
            continue
        found = {name.split(".")[0] for name in imports(path)} & {*PIPELINE, "components", "flows"}
        assert not found, f"{path.name} imports {found}"


def test_the_core_imports_where_no_pipeline_tool_is_installed() -> None:
    modules = [
        module_name(path)
        for package in CORE
        for path in sorted((ROOT / "normalign" / package).rglob("*.py"))
        if path.name != "lmms_adapter.py"
    ]
    code = f"""
import sys
for name in {PIPELINE!r}:
    sys.modules[name] = None
import importlib
for name in {modules!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["normalign.settings", "normalign.embeddings.measure", "normalign.commands.text_norm"])
def test_what_must_start_quickly_imports_without_torch(name: str) -> None:
    code = f"import sys; sys.modules['torch'] = sys.modules['transformers'] = None; import {name}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
