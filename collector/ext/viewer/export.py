"""Write the viewer's pages into one HTML file that needs no server."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any, Final

import numpy as np

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.report.files import MARK, write_report
from tallyroll.collector.ext.viewer.dataset import Dataset
from tallyroll.collector.ext.viewer.server import FILES
from tallyroll.collector.ext.viewer.values import FRAMES

MOST_NBYTES: Final = 20_000_000
"""The largest size of a page."""
_MOST_LINES: Final = 2000
_EPISODES: Final = 20
_REST_NBYTES: Final = 10_000
_FRAME_SIDE: Final = 96
_SCRIPTS: Final = ("uPlot.js", "viewer.js")
_STYLES: Final = ("uPlot.css", "page.css", "viewer.css")
_WAIT_SECONDS: Final = 0.05


def export_page(
    datasets: Sequence[Dataset],
    path: str,
    *,
    force: bool = False,
    progress: Callable[[int, int], object] = lambda rows, head: None,
) -> None:
    """Write a self-contained page about ``datasets``, of at most 20 MB.

    The page has the facts, the learning curves, the histograms and the first episodes of the
    table. If there is space, it also has the curves and small frames of some episodes. Notes on the
    page name the missing parts.

    Args:
        datasets: the storages.
        path: the file.
        force: replace a file that is not such a page or a report.
        progress: a callback with the numbers of rows counted and to count.

    Raises:
        ArgumentError: the file is not suitable, or the facts alone are too large.
        OSError: the file cannot be written.
    """
    page = _Page(MOST_NBYTES - sum(len(_file(name)) for name in FILES) - _REST_NBYTES)
    page.add("api", {"datasets": [each.name for each in datasets], "version": None})
    chosen = []
    for number, dataset in enumerate(datasets):
        while not (counted := dataset.counted()).complete:
            progress(counted.rows, counted.head)
            time.sleep(_WAIT_SECONDS)
        chosen.append(_choice(counted.table))
        _add_facts(page, number, dataset, len(counted.table))
    for each in range(max(map(len, chosen), default=0)):  # the same share for each storage
        for number, dataset in enumerate(datasets):
            if each < len(chosen[number]):
                _add_episode(page, number, dataset, chosen[number][each])
    write_report(path, page.text(), force=force)


class _Page:
    """The answers of an exported page, by path, as far as they fit."""

    def __init__(self, space: int) -> None:
        self._space = space
        self._answers: dict[str, str] = {}
        self.episodes = 0

    def __contains__(self, path: str) -> bool:
        return path in self._answers

    def add(self, path: str, answer: Any) -> bool:
        """Add an answer. Return False if there is no space for it."""
        text = json.dumps(answer, allow_nan=False).replace("<", "\\u003c")  # "</script>" ends it
        if (nbytes := len(text) + len(path) + 8) > self._space:
            return False
        self._space -= nbytes
        self._answers[path] = text
        return True

    def text(self) -> str:
        """Return the page."""
        note = (
            "This is an exported page. It has the curves of "
            f"{self.episodes} episodes, and reduced frames as far as there was space. Conditions "
            "on episodes, verification and flags need `tallyroll view`."
        )
        self._answers["left_out"] = json.dumps(note)
        joined = ",".join(f"{json.dumps(path)}:{text}" for path, text in self._answers.items())
        policy = f"default-src 'none'; script-src {_hashes(_SCRIPTS)}; style-src {_hashes(_STYLES)}"
        head = f'{MARK}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
        data = f'<script type="application/json" id="exported">{{{joined}}}</script>'
        parts = {'<meta charset="utf-8">': f'<meta charset="utf-8">\n{head}'}
        for name in _STYLES:
            link = f'<link rel="stylesheet" href="{name}">'
            parts[link] = f"<style>{_file(name)}</style>"
        for name in _SCRIPTS:
            parts[f'<script src="{name}"></script>'] = f"<script>{_file(name)}</script>"
        html = _file("")
        for tag, part in parts.items():
            before, _, after = html.partition(tag)
            html = f"{before}{part}{after}"
        before, _, after = html.partition('<article id="page">')
        return f'{before}{data}\n<article id="page">{after}'


def _file(name: str) -> str:
    return FILES[name][0].read_text("utf-8")


def _hashes(names: Sequence[str]) -> str:
    """Return the hashes of files, as a content security policy names them."""
    digests = (sha256(_file(name).encode()).digest() for name in names)
    return " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)


def _choice(table: np.ndarray) -> list[int]:
    """Return ids of episodes: the first, best, worst and longest, and others at equal distances."""
    if not len(table):
        return []
    returns = table["return"].reshape(len(table), -1)[:, 0]
    known = np.where(np.isnan(returns), -np.inf, returns)
    places = [0, int(known.argmax()), int(known.argmin()), int(table["length"].argmax())]
    places += np.linspace(0, len(table) - 1, _EPISODES).astype(int).tolist()
    return [int(table["id"][place]) for place in dict.fromkeys(places)][:_EPISODES]


def _add_facts(page: _Page, number: int, dataset: Dataset, episodes: int) -> None:
    base = f"api/{number}"
    facts = {**dataset.summary(), "flags": False}
    lines: list[dict[str, Any]] = []
    found = dataset.episodes()
    for at in range(0, min(episodes, _MOST_LINES), found["per_page"]):
        lines += dataset.episodes(page=at // found["per_page"])["lines"]
    total = found["total"]
    shown = {**found, "lines": lines, "total": len(lines), "counted": len(lines)}
    if total > len(lines):
        shown["left_out"] = f"The storage has {total:,} episodes; this page omits the others."
    if not page.add(f"{base}/summary", facts) or not page.add(f"{base}/episodes", shown):
        raise ArgumentError(
            f"{dataset.name}: its facts do not fit in an exported page of 20 MB. View it without "
            "--export, or give fewer storages."
        )
    page.add(f"{base}/trends", dataset.trends())
    page.add(f"{base}/histograms", dataset.histograms())
    page.add(f"{base}/verify", {"state": "none"})


def _add_episode(page: _Page, number: int, dataset: Dataset, id: int) -> None:
    base = f"api/{number}"
    found = dataset.episode(id)
    if not page.add(f"{base}/episode/{id}", found):
        return
    page.episodes += 1
    if f"{base}/episode/first" not in page:
        page.add(f"{base}/episode/first", found)
    for path, block in _frames(dataset, id, found):
        if not page.add(f"{base}/{path}", block):
            return


def _frames(dataset: Dataset, id: int, found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the blocks of small frames of the first image column of an episode."""
    if not found["pictures"]:
        return
    every = -(-max(found["pictures"][0][side] for side in ("height", "width")) // _FRAME_SIDE)

    def reduced(frames: np.ndarray) -> np.ndarray:
        return frames[:, ::every, ::every]

    for start in range(0, found["length"], FRAMES):
        frames = np.concatenate(dataset.frames(id, 0, start, reduced))
        _, height, width, channels = frames.shape
        content = base64.b64encode(frames.tobytes()).decode()
        block = {"height": height, "width": width, "channels": channels, "content": content}
        yield f"frames/{id}?column=0&start={start}", block
