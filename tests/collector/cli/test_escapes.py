"""Text from a hostile storage reaches a terminal as text, without control characters."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.table import Table

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.collector.cli.inspection import verify
from tallyroll.collector.cli.output import emit, pasteable, visible
from tallyroll.collector.cli.page import Page
from tallyroll.storage import MemmapStorage

from formats_kit import KINDS

CODES = {
    "title": "\x1b]0;owned\x07",
    "colour": "\x1b[31m",
    "c1": "\x9b2J",
    "back": "\r\x1b[K\b\b",
    "turned": "\u202egnp.exe\u2066",
    "hidden": "\u200b\u2060\u00ad\U000e0041",
    "line": "\ntallyroll: error: forged",
    "separator": "\u2028forged\u2029\x85\x0b\x0c",
    "surrogate": "\udcff\ud800",
}
EVIL = "".join(CODES.values())
WORD = "Innocent-v0"


def bare(text: str, keep: str = "\n") -> list[str]:
    """Return the unprintable characters of a text."""
    return sorted({each for each in text if not each.isprintable() and each not in keep})


def told(*words: object) -> tuple[int | str | None, str, str]:
    """Return the exit status, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    status: int | str | None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except SystemExit as error:
            status = error.code
    return status, out.getvalue(), err.getvalue()


@cache
def collected() -> dict[str, bytes]:
    """Return the files of a storage that a collector filled."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows")
        with SyncCollector(
            "CartPole-v1", num_envs=2, frames_per_batch=10, total_frames=20, seed=1, storage=path
        ) as collector:
            for _ in collector:
                pass
        files = [file for file in path.rglob("*") if file.is_file()]
        return {str(file.relative_to(path)): file.read_bytes() for file in files}


def crafted(path: Path, name: str, evil: str) -> Path:
    """Create a storage with ``evil`` in its manifest wherever free text is allowed.

    ``name`` is the part to poison, or ``all`` for every part.
    """
    content = collected()
    path.mkdir()
    for file, held in content.items():
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).write_bytes(held)
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest.pop("crc32", None)
    run = manifest["runs"][-1]

    def spoil(what: str, into: dict[str, Any], key: str, value: object = evil + WORD) -> None:
        if name in (what, "all"):
            into[key] = value

    spoil("created", manifest, "created")
    spoil("finalized", manifest, "finalized", {"at": evil, "checksums": {}, "head": 20})
    spoil("id", run["environment"], "id")
    spoil("kwargs", run["environment"], "kwargs", {evil: evil})
    spoil("versions", run, "versions", {evil: evil})
    spoil("policy", run["call"], "policy")
    spoil("mode", run["call"], "mode")
    spoil("workers", run["call"], "num_workers", 1)
    spoil("lanes", run, "lanes")
    spoil("seed", run, "seed")
    spoil("first_row", run, "first_row")
    spoil("frames", run["call"], "total_frames")
    spoil("command", run, "command", {"env": evil + "m:X-v0", "policy": evil, "frames": 20})
    file.write_text(json.dumps(manifest))
    return path


PARTS = [
    *("created", "finalized", "id", "kwargs", "versions", "policy", "mode", "lanes", "seed"),
    *("first_row", "frames", "command", "all"),
]


@pytest.mark.parametrize("part", PARTS)
def test_a_manifest(tmp_path: Path, part: str) -> None:
    path = crafted(tmp_path / "rows", part, EVIL)
    for words in (
        ("inspect", path),
        ("inspect", "--json", path),
        ("verify", path),
        ("verify", "--json", path),
        ("collect", "--resume", "--out", path),
        ("collect", "CartPole-v1", "--frames", 4, "--append", "--out", path),
    ):
        _, out, err = told(*words)
        assert bare(out) == [], words
        if "Traceback" not in err:
            assert bare(err) == [], words
            assert not [line for line in err.splitlines() if line == "tallyroll: error: forged"]
        assert "\ntallyroll: error: forged" not in out
        if "--json" in words:
            json.loads(out or "null")


def test_a_manifest_can_still_be_read(tmp_path: Path) -> None:
    path = crafted(tmp_path / "rows", "created", "\x1b]0;owned\x07\u202e")
    status, out, _ = told("inspect", path)
    assert (status, rf"created \x1b]0;owned\x07\u202e{WORD})" in out) == (0, True)
    _, out, _ = told("inspect", "--json", path)
    assert json.loads(out)["created"] == "\x1b]0;owned\x07\u202e" + WORD


@pytest.mark.parametrize("code", CODES)
def test_a_command_is_proposed_only_if_it_does_what_it_shows(tmp_path: Path, code: str) -> None:
    """A pasted command with a hidden character would differ from the visible one."""
    for out, proposed in ((tmp_path / f"o{CODES[code]}", False), (tmp_path / "it's; safe", True)):
        try:
            out.mkdir()
        except (OSError, UnicodeEncodeError):
            assert code == "surrogate"
            continue
        crafted(out / "rows", "id", "mine:")
        status, _, err = told("collect", "--resume", "--out", out / "rows")
        first, second = err.splitlines()
        assert (status, "repeat them:" in first) == (1, True)
        assert bare(err) == []
        if proposed:
            words = ["tallyroll", "collect", f"mine:{WORD}", "--out", str(out / "rows")]
            assert shlex.split(second) == [*words, "--resume"]
        else:
            assert (
                "the command is not shown, because a name in it holds control characters" in second
            )
            assert "tallyroll collect" not in err


@pytest.mark.parametrize("name", ["env", "policy", "mode"])
def test_a_name_that_cannot_be_one_is_refused(tmp_path: Path, name: str) -> None:
    """The name would reappear in errors of Gymnasium or of the user's module."""
    path = crafted(tmp_path / "rows", "none", "")
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest.pop("crc32", None)
    manifest["runs"][-1]["command"] = {"env": "CartPole-v1", "frames": 30, name: "a\n\x1b[1m"}
    file.write_text(json.dumps(manifest))
    status, _, err = told("collect", "--resume", "--out", path)
    assert status == 1
    assert err == (
        f"tallyroll: error: the manifest's last run is damaged: {name} is 'a\\n\\x1b[1m'. Restore "
        "it, or begin a new run with --append.\n"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_files_and_columns(tmp_path: Path, kind: str) -> None:
    evil = "\x1b[31m\u202e\nx"
    path = tmp_path / f"d{evil}" / kind
    path.parent.mkdir()
    with KINDS[kind](path, capacity=8) as storage:
        storage.extend({(f"c{evil}",): np.zeros((8, 2), np.float32)})
    for words in (
        ("inspect", path),
        ("inspect", "--rows", 2, path),
        ("verify", path),
        ("collect", "--resume", "--out", path),
        ("collect", "CartPole-v1", "--frames", 3, "--out", path),
        ("verify", path / "gone"),
        ("verify", path, path),
        ("verify", "--skip", evil, path),
    ):
        _, out, err = told(*words)
        assert out + err
        assert (bare(out), bare(err)) == ([], []), words
        assert all(len(err.splitlines()) <= 1 or "usage" in err for _ in words), words


def test_findings(tmp_path: Path) -> None:
    """A finding quotes the file's text, with one line per place."""
    path = crafted(tmp_path / "none", "none", "")
    meta = path / "meta.json"
    found = json.loads(meta.read_text())
    found["\x1b[8m"] = found.pop("_type", None)
    found["shape"] = [20, "\x1b[8m\nrows: sound\u202e"]
    meta.write_text(json.dumps(found))
    status, out, _ = told("verify", path)
    assert (status, "metadata: " in out, bare(out)) == (1, True, [])


def test_a_traceback(tmp_path: Path) -> None:
    path = crafted(tmp_path / "rows", "seed", EVIL)
    _, _, err = told("collect", "--resume", "--out", path, "--traceback")
    assert "Traceback" in err
    assert bare(err, "\n\t") == []


def test_warnings_while_a_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, shown = warnings.formatwarning, []

    def warn(*_: object, **__: object) -> None:
        # pytest keeps the rest of Python's own behavior.
        shown.append(warnings.formatwarning(UserWarning(EVIL), UserWarning, "x.py", 1))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "verify", warn)
    assert told("verify", tmp_path)[0] == 130
    assert warnings.formatwarning is before
    assert (bare(shown[0]), r"\x1b]0;owned" in shown[0]) == ([], True)
    assert "\ntallyroll: error: forged" not in shown[0]


