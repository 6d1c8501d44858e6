"""Packing samples into rows, and the mask that keeps packed samples and their segments apart.

Shape suffixes: B rows, L row length, N targets.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normalign.vlm.chat import IGNORE, Encoded

MAX_PADDING = 0.02  # share of a packed batch's tokens


@dataclass(frozen=True)
class Packed:
    """Rows of packed samples.

    ``node_BL`` numbers segments over the whole batch (padding is a segment of its own), ``ancestors`` says for each
    pair of segments whether the second is the first or above it. ``label_N`` are the targets,
    ``predictor_N`` the flat indices into B·L of the positions that predict them. ``order`` lists the samples.
    """

    input_ids_BL: Tensor
    position_ids_BL: Tensor
    node_BL: Tensor
    ancestors: Tensor
    label_N: Tensor
    predictor_N: Tensor
    order: list[Encoded]

    @property
    def plain(self) -> bool:
        """Every row is one undivided sample: causal attention alone is right, since padding lies behind."""
        return len(self.order) == len(self.input_ids_BL) and all(len(s.parents) == 1 for s in self.order)

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Additive attention mask (B, 1, L, L), or None where plain causal attention is right.

        0 where a query may look (causally, within its own segment and those above it), the dtype's minimum elsewhere.
        """
        if self.plain:
            return None
        length = self.node_BL.shape[1]
        allowed = self.ancestors[self.node_BL[:, :, None], self.node_BL[:, None, :]]
        allowed = allowed & torch.ones(length, length, dtype=torch.bool, device=allowed.device).tril()
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]

    def to(self, device: torch.device) -> "Packed":
        """The same rows with their tensors on ``device``."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **moved)


def assign_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of samples, row by row: as many rows as keep padding within MAX_PADDING of all tokens, one at the least.

    Attention costs the square of a row's length, so rows should be many; one row never needs padding. Longest first,
    each sample goes to the shortest row.
    """
    total = sum(lengths)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for count in range(min(len(lengths), int(total / (1 - MAX_PADDING) / max(lengths))), 1, -1):
        rows: list[list[int]] = [[] for _ in range(count)]
        sums = [0] * count
        for index in order:
            shortest = sums.index(min(sums))
            rows[shortest].append(index)
            sums[shortest] += lengths[index]
        if count * max(sums) * (1 - MAX_PADDING) <= total:
            return rows
    return [order]


def fed_tokens(sample: Encoded) -> list[int]:
    """Indices of the tokens that the model has to see: all but targets that end a leaf, which nothing looks at.

    A turn's end and an answer option of one token cost nothing that way.
    """
    followed = set(sample.previous)
    return [i for i, label in enumerate(sample.labels) if label == IGNORE or i in followed or sample.previous[i] < 0]


def pack(samples: Sequence[Encoded], *, share_rows: bool, pad_id: int) -> Packed:
    """Lay samples out in rows.

    Args:
        share_rows: samples share rows of about equal length; otherwise one sample a row, padded to the longest.
        pad_id: token of the positions behind the last sample of a row.
    """
    if not samples:
        raise ValueError("nothing to pack")
    kept = [fed_tokens(sample) for sample in samples]
    lengths = [len(indices) for indices in kept]
    rows = assign_rows(lengths) if share_rows else [[i] for i in range(len(samples))]
    length = max(sum(lengths[i] for i in row) for row in rows)
    input_ids = torch.full((len(rows), length), pad_id)
    positions = torch.zeros((len(rows), length), dtype=torch.long)
    node = torch.zeros((len(rows), length), dtype=torch.long)  # node 0 is padding
    parents: list[int] = [-1]
    labels: list[int] = []
    predictors: list[int] = []
    order: list[Encoded] = []
    for row, members in enumerate(rows):
        column = 0
        for sample, fed in ((samples[i], kept[i]) for i in members):
            place = slice(column, column + len(fed))
            input_ids[row, place] = torch.tensor([sample.ids[i] for i in fed])
            positions[row, place] = torch.tensor([sample.positions[i] for i in fed])
            node[row, place] = torch.tensor([sample.segment[i] for i in fed]) + len(parents)
            parents += [p if p < 0 else p + len(parents) for p in sample.parents]
            where = {index: row * length + column + place for place, index in enumerate(fed)}
            for label, before in zip(sample.labels, sample.previous, strict=True):
                if label != IGNORE and before >= 0:
                    labels.append(label)
                    predictors.append(where[before])
            order.append(sample)
            column += len(fed)
    return Packed(
        input_ids,
        positions,
        node,
        _ancestors(parents),
        torch.tensor(labels, dtype=torch.long),
        torch.tensor(predictors, dtype=torch.long),
        order,
    )


def _ancestors(parents: Sequence[int]) -> Tensor:
    """Boolean (nodes, nodes): whether the second node is the first one or above it."""
    above = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):  # a parent's number is below its children's
        if parent >= 0:
            above[node] |= above[parent]
    return above
