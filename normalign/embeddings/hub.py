"""Files of a hub repository by HTTP range requests: of terabytes, the few bytes that are asked for."""

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from normalign.embeddings.ranges import Readable

ENDPOINT = "https://huggingface.co"
TIMEOUT = 30.0  # seconds without a byte
MAX_DOCUMENT = 64 << 20  # bytes; the index of a thousand shards has about ten million
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class HubError(OSError):
    """The hub does not give what was asked for; the message says why and what to do."""


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


class _SameOriginToken(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token goes on only within the origin it was meant for, never to a storage host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.get_header("Authorization")
        if new is not None and token and _origin(newurl) == _origin(req.full_url):
            new.add_unredirected_header("Authorization", token)
        return new


@dataclass
class Hub:
    """A repository ``org/name`` at a revision, on the server and with the token of the environment."""

    repository: str
    revision: str
    endpoint: str
    token: str | None = field(repr=False)

    @classmethod
    def of_environment(cls, repository: str, revision: str, environment: Mapping[str, str]) -> "Hub":
        """The repository on ``HF_ENDPOINT``, read with ``HF_TOKEN``.

        Raises:
            ValueError: the endpoint is not an address of http or https, or the token is none.
        """
        endpoint = (environment.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
        if urlsplit(endpoint).scheme not in ("http", "https"):
            raise ValueError(f"HF_ENDPOINT is {endpoint!r}, not an address that begins with https:// or http://")
        token = environment.get("HF_TOKEN", "").strip()
        if not re.fullmatch(r"[!-~]*", token):  # http.client would print it in its own error
            raise ValueError("HF_TOKEN holds a space, a line break or a letter that no token has; set it again")
        return cls(repository, revision, endpoint, token or None)

    @property
    def name(self) -> str:
        return f"{self.repository}@{self.revision}"

    def document(self, file: str) -> bytes | None:
        """All of a small file; None where the repository has none of this name."""
        try:
            with self.request(file) as response:
                content = response.read(MAX_DOCUMENT + 1)
        except FileNotFoundError:
            return None
        if len(content) > MAX_DOCUMENT:
            raise HubError(f"{self.name}: {file} is larger than {MAX_DOCUMENT} bytes; refused")
        return content

    def file(self, file: str) -> "HubFile":
        """A large file, of which ranges are read."""
        return HubFile(self, file)

    @contextmanager
    def request(self, file: str, headers: Mapping[str, str] | None = None) -> Iterator[http.client.HTTPResponse]:
        """The response to a request for ``file``; failures, also while it is read, as errors that say what to do.

        Raises:
            FileNotFoundError: the server knows no such file (or no such repository).
            HubError: anything else went wrong.
        """
        url = f"{self.endpoint}/{self.repository}/resolve/{quote(self.revision, safe='')}/{quote(file)}"
        request = urllib.request.Request(url, headers=dict(headers or {}))
        if self.token:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.build_opener(_SameOriginToken).open(request, timeout=TIMEOUT) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise self._refusal(file, error) from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, HubError):
                raise
            reason = getattr(error, "reason", None) or error
            raise HubError(
                f"{self.name} is no path here, and reading {file} from {self.endpoint} failed ({reason}); check the "
                "name, or connect and run again"
            ) from error

    def _refusal(self, file: str, error: urllib.error.HTTPError) -> OSError:
        error.close()
        if error.code in (401, 403):
            return HubError(
                f"{self.name} is no path here, and {self.endpoint} refuses access ({error.code}): check the name; if "
                f"it is gated or private, accept its terms at {self.endpoint}/{self.repository} and set HF_TOKEN"
            )
        if error.code == 404:
            return FileNotFoundError(
                f"{self.name} is no path here, and {self.endpoint} has no {file} of it; check name and revision (a "
                "model must be stored as safetensors: pickled files are never read)"
            )
        return HubError(
            f"{self.name}: {self.endpoint} answers {error.code} ({error.reason}) for {file}; run again later"
        )


@dataclass
class HubFile:
    """A file of a repository, of which any range can be read."""

    hub: Hub
    file: str
    _size: int | None = None

    @property
    def name(self) -> str:
        return f"{self.hub.name}: {self.file}"

    @property
    def size(self) -> int:
        """Its length in bytes, as the server gave it with the last range."""
        if self._size is None:
            with self.open(0, 1):
                pass
        assert self._size is not None
        return self._size

    @contextmanager
    def open(self, start: int, size: int) -> Iterator[Readable]:
        """The bytes from ``start`` on as a stream.

        Raises:
            FileNotFoundError, HubError: as of :meth:`Hub.request`; also of a server that does not serve ranges.
        """
        with self.hub.request(self.file, {"Range": f"bytes={start}-{start + size - 1}"}) as response:
            if response.status != 206:
                raise HubError(
                    f"{self.name}: the server sends whole files only (it ignores Range), and the whole is not "
                    "downloaded for one tensor; set HF_ENDPOINT to a server with ranges, or give a local folder"
                )
            given = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if given is None or int(given[1]) != start:
                raise HubError(
                    f"{self.name}: asked for bytes from {start} on, the server sends "
                    f"{response.headers.get('Content-Range')!r}; run again"
                )
            self._size = int(given[3])
            yield response
