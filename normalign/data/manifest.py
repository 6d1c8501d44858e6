"""What a data set holds after reading: counts, why records were dropped, a fingerprint of what was kept."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from normalign.data.llava import REMEMBERED, Record, Reject

MAX_EXAMPLES = 10
MESSAGE_CHARACTERS = 200


@dataclass
class Dropped:
    """How many records fell to one reason, with the ids of the first few and what was wrong with the first."""

    count: int = 0
    examples: list[str] = field(default_factory=list)
    message: str = ""


@dataclass
class Manifest:
    """Counts of one stage's data. ``fingerprint``: SHA-256 over the kept records and their images' bytes."""

    read: int
    kept: int
    dropped: int
    turns: int
    with_image: int
    dropped_by_reason: dict[str, Dropped]
    fingerprint: str

    def summary(self) -> str:
        """For example ``98 of 100 records kept, dropped: 2 blank_answer``."""
        reasons = ", ".join(f"{d.count} {reason}" for reason, d in self.dropped_by_reason.items())
        return f"{self.kept} of {self.read} records kept, dropped: {reasons or 'none'}"


class Tally:
    """Counts what a reader yields while it passes by; nothing of it is held."""

    def __init__(self, image_root: Path) -> None:
        self._root = image_root
        self._kept = self._turns = self._with_image = 0
        self._dropped: dict[str, Dropped] = {}
        self._digest = hashlib.sha256()
        self._image_digest = lru_cache(REMEMBERED)(self._hash_image)

    def lines(self, rows: Iterable[Record | Reject]) -> Iterator[bytes]:
        """The records among ``rows`` as lines of a prepared data set; the rest is counted by reason."""
        for row in rows:
            if isinstance(row, Reject):
                count_dropped(self._dropped, row.reason, row.id, row.message)
                continue
            self._kept += 1
            self._turns += len(row.turns)
            line = row.to_line()
            self._digest.update(line)
            if row.image is not None:
                self._with_image += 1
                self._digest.update(self._image_digest(row.image))
            yield line

    def _hash_image(self, path: str) -> bytes:
        with (self._root / path).open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").digest()

    def manifest(self) -> Manifest:
        """What has passed so far."""
        total = sum(entry.count for entry in self._dropped.values())
        return Manifest(
            read=self._kept + total,
            kept=self._kept,
            dropped=total,
            turns=self._turns,
            with_image=self._with_image,
            dropped_by_reason=dict(sorted(self._dropped.items())),
            fingerprint=self._digest.hexdigest(),
        )


def count_dropped(dropped: dict[str, Dropped], reason: str, record_id: str, message: str) -> None:
    """Add one record to what ``dropped`` holds under ``reason``."""
    entry = dropped.setdefault(reason, Dropped(message=message[:MESSAGE_CHARACTERS]))
    entry.count += 1
    if len(entry.examples) < MAX_EXAMPLES:
        entry.examples.append(record_id)


def explain_dropped(dropped: dict[str, Dropped]) -> str:
    """For example ``2 blank_answer (17, 230; answer 0 is blank), 1 image_empty (5; 'a.png' has no content)``."""
    return ", ".join(
        f"{entry.count} {reason} ({', '.join(entry.examples[:3])}{', ...' * (entry.count > 3)}; {entry.message})"
        for reason, entry in dropped.items()
    )


def require_kept(manifest: Manifest, max_dropped_share: float, source: str, remedy: str) -> None:
    """Refuse a data set of which nothing or too little is left, or in which no record has an image.

    Args:
        source: what the user knows the data by.
        remedy: what to do about them.

    Raises:
        ValueError: names the source, the reasons with counts and example ids, the bound and the remedy.
    """
    if manifest.kept and manifest.dropped <= max_dropped_share * manifest.read:
        if not manifest.with_image:
            raise ValueError(
                f"{source}: none of the {manifest.kept} records kept has an image, and visual tokens are what is "
                f"trained; {remedy}"
            )
        return
    reasons = explain_dropped(manifest.dropped_by_reason) or "no record at all"
    raise ValueError(
        f"{source}: {manifest.dropped} of {manifest.read} records dropped, {manifest.kept} kept; "
        f"dataset.max_dropped_share allows {max_dropped_share:.1%}. "
        f"Reasons: {reasons}; {remedy}{', or raise the bound' if manifest.kept else ''}"
    )
