"""Test workers in Ray actors: the rows of one process, and exactly N of them despite deaths."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import psutil
import pytest
import ray
import torch
from loopback_kit import (
    KILLS,
    LANES,
    SECONDS_OF_ALL,
    SECONDS_OF_KILLS,
    SEED,
    Killer,
    actors,
    assert_whole,
    collecting,
    inside,
    nothing_left_behind,
    own_ray,
    run_inside,
)
from pixel_kit import assert_frames_show_their_place, stacked

from tallyroll.collector import (
    Actors,
    ArgumentError,
    MultiprocessCollector,
    RayCollector,
    SyncCollector,
    WorkerDied,
    WorkerHung,
    WorkerRaised,
)
from tallyroll.collector.ext.ray import transport as connection
from tallyroll.collector.ext.ray.actor import ActorLanes
from tallyroll.storage import MemmapStorage, ZarrStorage, open_storage, verify
from tallyroll.storage.rows.spaces import space_of

from collect_kit import joined
from oracles import check_rows
from worker_faults_kit import Fault, Faults, check_lives
from worker_faults_kit import factories as faulty
from worker_kit import (
    DISABLED,
    LENGTHS,
    NEXT,
    SAME,
    RecordingPolicy,
    Versioned,
    assert_alike,
    chosen_by,
    collect_all,
    factories,
    sync_collector,
)

__all__ = ["nothing_left_behind"]

_log = logging.getLogger(__name__)
RUN: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 200, "seed": 3, "spares": 0}


@pytest.mark.timeout(SECONDS_OF_ALL + 100)
def test_in_a_network_namespace() -> None:
    run_inside(__file__, "in_step or out_of_step or half_of_new or dies_in_a_step")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with own_ray():
        yield


# --- the rows -------------------------------------------------------------------------------------


@inside
@pytest.mark.parametrize(
    ("source", "options"),
    [(NEXT, {}), (DISABLED, {"surplus": "never_step"}), ("torch", {"init_random_frames": 40})],
)
def test_in_step_rows_are_those_of_one_process(source: str, options: Any) -> None:
    given = {**RUN, **options}
    spares = given.pop("spares")
    one = collect_all(sync_collector(source, RecordingPolicy(), LANES, **given))
    many = collect_all(
        RayCollector(factories(source, 2, LANES), RecordingPolicy(), spares=spares, **given)
    )
    assert_alike(one, many)


@inside
@pytest.mark.parametrize("kind", [MemmapStorage, ZarrStorage])
def test_frames_stored_once_are_those_of_whole_rows(kind: Any, tmp_path: Path) -> None:
    found = []
    for once in (True, False):
        path = tmp_path / str(once)
        ring = {"max_size": 150} if kind is MemmapStorage else {}
        with (
            kind(path, once=once, **ring) as storage,
            RayCollector(stacked, num_envs=4, num_workers=2, storage=storage, **RUN) as collector,
        ):
            for _ in collector:
                pass
        assert verify(path).sound
        assert_frames_show_their_place(path)
        with open_storage(path) as stored:
            assert stored.stores_once is once
            assert stored.head == RUN["total_frames"]
            found.append(stored.in_order())
    one, other = found
    assert {*one.keys(True, True)} == {*other.keys(True, True)}
    assert (one == other).all()


@inside
def test_in_step_random_actions_are_those_of_one_process() -> None:
    run = {"num_envs": 5, "frames_per_batch": 64, "total_frames": 333, "seed": 5}
    with SyncCollector("CartPole-v1", **run) as collector:
        one = list(collector)
    with RayCollector("CartPole-v1", num_workers=2, spares=0, **run) as collector:
        many = list(collector)
    assert all((mine == theirs).all() for mine, theirs in zip(one, many, strict=True))
    assert joined(one).batch_size == joined(many).batch_size == (333,)


@inside
@pytest.mark.parametrize("source", [SAME, NEXT])
def test_out_of_step_every_lane_is_whole(source: str) -> None:
    run = collect_all(
        RayCollector(factories(source, 3, LANES), RecordingPolicy(), mode="async", **RUN)
    )
    rows = joined(run.batches)
    assert len(rows) == run.collector.ledger.stored == 200
    checked = check_rows(rows, LENGTHS, ends="mixed", from_start=True)
    assert set(checked.lane.tolist()) == set(range(LANES))
    assert run.collector.ledger.episodes_complete == checked.ended.sum()


@inside
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_action_is_chosen_by_half_of_new_weights(mode: Any) -> None:
    policy, batches = Versioned(100_000), []
    options = {**RUN, "total_frames": 31 * 30, "frames_per_batch": 30}
    with RayCollector(factories(SAME, 2, LANES), policy, mode=mode, **options) as collector:
        for batch in collector:
            batches.append(batch)
            collector.update_policy_weights_(policy.set_to(collector.policy_version + 1))
    rows = joined(batches)
    version = rows["collector", "policy_version"]
    for name in ("low", "high"):
        assert torch.equal(rows[name], version.float())
    assert torch.equal(rows["action"], chosen_by(rows, version))
    newest = [int(batch["collector", "policy_version"].max()) for batch in batches]
    assert all(seen <= number for number, seen in enumerate(newest))
    if mode == "sync":
        assert newest == list(range(31))
    assert newest[-1] > 20


@inside
@pytest.mark.parametrize("others", [MultiprocessCollector, SyncCollector])
def test_a_storage_goes_on_with_another_collector(others: Any, tmp_path: Path) -> None:
    run: dict[str, Any] = {"num_envs": 4, "frames_per_batch": 50, "seed": 1}
    run["storage"] = tmp_path / "rows"
    more: dict[str, Any] = {"num_workers": 2} if others is MultiprocessCollector else {}
    with RayCollector("CartPole-v1", num_workers=2, spares=0, total_frames=120, **run) as collector:
        list(collector)
    run["resume"] = True
    with others("CartPole-v1", total_frames=230, **run, **more) as collector:
        list(collector)
    with RayCollector(
        "CartPole-v1", num_workers=3, mode="async", spares=0, total_frames=301, **run
    ) as collector:
        list(collector)
    with open_storage(tmp_path / "rows") as storage:
        assert len(storage) == 301
        calls = [each["call"] for each in storage.runs]
        assert [call.get("transport", "process") for call in calls] == ["ray", "process", "ray"]
        assert calls[0]["nodes"] == [socket.gethostname()] * 2
        spaces = [each["spaces"] for each in storage.runs]
        assert spaces[0] == spaces[1] == spaces[2]  # independent of the actors and their nodes
        limits = gymnasium.make("CartPole-v1").observation_space
        assert isinstance(limits, gymnasium.spaces.Box)
        assert space_of(spaces[0]["observation"]).low.tolist() == limits.low.tolist()
        assert spaces[0]["action"]["n"] == 2
    assert verify(tmp_path / "rows").sound


# --- deaths ---------------------------------------------------------------------------------------


@inside
@pytest.mark.timeout(SECONDS_OF_KILLS)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_actors_killed_at_random(mode: Any, tmp_path: Path) -> None:
    faults = Faults(tmp_path)
    with collecting(tmp_path, mode, spares=2, heartbeat=0.5) as collector:
        killer = Killer(collector, random.Random(SEED), KILLS)
        killer.start()
        try:
            for batch in collector:
                assert len(batch) == 50
                # A killed worker whose process is known has a successor.
                if not killer.is_alive() and collector.ledger.respawned >= killer.deaths["worker"]:
                    break
        finally:
            killer.stop()
    ledger, deaths = collector.ledger, killer.deaths
    ledger.check()
    assert deaths["worker"]
    assert deaths["worker"] + deaths["waiting"] == KILLS
    executed, stored = faults.executed(LANES), ledger.stored
    assert ledger.executed <= executed
    assert_whole(tmp_path, stored, mode)
    lost = executed - ledger.executed + ledger.lost
    found = mode, SEED, dict(deaths), ledger.respawned, stored, ledger.lost, lost
    _log.info("%s, seed %d: %s, respawned %d, rows %d, lost %d of %d", *found)
    more = {"resume": True, "spares": 0, "total_frames": stored + 137}
    with collecting(tmp_path, mode, workers=1, **more) as collector:
        assert sum(map(len, collector)) == 137
    assert_whole(tmp_path, stored + 137, mode)
    seeds = faults.noted("seeds")
    assert len(set(seeds)) == len(seeds)


@inside
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_exactly_so_many_where_one_dies_in_a_step(mode: Any, tmp_path: Path) -> None:
    faults = Faults(tmp_path, [Fault("step", "kill", 0, 20), Fault("step", "exit", 3, 25)])
    with RayCollector(
        faulty(faults, LANES, 2),
        None,
        mode=mode,
        storage=tmp_path / "rows",
        on_worker_death="respawn",
        **{**RUN, "total_frames": 501, "spares": 1},
    ) as collector:
        rows = sum(len(batch) for batch in collector)
        ledger = collector.ledger
    assert rows == ledger.stored == 501
    assert ledger.respawned == 2
    with open_storage(tmp_path / "rows") as storage:
        check_lives(storage[:], LANES, gaps=mode == "async")


@inside
def test_a_failure_says_what_it_was(tmp_path: Path) -> None:
    for how, error, said in (
        ("raise", WorkerRaised, "Sabotage while stepping: as planned; lane 0"),
        ("sys.exit", WorkerDied, r"worker 0 .* ended with SystemExit"),
        ("kill", WorkerDied, r"worker 0 .*Ray actor of process \d+ on node .* ended \(ActorDied"),
        ("sleep", WorkerHung, "completed no step within step_timeout=3 seconds, and was ended"),
    ):
        folder = tmp_path / how
        folder.mkdir()
        faults = Faults(folder, [Fault("step", how, 0, 20)])  # type: ignore[arg-type]
        with (
            pytest.raises(error, match=said),
            RayCollector(faulty(faults, 4, 2), None, step_timeout=3, **RUN) as collector,
        ):
            list(collector)


@inside
def test_a_long_lease_is_no_hanging_one(tmp_path: Path) -> None:
    """Heartbeats show that the lease is in progress before any of its rows arrive."""
    with RayCollector(
        faulty(Faults(tmp_path), 2, 2, slow=0.1),
        None,
        mode="async",
        step_timeout=2,
        heartbeat=0.3,
        frames_per_batch=80,
        total_frames=80,
        spares=0,
    ) as collector:
        began = time.monotonic()
        assert [len(batch) for batch in collector] == [80]
    assert time.monotonic() - began > 2.5


@inside
def test_the_server_keeps_nothing_of_a_call() -> None:
    """Heartbeats and leases go on for days. With 4 KB per call, they once took 400 MB."""
    actor = ActorLanes.options(num_cpus=1).remote()  # type: ignore[attr-defined]
    ray.get(actor.facts.remote())
    (server,) = (each for each in psutil.Process().children() if each.name() == "gcs_server")
    before = server.memory_full_info().uss
    for _ in range(2000):
        ray.get(actor.words.remote())
    time.sleep(3)  # events are sent every second
    assert server.memory_full_info().uss < before + 2 * 2**20
    ray.kill(actor)


@inside
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_that_is_frozen_is_replaced_and_does_not_come_back(mode: Any, tmp_path: Path) -> None:
    faults = Faults(tmp_path)
    with RayCollector(
        faulty(faults, LANES, 2, slow=0.002),
        None,
        mode=mode,
        storage=tmp_path / "rows",
        on_worker_death="respawn",
        heartbeat=0.3,
        **{**RUN, "total_frames": 1500, "spares": 1},
    ) as collector:
        frozen, rows = 0, 0
        for number, batch in enumerate(collector):
            rows += len(batch)
            if number == 5:
                frozen = collector.worker_pids[0]
                os.kill(frozen, signal.SIGSTOP)
            if collector.ledger.respawned and frozen:
                with suppress(ProcessLookupError):  # Ray may have killed it already
                    os.kill(frozen, signal.SIGCONT)
                frozen = 0
        ledger = collector.ledger
        assert not frozen
    assert rows == ledger.stored == 1500
    assert ledger.respawned == 1
    with open_storage(tmp_path / "rows") as storage:
        check_lives(storage[:], LANES, gaps=mode == "async")


# --- addresses and versions -----------------------------------------------------------------------


@inside
def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from tallyroll.collector.ext.ray import transport

    monkeypatch.setattr(transport, "versions", lambda: {"python": "3.11.4", "torch": "1.0"})
    said = r"expected the driver's package versions on every node, got .*torch .*has 1\.0.* on node"
    with pytest.raises(ArgumentError, match=said):
        RayCollector("CartPole-v1", num_workers=1, **RUN)


@inside
def test_a_connection_of_the_program_is_left_alone() -> None:
    with pytest.raises(ArgumentError, match="address: expected None, because this process is"):
        RayCollector("CartPole-v1", num_workers=1, address="auto", **RUN)
    assert ray.is_initialized()
    with RayCollector(
        "CartPole-v1",
        num_workers=1,
        actors=Actors(spares=2),
        **{key: value for key, value in RUN.items() if key != "spares"},
    ) as collector:
        assert sum(map(len, collector)) == 200
        assert len(actors()) >= 1
    assert ray.is_initialized()


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n"])
def test_an_address_without_a_cluster(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either no server listens there, or the server answers nothing, or something else."""
    monkeypatch.setattr(connection, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if answer is not None:
            server.listen()
        ours = threading.Thread(target=_answer, args=(server, answer), daemon=True)
        ours.start()
        began = time.monotonic()
        with pytest.raises(
            ArgumentError, match=f"expected a Ray cluster that answers at '{address}"
        ):
            connection.connect(address, 1)
        assert time.monotonic() - began < 5
        ours.join()


def _answer(server: socket.socket, answer: bytes | None) -> None:
    if answer is not None:
        with suppress(ConnectionError), server.accept()[0] as client:
            client.sendall(answer)
            while client.recv(100):
                pass


@inside
def test_the_address_of_a_cluster_answers() -> None:
    connection._require_answer(ray.get_runtime_context().gcs_address)


@pytest.mark.parametrize("address", ["nowhere", "ray://here:1", "here:", ":1"])
def test_an_address_that_is_none(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ArgumentError, match='expected "local", "auto" or HOST:PORT'):
        connection.connect(address, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"address": ""}, 'address: expected "local", "auto", HOST:PORT or None'),
        ({"spares": -1}, "spares: expected an integer of at least 0"),
        ({"heartbeat": 0}, "heartbeat: expected a number of seconds above 0"),
        ({"heartbeat": None}, "heartbeat: expected a number of seconds above 0, got None"),
        ({"actor_options": 3}, "actor_options: expected a mapping of keyword arguments"),
    ],
)
def test_values_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Actors(**options)
