"""The page is parsed: its content, no external resources, and no injected markup."""

from __future__ import annotations

import base64
import json
import re
import shutil
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tallyroll.collector import RunsReport, report
from tallyroll.collector.ext.report import page as page_module
from tallyroll.collector.ext.report.page import number, visible

from report_kit import FRAMES, SEEDS, poisoned

EVIL = "<script>alert(1)</script>"
FOLDER = "<img src=x onerror=alert(2)> &amp;-7"
VOID = {"meta", "img", "link", "br", "input"}
LOADING = ("src", "href", "srcset", "action", "data", "poster")


class Parsed(HTMLParser):
    """Tags, attributes, scripts and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.attributes += of.items()
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((of, ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            of, text = self.scripts[-1]
            self.scripts[-1] = (of, text + data)
        elif not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def page_of(found: RunsReport, folder: Path) -> tuple[str, Parsed]:
    found.to_html(folder / "report.html")
    html = (folder / "report.html").read_text("utf-8")
    return html, Parsed(html)


def test_the_page_shows_the_numbers_and_loads_nothing(tmp_path: Path, made: Any) -> None:
    found = report(made[0])
    html, parsed = page_of(found, tmp_path)
    for line in found.table:
        assert Path(line["run"]).name in parsed.texts
    assert f"{made[0]}/" in parsed.texts
    for group in found.groups:
        assert group.interquartile_mean is not None
        assert number(group.interquartile_mean) in parsed.texts
        assert f"{number(group.mean)}" in parsed.texts
    assert not [each for each in parsed.attributes if each[0] in LOADING]
    assert not {"link", "iframe", "object", "embed", "form", "base"} & {*parsed.tags}
    assert "url(" not in html
    assert "@import" not in html
    # The only address is in uPlot's initial comment.
    assert re.findall(r"\w+://[\w./]+", html) == ["https://github.com/leeoniya/uPlot"]
    (policy,) = (value for name, value in parsed.attributes if "script-src" in value)
    (data, json_text), *scripts = parsed.scripts
    assert data == {"type": "application/json", "id": "curves"}
    hashes = [
        f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'"
        for _, text in scripts
    ]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src ")
    assert re.findall(r"'sha256-[^']+'", policy) == hashes
    assert len(hashes) == 2
    (panel,) = json.loads(json_text)
    for shown, group in zip(panel["groups"], found.groups, strict=True):
        curve = found.to_dict()["groups"][found.groups.index(group)]["curve"]
        assert panel["at"] == curve["transitions"]
        assert {name: shown[name] for name in ("value", "low", "high")} == {
            name: curve[name] for name in ("value", "low", "high")
        }


def hostile(folder: Path, made: Path) -> RunsReport:
    for seed in SEEDS:
        place = folder / f"{FOLDER}{seed}"
        shutil.copytree(made / f"left-{seed}", place)
        poisoned(
            place,
            {
                "environment": {"id": EVIL, "kwargs": {EVIL: seed}},
                "versions": {EVIL: f"{EVIL}{seed}", "torch": f"\u202e\x1b[1m{seed}"},
                "call": {"policy": EVIL, "total_frames": FRAMES, "info_keys": [EVIL, seed]},
                "seed": 7,
            },
        )
    (folder / EVIL.replace("/", "")).write_text("")
    return report([folder, folder / EVIL.replace("/", "")], group_by=["environment", "label"])


def test_nothing_of_a_storage_is_obeyed(tmp_path: Path, made: Any) -> None:
    found = hostile(tmp_path, made[0])
    assert found.groups[0].environments == (EVIL,)
    html, parsed = page_of(found, tmp_path)
    assert parsed.tags.count("script") == 3
    assert "img" not in parsed.tags
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert EVIL in parsed.text
    assert FOLDER in parsed.text
    assert "\u202e" not in html
    assert "\x1b" not in html
    assert r"\u202e\x1b[1m" in parsed.text
    assert "<" not in parsed.scripts[0][1]
    shown = json.loads(parsed.scripts[0][1])[0]["groups"][0]["name"]
    assert shown == FOLDER.removesuffix("-7")


@pytest.mark.parametrize(
    "run",
    [
        {"environment": 3, "versions": [1], "call": "x", "made": None, "seed": "a", "lanes": [2]},
        {"environment": {"id": {"a": [EVIL]}}, "call": {"total_frames": -5, "policy": {}}},
        {"call": {"total_frames": 2**63}, "incarnation": -3, "respawned": "x", "seed": 2**64},
        {"versions": {"a" * 10_000: "b" * 100_000}, "command": {"frames": True, "policy": [1]}},
        {"call": {"nested": [[[[[[]]]]]], "deep": {"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}}},
        {"resumed": "x", "resumed_at": 5, "rows": None, "first_row_of_run": "0"},
    ],
    ids=range(6),
)
def test_a_manifest_may_say_anything(tmp_path: Path, made: Any, run: Any) -> None:
    shutil.copytree(made[0] / "left-0", tmp_path / "left-0")
    poisoned(tmp_path / "left-0", run)
    found = report([tmp_path / "left-0", made[0] / "left-1"])
    assert len(found.runs) == 2
    _, parsed = page_of(found, tmp_path)
    assert len(parsed.text) < 20_000
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.as_csv().count("\n") == 3


def test_what_is_not_in_the_numbers_is_on_the_page(tmp_path: Path, made: Any) -> None:
    found = report([made[0], tmp_path / "gone"])
    _, parsed = page_of(found, tmp_path)
    assert "Not in the numbers" in parsed.texts
    assert str(tmp_path / "gone") in parsed.texts
    one = report(made[0] / "left-0")
    _, parsed = page_of(one, tmp_path)
    assert "1 run in 1 group" in parsed.texts
    assert "Nothing: all have the same versions" in parsed.text


def test_the_folder_of_all_storages() -> None:
    assert page_module.common_folder(["a/b/c1", "a/b/c2"]) == "a/b/"
    assert page_module.common_folder(["a/b1", "c/b2"]) == page_module.common_folder(["a"]) == ""
    assert page_module.common_folder([]) == ""
    assert page_module.common_folder(["/a", "/b/c"]) == "/"


def test_numbers_and_text() -> None:
    shown = {0.5: "0.5000", 22.5: "22.50", 999.96: "1000", 12345.6: "12,346", 7: "7"}
    assert {value: number(value) for value in shown} == shown
    assert (number(None), number(-0.25), number(3_000_000)) == ("-", "-0.2500", "3,000,000")
    assert visible("ünï 🙂") == "ünï 🙂"
    assert visible("a\n\x9b\udcff") == r"a\n\x9b\udcff"
    assert page_module.visible("") == ""
