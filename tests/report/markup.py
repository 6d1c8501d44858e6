"""What every page has to satisfy."""

import re
from html.parser import HTMLParser


class Tags(HTMLParser):
    """Collects tags and attributes; fails on a closing tag that does not match."""

    VOID = frozenset({"meta", "br", "img", "link", "hr"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_self_contained(page: str) -> None:
    """Well-formed, without scripts or anything to load from elsewhere, and below 5 MB."""
    tags = Tags(page).seen
    assert not {"script", "link", "iframe", "img"} & {tag for tag, _ in tags}
    for _, attributes in tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "src", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))
    assert "url(http" not in page and "@import" not in page
    assert len(page.encode()) < 5_000_000


def check_references(page: str) -> None:
    """Ids are unique and every reference to one resolves."""
    names = [attributes["id"] for _, attributes in Tags(page).seen if "id" in attributes]
    assert len(names) == len(set(names))
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page))
    assert {one or other for one, other in used} <= set(names)
