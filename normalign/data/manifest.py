"""What a data set holds after reading: counts, why records were dropped, a fingerprint of what was kept."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from normalign.data.llava import Record, Reject

MAX_EXAMPLES = 10


@dataclass
class Dropped:
    """How many records fell to one reason, with the ids of the first few."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


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


def collect(rows: Iterable[Record | Reject], image_root: Path) -> tuple[list[Record], Manifest]:
    """Split what a reader yields into the records to keep and the manifest that tells about all of it."""
    records: list[Record] = []
    dropped: dict[str, Dropped] = {}
    digest = hashlib.sha256()
    for row in rows:
        if isinstance(row, Reject):
            entry = dropped.setdefault(row.reason, Dropped())
            entry.count += 1
            if len(entry.examples) < MAX_EXAMPLES:
                entry.examples.append(row.id)
            continue
        records.append(row)
        digest.update(json.dumps(row.to_json(), sort_keys=True).encode() + b"\n")
        if row.image is not None:
            digest.update(hashlib.sha256((image_root / row.image).read_bytes()).digest())
    total = sum(entry.count for entry in dropped.values())
    manifest = Manifest(
        read=len(records) + total,
        kept=len(records),
        dropped=total,
        turns=sum(len(record.turns) for record in records),
        with_image=sum(record.image is not None for record in records),
        dropped_by_reason=dict(sorted(dropped.items())),
        fingerprint=digest.hexdigest(),
    )
    return records, manifest


def require_kept(manifest: Manifest, max_dropped_share: float, source: Path) -> None:
    """Refuse a data set of which nothing or too little is left.

    Raises:
        ValueError: names the source, the reasons with counts and example ids, and the bound.
    """
    if manifest.kept and manifest.dropped <= max_dropped_share * manifest.read:
        return
    examples = "; ".join(
        f"{entry.count} {reason} (e.g. {', '.join(entry.examples[:3])})"
        for reason, entry in manifest.dropped_by_reason.items()
    )
    raise ValueError(
        f"{source}: {manifest.dropped} of {manifest.read} records dropped, {manifest.kept} kept; "
        f"dataset.max_dropped_share allows {max_dropped_share:.1%}. "
        f"Reasons: {examples or 'no record at all'}. Mend the data or raise the bound"
    )
