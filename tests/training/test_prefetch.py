"""Data made ready in a thread: the same items in the same order, one ahead and no more."""

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normalign.training.prefetch import prefetch


@given(items=st.lists(st.one_of(st.none(), st.integers()), max_size=20))
def test_items_and_their_order_are_those_of_the_plain_iterator(items: list[int | None]) -> None:
    assert list(prefetch(iter(items))) == items


def test_the_next_item_is_produced_while_the_present_one_is_in_use() -> None:
    begun = [threading.Event() for _ in range(4)]

    def items() -> Iterator[int]:
        for number, event in enumerate(begun):
            event.set()
            yield number

    for number in prefetch(items()):
        if number + 1 < len(begun):
            assert begun[number + 1].wait(timeout=30), "nobody produces the next one"


def test_no_more_than_one_is_held_ready_and_closing_leaves_no_thread() -> None:
    produced: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            produced.append(number)
            yield number

    before = threading.active_count()
    steps = prefetch(items())
    for expected in range(3):
        assert next(steps) == expected
    steps.close()
    assert len(produced) <= 4
    assert threading.active_count() == before


def test_what_producing_an_item_raises_is_raised_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("broken")

    seen: list[int] = []
    with pytest.raises(ValueError, match="broken"):
        for item in prefetch(items()):
            seen.append(item)
    assert seen == [0, 1, 2]
