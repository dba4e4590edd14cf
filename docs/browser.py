"""Check each page of the built site with Debian's chromium: `./check.sh --browser`.

Also checks the report page that `report_page.py` makes, and the pages of `tallyroll view` for the
storages of `viewed.py`. At the widths of a phone and of a desktop, in light and dark mode, it looks
for errors, for resources that are missing or come from the network, for content that is cut off,
too small to read or not drawn, and for a search without results. With `--axe` it also reports what
axe-core finds serious or critical on our own pages; the site has those of its theme. Needs
playwright.
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

READ = """() => ![...document.querySelectorAll("[role=status]")]
    .some((each) => each.textContent === "Reading …")"""

AXE = """async () => {
    const rules = {region: {enabled: false}}  // parts of a page outside of landmarks: not serious
    const {violations} = await axe.run(document, {rules, preload: false})
    return violations
        .filter((each) => ["critical", "serious"].includes(each.impact))
        .map((each) => `${each.impact}: ${each.help}: ${each.nodes.length} times, such as `
            + each.nodes[0].html.replace(/\\s+/g, " ").slice(0, 120))
}"""

BROKEN = """<!doctype html><body><article><p style="width: 2000px">wide</p><img src="none.svg">
<img width="90" src="wide.svg"><pre style="width: 9em">a line of code that is too long for it</pre>
<div class="chart"></div><p style="color: #ddd; background: #fff">pale</p></article><script>
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
OF_AXE = ("serious: Elements must meet minimum color contrast", "critical: Images must have")


def chromium() -> str:
    """Return the path of the browser, or exit if there is none."""
    wanted = os.environ.get("CHROMIUM") or "chromium"
    found = shutil.which(wanted)
    if found is None:
        sys.exit(f"no {wanted} is installed: apt-get install chromium, or CHROMIUM=/path/to/it")
    return found


class Looker:
    """A page of the browser, and the errors that it reported."""

    def __init__(
        self, browser: Any, scheme: str, device: str, axe: str | None, server: str = "file:"
    ) -> None:
        self.desk, self._axe, self._server = device == "desk", axe, server
        size = {"width": WIDTHS[device], "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", self._request)
        self.page.on("dialog", self._dialog)

    @property
    def has_axe(self) -> bool:
        """True if axe-core checks the pages too."""
        return self._axe is not None

    def _console(self, message: Any) -> None:
        refused = "Failed to load resource: the server responded with a status of 4"
        if message.type in ("error", "warning") and not message.text.startswith(refused):
            self.said.append(f"console: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", self._server)):
            self.said.append(f"from the network: {request.url}")

    def _dialog(self, dialog: Any) -> None:
        self.said.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def look(self, file: Path, *, ours: bool = True) -> list[str]:
        """Open a file, and return its faults, those of axe-core only if the page is ``ours``."""
        self.said.clear()
        self.page.goto(file.as_uri())
        return self.faults(ours=ours)

    def faults(self, *, ours: bool = True) -> list[str]:
        """Return the faults of the open page, and the errors that it reported."""
        found = [*self.page.evaluate(FAULTS, [self.desk, SMALLEST]), *self.said]
        if ours and self._axe is not None:
            self.page.evaluate(self._axe)
            found += self.page.evaluate(AXE)
        return found

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
    for fault in (*OF_BROKEN, *(OF_AXE if looker.has_axe else ())):
        if not any(each.startswith(fault) for each in found):
            yield f"a page with this fault passes: {fault}"


def look_at(
    browser: Any, site: Path, axe: str | None, shots: Path | None, more: Sequence[Path] = ()
) -> Iterator[str]:
    """Yield the faults of all pages of the site and of the additional pages, one per line."""
    pages = [*sorted(site.glob("*.html")), *more]
    for device in WIDTHS:
        for scheme in SCHEMES:
            looker = Looker(browser, scheme, device, axe)
            if device == "desk":
                yield from check_itself(looker)
            for file in pages:
                for fault in looker.look(file, ours=file in more):
                    yield f"{file.name}, {device}, {scheme}: {fault}"
                if shots is not None:
                    shot = shots / f"{file.stem}-{device}-{scheme}.png"
                    looker.page.screenshot(path=shot, full_page=True)
            for fault in looker.search(site, "ledger"):
                yield f"search.html, {device}, {scheme}: {fault}"
            looker.context.close()


VIEWED = ("", "#/0", "#/0/episode/first", "#/1", "#/1/episode/first", "#/2", "#/2/episode/0", "#/9")
"""The pages of the viewer for the storages of `viewed.py`."""


