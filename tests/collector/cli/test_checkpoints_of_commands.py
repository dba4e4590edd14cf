"""``--checkpoint``: a killed or interrupted command continues from its newest checkpoint.

``TALLYROLL_KILLS`` is the number of kills, 6 by default.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tallyroll.collector.cli.parser import make_parser
from tallyroll.storage import open_storage, verify

from collect_kit import check_numbers
from oracles import check_rows
from warm_cli import LENGTHS, WarmServer

KILLS = int(os.environ.get("TALLYROLL_KILLS", "6"))
FRAMES, LANES, EVERY = 3001, 3, 210
COLLECT = (
    *("collect", "warm_cli:Oracle-v0", "--num-envs", LANES, "--frames", FRAMES, "--out", "data"),
    *("--frames-per-batch", 7, "--env-kwargs", json.dumps({"lanes": LANES, "kind": "seeded"})),
    *("--checkpoint", "saved", "--checkpoint-every", EVERY, "--checkpoint-on", "SIGUSR1"),
)


def check(folder: Path) -> int:
    """Check that each row is correct and occurs once in the lanes of its run.

    Return the number of rows.
    """
    with open_storage(folder / "data") as storage:
        firsts = [run["first_row"] for run in storage.runs]
        for first, stop in zip(firsts, [*firsts[1:], storage.head], strict=True):
            if first < stop:
                rows = storage.get(slice(first, stop))
                check_rows(rows, LENGTHS, kind="seeded", ends="mixed")
        ids, step = (
            np.asarray(storage.column(("collector", name))) for name in ("traj_ids", "step")
        )
        check_numbers(ids, step)
        head = storage.head
    assert not verify(folder / "data").findings
    return head


def newest(folder: Path) -> int:
    names = sorted(path.name for path in (folder / "saved").glob("0*"))
    return int(names[-1].rpartition("-")[2]) if names else 0


@pytest.mark.timeout(120 + 10 * KILLS)
def test_killed_or_asked_to_end_it_goes_on(server: WarmServer, tmp_path: Path) -> None:
    chance, ended = random.Random(3), []
    for number in range(KILLS):
        command = server.start(tmp_path, *COLLECT, "--resume")
        before, deadline = newest(tmp_path), time.monotonic() + 60
        while newest(tmp_path) == before < FRAMES and number % 3:
            assert time.monotonic() < deadline, command.err
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.05))
        which = chance.choice([signal.SIGKILL, signal.SIGUSR1, signal.SIGTERM])
        command.kill(which)
        status = command.wait()
        if not (tmp_path / "data" / "manifest.json").exists():
            continue
        head = check(tmp_path)
        ended.append(status)
        if status == 128 + which:  # it had time to save
            assert newest(tmp_path) == head
            assert "Continue with" in command.err
            assert "--checkpoint saved" in command.err
        assert newest(tmp_path) <= head
    last = server.run(tmp_path, *COLLECT, "--resume")
    assert check(tmp_path) == newest(tmp_path) == FRAMES
    assert len(list((tmp_path / "saved").glob("0*"))) == 2
    with open_storage(tmp_path / "data") as storage:
        assert storage.record is not None
        ledger = json.loads(storage.record[1])["ledger"]
    assert ledger["stored"] == FRAMES
    assert f"{FRAMES:,} frames of" in last.out or "complete already" in last.err


def test_rows_that_came_later_are_kept_where_that_is_asked_for(
    server: WarmServer, tmp_path: Path
) -> None:
    server.run(tmp_path, *COLLECT[:4], "--frames", 700, *COLLECT[6:])
    server.run(tmp_path, *COLLECT[:4], "--frames", 900, "--out", "data", "--resume")
    command = server.run(tmp_path, *COLLECT, "--resume", "--checkpoint-rows", "keep")
    assert "200 later rows kept" in command.err
    assert check(tmp_path) == FRAMES
    again = server.start(tmp_path, *COLLECT[:6], *COLLECT[6:8], *COLLECT[12:], "--append")
    assert again.wait() == 1
    assert "saved already has checkpoints of another run" in again.err


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--checkpoint-every 5", "needs --checkpoint"),
        ("--checkpoint-on SIGUSR1", "needs --checkpoint"),
        ("--checkpoint c --checkpoint-rows keep", "needs --resume"),
        ("--checkpoint c --checkpoint-on SIGKILL", "expected SIGTERM, SIGUSR1 or SIGUSR2, got"),
        ("--checkpoint c --checkpoint-every 0", "--checkpoint-every"),
    ],
)
def test_mistakes(words: str, match: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tallyroll.collector.cli.collect import run

    with pytest.raises(SystemExit):
        run(
            make_parser().parse_args(
                ["collect", "a", "--frames", "5", "--out", "b", *words.split()]
            )
        )
    assert match in capsys.readouterr().err
