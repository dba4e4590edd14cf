"""Test kill -9 of a collecting process at any moment: committed rows are right, and it resumes.

``TALLYROLL_KILLS`` sets the number of kills, 10 by default.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.storage import MemmapStorage, open_storage

from collect_kit import check_numbers
from oracles import check_rows
from warm_cli import LENGTHS, WarmServer

KILLS = int(os.environ.get("TALLYROLL_KILLS", "10"))
KILLS_A_CHAIN = 4
FRAMES = 3001
LANES = 3
COLLECT = (
    *("collect", "warm_cli:Oracle-v0", "--num-envs", LANES, "--frames", FRAMES, "--out", "data"),
    *("--frames-per-batch", 7, "--env-kwargs", json.dumps({"lanes": LANES, "kind": "seeded"})),
)


def incarnations(storage: MemmapStorage) -> list[Any]:
    """Return the rows of each process that wrote some."""
    first = [run["first_row"] for run in storage.manifest["runs"]]
    stops = [*first[1:], storage.head]
    return [storage.get(slice(a, b)) for a, b in zip(first, stops, strict=True) if a < b]


def check(storage: MemmapStorage) -> None:
    """Check that each committed row is a real transition, occurs once, and has the right number."""
    parts = incarnations(storage)
    assert sum(len(part) for part in parts) == storage.head
    for part in parts:
        check_rows(part, LENGTHS, kind="seeded", ends="mixed", from_start=True)
    if not parts:
        return
    ids, step = (np.asarray(storage.column(("collector", name))) for name in ("traj_ids", "step"))
    check_numbers(ids, step)
    for earlier, later in itertools.pairwise(parts):
        ours, theirs = earlier["collector", "traj_ids"], later["collector", "traj_ids"]
        assert int(ours.max()) < int(theirs.min()), "an id was used by two processes"
    check_noise(storage)


def check_noise(storage: MemmapStorage) -> None:
    """Check that no two processes drew equal noise: pairs of float32 do not repeat by chance."""
    columns = [storage.column(key)[:, 3] for key in ("observation", ("next", "observation"))]
    assert len(np.unique(np.stack(columns, -1), axis=0)) == storage.head, "data was repeated"


def head_of(folder: Path) -> int | None:
    """Return the number of committed rows after checking them, or None without a storage."""
    if not (folder / "data" / "manifest.json").exists():
        return None
    with open_storage(folder / "data") as storage:
        check(storage)
        return storage.head


def rows_in(folder: Path) -> int:
    """Return the number of committed rows without checking them."""
    if not (folder / "data" / "manifest.json").exists():
        return 0
    with open_storage(folder / "data") as storage:
        return storage.head


def kill_after(
    server: WarmServer, folder: Path, seconds: float, *more: str, wait: bool = False
) -> int:
    """Collect or resume, and kill that process. Return its exit status.

    ``wait`` until it has committed some rows.
    """
    command = server.start(folder, *COLLECT, "--resume", *more)
    if wait:  # on a busy machine, most kills would precede the first commit
        before, deadline = rows_in(folder), time.monotonic() + 60
        while rows_in(folder) == before < FRAMES:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    time.sleep(seconds)
    command.kill()
    status = command.wait()
    assert status in (0, -signal.SIGKILL), command.err
    return status


def finish(server: WarmServer, folder: Path) -> dict[str, int]:
    """Resume to the end. Return the ledger."""
    command = server.run(folder, *COLLECT, "--resume")
    assert head_of(folder) == FRAMES
    again = server.run(folder, *COLLECT, "--resume")
    assert "is complete already" in again.err
    with open_storage(folder / "data") as storage:
        assert storage.record is not None
        ledger = json.loads(storage.record[1])["ledger"]
        runs = storage.manifest["runs"]
    assert [run["incarnation"] for run in runs] == list(range(len(runs)))
    if len(runs) > 1 and "complete already" not in command.err:
        assert f"resumed {'once' if len(runs) == 2 else f'{len(runs) - 1} times'}" in command.out
    return ledger


@pytest.fixture(scope="module")
def full_run(server: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return the seconds of an undisturbed run.

    Take the faster of two, as the machine may be busy.
    """
    seconds = []
    for _ in range(2):
        folder = tmp_path_factory.mktemp("undisturbed")
        began = time.monotonic()
        server.run(folder, *COLLECT)
        seconds.append(time.monotonic() - began)
        assert head_of(folder) == FRAMES
    return min(seconds)


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * KILLS)
def test_kill_minus_nine_at_random_points(
    server: WarmServer, full_run: float, tmp_path: Path
) -> None:
    chance = random.Random(20)
    killed, heads = 0, []
    chain = 0
    while killed < KILLS:
        folder = tmp_path / f"chain-{chain}"
        chain += 1
        more = ("--durability", "power") if chain % 3 == 0 else ()
        before = 0
        for place in range(KILLS_A_CHAIN):
            # The first kill of a chain may hit the startup. Later ones reach the end of the run.
            share = chance.uniform(0, 0.3 + 0.25 * place)
            seconds, wait = share * full_run, place % 2 == 1
            status = kill_after(server, folder, seconds, *more, wait=wait)
            killed += status == -signal.SIGKILL
            head = head_of(folder)
            heads.append(head)
            assert (head or 0) >= before, "committed rows were lost"
            before = head or 0
        ledger = finish(server, folder)
        assert ledger["stored"] == FRAMES
        assert ledger["slots"] == ledger["executed"] + ledger["reset_slots"]
        kept = ledger["stored"] + ledger["discarded"] + ledger["carried"] + ledger["lost"]
        assert ledger["executed"] == kept
        assert ledger["carried"] == 0
    inside = [head for head in heads if head and head < FRAMES]
    assert len(inside) >= KILLS // 4, f"too few kills hit the middle of a run: {heads}"


def test_a_kill_before_the_first_commit(server: WarmServer, tmp_path: Path) -> None:
    slow = {"lanes": LANES, "kind": "seeded", "slow": 0.05}
    words = [json.dumps(slow) if word == COLLECT[-1] else word for word in COLLECT]
    command = server.start(tmp_path, *words)
    deadline = time.monotonic() + 30
    while not (tmp_path / "data" / "manifest.json").exists():
        assert time.monotonic() < deadline, command.err
        time.sleep(0.005)
    command.kill()
    assert command.wait() == -signal.SIGKILL
    assert head_of(tmp_path) == 0
    resumed = server.start(tmp_path, *COLLECT, "--resume")
    assert resumed.wait() == 1
    assert "made by another environment: kwargs was" in resumed.err
    assert head_of(tmp_path) == 0
