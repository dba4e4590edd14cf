"""Storages for the tests of the viewer, and a browser's part in talking to its server."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from tensordict import TensorDict

from tallyroll.collector.ext.viewer.dataset import Dataset
from tallyroll.collector.ext.viewer.server import Viewer
from tallyroll.storage import MemmapStorage

from lane_model import Model

SECONDS = 30


def coded(path: Path, rows: int = 300, seed: int = 0, *, more: Mapping[str, Any] = {}) -> Model:
    """Write a storage whose observations are (lane, episode, step); return its rows' model.

    ``more`` has further columns, [rows, ...].
    """
    model = Model.random(np.random.default_rng(seed), rows=rows, lanes=3)
    batch = model.rows()
    code = np.stack([model.lane, model.ids, model.steps], 1).astype(np.float64)
    batch["observation"] = torch.from_numpy(code)
    batch["next", "observation"] = torch.from_numpy(code + 0.5)
    for name, values in more.items():
        batch[name] = torch.as_tensor(values)
    with MemmapStorage(path, mode="create") as storage:
        storage.extend(batch)
    return model


def straight(length: int, value: np.ndarray) -> TensorDict:
    """Return one trajectory of one lane, whose observations are ``value`` [length, ...]."""
    ended = torch.zeros(length, 1, dtype=torch.bool)
    ended[-1] = True
    return TensorDict(
        {
            "observation": torch.as_tensor(value),
            "next": {
                "reward": torch.ones(length, 1),
                "done": ended,
                "terminated": ended,
                "truncated": torch.zeros_like(ended),
            },
            "collector": {
                "traj_ids": torch.full((length,), 7),
                "step": torch.arange(length),
                "lane": torch.zeros(length, dtype=torch.int32),
            },
        },
        [length],
    )


@dataclass
class Browser:
    """A client that has exchanged the token for the cookie."""

    viewer: Viewer
    cookie: str = ""

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str | None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Return the answer and its content. A header of None is not sent."""
        sent = {"Cookie": self.cookie, "Host": f"127.0.0.1:{self.viewer.port}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}  # type: ignore[misc]
        link = http.client.HTTPConnection("127.0.0.1", self.viewer.port, timeout=SECONDS)
        try:
            link.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                if value is not None:
                    link.putheader(name, value)
            if body is not None:
                link.putheader("Content-Length", str(len(body.encode())))
            link.endheaders(None if body is None else body.encode())
            answer = link.getresponse()
            return answer, answer.read()
        finally:
            link.close()

    def get(self, path: str, status: int = 200) -> Any:
        """Return the JSON value at a path."""
        answer, content = self.ask(path)
        assert answer.status == status, content
        assert answer.getheader("content-type") == "application/json"
        return json.loads(content, parse_constant=refused)

    def enter(self) -> None:
        """Exchange the token of the printed address."""
        place = urlsplit(self.viewer.url)
        answer, _ = self.ask(f"{place.path}?{place.query}", Cookie=None)
        assert answer.status == 303
        self.cookie = str(answer.getheader("set-cookie")).partition(";")[0]


def refused(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


@contextmanager
def served(*paths: Path | str, flags: Any = None) -> Iterator[Browser]:
    """Serve storages in a thread, and yield a client that may see them."""
    datasets = [Dataset(str(path), flags) for path in paths]
    viewer = Viewer(datasets)
    thread = threading.Thread(target=viewer.serve)
    thread.start()
    try:
        browser = Browser(viewer)
        browser.enter()
        yield browser
    finally:
        viewer.stop()
        thread.join(SECONDS)
        for each in datasets:
            each.close()
    assert not thread.is_alive()
