"""Folders and hub snapshots: taken as they are, towers cut out, never pickled, offline from the cache."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer, SiglipModel

from normalign.embeddings.ranges import LocalFile
from normalign.embeddings.safetensors_header import StoredTensor, read_header
from normalign.settings import SourceSettings
from normalign.weights import fetch_language, fetch_vision
from normalign.weights.safetensors_file import copy_tensors

from .conftest import RANDOM_LANGUAGE, contents

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def folder_source(folder: Path) -> SourceSettings:
    return SourceSettings(f"folder:{folder}", None, None, {})


@pytest.fixture
def language(tmp_path: Path) -> Path:
    """A language model as a hub snapshot lays it out, in shards, beside files that must not be taken."""
    fetch_language(RANDOM_LANGUAGE, tmp_path / "made")
    folder = tmp_path / "snapshot"
    AutoModelForCausalLM.from_pretrained(tmp_path / "made").save_pretrained(folder, max_shard_size="50KB")
    AutoTokenizer.from_pretrained(tmp_path / "made").save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "modeling_x.py").write_text("raise SystemExit")
    (folder / "LICENSE.txt").write_text("terms")
    return folder


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with no network."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def put_in_cache(cache: Path, folder: Path, name: str) -> Path:
    """Lay ``folder`` out as the hub's cache does: blobs, snapshots of symbolic links, refs."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    snapshot.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for path in folder.iterdir():
        shutil.copyfile(path, repository / "blobs" / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"blob-{path.name}")
    return snapshot


def test_a_sharded_language_model_is_linked_unchanged_and_loads(language: Path, tmp_path: Path) -> None:
    told = fetch_language(folder_source(language), tmp_path / "out")
    taken = contents(tmp_path / "out")
    assert taken == {k: v for k, v in contents(language).items() if not k.endswith((".bin", ".py"))}
    shard = next(path for path in (tmp_path / "out").iterdir() if path.suffix == ".safetensors")
    assert shard.stat().st_ino == (language / shard.name).stat().st_ino
    assert told["source"] == "folder:snapshot"  # no path of this machine
    assert told["class"] == "LlamaForCausalLM"
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("made", "out"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_a_siglip_pairs_vision_tower_is_cut_out_and_computes_the_same(siglip_pair: Path, tmp_path: Path) -> None:
    told = fetch_vision(folder_source(siglip_pair), tmp_path / "out")
    tower = AutoModel.from_pretrained(tmp_path / "out").eval()
    whole = SiglipModel.from_pretrained(siglip_pair).eval()
    pixels = torch.rand(2, 3, 28, 28)
    with torch.no_grad():
        assert torch.equal(tower(pixels).last_hidden_state, whole.vision_model(pixels).last_hidden_state)
    assert told["class"] == type(tower).__name__ == "SiglipVisionModel"
    assert told["parameters"] == sum(parameter.numel() for parameter in whole.vision_model.parameters())
    assert AutoImageProcessor.from_pretrained(tmp_path / "out").size["height"] == 28
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "preprocessor_config.json"}


def test_a_tower_alone_is_linked_whole(siglip_pair: Path, tmp_path: Path) -> None:
    fetch_vision(folder_source(siglip_pair), tmp_path / "tower")
    fetch_vision(folder_source(tmp_path / "tower"), tmp_path / "again")
    assert contents(tmp_path / "tower") == contents(tmp_path / "again")


def test_a_cached_snapshot_is_used_offline(siglip_pair: Path, hub_cache: Path, tmp_path: Path) -> None:
    put_in_cache(hub_cache, siglip_pair, "owner/siglip")
    told = fetch_vision(SourceSettings("hub:owner/siglip", COMMIT, None, {}), tmp_path / "out")
    assert (told["source"], told["revision"]) == ("hub:owner/siglip", COMMIT)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    AutoModel.from_pretrained(tmp_path / "out")


def test_a_cached_language_snapshot_outlives_the_cache(language: Path, hub_cache: Path, tmp_path: Path) -> None:
    put_in_cache(hub_cache, language, "owner/llama")
    fetch_language(SourceSettings("hub:owner/llama", COMMIT, None, {}), tmp_path / "out")
    shutil.rmtree(hub_cache)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_an_incomplete_cached_snapshot_is_not_taken_for_whole(language: Path, hub_cache: Path, tmp_path: Path) -> None:
    snapshot = put_in_cache(hub_cache, language, "owner/llama")
    next(snapshot.glob("*.safetensors")).unlink()
    with pytest.raises(OSError, match=f"hub:owner/llama at {COMMIT}.*connect"):
        fetch_language(SourceSettings("hub:owner/llama", COMMIT, None, {}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_uncached_repository_without_network_says_what_to_do(hub_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"not in the cache.*cannot be reached; connect once"):
        fetch_language(SourceSettings("hub:owner/absent", COMMIT, None, {}), tmp_path / "out")


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:12]])
def test_a_hub_source_that_is_not_pinned_to_a_commit_is_refused(revision: str | None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a commit; pin all 40 digits"):
        fetch_language(SourceSettings("hub:owner/x", revision, None, {}), tmp_path / "out")


def test_pickled_weights_alone_are_refused(language: Path, tmp_path: Path) -> None:
    for path in [*language.glob("*.safetensors"), language / "model.safetensors.index.json"]:
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"only safetensors are read"):
        fetch_language(folder_source(language), tmp_path / "out")


def test_a_shard_outside_the_folder_is_refused(language: Path, tmp_path: Path) -> None:
    (language / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../../x.safetensors"}}))
    with pytest.raises(ValueError, match="not a plain file name"):
        fetch_language(folder_source(language), tmp_path / "out")


def test_a_model_type_that_needs_code_from_the_checkpoint_is_refused(language: Path, tmp_path: Path) -> None:
    config = json.loads((language / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "modeling_x.Config"}}
    (language / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"'strange' is unknown.*never run"):
        fetch_language(folder_source(language), tmp_path / "out")


@pytest.mark.parametrize(("field", "value"), [("num_hidden_layers", 3), ("intermediate_size", 48)])
def test_weights_that_do_not_fit_the_configuration_are_refused(
    language: Path, tmp_path: Path, field: str, value: int
) -> None:
    config = json.loads((language / "config.json").read_text())
    (language / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=r"(missing|mismatched) keys against its config.json, such as model"):
        fetch_language(folder_source(language), tmp_path / "out")


def test_copied_tensors_equal_the_sources_as_the_safetensors_library_reads_them(tmp_path: Path) -> None:
    state = {
        "half": torch.arange(5, dtype=torch.bfloat16),
        "wide": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "byte": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }
    save_file(state, tmp_path / "a.safetensors")
    copy_tensors(read_header(LocalFile(tmp_path / "a.safetensors")), tmp_path / "b.safetensors")
    copied = load_file(tmp_path / "b.safetensors")
    assert copied.keys() == state.keys()
    assert all(torch.equal(copied[name], state[name]) for name in state)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "a.safetensors")
    whole = (tmp_path / "a.safetensors").read_bytes()
    for size in (4, 20, len(whole) - 1):
        (tmp_path / "a.safetensors").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="fetch it again"):
            read_header(LocalFile(tmp_path / "a.safetensors"))
    short = StoredTensor(LocalFile(tmp_path / "a.safetensors"), "F32", (1000,), 0, 4000)
    with pytest.raises(ValueError, match="ended early"):
        copy_tensors({"a": short}, tmp_path / "b.safetensors")