def look_at_viewer(
    browser: Any, folder: Path, url: str, axe: str | None, shots: Path | None
) -> Iterator[str]:
    """Yield the faults of the viewer's pages, one per line. Move a storage of ``folder`` away."""
    base = url.partition("?")[0]
    for device in WIDTHS:
        for scheme in SCHEMES:
            looker = Looker(browser, scheme, device, axe, base)
            looker.page.goto(url)
            if looker.page.url != base:
                yield f"viewer, {device}, {scheme}: the token is still in {looker.page.url}"
            for place in VIEWED:
                open_view(looker, base + place)
                for summary in looker.page.query_selector_all("summary"):
                    summary.click()
                looker.page.wait_for_function(READ, timeout=30_000)
                looker.page.wait_for_timeout(500)  # for frames
                for fault in looker.faults():
                    yield f"viewer{place}, {device}, {scheme}: {fault}"
                if shots is not None:
                    name = "-".join(("view", *place.strip("#/").split("/"), device, scheme))
                    looker.page.screenshot(path=shots / f"{name}.png", full_page=True)
            if (device, scheme) == ("desk", "light"):
                for fault in use_viewer(looker, folder, base):
                    yield f"viewer: {fault}"
            looker.context.close()


def open_view(looker: Looker, url: str) -> None:
    """Open a page of the viewer, and wait until it is drawn."""
    looker.said.clear()
    looker.page.goto(url)
    looker.page.reload()  # because a page that differs only behind # is not loaded again
    looker.page.wait_for_selector('#page[aria-busy="false"]', timeout=10_000)


def use_viewer(looker: Looker, folder: Path, base: str) -> Iterator[str]:
    """Yield the faults of the viewer's controls, one per line."""
    page = looker.page
    open_view(looker, f"{base}#/1/episode/first")
    step = page.locator("output", has_text="step ").first
    page.get_by_role("button", name="Play").click()
    page.wait_for_timeout(1000)
    page.get_by_role("button", name="Pause").click()
    if step.text_content().startswith("step 0 "):
        yield "the film does not play"
    page.get_by_role("slider").press("End")
    at, last = step.text_content().removeprefix("step ").split(" of ")
    if at != last:
        yield f"the key End shows step {at} of {last}"
    page.get_by_label("Flag").fill("<b>odd")
    page.get_by_role("button", name="Save").click()
    page.wait_for_timeout(500)
    if '"<b>odd"' not in (folder / "flags.jsonl").read_text(encoding="utf-8"):
        yield "a flag is not saved"
    open_view(looker, f"{base}#/0")
    condition = page.get_by_role("searchbox")
    condition.fill("return > 3 and")
    condition.press("Enter")
    page.wait_for_selector(".wrong", timeout=5_000)
    condition.fill("length > 20")
    condition.press("Enter")
    heading = page.get_by_role("button", name="length")
    heading.click()
    page.wait_for_timeout(500)
    lengths = page.locator("tbody tr td:nth-child(3)").all_text_contents()
    if not lengths or int(lengths[0]) <= 20 or [*map(int, lengths)] != sorted(map(int, lengths)):
        yield f"the table is not filtered and sorted by length: {lengths[:5]}"
    if looker.said:
        yield f"using the viewer: {looker.said}"
    (folder / "moved").rename(folder / "away")
    open_view(looker, f"{base}#/3")
    if "does not exist any more" not in page.locator("article").inner_text():
        yield "a storage that was moved away is not named"


def main() -> None:
    """Check the site. Exit with 1 if a page has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, nargs="?", help="the folder of the built site")
    parser.add_argument(
        "--page", type=Path, action="append", default=[], help="a page to look at beside the site"
    )
    parser.add_argument(
        "--viewer",
        nargs=2,
        metavar=("FOLDER", "URL"),
        help="storages of viewed.py, and the viewer that shows them; nothing else is checked",
    )
    parser.add_argument("--axe", type=Path, help="axe.min.js of axe-core")
    parser.add_argument("--shots", type=Path, help="a folder for pictures of all pages")
    args = parser.parse_args()
    browser_path = chromium()
    if args.site is None and args.viewer is None:
        return  # only checks that there is a browser
    if args.viewer is None and not (args.site / "index.html").is_file():
        sys.exit(f"no site is in {args.site}: python -m sphinx -b html docs {args.site} makes it")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("playwright is not installed: pip install -c constraints.txt playwright")
    if args.shots is not None:
        args.shots.mkdir(parents=True, exist_ok=True)
    axe = None if args.axe is None else args.axe.read_text(encoding="utf-8")
    faults = 0
    with sync_playwright() as driver:
        # Chromium refuses to start its sandbox as root, and the pages are ours.
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        if args.viewer is None:
            more = [each.resolve() for each in args.page]
            found = look_at(browser, args.site.resolve(), axe, args.shots, more)
        else:
            found = look_at_viewer(browser, Path(args.viewer[0]), args.viewer[1], axe, args.shots)
        for fault in found:
            faults += 1
            sys.stdout.write(f"{fault}\n")
        browser.close()
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
