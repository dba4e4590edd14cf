"""Reports in Python: their text is that of the command, and their HTML holds the same numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.collector import SyncCollector, replay, report
from tallyroll.collector.cli import main
from tallyroll.storage import (
    DiskStorage,
    MemmapStorage,
    diff,
    import_dataset,
    open_storage,
    repair,
    verify,
)
from tallyroll.storage.rows.pages import MOST_ROWS, HtmlPage, TextPage

HOSTILE = "<script src=a onload='b'>&amp;\x1b[31m"
PLAIN = {"div", "b", "table", "thead", "tbody", "tr", "th", "td"}


class Cells(HTMLParser):
    """The tags and the cells of a piece of HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def pole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shown") / "pole"
    with SyncCollector(
        "CartPole-v1", num_envs=2, frames_per_batch=100, total_frames=300, seed=0, storage=path
    ) as collector:
        collector.collect(300)
    return path


@pytest.fixture
def storage(pole: Path) -> Any:
    with open_storage(pole) as opened:
        yield opened


def words(text: str) -> list[str]:
    """Return the words without durations. A terminal pads the columns of tables otherwise."""
    return re.sub(r",? ?\b[\d.]+ s\b", "", text).split()


def _copied(storage: DiskStorage, to: Path) -> Any:
    return storage.copy_to(to)


REPORTS: dict[str, tuple[Callable[[DiskStorage, Path], Any], list[str]]] = {
    "verify": (lambda s, to: verify(s.path), ["verify", "POLE"]),
    "diff": (lambda s, to: diff(s.path, s.path), ["diff", "POLE", "POLE"]),
    "replay": (lambda s, to: replay(s.path, "all"), ["replay", "POLE", "--all"]),
    "report": (lambda s, to: report(s.path), ["report", "POLE"]),
    "copy": (_copied, ["copy", "POLE", "TO"]),
    "export": (lambda s, to: s.export(to, "npz"), ["export", "POLE", "npz:TO"]),
    "pack": (lambda s, to: s.pack(to), ["pack", "POLE", "TO"]),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_prints_what_its_command_prints(
    name: str, storage: DiskStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, command = REPORTS[name]
    to = tmp_path / "made"
    found = make(storage, to)
    said = [each.replace("POLE", str(storage.path)).replace("TO", f"{to}2") for each in command]
    assert main(said) == 0
    assert words(str(found)) == words(capsys.readouterr().out.replace(f"{to}2", str(to)))
    assert max(map(len, str(found).splitlines())) < 240
    assert len(str(found).splitlines()) > 0
    assert Cells(found._repr_html_()).tags <= PLAIN


def test_reports_of_imports_and_repairs(pole: Path, tmp_path: Path) -> None:
    with open_storage(pole) as storage:
        storage.export(tmp_path / "pole.npz", "npz")
    imported = import_dataset(tmp_path / "pole.npz", tmp_path / "imported", "npz")
    assert str(imported).startswith(f"{tmp_path}/imported: 300 rows written (memmap, ")
    repaired = repair(pole, tmp_path / "repaired")
    assert "300 rows written (memmap" in str(repaired)
    assert str(repaired).endswith("\nnothing was lost")


def test_statistics_print_their_table(storage: DiskStorage) -> None:
    found = storage.statistics()
    lines = str(found).splitlines()
    assert lines[0] == "300 rows"
    assert " ".join(lines[1].split()) == "column count mean std min q05 q50 q95 max NaN"
    (line,) = (each for each in lines if each.startswith("observation[2] "))
    rows = storage[:]["observation"][:, 2].numpy().astype(np.float64)
    wanted = [rows.mean(), rows.std(), rows.min()]
    assert line.split()[1:5] == ["300", *(f"{each:.4g}" for each in wanted)]
    cells = Cells(found._repr_html_()).rows
    assert [" ".join(row).split() for row in cells] == [each.split() for each in lines[1:]]
    one = str(found["observation"]).splitlines()
    assert [each.split()[0] for each in one[1:]] == [f"value[{at}]" for at in range(4)]


def test_ledgers_and_plans(capsys: pytest.CaptureFixture[str]) -> None:
    with SyncCollector(
        "CartPole-v1", num_envs=8, frames_per_batch=50, total_frames=100
    ) as collector:
        for _ in collector:
            pass
    ledger = collector.ledger
    numbers = {line.rsplit("  ", 1)[0].strip(): line for line in str(ledger).splitlines()}
    assert any(each.split() == ["stored", "100"] for each in numbers)
    assert f"{ledger.discarded:,}" in str(ledger)
    assert "executed" in ledger._repr_html_()
    rows = Cells(collector.plan._repr_html_()).rows
    assert ["acts", "drawn", ""] in rows
    assert len(rows) == 1 + len(collector.plan.as_json())
    assert capsys.readouterr().out == ""


def test_storages_and_trajectories(storage: DiskStorage) -> None:
    rows = Cells(storage._repr_html_()).rows
    assert ["observation", "float32", "[4]", "16"] in rows
    assert ["0", "CartPole-v1", "0", "2", "0"] in rows
    trajectories = storage.trajectories
    rows = Cells(trajectories._repr_html_()).rows
    table = trajectories.table
    columns = trajectories.ids, trajectories.lanes, table["length"], trajectories.ends
    wanted = zip(*columns, strict=True)
    assert [(row[0], row[1], row[2], row[4]) for row in rows[1:]] == [
        tuple(map(str, each)) for each in wanted
    ][:MOST_ROWS]
    assert [float(row[3]) for row in rows[1:]] == trajectories.returns[:MOST_ROWS].tolist()
    storage.close()
    assert "closed" in storage._repr_html_()


def test_an_empty_storage_shows_itself(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "empty") as storage:
        assert "MemmapStorage" in storage._repr_html_()


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "<b>rows") as storage:
        rows = TensorDict({HOSTILE: torch.zeros(3, 2), "next": {"reward": torch.ones(3)}}, [3])
        storage.extend(rows)
        shown = [storage._repr_html_(), storage.statistics()._repr_html_()]
        assert "\x1b" not in str(storage.statistics())
        shown.append(verify(storage.path)._repr_html_())
        shown.append(storage.copy_to(tmp_path / HOSTILE)._repr_html_())
    for each in shown:
        found = Cells(each)
        assert found.tags <= PLAIN
        assert "\x1b" not in each
        assert "color" not in each


def test_pages_are_bounded() -> None:
    page = HtmlPage()
    for _ in range(1000):
        page.print("line")
    page.table(("name", "number"), ((str(n), n) for n in range(1000)))
    assert page.html.count("line") == MOST_ROWS
    rows = Cells(page.html).rows
    assert len(rows) == MOST_ROWS + 1
    assert "and 960 more" in page.html
    text = TextPage()
    text.head("Head")
    text.table(("name", "number"), [("a", 1000), ("bc\x1b", -1)])
    assert text.text == "Head\nname    number\na        1,000\nbc\\x1b      -1"
