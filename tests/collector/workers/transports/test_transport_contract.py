"""The contract tests of transports, with processes, threads and a user-defined transport."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tallyroll.collector import ArgumentError, MultiprocessCollector, SyncCollector
from tallyroll.collector.testing.transports import TransportContract
from tallyroll.collector.workers.local.processes import ProcessTransport
from tallyroll.collector.workers.local.threads import ThreadTransport
from tallyroll.collector.workers.transport import Transport
from tallyroll.storage import open_storage

from examples_kit import EXAMPLES
from far_kit import FarThreads
from fork_server import warm_fork_server

command = runpy.run_path(str(EXAMPLES / "cluster" / "workers_by_command.py"))["CommandTransport"]


class TestProcesses(TransportContract):
    def transport(self, jobs: Sequence[bytes]) -> Transport[Any]:
        warm_fork_server()
        return ProcessTransport(jobs, start_method="forkserver", threads=1)


class TestThreads(TransportContract):
    processes = False
    threads = None

    def transport(self, jobs: Sequence[bytes]) -> Transport[Any]:
        return ThreadTransport(jobs)

    def collector(self, create: Any, policy: Any = None, **options: Any) -> MultiprocessCollector:
        return MultiprocessCollector(create, policy, transport="thread", **options)


class TestFarThreads(TransportContract):
    processes = False
    threads = None

    def transport(self, jobs: Sequence[bytes]) -> Transport[Any]:
        return FarThreads(jobs)


@pytest.mark.slow
class TestCommands(TransportContract):
    """Tests of processes by command, each of which spends seconds of CPU time on imports."""

    def transport(self, jobs: Sequence[bytes]) -> Transport[Any]:
        made: Transport[Any] = command(jobs)
        return made


def test_a_transport_of_one_file_is_chosen_as_an_object(tmp_path: Path) -> None:
    """Only the manifest names the transport, and none of our code does.

    A worker by command imports torch. Rows of several: `TestCommands`.
    """
    run: dict[str, Any] = {"num_envs": 3, "frames_per_batch": 40, "total_frames": 101, "seed": 5}
    with SyncCollector("CartPole-v1", **run) as collector:
        one = list(collector)
    with MultiprocessCollector(
        "CartPole-v1", num_workers=1, transport=command, storage=tmp_path / "rows", **run
    ) as collector:
        many = list(collector)
    assert [len(batch) for batch in many] == [40, 40, 21]
    assert all((mine == theirs).all() for mine, theirs in zip(one, many, strict=True))
    with open_storage(tmp_path / "rows") as storage:
        assert storage.runs[0]["call"]["transport"] == "CommandTransport"


def test_what_is_no_transport_is_refused() -> None:
    for wrong in ("socket", 3, None):
        with pytest.raises(ArgumentError, match=r"transport: expected one of .*, or a function"):
            MultiprocessCollector(
                "CartPole-v1",
                num_workers=1,
                frames_per_batch=4,
                total_frames=4,
                transport=wrong,  # type: ignore[arg-type]
            )
    with pytest.raises(ArgumentError, match=r'mp_start_method=.* needs transport="process"'):
        MultiprocessCollector(
            "CartPole-v1",
            num_workers=1,
            frames_per_batch=4,
            total_frames=4,
            transport=command,
            mp_start_method="forkserver",
        )
