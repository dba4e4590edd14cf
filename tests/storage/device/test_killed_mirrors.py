"""Test kill -9 of runs with a mirrored ring: committed rows are right, and the runs resume.

``TALLYROLL_KILLS`` sets the number of kills for each lag, 3 by default. Many kills take longer than
pytest's own limit: pass ``-o faulthandler_timeout=0``.
"""

from __future__ import annotations

import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from device_runs_kit import collect_mirrored

from tallyroll.storage import DeviceStorage, open_storage, verify

from collect_kit import check_numbers
from fork_server import warm_fork_server
from oracles import check_rows
from storage_contract import WAIT_SECONDS, process
from worker_kit import DISABLED, LENGTHS, NEXT

KILLS = int(os.environ.get("TALLYROLL_KILLS", "3"))
FRAMES = 1201
KILLS_A_RUN = 3
RING = 150


def heads_until_killed(path: Path, source: str, lag: int, batches: int, seconds: float) -> int:
    """Collect or resume a run; return the last head of its ring that the child reported.

    Kill it `seconds` after that many batches. It may end before.
    """
    with process(collect_mirrored, path, source, FRAMES, lag, RING) as (child, connection):
        head = _last_head(connection, batches)
        time.sleep(seconds)
        child.kill()
        child.join(WAIT_SECONDS)
        return max(head, _last_head(connection, FRAMES))


def _last_head(connection: Connection, batches: int) -> int:
    head = 0
    for _ in range(batches):
        try:
            assert connection.poll(WAIT_SECONDS), "the run said nothing"
            head = connection.recv()
        except EOFError:
            break
    return head


def check(path: Path) -> int:
    """Check each row on disk, and a ring that is filled from it; return the number of rows."""
    with open_storage(path) as disk:
        head, first = disk.head, [run["first_row"] for run in disk.manifest["runs"]]
        parts = [
            disk.get(slice(a, b)) for a, b in zip(first, [*first[1:], head], strict=True) if a < b
        ]
        if parts:
            ids, step = (
                np.asarray(disk.column(("collector", name))) for name in ("traj_ids", "step")
            )
            check_numbers(ids, step)
        used = -1
        for part in parts:
            check_rows(part, LENGTHS, ends="mixed", from_start=True)
            assert int(part["collector", "traj_ids"].min()) > used, "an id was used again"
            used = int(part["collector", "traj_ids"].max())
        newest = disk.in_order()[-RING:] if head else None
    assert not verify(path).findings
    with DeviceStorage(max_size=RING, device="cpu", mirror=path) as ring:
        assert ring.head == ring.committed == head
        if newest is not None:
            there = ring.in_order()
            assert len(there) == len(newest)
            for key, leaf in newest.items(True, True):
                assert torch.equal(leaf, there[key]), key
    return head


@pytest.mark.slow
@pytest.mark.timeout(120 + 20 * KILLS)
@pytest.mark.parametrize("lag", [0, 1000])
def test_kill_minus_nine_at_random_points(lag: int, tmp_path: Path) -> None:
    warm_fork_server("device_runs_kit")
    chance, killed, run, lost = random.Random(lag), 0, 0, 0
    while killed < KILLS:
        path, source = tmp_path / f"run-{run}", (NEXT, DISABLED)[run % 2]
        run += 1
        for _ in range(KILLS_A_RUN):
            batches = chance.choice([0, 1, chance.randint(1, FRAMES // 14)])
            head = heads_until_killed(path, source, lag, batches, chance.uniform(0, 0.02))
            killed += 1
            if not (path / "manifest.json").exists():
                assert head == 0
                continue
            committed = check(path)
            assert committed >= head - lag, "rows beyond the lag were lost"
            lost += max(0, head - committed)
        heads_until_killed(path, source, lag, FRAMES, 0)
        assert check(path) == FRAMES
    assert (lost > 0) is (lag > 0), "no kill came while the ring was ahead"
