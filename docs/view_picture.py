"""Take the pictures of `tallyroll view` on the front page, in light and dark mode.

`python docs/viewed.py .venv-browser/bin/python docs/view_picture.py` serves a Breakout run with
random actions, opens an episode of it in chromium, and saves its frames and first curve in
`pictures/`. Needs playwright and pillow.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from browser import SCHEMES, Looker, chromium, open_view
from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent / "pictures"
WIDTH = 480  # as wide as the drawings, so that a phone shows it large enough
STEP, COLOURS = 118, 64


def main(url: str) -> None:
    """Save a picture for each colour scheme."""
    base = url.partition("?")[0]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for scheme in SCHEMES:
            looker = Looker(browser, scheme, "desk", base)
            page = looker.page
            page.set_viewport_size({"width": WIDTH, "height": 900})
            page.goto(url)
            open_view(looker, f"{base}#/1/episode/1")
            for _ in range(STEP):
                page.get_by_role("slider").press("ArrowRight")
            page.wait_for_timeout(1000)
            page.evaluate("document.activeElement.blur()")
            top, end = (
                int(page.get_by_role("heading", name=name, exact=True).bounding_box()["y"]) - 12
                for name in ("Frames", "action")
            )
            clip = {"x": 0, "y": top, "width": WIDTH, "height": end - top}
            taken = page.screenshot(full_page=True, clip=clip)
            picture = Image.open(io.BytesIO(taken)).convert("RGB").quantize(COLOURS)
            picture.save(FOLDER / f"view-{scheme}.png", optimize=True)
            looker.context.close()
        browser.close()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    main(sys.argv[-1])
