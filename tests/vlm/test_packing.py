"""Packing: every sample once, no row too long, and who may look at whom, against a brute-force check."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normalign.vlm.chat import IGNORE, Encoded
from normalign.vlm.packing import Packed, assign_rows, fed_tokens, pack


@st.composite
def trees(draw: st.DrawFn) -> Encoded:
    """A sample of 1 to 5 segments hung up anyhow, with some labels."""
    sample = Encoded(f"s{draw(st.integers(0, 99))}")
    for number in range(draw(st.integers(1, 5))):
        ids = draw(st.lists(st.integers(1, 50), min_size=1, max_size=4))
        labels = [token if draw(st.booleans()) else IGNORE for token in ids]
        sample.add(ids, labels, parent=draw(st.integers(-1, number - 1)))
    return sample


@given(st.lists(st.integers(1, 900), min_size=1, max_size=40))
def test_shared_rows_hold_every_sample_once_with_at_most_two_percent_padding(lengths: list[int]) -> None:
    rows = assign_rows(lengths)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    longest = max(sum(lengths[i] for i in row) for row in rows)
    assert all(rows) and sum(lengths) >= 0.98 * len(rows) * longest


def test_rows_are_as_many_as_that_allows() -> None:
    assert len(assign_rows([100] * 8)) == 8
    assert sorted(map(sorted, assign_rows([60, 100, 40]))) == [[0, 2], [1]]
    assert assign_rows([60, 100]) == [[1, 0]]


def above(sample: Encoded, segment: int) -> list[int]:
    """The segment and those above it, by following parents."""
    chain = [segment]
    while sample.parents[chain[-1]] >= 0:
        chain.append(sample.parents[chain[-1]])
    return chain


def places(packed: Packed) -> list[dict[int, int]]:
    """For each sample in ``order``, where its tokens lie: index in the sample to flat index into B·L.

    Segments are numbered over the batch in the order of the samples, 0 being padding.
    """
    nodes = packed.node_BL.flatten().tolist()
    first, found = 1, []
    for sample in packed.order:
        flat = [i for i, node in enumerate(nodes) if first <= node < first + len(sample.parents)]
        assert flat == list(range(flat[0], flat[0] + len(flat))), "a sample lies in one piece"
        found.append(dict(zip(fed_tokens(sample), flat, strict=True)))
        first += len(sample.parents)
    return found


@given(trees())
def test_only_targets_that_nothing_follows_are_not_fed(sample: Encoded) -> None:
    fed = set(fed_tokens(sample))
    for index, label in enumerate(sample.labels):
        predicts = index in sample.previous
        assert (index in fed) == (predicts or label == IGNORE or sample.previous[index] < 0)


@given(st.lists(trees(), min_size=1, max_size=5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_mask_lets_a_token_see_exactly_its_own_past_in_its_segment_and_those_above(
    samples: list[Encoded], share_rows: bool
) -> None:
    packed = pack(samples, share_rows=share_rows, pad_id=0)
    rows, length = packed.input_ids_BL.shape
    expected = torch.zeros(rows, length, length, dtype=torch.bool)
    covered = torch.zeros(rows, length, dtype=torch.bool)
    for sample, where in zip(packed.order, places(packed), strict=True):
        for query, flat in where.items():
            row, column = divmod(flat, length)
            covered[row, column] = True
            for key in (k for k in where if k <= query):
                if sample.segment[key] in above(sample, sample.segment[query]):
                    expected[row, column, where[key] % length] = True
    mask = packed.mask(torch.float32)
    if mask is None:  # plain rows: causal attention, and padding lies behind everything
        assert all(len(set(sample.segment)) == 1 for sample in samples)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        assert torch.equal((causal & covered[:, :, None])[covered], expected[covered])
    else:
        assert torch.equal((mask[:, 0] == 0)[covered], expected[covered])
        assert mask[:, 0].eq(0).any(-1).all(), "a query that sees nothing gives NaN"


@given(st.lists(trees(), min_size=1, max_size=5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_ids_positions_and_targets_lie_where_the_order_says(samples: list[Encoded], share_rows: bool) -> None:
    packed = pack(samples, share_rows=share_rows, pad_id=0)
    assert sorted(map(id, packed.order)) == sorted(map(id, samples))
    ids, positions = packed.input_ids_BL.flatten(), packed.position_ids_BL.flatten()
    pairs = []
    for sample, where in zip(packed.order, places(packed), strict=True):
        for index, flat in where.items():
            assert ids[flat] == sample.ids[index] and positions[flat] == sample.positions[index]
        for index, label in enumerate(sample.labels):
            above_it = [i for i in range(index) if sample.segment[i] in above(sample, sample.segment[index])]
            assert sample.positions[index] == len(above_it)
            assert sample.previous[index] == (above_it[-1] if above_it else -1)
            if label != IGNORE and above_it:
                pairs.append((label, where[above_it[-1]]))
    assert list(zip(packed.label_N.tolist(), packed.predictor_N.tolist(), strict=True)) == pairs
    assert len(pairs) == sum(sample.supervised for sample in samples)


def test_nothing_to_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to pack"):
        pack([], share_rows=True, pad_id=0)
