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


@dataclass(frozen=True)
class Packed:
    """Rows of packed samples.

    ``node_BL`` numbers segments over the whole batch (padding is a segment of its own), ``ancestors`` says for each
    pair of segments whether the second is the first or above it. ``target_N`` and ``predictor_N`` are flat
    indices into B·L. ``order`` lists the samples as they lie, ``starts`` the flat index of each one's first token.
    """

    input_ids_BL: Tensor
    position_ids_BL: Tensor
    node_BL: Tensor
    ancestors: Tensor
    target_N: Tensor
    predictor_N: Tensor
    order: list[Encoded]
    starts: list[int]

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


def assign_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit-decreasing: indices of samples, row by row, no row above ``capacity`` tokens.

    Raises:
        ValueError: a sample is longer than ``capacity``.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[index] > capacity:
            raise ValueError(f"sample of {lengths[index]} tokens does not fit into rows of {capacity}")
        row = next((r for r, free in enumerate(room) if free >= lengths[index]), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def pack(samples: Sequence[Encoded], *, share_rows: bool, pad_id: int, capacity: int | None = None) -> Packed:
    """Lay samples out in rows.

    Args:
        share_rows: short samples fill up rows together; otherwise one sample a row.
        pad_id: token of the positions behind the last sample of a row.
        capacity: length of shared rows; the longest sample's by default.
    """
    if not samples:
        raise ValueError("nothing to pack")
    lengths = [len(sample.ids) for sample in samples]
    capacity = max(lengths) if capacity is None else max(capacity, max(lengths))
    rows = assign_rows(lengths, capacity) if share_rows else [[i] for i in range(len(samples))]
    length = max(sum(lengths[i] for i in row) for row in rows)
    input_ids = torch.full((len(rows), length), pad_id)
    positions = torch.zeros((len(rows), length), dtype=torch.long)
    node = torch.zeros((len(rows), length), dtype=torch.long)  # node 0 is padding
    parents: list[int] = [-1]
    targets: list[int] = []
    predictors: list[int] = []
    order: list[Encoded] = []
    starts: list[int] = []
    for row, members in enumerate(rows):
        column = 0
        for sample in (samples[i] for i in members):
            place = slice(column, column + len(sample.ids))
            start = row * length + column
            input_ids[row, place] = torch.tensor(sample.ids)
            positions[row, place] = torch.tensor(sample.positions)
            node[row, place] = torch.tensor(sample.segment) + len(parents)
            parents += [p if p < 0 else p + len(parents) for p in sample.parents]
            for index, (label, before) in enumerate(zip(sample.labels, sample.previous, strict=True)):
                if label != IGNORE and before >= 0:
                    targets.append(start + index)
                    predictors.append(start + before)
            order.append(sample)
            starts.append(start)
            column += len(sample.ids)
    return Packed(
        input_ids,
        positions,
        node,
        _ancestors(parents),
        torch.tensor(targets, dtype=torch.long),
        torch.tensor(predictors, dtype=torch.long),
        order,
        starts,
    )


def _ancestors(parents: Sequence[int]) -> Tensor:
    """Boolean (nodes, nodes): whether the second node is the first one or above it."""
    above = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):  # a parent's number is below its children's
        if parent >= 0:
            above[node] |= above[parent]
    return above
