"""``tallyroll watch`` beside a writer in another process, and on storages that nobody writes."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.collector.cli.inspection.watch import sparkline
from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.errors import OpenError

from warm_cli import Command, WarmServer

SECONDS = 60.0
SLOW = json.dumps({"lanes": 2, "slow": 0.002})


def begun(server: WarmServer, tmp_path: Path, frames: int, *more: object) -> Command:
    """Start a collection into ``tmp_path/w/data``, and wait for its first rows."""
    words = ("warm_cli:Oracle-v0", "--env-kwargs", SLOW, "--frames", frames, "--num-envs", 2)
    words += ("--frames-per-batch", 20, "--out", "data", "--seed", 0, *more)
    writer = server.start(tmp_path / "w", "collect", *words)
    until = time.monotonic() + SECONDS
    while True:
        assert time.monotonic() < until, writer.err
        with suppress(OpenError), open_storage(tmp_path / "w" / "data", mode="read") as storage:
            if storage.head:
                return writer
        time.sleep(0.02)


def watching(server: WarmServer, tmp_path: Path, *more: object) -> Command:
    words = ("watch", tmp_path / "w" / "data", "--json", "--interval", 0.1, *more)
    return server.start(tmp_path / "r", *words)


def looks(command: Command, count: int = 0) -> list[dict[str, Any]]:
    """Return the looks so far, once there are ``count``."""
    until = time.monotonic() + SECONDS
    while command.out.count("\n") < count:
        assert time.monotonic() < until, command.err
        time.sleep(0.02)
    return [json.loads(line) for line in command.out.splitlines()]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_is_watched_until_it_is_complete(
    server: WarmServer, tmp_path: Path, workers: int
) -> None:
    more = ("--workers", 2, "--transport", "thread") if workers else ()
    writer = begun(server, tmp_path, 600, *more)
    watch = watching(server, tmp_path)
    assert writer.wait(SECONDS) == 0
    assert watch.wait(SECONDS) == 0
    found = looks(watch)
    frames = [each["frames"] for each in found]
    assert len({*frames}) > 2
    assert frames == sorted(frames)
    assert {each["state"] for each in found[:-1]} <= {"running", "waiting"}
    for each in (each for each in found[:-1] if each["rate"]):
        assert 0 < each["rate"] < 2 / 0.002
        assert each["seconds_left"] == pytest.approx((600 - each["frames"]) / each["rate"])
    last = found[-1]
    assert (last["state"], last["frames"], last["asked"]) == ("complete", 600, 600)
    assert (last["lanes"], last["workers"], last["seconds_left"]) == (2, workers, None)
    with open_storage(tmp_path / "w" / "data") as storage:
        table = storage.trajectories.table
        ended = table[np.isin(storage.trajectories.ends, ["terminated", "truncated"])]
        returns = ended["return"][np.argsort(ended["last_row"])]
    assert last["episodes"] == len(ended)
    assert last["return_mean"] == pytest.approx(returns[-100:].mean())
    assert len(last["returns"]) == min(40, len(returns))
    sizes = [len(each) for each in np.array_split(returns, len(last["returns"]))]
    assert np.average(last["returns"], weights=sizes) == pytest.approx(returns.mean())
    ledger = last["ledger"]
    assert ledger["stored"] == 600
    assert ledger["executed"] == 600 + ledger["discarded"] + ledger["carried"] + ledger["lost"]


def test_it_ends_with_a_killed_writer(server: WarmServer, tmp_path: Path) -> None:
    writer = begun(server, tmp_path, 10**6)
    watch = watching(server, tmp_path)
    looks(watch, 2)
    writer.kill()
    writer.wait(SECONDS)
    assert watch.wait(SECONDS) == 0
    last = looks(watch)[-1]
    assert last["state"] == "killed"
    with open_storage(tmp_path / "w" / "data") as storage:
        assert last["rows"] == last["frames"] == storage.head


def test_ctrl_c_ends_it_and_not_the_run(server: WarmServer, tmp_path: Path) -> None:
    writer = begun(server, tmp_path, 10**6)
    watch = watching(server, tmp_path, "--interval", 1000)
    looks(watch, 1)
    watch.kill(signal.SIGINT)
    assert watch.wait(SECONDS) == 130
    assert watch.err == ""
    os.kill(writer.pid, 0)
    writer.kill(signal.SIGTERM)
    assert writer.wait(SECONDS) == 143


def test_in_a_terminal_the_display_is_updated(server: WarmServer, tmp_path: Path) -> None:
    writer = begun(server, tmp_path, 300)
    mine, theirs = os.openpty()
    try:
        words = ("watch", tmp_path / "w" / "data", "--interval", 0.1)
        watch = server.start(tmp_path / "r", *words, tty=os.ttyname(theirs))
        text = b""
        until = time.monotonic() + SECONDS
        while b"300 of 300 frames" not in text:
            assert time.monotonic() < until, text
            text += os.read(mine, 4096)
        assert watch.wait(SECONDS) == 0
    finally:
        os.close(mine)
        os.close(theirs)
    assert writer.wait(SECONDS) == 0
    assert b"\x1b[1A" in text  # the cursor returns to the first line


def test_a_look_at_a_complete_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SyncCollector(
        "CartPole-v1",
        num_envs=2,
        frames_per_batch=50,
        total_frames=200,
        seed=0,
        storage=tmp_path / "pole\x1b",
    ) as collector:
        collector.collect(200)
    assert main(["watch", str(tmp_path / "pole\x1b")]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    lines = said.splitlines()
    assert lines[0].endswith(r"pole\x1b: complete")
    assert lines[1] == "200 of 200 frames of CartPole-v1"
    metrics = collector.metrics()
    assert lines[2] == (
        f"{metrics['episodes']} episodes, mean return of the last 100: {metrics['return_mean']:.5g}"
    )
    assert lines[3].endswith("  returns")
    assert lines[4].startswith("2 lanes; ")
    assert (
        str(collector.ledger).splitlines()
        == lines[lines.index("Ledger at the last commit") + 1 :][:-1]
    )


def test_a_storage_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        assert (
            main(["watch", str(tmp_path / "rows"), "--once"]) == 1
        )  # not on disk before its schema
        storage.extend({("a",): np.zeros(3, np.float32)})
        assert main(["watch", str(tmp_path / "rows"), "--once", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["state"], facts["frames"], facts["ledger"]) == ("running", 3, None)
    assert main(["watch", str(tmp_path / "rows")]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "3 frames of unknown environment"
    assert main(["watch", str(tmp_path / "gone")]) == 1


def test_rows_of_a_copy_have_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"frames_per_batch": 5, "total_frames": 5, "storage": tmp_path / "run"}
    with SyncCollector("CartPole-v1", **options) as collector:
        collector.collect(5)
    with open_storage(tmp_path / "run") as run, MemmapStorage(tmp_path / "copy") as copy:
        copy.extend(run[:])
    assert main(["watch", str(tmp_path / "copy")]) == 0
    state, rows, why = capsys.readouterr().out.strip().splitlines()
    assert state.endswith("copy: closed")
    assert rows.startswith("5 rows; ")
    assert why.startswith("no counts of a run: rows 0 to 4 were copied from other storages.")
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
    assert "\n1 lane; " in capsys.readouterr().out


def test_sparklines() -> None:
    assert sparkline([0, 7, 3.5, math.nan, 7]) == "▁█▅ █"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([math.nan]) == sparkline([]) == ""
