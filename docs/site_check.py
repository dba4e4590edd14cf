"""Check the built site: `python docs/site_check.py SITE`. Tests run the check, too.

Links must lead to existing pages and headings, images must exist and have alternative text, and
nothing may be loaded from the network, so that the site can be opened from disk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """The ids of a page, the resources it loads, the targets of its links, and its faults."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = {"", "top"}
        self.loads: list[str] = []
        self.links: list[str] = []
        self.faults: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record a start tag."""
        of = {name: value or "" for name, value in attrs}
        if "id" in of:
            if of["id"] in self.ids:
                self.faults.append(f"two elements have the id {of['id']}")
            self.ids.add(of["id"])
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        if tag == "img" and not of.get("alt"):
            self.faults.append(f"an image has no text: {of.get('src')}")
        if of.get("rel") not in ("next", "prev", "search", "index") and LOADING.get(tag) in of:
            self.loads.append(of[LOADING[tag]])


def check(site: Path) -> Iterator[str]:
    """Yield the faults of all pages, one per line."""
    pages = {file: Page(file.read_text("utf-8")) for file in sorted(site.resolve().rglob("*.html"))}
    if not pages:
        yield f"no page is in {site}: python -m sphinx -b html docs {site} makes them"
    for file, page in pages.items():
        yield from (f"{file.name}: {fault}" for fault in page.faults)
        for link in page.loads + page.links:
            to = urlsplit(link)
            if to.scheme or to.netloc:
                if link in page.loads and to.scheme != "data":
                    yield f"{file.name}: loads {link} from the network"
                continue
            target = (file.parent / unquote(to.path)).resolve() if to.path else file
            if not target.is_file():
                yield f"{file.name}: {link} is not there"
            elif target in pages and unquote(to.fragment) not in pages[target].ids:
                yield f"{file.name}: {link} leads to no heading"


def main() -> None:
    """Check the given site. Exit with 1 if a page has a fault."""
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/site_check.py SITE")
    faults = [*check(Path(sys.argv[1]))]
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