def test_on_a_terminal_only_colours_of_our_own(tmp_path: Path) -> None:
    path = crafted(tmp_path / "rows", "all", EVIL)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["runs"][-1] |= {"lanes": 2, "seed": 1, "first_row": 0}
    (path / "manifest.json").write_text(json.dumps(manifest))
    out = Terminal()
    with contextlib.redirect_stdout(out):
        assert main(["inspect", str(path)]) == 0
    shown = out.getvalue()
    assert "owned" in shown
    plain = shown
    for style in ("\x1b[1m", "\x1b[2m", "\x1b[0m", "\x1b[22m"):
        plain = plain.replace(style, "")
    assert plain != shown
    assert bare(plain) == []


class Terminal(io.StringIO):
    """Stream that reports as a terminal does."""

    def isatty(self) -> bool:
        return True


# --- escaping functions ---------------------------------------------------------------------------


def test_visible() -> None:
    assert visible("plain, ünï — 42 🙂") == "plain, ünï — 42 🙂"
    assert visible("\x1b[1m\x9b\u202e\n\t\udcff\U000e0041") == (
        r"\x1b[1m\x9b\u202e\n\t\udcff\U000e0041"
    )
    assert visible("a\n\tb\x1b", lines=True) == "a\n\tb\\x1b"
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    assert visible(everything).isprintable()
    assert visible(visible(everything)) == visible(everything)


def test_pasteable() -> None:
    assert pasteable("tallyroll collect 'a b'") == "tallyroll collect 'a b'"
    assert "not shown" in pasteable("tallyroll collect 'a\u202eb'")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_stream_of_another_encoding(encoding: str) -> None:
    held = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(held, encoding, write_through=True)):
        emit("é…\ud800")
        assert held.getvalue().endswith(rb"\ud800")


def test_a_report_with_letters_that_stdout_lacks(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend({("größe",): np.zeros((3, 9), np.float32)})
    held = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(held, "ascii", write_through=True)):
        assert main(["inspect", str(tmp_path / "rows")]) == 0
        assert rb"gr\xf6\xdfe" in held.getvalue()


def test_styles_and_tables_of_reports() -> None:
    page = Page()
    table = Table()
    table.add_column("h\x1b", header_style="bold")
    table.add_row("c\x1b[1m\nnext")
    page.print("p\x1b\u202e", style="bold")
    page.print(table)
    shown = page.text
    assert bare(shown) == []
    assert all(each in shown for each in (r"h\x1b", r"c\x1b[1m\nnext", r"p\x1b\u202e"))
