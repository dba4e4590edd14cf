"""Logs have each row at a multiple once, however a run ends, and collecting continues."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.collector import (
    ArgumentError,
    LogWarning,
    MissingExtra,
    RunLog,
    SyncCollector,
    evaluate,
    load_checkpoint,
    save_checkpoint,
)
from tallyroll.collector.ext.logs.target import CsvLog
from tallyroll.storage import MemmapStorage
from tallyroll.storage.ext.testing.exchange_contract import file_size_limit

from worker_kit import DISABLED, LANES, factory

RUN: dict[str, Any] = {"frames_per_batch": 10, "seed": 3}


def collector(total: int, **more: Any) -> SyncCollector:
    return SyncCollector(factory(DISABLED, 0, LANES), total_frames=total, **RUN, **more)


def log(run: SyncCollector, target: Any, every: int = 25) -> SyncCollector:
    with run, RunLog(run, target, every=every) as rows:
        for _ in run:
            rows.update()
    return run


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def frames_of(path: Path) -> list[int]:
    return [int(line["frames"]) for line in lines_of(path)]


def test_a_row_at_each_multiple_and_at_the_end(tmp_path: Path) -> None:
    path, rows = tmp_path / "logs" / "run.csv", []
    with collector(94) as run, RunLog(run, path, every=25) as one, RunLog(run, rows.append) as two:
        for number, _ in enumerate(run):
            one.update()
            two.update(loss=number / 2)
    assert frames_of(path) == [30, 50, 80, 94]
    assert [row["frames"] for row in rows] == [94], "every 1,000 by default"
    last, numbers = lines_of(path)[-1], run.metrics()
    assert {name: float(last[name]) for name in numbers} == numbers
    assert int(last["seed"]) == 3
    assert lines_of(path)[0].keys() == {"frames", "seconds", *numbers, "seed"}
    assert rows[0]["loss"] == 4.5
    assert {**numbers, "seed": 3}.items() <= rows[0].items()


def test_numbers_that_are_unknown_are_empty(tmp_path: Path) -> None:
    long = SyncCollector(factory(DISABLED, 0, 1, lengths=[[99]]), total_frames=20, **RUN)
    log(long, tmp_path / "run.csv", every=10)
    assert [line["return_mean"] for line in lines_of(tmp_path / "run.csv")] == ["", ""]


def cells(path: Path, *names: str) -> list[tuple[str, ...]]:
    return [tuple(line[name] for name in names) for line in lines_of(path)]


def test_refused_numbers_cost_no_row(tmp_path: Path) -> None:
    with collector(40) as run, RunLog(run, tmp_path / "run.csv", every=10) as rows:
        for number, _ in enumerate(run):
            if number == 1:
                with pytest.raises(
                    ArgumentError, match=r"names that are not reserved, got frames\."
                ):
                    rows.update(frames=1.0, loss=8.0)
                with pytest.raises(ArgumentError, match="log: expected numbers, got loss='high'"):
                    rows.update(loss="high")  # type: ignore[arg-type]
                with pytest.raises(ArgumentError, match=r"names without line breaks, got 'a\\nb'"):
                    rows.update(**{"a\nb": 1.0})
            else:
                rows.update(loss=number)
    assert cells(tmp_path / "run.csv", "frames", "loss") == [
        ("10", "0"), ("30", "2"), ("40", "3")
    ]  # fmt: skip


@pytest.mark.parametrize("linked", [False, True])
def test_names_may_come_in_any_row(tmp_path: Path, linked: bool) -> None:
    """A new name leaves an empty cell in earlier rows and in rows without it."""
    path, rows = tmp_path / "run.csv", []
    if linked:
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere" / "rows.csv")
    nan = np.nan  # a value of the caller, which is not missing
    given = [{}, {"loss": 1.0}, {"a, b": 2.0, "loss": nan}, {}, {"other": 4.0}, {"loss": 5.0}]
    with collector(60) as run, RunLog(run, path, every=10) as one, RunLog(
        run, rows.append, every=10
    ) as two:  # fmt: skip
        for numbers, _ in zip(given, run, strict=True):
            one.update(**numbers)
            two.update(**numbers)
    assert cells(path, "frames", "loss", "a, b", "other") == [
        ("10", "", "", ""),
        ("20", "1.0", "", ""),
        ("30", "nan", "2.0", ""),
        ("40", "", "", ""),
        ("50", "", "", "4.0"),
        ("60", "5.0", "", ""),
    ]
    assert path.is_symlink() == linked
    assert [
        {name: row[name] for name in row if name in ("loss", "a, b", "other")} for row in rows
    ] == given
    with path.open(newline="") as file:
        assert {len(line) for line in csv.reader(file)} == {len(rows[0]) + 3}


def test_numbers_wait_for_the_row_that_is_due(tmp_path: Path) -> None:
    """Calls between two rows accumulate, and each value is written once."""
    path = tmp_path / "run.csv"
    with collector(94) as run, RunLog(run, path, every=25) as rows:
        for number, _ in enumerate(run):
            rows.update(loss=number)
            if number == 0:
                rows.update(eval_return=7.0)
    assert cells(path, "frames", "loss", "eval_return") == [
        ("30", "2", "7.0"), ("50", "4", ""), ("80", "7", ""), ("94", "9", "")
    ]  # fmt: skip


def test_an_evaluation_joins_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    result = evaluate(None, factory(DISABLED, 0, LANES), episodes=4, seed=0)
    with collector(60) as run, RunLog(run, path, every=20) as rows:
        for number, _ in enumerate(run):
            if number == 2:
                rows.evaluation(result)
            rows.update()
    first, second, third = lines_of(path)
    assert {name for name, value in first.items() if value == ""} >= {
        "eval_frames",
        "eval_episodes",
    }
    assert (second["eval_frames"], second["eval_episodes"]) == ("30", "4")
    assert float(second["eval_return_mean"]) == result.mean_return == np.mean(result.returns)
    assert float(second["eval_return_std"]) == np.std([e.total_return for e in result.episodes])
    assert float(second["eval_length_mean"]) == np.mean(result.lengths)
    assert third["eval_frames"] == ""


def test_numbers_after_the_last_row_are_written_at_the_end(tmp_path: Path) -> None:
    path, rows = tmp_path / "run.csv", []
    with collector(20) as run, RunLog(run, path, every=10) as one, RunLog(
        run, rows.append, every=10
    ) as two:  # fmt: skip
        for _ in run:
            one.update()
            two.update()
        one.update(score=9)
        two.update(score=9)
    assert cells(path, "frames", "score") == [("10", ""), ("20", ""), ("20", "9")]
    assert [row.get("score") for row in rows] == [None, None, 9]


def test_a_resumed_run_adds_names(tmp_path: Path) -> None:
    path, storage = tmp_path / "run.csv", tmp_path / "rows"
    log(collector(50, storage=storage), path)
    with collector(80, storage=storage, resume=True) as run, RunLog(run, path, every=25) as rows:
        for number, _ in enumerate(run):
            rows.update(late=number)
    assert cells(path, "frames", "late") == [("30", ""), ("50", ""), ("80", "2")]


@pytest.mark.parametrize("opens", ["before the load", "after the load"])
@pytest.mark.parametrize("saved", [20, 60])
def test_rows_of_transitions_that_a_checkpoint_takes_back(
    tmp_path: Path, opens: str, saved: int
) -> None:
    path, rows = tmp_path / "run.csv", list[dict[str, Any]]()
    with MemmapStorage(tmp_path / "rows") as storage:
        with collector(200, storage=storage) as run, RunLog(run, path, every=25) as first:
            for number, _ in enumerate(run):
                first.update(number=number)
                if run.ledger.stored == saved:
                    save_checkpoint(tmp_path / "saved", collector=run)
                if number == 10:  # as a kill would do
                    break
        assert frames_of(path) == [30, 50, 80, 100, 110]
        with collector(200, storage=storage, resume=True) as run:
            if opens == "after the load":
                load_checkpoint(tmp_path / "saved", collector=run)
            with RunLog(run, path, every=25) as second, RunLog(run, rows.append, every=25) as third:
                if opens == "before the load":
                    load_checkpoint(tmp_path / "saved", collector=run)
                assert run.ledger.stored == saved
                for number, _ in enumerate(run):
                    second.update(number=100 + number)
                    third.update()
    found = [(int(frames), int(number)) for frames, number in cells(path, "frames", "number")]
    assert [frames for frames, _ in found] == [30, 50, 80, 100, 130, 150, 180, 200]
    assert all((number >= 100) == (frames > saved) for frames, number in found)
    assert [row["frames"] for row in rows] == [frames for frames, _ in found if frames > saved]


def test_a_full_disk_keeps_the_rows_while_columns_are_added(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    with collector(40) as run, RunLog(run, path, every=10) as rows:
        for number, _ in enumerate(run):
            if number == 2:
                whole = path.read_bytes()
                with (
                    file_size_limit(len(whole) + 2),
                    pytest.warns(LogWarning, match="cannot be written"),
                ):
                    rows.update(late=2.0)
                assert path.read_bytes() == whole
                assert [*tmp_path.iterdir()] == [path]
            else:
                rows.update()
    assert cells(path, "frames", "late") == [("10", ""), ("20", ""), ("30", "2.0"), ("40", "")]


def test_a_file_that_got_columns_is_locked_as_before(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.touch(mode=0o640)
    with collector(30) as run, RunLog(run, path, every=10) as rows:
        for number, _ in enumerate(run):
            rows.update(**{f"n{number}": 1.0})
            with pytest.raises(ArgumentError, match="another run is writing to"):
                CsvLog(str(path))
    assert path.stat().st_mode & 0o777 == 0o640
    CsvLog(str(path)).close()


# --- continuing a run -----------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["", "6", "60,1.0,6", "a row too few"])
def test_a_resumed_run_goes_on_after_its_rows(tmp_path: Path, left: str) -> None:
    """A kill left half a line, or rows of the storage that the log lacks."""
    path, storage = tmp_path / "run.csv", tmp_path / "rows"
    log(collector(50, storage=storage), path)
    content = path.read_text()
    if left == "a row too few":
        content = "".join(content.splitlines(keepends=True)[:-1])
    path.write_text(content + left.partition("a")[0])
    log(collector(94, storage=storage, resume=True), path)
    assert frames_of(path) == [30, 50, 80, 94]
    assert path.read_text().endswith("\n")
    seconds = [float(line["seconds"]) for line in lines_of(path)]
    assert seconds == sorted(seconds)


def test_rows_of_lost_transitions_are_cut_off(tmp_path: Path) -> None:
    """After a power cut, the log may have rows that the storage lost."""
    path, storage = tmp_path / "run.csv", tmp_path / "rows"
    log(collector(50, storage=storage), path, every=10)
    content = path.read_text()
    path.write_text(content + content.splitlines()[-1].replace("50", "70", 1) + "\n")
    log(collector(80, storage=storage, resume=True), path, every=10)
    assert frames_of(path) == [10, 20, 30, 40, 50, 60, 70, 80]


def test_rows_of_another_run_are_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    log(collector(30), path)
    content = path.read_text()
    for seed in (3, 4):
        other = SyncCollector(
            factory(DISABLED, 0, LANES), total_frames=30, frames_per_batch=10, seed=seed
        )
        with (
            other,
            pytest.raises(ArgumentError, match=r"another run, up to transition 30, .* has 0"),
        ):
            RunLog(other, path)
    assert path.read_text() == content


def test_two_runs_to_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "run.csv")
    with closing(CsvLog(path)), pytest.raises(ArgumentError, match=r"another run is writing to .*"):
        CsvLog(path)
    CsvLog(path).close()


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "frames\n1\n", "words", "frames,seconds,x\n"])
def test_a_file_of_others_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.csv"
    path.write_text(content)
    with pytest.raises(ArgumentError, match="is not a log of a run"):
        CsvLog(str(path))
    assert path.read_text() == content


def test_what_is_no_target(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "folder.csv").mkdir()
    wanted = "expected a path that ends in .csv, tensorboard:DIR, wandb:PROJECT, or a function"
    with collector(10) as run:
        for target, message in {
            "run.txt": f"{wanted}.*got 'run.txt'",
            "tensorbord:x": wanted,
            "wandb:": "without a folder or project",
            str(tmp_path / "pipe.csv"): "is not a regular file",
            str(tmp_path / "folder.csv"): "cannot be opened: Is a directory",
            "/proc/none/run.csv": "cannot be opened",
        }.items():
            with pytest.raises(ArgumentError, match=message):
                RunLog(run, target)
        with pytest.raises(ArgumentError, match=wanted):
            RunLog(run, 3)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="every: expected an integer above 0, got 0"):
            RunLog(run, print, every=0)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_an_extra_that_is_not_there(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with collector(10) as run, pytest.raises(MissingExtra, match=rf'pip install .*\[{name}\]"$'):
        RunLog(run, f"{name}:x")


# --- rows that cannot be written ------------------------------------------------------------------


def test_collecting_goes_on_where_a_row_cannot_be_written(tmp_path: Path) -> None:
    """The system first writes a part of a line and refuses the rest.

    Later it accepts all writes.
    """
    path = tmp_path / "run.csv"
    with MemmapStorage(tmp_path / "rows") as storage:
        run = collector(50, storage=storage)
        with run, RunLog(run, path, every=10) as rows:
            for number, _ in enumerate(run):
                if number == 0:
                    rows.update()
                    whole = path.read_bytes()
                elif number in (1, 2):
                    with file_size_limit(len(whole) + 5):
                        if number == 1:
                            with pytest.warns(LogWarning, match=r"run.csv cannot be written \(OS"):
                                rows.update()
                        else:
                            rows.update()  # without another warning
                    assert path.read_bytes() == whole
                else:
                    rows.update()
        assert len(storage) == 50
    assert frames_of(path) == [10, 20, 30, 40, 50]


def test_an_error_of_a_function_is_one_warning() -> None:
    def refuse(row: dict[str, float]) -> None:
        raise RuntimeError(f"not {row['frames']}")

    with pytest.warns(LogWarning, match=r"the function cannot .* \(RuntimeError: not 30\)") as seen:
        assert log(collector(94), refuse).ledger.stored == 94
    assert len(seen) == 1


# --- the command ----------------------------------------------------------------------------------


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tallyroll.collector.cli", "collect", *words]


@pytest.mark.slow
def test_a_killed_command_leaves_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path, out = tmp_path / "run.csv", str(tmp_path / "rows")
    more = ["--out", out, "--log", str(path), "--log-every", "500", "--quiet"]
    words = ["CartPole-v1", "--frames", "1e8", "--num-envs", "4", "--frames-per-batch", "100"]
    process = subprocess.Popen(command(*words, *more))
    while process.poll() is None and (not path.exists() or path.stat().st_size < 3000):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert path.read_bytes().endswith(b"\n")
    with MemmapStorage(out, mode="append") as storage:
        total = len(storage) + 1000
    assert subprocess.run(command("--resume", "--frames", f"{total}", *more)).returncode == 0
    wanted = [*range(500, total, 500), total]
    assert frames_of(path) == wanted
