"""A hub repository is read by ranges: its documents, one header, one tensor; and the token goes to the hub alone."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from normalign.embeddings.hub import HubError
from normalign.embeddings.source import find_embedding

from .helpers import NAME, checkpoint, sharded
from .hub_server import TOKEN, LocalHub, local_hub

ROWS = torch.randn(5000, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)  # 640 kB
OTHER = torch.ones(40_000, 32)  # 5 MB
EXPECTED = ROWS.double().norm(dim=-1).numpy()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """The hub, with a model in one file, ``org/model``, and one in two, ``org/shards``."""
    checkpoint(tmp_path / "org" / "model", {NAME: ROWS, "lm_head.weight": OTHER}, {"model_type": "gemma"})
    sharded(tmp_path / "org" / "shards", [{"a.weight": OTHER}, {NAME: ROWS, "lm_head.weight": OTHER}])
    monkeypatch.chdir(tmp_path / "org")  # where no path is like a model's name
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    with local_hub(tmp_path) as local:
        monkeypatch.setenv("HF_ENDPOINT", local.endpoint + "/")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield local


def header_bytes(file: Path) -> int:
    return 8 + int(struct.unpack("<Q", file.read_bytes()[:8])[0])


@pytest.mark.parametrize(
    ("name", "file"), [("org/model", "model.safetensors"), ("org/shards@refs/pr/1", "model-1.safetensors")]
)
def test_one_header_and_one_tensor_are_served_and_no_byte_more(hub: LocalHub, name: str, file: str) -> None:
    embedding = find_embedding(name)
    np.testing.assert_allclose(embedding.row_norms(), EXPECTED, rtol=1e-13)
    folder = hub.root / name.partition("@")[0]
    assert hub.storage.bytes == header_bytes(folder / file) + embedding.size
    assert {path.partition("?")[0] for path in hub.storage.paths} == {f"/{name.partition('@')[0]}/{file}"}
    documents = sum(path.stat().st_size for path in folder.glob("*.json"))
    assert hub.hub.bytes == documents
    assert embedding.scale == (8.0 if name == "org/model" else 1.0)
    assert not embedding.is_local


def test_the_token_reaches_the_hub_and_never_the_storage(hub: LocalHub) -> None:
    hub.needs_token = True
    find_embedding("org/model").row_norms()
    assert set(hub.hub.tokens) == {f"Bearer {TOKEN}"}
    assert set(hub.storage.tokens) == {None}
    assert None not in hub.storage.ranges


def test_a_renamed_repository_is_followed_with_the_token(hub: LocalHub) -> None:
    hub.needs_token = True
    np.testing.assert_allclose(find_embedding("old/name").row_norms(), EXPECTED, rtol=1e-13)


@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_gated_repository_says_that_a_token_is_needed(
    hub: LocalHub, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.needs_token = True
    monkeypatch.delenv("HF_TOKEN") if token is None else monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match=r"org/model@main.*refuses access \(401\).*set HF_TOKEN") as caught:
        find_embedding("org/model")
    assert "wrong" not in str(caught.value)


def test_a_server_without_ranges_is_refused_before_the_file_is_fetched(hub: LocalHub) -> None:
    hub.ranges = False
    with pytest.raises(HubError, match="ignores Range") as caught:
        find_embedding("org/model")
    assert "model.safetensors" in str(caught.value)
    assert len(hub.storage.paths) == 1


@pytest.mark.parametrize("name", ["org/none", "org/model@v2"])
def test_a_repository_or_revision_that_does_not_exist_is_named(hub: LocalHub, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{name}.* is no path here, and {hub.endpoint} has no model"):
        find_embedding(name)


def test_pickled_weights_alone_are_not_fetched(hub: LocalHub) -> None:
    (hub.root / "org" / "model" / "model.safetensors").rename(hub.root / "org" / "model" / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pickled files are never read"):
        find_embedding("org/model")


def test_a_file_cut_short_on_the_server_is_refused(hub: LocalHub) -> None:
    file = hub.root / "org" / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut short"):
        find_embedding("org/model")


def test_a_connection_that_breaks_off_is_told(hub: LocalHub) -> None:
    embedding = find_embedding("org/model")
    hub.cut = 1000
    with pytest.raises((HubError, ValueError), match=r"org/model@main.*(ended early|failed)"):
        embedding.row_norms()


def test_a_hub_that_cannot_be_reached_is_told(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"org/model@main is no path here.*127\.0\.0\.1:9 failed.*connect and run again"):
        find_embedding("org/model")


def test_a_broken_token_is_refused_without_being_printed(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_se\ncret")
    with pytest.raises(ValueError, match="HF_TOKEN holds a space") as caught:
        find_embedding("org/model")
    assert "cret" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\n")
    hub.needs_token = True
    assert find_embedding("org/model").width == 64


@pytest.mark.parametrize("endpoint", ["file:///etc", "huggingface.co"])
def test_only_web_addresses_are_endpoints(hub: LocalHub, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(ValueError, match="HF_ENDPOINT"):
        find_embedding("org/model")
