"""``tallyroll view``: its server as a process, its exported page, and its errors."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from html.parser import HTMLParser
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.collector.cli import main
from tallyroll.collector.ext.viewer import export
from tallyroll.storage import import_dataset, open_storage

from viewer_kit import coded

HOSTILE = "<script><!--"
FOLDER = "a</script><script>alert(1)<!--"


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal(tmp_path: Path, signal_: signal.Signals) -> None:
    coded(tmp_path / "rows", 50)
    command = [sys.executable, "-m", "tallyroll.collector.cli", "view", "rows", "--json"]
    process = subprocess.Popen(
        [*command, "--no-browser"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(CookieJar())
        )
        with opener.open(url, timeout=30) as answer:
            assert answer.url == url.partition("?")[0]
            assert answer.read().startswith(b"<!doctype html>")
        with opener.open(f"{answer.url}api/0/summary", timeout=30) as found:
            assert json.load(found)["rows"] == 50
        process.send_signal(signal_)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (out, err) == ("", "")
    assert process.returncode in (130, 143, -signal_)


def test_it_opens_the_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tallyroll.collector.ext.viewer.server import Viewer

    coded(tmp_path / "rows", 20)
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(Viewer, "serve", lambda viewer: None)
    assert main(["view", str(tmp_path / "rows")]) == 0
    assert opened == [capsys.readouterr().out.splitlines()[0]]
    assert main(["view", str(tmp_path / "rows"), "--no-browser"]) == 0
    assert len(opened) == 1


class Page(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        at = len(self.tags) - 1
        self.texts[at] = self.texts.get(at, "") + data

    @property
    def data(self) -> Any:
        at = next(at for at, (_, own) in enumerate(self.tags) if own.get("id") == "exported")
        return json.loads(self.texts[at])


def exported(tmp_path: Path, *words: str) -> Page:
    file = tmp_path / "page.html"
    assert main(["view", *words, "--export", str(file), "--force"]) == 0
    assert file.stat().st_size <= 20_000_000
    return Page(file.read_text())


def test_an_exported_page_needs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("starlette", "uvicorn", "PIL"):
        monkeypatch.setitem(sys.modules, name, None)
    pixels = np.random.default_rng(0).integers(0, 256, (300, 300, 200), np.uint8)
    path = tmp_path / FOLDER
    path.parent.mkdir()
    coded(path, more={"pixels": pixels, HOSTILE: np.arange(300)})
    page = exported(tmp_path, str(path))
    assert capsys.readouterr().out == f"wrote {tmp_path / 'page.html'}\n"
    for tag, attributes in page.tags:
        assert not {"src", "href", "style"} & {*attributes}
        assert not [name for name in attributes if name.startswith("on")]
        assert tag in {
            "html",
            "head",
            "meta",
            "title",
            "style",
            "body",
            "script",
            "article",
            "noscript",
        }
    assert [tag for tag, _ in page.tags].count("script") == 3
    policy = next(own["content"] for _, own in page.tags if own.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in str(policy)
    data = page.data
    assert data["api"]["datasets"] == [str(path)]
    with open_storage(path) as storage:
        mine = storage.trajectories
        lines = data["api/0/episodes"]["lines"]
        assert [int(each["id"]) for each in lines] == mine.ids.tolist()
        assert [each["return"] for each in lines] == mine.returns.tolist()
        first = data["api/0/episode/first"]
        assert first["id"] == str(mine.ids[0])
        best = int(mine.ids[mine.returns.argmax()])
        assert data[f"api/0/episode/{best}"]["return"] == mine.returns.max()
        (block,) = (data[name] for name in data if name.startswith(f"api/0/frames/{mine.ids[0]}?"))
        assert (block["height"], block["width"], block["channels"]) == (75, 50, 1)
    assert "exported page" in data["left_out"]
    assert HOSTILE in [each["name"] for each in data["api/0/summary"]["columns"]]


def test_a_page_that_is_full_leaves_episodes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded(tmp_path / "a", 4000)
    coded(tmp_path / "b", 4000, seed=1)
    monkeypatch.setattr(export, "MOST_NBYTES", 300_000)
    page = exported(tmp_path, str(tmp_path / "a"), str(tmp_path / "b"))
    assert (tmp_path / "page.html").stat().st_size <= 300_000
    of = [{name for name in page.data if name.startswith(f"api/{n}/episode/")} for n in range(2)]
    assert 0 < len(of[0] | of[1]) < 40
    count = len({name for each in of for name in each if not name.endswith("first")})
    assert f"the curves of {count} episodes" in page.data["left_out"]
    monkeypatch.setattr(export, "_MOST_LINES", 100)
    found = exported(tmp_path, str(tmp_path / "a")).data["api/0/episodes"]
    assert len(found["lines"]) == 100
    with open_storage(tmp_path / "a") as storage:
        assert f"The storage has {len(storage.trajectories):,}" in found["left_out"]


@pytest.mark.parametrize("kind", ["npz", "parquet", "torchrl"])
def test_a_dataset_of_another_library_is_shown_as_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    coded(tmp_path / "rows", 100)
    with open_storage(tmp_path / "rows") as storage:
        storage.export(tmp_path / "data", kind)
    import_dataset(tmp_path / "data", tmp_path / "imported", kind)
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    name = f"{kind}:{tmp_path / 'data'}"
    data = exported(tmp_path, name, str(tmp_path / "imported")).data
    assert data["api"]["datasets"] == [name, str(tmp_path / "imported")]
    assert data["api/0/episodes"]["lines"] == data["api/1/episodes"]["lines"]
    assert data["api/0/episode/first"] == data["api/1/episode/first"]
    assert data["api/0/summary"]["path"] == name
    assert not [*scratch.iterdir()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none", "none does not exist. Give the path of a storage."),
        ("rows none", "none does not exist. Give the path of a storage."),
        ("rows --export none/page.html", "is not a folder"),
        ("rows --export rows/manifest.json", "exists and is not a report"),
        ("rows --flags rows/flags", "expected a file outside the storage"),
        ("npz:none.npz", "none.npz"),
        ("npz:rows", "rows"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    message: str,
) -> None:
    coded(tmp_path / "rows", 20)
    monkeypatch.chdir(tmp_path)
    assert main(["view", *words.split(), "--no-browser"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("tallyroll: error: ")
    assert message in line


def test_a_storage_with_the_name_of_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    coded(tmp_path / "npz:rows", 20)
    assert exported(tmp_path, "npz:rows").data["api"]["datasets"] == ["npz:rows"]


def test_flags_are_for_storages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coded(tmp_path / "rows", 20)
    with pytest.raises(SystemExit) as end:
        main(["view", "npz:rows.npz", "--flags", str(tmp_path / "flags"), "--no-browser"])
    assert end.value.code == 2
    assert "--flags: expected storages, got the dataset npz" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["65536", "-1", "x", "1e3", "", "٣"])
def test_other_ports_are_no_ports(capsys: pytest.CaptureFixture[str], port: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["view", "rows", f"--port={port}"])
    assert end.value.code == 2
    assert "expected a port from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["starlette", "uvicorn"])
def test_a_missing_extra_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
) -> None:
    coded(tmp_path / "rows", 20)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["view", str(tmp_path / "rows"), "--no-browser"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf'need the package {module}, .* pip install "tallyroll\[view\]"$', line)
