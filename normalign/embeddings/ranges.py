"""Bytes by range, wherever they lie: what the readers of safetensors and GGUF stand on."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

BLOCK = 1 << 20


class Readable(Protocol):
    """An open file or an HTTP response."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill some of ``buffer``; how many bytes, 0 at the end."""


class ByteSource(Protocol):
    """A file of which any range can be read."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def size(self) -> int:
        """Its length in bytes."""

    def open(self, start: int, size: int) -> AbstractContextManager[Readable]:
        """A stream that begins at byte ``start``; at most ``size`` bytes are read from it."""


@dataclass(frozen=True)
class LocalFile:
    """A file on this machine."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @contextmanager
    def open(self, start: int, size: int) -> Iterator[Readable]:
        # Unbuffered: the blocks are large, and memory mapped instead would count as the process's own.
        with self.path.open("rb", buffering=0) as handle:
            handle.seek(start)
            yield handle


def read_blocks(source: ByteSource, start: int, size: int, block: int = BLOCK) -> Iterator[memoryview]:
    """``size`` bytes from ``start`` on, ``block`` at a time; each piece is overwritten by the next.

    Raises:
        ValueError: ``source`` ends before that.
    """
    buffer = memoryview(bytearray(min(block, size)))
    with source.open(start, size) as handle:
        while size:
            piece = buffer[: min(len(buffer), size)]
            filled = 0
            while filled < len(piece):
                count = handle.readinto(piece[filled:])
                if not count:
                    raise ValueError(f"{source.name} ended early; fetch it again")
                filled += count
            yield piece
            size -= len(piece)


def read_bytes(source: ByteSource, start: int, size: int) -> bytes:
    """``size`` bytes from ``start`` on.

    Raises:
        ValueError: ``source`` ends before that.
    """
    return b"".join(bytes(piece) for piece in read_blocks(source, start, size))
