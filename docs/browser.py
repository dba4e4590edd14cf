"""Check each page of the built site with Debian's chromium: `./check.sh --browser`.

Also checks the report page that `report_page.py` makes. At the widths of a phone and of a desktop,
in light and dark mode, it looks for errors, for resources that are missing or come from the
network, for content that is cut off, too small to read or not drawn, and for a search without
results. Needs playwright.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WIDTHS = {"phone": 390, "desk": 1280}
SCHEMES = ("light", "dark")
SMALLEST = 0.7
"""Minimum scale of a drawing, at which its small letters of 12 px have 8 px."""

FAULTS = """([desk, smallest]) => {
    const found = [], edge = document.documentElement.clientWidth
    const say = (words, element) => {
        const text = element.alt || element.innerText || element.outerHTML
        found.push(`${words}: ${element.tagName} ${text.replace(/\\s+/g, " ").slice(0, 60)}`)
    }
    const scrolls = (element) => element && (
        ["auto", "scroll"].includes(getComputedStyle(element).overflowX)
        || scrolls(element.parentElement))
    const past = (element) => {
        const box = element.getBoundingClientRect()
        return box.width > 0 && box.right > edge + 1
    }
    if (document.documentElement.scrollWidth > edge) found.push("the page is wider than the screen")
    for (const each of document.querySelectorAll("article *"))
        if (past(each) && !scrolls(each.parentElement)) say("it is cut off at the right", each)
    for (const image of document.images) {
        if (!image.naturalWidth) say("the image does not load", image)
        else if (image.width < smallest * image.naturalWidth) say("it is shown too small", image)
    }
    const drawn = (canvas) => {
        const of = [0, 0, canvas.width, canvas.height]
        return canvas.width && canvas.getContext("2d").getImageData(...of).data.some(Boolean)
    }
    for (const chart of document.querySelectorAll(".chart"))
        if (![...chart.querySelectorAll("canvas")].some(drawn)) say("nothing is drawn in it", chart)
    for (const code of desk ? document.querySelectorAll("article pre") : [])
        if (code.scrollWidth > code.clientWidth + 1) say("code is wider than its box", code)
    return found
}"""

BROKEN = """<!doctype html><body><article><p style="width: 2000px">wide</p><img src="none.svg">
<img width="90" src="wide.svg"><pre style="width: 9em">a line of code that is too long for it</pre>
<div class="chart"></div></article><script>
console.error("said"); fetch("https://example.invalid"); undefined.name</script>"""
WIDE = '<svg xmlns="http://www.w3.org/2000/svg" width="600" height="9"/>'
OF_BROKEN = (
    "console: said",
    "from the network: https://example.invalid",
    "error: ",
    "the page is wider",
    "it is cut off",
    "the image does not load",
    "it is shown too small",
    "nothing is drawn in it",
    "code is wider",
)


def chromium() -> str:
    """Return the path of the browser, or exit if there is none."""
    wanted = os.environ.get("CHROMIUM") or "chromium"
    found = shutil.which(wanted)
    if found is None:
        sys.exit(f"no {wanted} is installed: apt-get install chromium, or CHROMIUM=/path/to/it")
    return found


class Looker:
    """A page of the browser, and the errors that it reported."""

    def __init__(self, browser: Any, scheme: str, device: str) -> None:
        self.desk = device == "desk"
        size = {"width": WIDTHS[device], "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.said.append(f"console: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.said.append(f"from the network: {request.url}")

    def look(self, file: Path) -> list[str]:
        """Open a file, and return its faults."""
        self.said.clear()
        self.page.goto(file.as_uri())
        return [*self.page.evaluate(FAULTS, [self.desk, SMALLEST]), *self.said]

    def search(self, site: Path, word: str) -> list[str]:
        """Search for a word of the pages. Return a fault if it is not found."""
        self.page.goto(f"{(site / 'search.html').as_uri()}?q={word}")
        try:
            self.page.wait_for_selector("#search-results li a", timeout=10_000)
        except Exception as error:  # noqa: BLE001  reported as a fault
            return [f"no result for {word}: {str(error).splitlines()[0]}"]
        return []


def check_itself(looker: Looker) -> Iterator[str]:
    """Yield the faults that the checks miss on a page that has them all."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "broken.html"
        file.write_text(BROKEN, encoding="utf-8")
        file.with_name("wide.svg").write_text(WIDE, encoding="utf-8")
        found = looker.look(file)
    for fault in OF_BROKEN:
        if not any(each.startswith(fault) for each in found):
            yield f"a page with this fault passes: {fault}"


def look_at(
    browser: Any, site: Path, shots: Path | None, more: Sequence[Path] = ()
) -> Iterator[str]:
    """Yield the faults of all pages of the site and of the additional pages, one per line."""
    pages = [*sorted(site.glob("*.html")), *more]
    for device in WIDTHS:
        for scheme in SCHEMES:
            looker = Looker(browser, scheme, device)
            if device == "desk":
                yield from check_itself(looker)
            for file in pages:
                for fault in looker.look(file):
                    yield f"{file.name}, {device}, {scheme}: {fault}"
                if shots is not None:
                    shot = shots / f"{file.stem}-{device}-{scheme}.png"
                    looker.page.screenshot(path=shot, full_page=True)
            for fault in looker.search(site, "ledger"):
                yield f"search.html, {device}, {scheme}: {fault}"
            looker.context.close()


def main() -> None:
    """Check the site. Exit with 1 if a page has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, nargs="?", help="the folder of the built site")
    parser.add_argument(
        "--page", type=Path, action="append", default=[], help="a page to look at beside the site"
    )
    parser.add_argument("--shots", type=Path, help="a folder for pictures of all pages")
    args = parser.parse_args()
    browser_path = chromium()
    if args.site is None:
        return  # only checks that there is a browser
    if not (args.site / "index.html").is_file():
        sys.exit(f"no site is in {args.site}: python -m sphinx -b html docs {args.site} makes it")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("playwright is not installed: pip install -c constraints.txt playwright")
    if args.shots is not None:
        args.shots.mkdir(parents=True, exist_ok=True)
    faults = 0
    with sync_playwright() as driver:
        # Chromium refuses to start its sandbox as root, and the pages are ours.
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for fault in look_at(
            browser, args.site.resolve(), args.shots, [each.resolve() for each in args.page]
        ):
            faults += 1
            sys.stdout.write(f"{fault}\n")
        browser.close()
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
