"""Test that a copy includes the overlay values of its rows and no others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.errors import ColumnsMissing, DamagedOverlay
from tallyroll.storage.ext import atomic_create, storage_copy
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.rewinds import rewind_to

from killed_storages_kit import forked, in_a_process

FILL, NESTED = -1, ("next", "pair")
ROWS = 200
NOTES = "copy.h5.notes"
"""A file that belongs to the user."""

Values = dict[int, tuple[int, list[int]]]
"""Values of the rows that have some, by the row's observation."""


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_copy, "_BLOCK_NBYTES", 1500)


def numbers_of(storage: DiskStorage) -> list[int]:
    observed = storage.get(slice(None), keys=["observation"])["observation"]
    return [int(each) for each in observed.reshape(-1)]


def set_some(storage: DiskStorage, seed: int) -> Values:
    """Set values for half of the rows. Return the values."""
    pick = np.random.default_rng(seed)
    at = pick.choice(len(storage), len(storage) // 2, replace=False)
    one, two = pick.integers(0, 2**40, len(at)), pick.integers(0, 99, (len(at), 2))
    storage.overlay("value", torch.int64, fill=FILL)[at] = one
    storage.overlay(NESTED, torch.int32, 2, FILL)[at] = two.astype(np.int32)
    known = numbers_of(storage)
    return {known[row]: (int(a), b.tolist()) for row, a, b in zip(at, one, two, strict=True)}


def assert_has(storage: DiskStorage, wanted: Values) -> None:
    assert storage.overlays == [NESTED, "value"]
    found = storage.with_overlays("value", NESTED).get(slice(None))
    none = (FILL, [FILL, FILL])
    rows = [wanted.get(number, none) for number in numbers_of(storage)]
    assert found["value"].tolist() == [one for one, _ in rows]
    assert found["next", "pair"].tolist() == [two for _, two in rows]


def make(path: Path, first: int, count: int = ROWS, **more: Any) -> Values:
    with MemmapStorage(path, **more) as storage:
        for start in range(first, first + count, 10):
            storage.extend(trajectory_rows(start, 10, steps=7))
        return set_some(storage, first)


@pytest.mark.parametrize("suffix", ["", ".h5", ".zarr"])
@pytest.mark.parametrize("way", ["all", "sorted", "chosen", "several", "ring"])
def test_values_stay_with_their_rows(way: str, suffix: str, tmp_path: Path) -> None:
    wanted = make(tmp_path / "a", 0, max_size=90 if way == "ring" else None)
    paths = [tmp_path / "a"]
    if way in ("several", "sorted", "chosen"):
        wanted |= make(tmp_path / "b", 1000)
        paths.append(tmp_path / "b")
        with MemmapStorage(tmp_path / "c") as plain:
            plain.extend(trajectory_rows(2000, 20, steps=7))
        paths.append(tmp_path / "c")
    place = tmp_path / f"copy{suffix}"
    with open_storage(paths if len(paths) > 1 else paths[0]) as storage:
        chosen = storage.trajectories.where("id % 3 != 1") if way == "chosen" else storage
        report = chosen.copy_to(place, sort=way == "sorted")
    assert {*report.overlays} == {"value", "next/pair"}
    assert report.overlays_left_out == ()
    with open_storage(place) as copy:
        assert len(copy) > 60
        assert 0 < len([each for each in numbers_of(copy) if each in wanted]) < len(copy)
        assert_has(copy, wanted)
    assert verify(place).sound
    with open_storage(place, mode="append", capacity=500) as copy:  # the copied overlay is writable
        copy.extend(trajectory_rows(5000, 7, steps=7), ids="renumber")
        copy.overlay("value")[-1] = 5
        assert copy.overlay("value")[-2:].tolist() == [FILL, 5]


def test_values_of_rows_that_were_taken_back(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "a") as storage:
        storage.extend(trajectory_rows(0, 35, steps=7))
        storage.extend(trajectory_rows(35, 35, steps=7))
        wanted = set_some(storage, 1)
        rewind_to(storage.writer, 35, None)
        storage.extend(trajectory_rows(700, 7, steps=7))
        storage.copy_to(tmp_path / "copy")
    with open_storage(tmp_path / "copy") as copy:
        assert_has(copy, {row: each for row, each in wanted.items() if row < 35})


def test_values_that_are_there_when_rows_are_followed(tmp_path: Path) -> None:
    writer = MemmapStorage(tmp_path / "a")
    writer.extend(trajectory_rows(0, 14, steps=7))
    value = writer.overlay("value", torch.int64)
    value[:] = torch.arange(14) + 1

    def on(*_: int) -> None:
        if len(writer) < 40:
            writer.extend(trajectory_rows(len(writer), 7, steps=7))
            value[-7:] = len(writer)
        else:
            writer.close()

    with open_storage(tmp_path / "a") as storage:
        storage.copy_to(tmp_path / "copy", follow=True, progress=on)
        with open_storage(tmp_path / "copy") as copy:
            assert len(copy) == 42
            assert copy.overlay("value")[:].equal(storage.overlay("value")[:])


def test_those_that_are_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names select overlays as they select columns.

    A copy of several storages has the common ones.
    """
    make(tmp_path / "a", 0)
    with MemmapStorage(tmp_path / "b") as storage:
        storage.extend(trajectory_rows(1000, 20, steps=7))
        storage.overlay("value", torch.float32)
        storage.overlay("other", torch.float32)[:] = 2
    a, b = str(tmp_path / "a"), str(tmp_path / "b")

    def copied(*sources: str, **options: str) -> tuple[set[str], set[str]]:
        more = [word for name, value in options.items() for word in (f"--{name}", value)]
        place = tmp_path / f"copy-{len([*tmp_path.iterdir()])}"
        words = ["copy", *sources, str(place), *more, "--json"]
        assert main([*words, "--dry-run"]) == 0
        would = json.loads(capsys.readouterr().out)
        assert main(words) == 0
        said = json.loads(capsys.readouterr().out)
        assert (would["overlays"], would["nbytes"]) == (said["overlays"], said["nbytes"])
        with open_storage(place) as copy:
            there = {each if isinstance(each, str) else "/".join(each) for each in copy.overlays}
        assert there == {*said["overlays"]}
        return there, {*said["overlays_left_out"]}

    assert copied(a) == ({"value", "next/pair"}, set())
    assert copied(a, drop="next/pair") == ({"value"}, {f"{a}: next/pair"})
    assert copied(a, columns="observation,next/pair") == ({"next/pair"}, {f"{a}: value"})
    assert copied(a, columns="observation") == (set(), {f"{a}: value", f"{a}: next/pair"})
    assert copied(a, b) == ({"value", "next/pair", "other"}, {f"{b}: value"})
    assert copied(a, b, columns="observation,other") == (
        {"other"},
        {f"{a}: value", f"{a}: next/pair", f"{b}: value"},
    )
    assert copied(a, b, drop="value,other") == (
        {"next/pair"},
        {f"{a}: value", f"{b}: value", f"{b}: other"},
    )
    assert main(["copy", a, b, str(tmp_path / "shown")]) == 0
    out = capsys.readouterr().out
    assert "with overlays next/pair, value, other\n" in out
    assert f"not copied: overlay {b}: value\n" in out
    with open_storage(a) as storage, pytest.raises(ColumnsMissing, match=r"got other\."):
        storage.copy_to(tmp_path / "none", drop=["other"])
    with open_storage(a) as storage:
        plain = storage.copy_to(tmp_path / "dry", dry_run=True, columns=["observation"])
        wide = storage.copy_to(tmp_path / "dry", dry_run=True, columns=["observation", "value"])
    assert wide.nbytes - plain.nbytes == 4096 + ROWS * 24


def test_one_that_is_damaged(tmp_path: Path) -> None:
    make(tmp_path / "a", 0)
    (tmp_path / "a/value.overlay").write_bytes(b"no overlay")
    with open_storage(tmp_path / "a") as storage:
        with pytest.raises(DamagedOverlay, match="drop the overlay"):
            storage.copy_to(tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
        assert storage.copy_to(tmp_path / "copy", drop=["value"]).overlays == ("next/pair",)


def killed_at(link: int, folder: Path) -> int:
    """Copy to an HDF5 file and exit at the ``link``-th call of `os.link`.

    Return the exit status.
    """

    def copy() -> None:
        links, real = iter(range(99)), os.link

        def counted(*of: Any, **more: Any) -> None:
            if next(links) == link:
                os._exit(3)
            real(*of, **more)

        atomic_create.os.link = counted  # type: ignore[assignment,attr-defined]
        with open_storage(folder / "a") as storage:
            storage.copy_to(folder / "copy.h5")

    return os.waitstatus_to_exitcode(os.waitpid(forked(copy), 0)[1])


def kill_at_each_name(folder: Path) -> list[bool]:
    """End a copy at each link that it makes. Return whether each left other files behind."""
    found = []
    with open_storage(folder / "a") as storage:
        for link in range(99):
            status = killed_at(link, folder)
            assert (folder / "copy.h5").exists() == (status == 0)
            if status == 0:
                break
            there = {each.name for each in folder.glob("copy.h5.*")} - {NOTES}
            found.append(bool(there))
            if not found[-1]:
                continue
            storage.copy_to(folder / "copy.h5", drop=["value", NESTED])
            assert verify(folder / "copy.h5", skip=["observations", "nan"]).sound
            for each in folder.glob("copy.h5*"):
                assert not each.name.endswith(".overlay"), f"{each} is of the copy before"
                if each.name != NOTES:
                    each.unlink()
    return found


def test_names_that_a_killed_copy_gave(tmp_path: Path) -> None:
    """An HDF5 copy first names the files next to it. Without the main file, they are removed."""
    make(tmp_path / "a", 0, 20)
    (tmp_path / NOTES).write_text("mine")
    left = in_a_process(kill_at_each_name, tmp_path)
    assert len(left) >= 4
    assert left == [False] + [True] * (len(left) - 1)
    assert (tmp_path / NOTES).read_text() == "mine"
