"""Data of the next step made ready while a GPU computes the present one."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_END = object()


def prefetch(items: Iterator[T]) -> Generator[T, None, None]:
    """Yield ``items`` in order, each produced in a thread of its own while its predecessor is in use.

    One is held ready, never more. Decoders and tokenizers work outside the interpreter's lock, so that a GPU does not
    wait for them. What producing an item raises is raised in its place; closing waits for the item under way.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead = pool.submit(next, items, _END)
        while (item := ahead.result()) is not _END:
            ahead = pool.submit(next, items, _END)
            yield item  # type: ignore[misc]  # the end, the only other object there is, was looked for
    finally:
        pool.shutdown(cancel_futures=True)
