"""Excluded columns reach the policy and batches, and no storage; all other data stays the same.

The rows are compared with those of a run that excludes nothing. Where order or timing differs, the
oracle's model checks them: the observation that is left encodes its lane, episode and step.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groups_kit import GroupsEnv
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tallyroll.collector import (
    Columns,
    MultiprocessCollector,
    SyncCollector,
    load_checkpoint,
    replay,
    save_checkpoint,
)
from tallyroll.collector.cli import main
from tallyroll.collector.cli.plan import Plan
from tallyroll.collector.errors import ArgumentError
from tallyroll.storage import (
    H5Storage,
    HindsightSampler,
    MemmapStorage,
    ZarrStorage,
    fast_paths,
    n_step,
    open_storage,
    verify,
)
from tallyroll.storage.errors import ColumnsMissing, InvalidSchema, SchemaMismatch

from collect_kit import ByObservation, assert_same, joined
from far_kit import FarThreads
from oracles import OracleEnv, check_rows
from pairs import each_pair
from worker_kit import (
    DISABLED,
    LANES,
    LENGTHS,
    NEXT,
    SAME,
    factories,
    factory,
    in_threads,
    start,
    sync_collector,
)

RUN: dict[str, Any] = {"frames_per_batch": 17, "total_frames": 87, "seed": 3}
"""17 is not a multiple of the lanes: rows are carried over, and the last batch is shorter."""
CODE = ("inner", "code")
EXCLUDE = ("img", "inner/code")
OUT = ("img", CODE, ("next", "img"), ("next", *CODE))
TO_CHECK = {"rename": {"pos": "observation"}, "exclude": EXCLUDE}
"""Makes rows that `check_rows` knows, although the policy sees three columns."""
NAMED = r"excluded img \(Columns\(exclude=...\)\)"


def policy(kind: Any = "dict", **names: str) -> ByObservation:
    """Return a policy that reads all observations, under their new names."""
    made = ByObservation(kind)
    made.in_keys = [names.get(str(key), key) for key in made.in_keys]
    return made


def rows_in(path: Path) -> TensorDict:
    """Return all valid rows of a storage in order."""
    with open_storage(path, mode="read") as storage:
        rows = storage.get(torch.from_numpy(storage.slots_of(np.array(storage.span)))).clone()
    assert isinstance(rows, TensorDict)
    return rows


def collector(source: str, workers: int, kind: str = "dict", **given: Any) -> Any:
    """Return a collector with or without workers, which are threads within `in_threads`."""
    options = {**RUN, **given}
    if not workers:
        return sync_collector(source, policy(kind), oracle={"kind": kind}, **options)
    create = factories(source, workers, kind=kind)
    if "transport" in options:
        return MultiprocessCollector(create, policy(kind), **options)
    return start(create, policy(kind), **options)


def take(made: Any, *, collects: bool) -> list[TensorDictBase]:
    """Finish a run by iterating, or by calls of `collect`; return the batches."""
    with made:
        if not collects:
            return [batch.clone() for batch in made]
        while made.collect(LANES):
            pass
        return []


def assert_without(rows: TensorDictBase, whole: TensorDictBase) -> None:
    """Check that ``rows`` are ``whole`` without the excluded columns, and without empty groups."""
    assert not {*OUT} & {*rows.keys(True, True)}
    assert "inner" not in rows.keys()
    assert {*OUT} < {*whole.keys(True, True)}
    assert_same(rows, whole, *OUT)


def in_order(rows: TensorDictBase) -> TensorDictBase:
    """Return rows trajectory by trajectory, as packing stores them."""
    of = rows["collector"]
    return rows[torch.from_numpy(np.lexsort([of["step"].numpy(), of["traj_ids"].numpy()]))]


def storage_at(path: Path, name: str) -> Any:
    """Return a storage for `collector`; all but the ring keep every row."""
    if name == "ring":
        return MemmapStorage(path, max_size=30)
    kind = {"h5": H5Storage, "zarr": ZarrStorage}.get(name, MemmapStorage)
    more = {"capacity": 100} if name == "h5" else {}
    return kind(path.with_suffix({"h5": ".h5", "zarr": ".zarr"}.get(name, "")), **more)


@each_pair(
    form=("memmap", "h5", "zarr", "ring"),
    source=(DISABLED, NEXT, SAME, "torch"),
    workers=(0, 2),
    collects=(False, True),
    off=((), ("kernel",), ("fast-collect",)),
)
def test_rows_are_those_of_the_whole_run_without_the_columns(
    form: str, source: str, workers: int, collects: bool, off: tuple[str, ...], tmp_path: Path
) -> None:
    stored, batches, plans = [], [], []
    for exclude in ((), EXCLUDE):
        storage = storage_at(tmp_path / f"{len(stored)}", form)
        with fast_paths.switched_off(*off), in_threads() if workers else nullcontext():
            made = collector(source, workers, storage=storage, exclude=exclude)
            batches.append(take(made, collects=collects))
        plans.append({**made.plan.as_json(), "frames": None})  # it has the bytes of a row
        storage.close()
        stored.append(rows_in(storage.path))
        assert verify(storage.path).sound
    assert_without(stored[1], stored[0])
    assert plans[0] == plans[1]  # no fast path is off
    for mine, theirs in zip(*batches, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("layout", ["lanes", "trajectories", "torchrl"])
def test_batches_of_each_layout_have_the_columns(layout: str, tmp_path: Path) -> None:
    batches = []
    for exclude in ((), EXCLUDE):
        path = tmp_path / f"{len(batches)}"
        made = collector(
            "torch",
            0,
            storage=path,
            exclude=exclude,
            layout=layout,
            frames_per_batch=LANES * 4,
            total_frames=LANES * 8,
        )
        batches.append(take(made, collects=False))
    assert_same(*map(joined, batches))
    assert_without(rows_in(tmp_path / "1"), rows_in(tmp_path / "0"))


@pytest.mark.parametrize("far", [False, True])
def test_async_workers(far: bool, tmp_path: Path) -> None:
    how = {"transport": FarThreads} if far else {}
    with in_threads():
        made = collector(NEXT, 2, storage=tmp_path / "s", exclude=EXCLUDE, mode="async", **how)
        whole = joined(take(made, collects=False))
    check_rows(whole, LENGTHS, kind="dict", ends="mixed")
    assert_without(rows_in(tmp_path / "s"), whole)


def test_shards_of_workers_and_their_resumption(tmp_path: Path) -> None:
    options = {**RUN, **TO_CHECK, "mode": "async", "sharded": True, "transport": "thread"}
    create = factories(NEXT, 2, kind="dict")
    path = tmp_path / "s"
    for total, resume in ((87, False), (150, True)):
        run = {**options, "storage": path, "resume": resume, "total_frames": total}
        with MultiprocessCollector(create, policy(pos="observation"), **run) as made:
            made.collect(total)
        rows = rows_in(path)
        assert len(rows) == total
        assert {"action", "collector", "next", "observation"} == {*rows.keys()}
        for part in (rows[:87], rows[87:]):  # environments begin again
            if len(part):
                check_rows(part, LENGTHS, ends="mixed", contiguous=False)
    run = {**options, "storage": path, "resume": True, "total_frames": 200, "exclude": ()}
    with pytest.raises(SchemaMismatch, match=r"exclude was \['img', 'inner/code'\], is None"):
        MultiprocessCollector(create, policy(pos="observation"), **run)


# --- large columns ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("yields", [False, True])
def test_large_columns(workers: int, yields: bool, tmp_path: Path) -> None:
    out = ("img", ("next", "img"))
    with in_threads():
        given = {"storage": tmp_path / "s", "yield_large": yields, "exclude": ["img"]}
        batch = joined(take(collector(SAME, workers, "images", **given), collects=False))
    rows = rows_in(tmp_path / "s")
    assert ({*out} <= {*batch.keys(True, True)}) is yields
    assert_same(rows, batch, *out)
    assert sum(each.stat().st_size for each in (tmp_path / "s").rglob("*img*")) == 0


def test_a_postproc_gets_them_and_may_drop_them(tmp_path: Path) -> None:
    for drops in (False, True):

        def postproc(batch: TensorDictBase, drops: bool = drops) -> TensorDictBase:
            assert {*OUT} < {*batch.keys(True, True)}
            return batch.exclude("img") if drops else batch.set("more", batch["pos"] + 1)

        path = tmp_path / str(drops)
        made = collector(SAME, 0, storage=path, exclude=EXCLUDE, postproc=postproc)
        batch = joined(take(made, collects=False))
        rows = rows_in(path)
        assert not {*OUT} & {*rows.keys(True, True)}
        assert_same(rows, batch, *OUT)


@pytest.mark.parametrize("layout", ["rows", "torchrl"])
@pytest.mark.parametrize("own", [True, False])
def test_replay_buffers_do_not_store_them(layout: str, own: bool, tmp_path: Path) -> None:
    held = []
    for exclude in ((), EXCLUDE):
        storage: Any = LazyTensorStorage(200, ndim=2 if layout == "torchrl" else 1)
        if own:
            storage = MemmapStorage(tmp_path / f"{len(held)}", max_size=200)
        made = collector(
            "torch",
            0,
            replay_buffer=ReplayBuffer(storage=storage),
            exclude=exclude,
            layout=layout,
            frames_per_batch=LANES * 4,
            total_frames=LANES * 8,
        )
        assert {*OUT} < {*take(made, collects=False)[0].keys(True, True)}
        held.append(storage.get(slice(0, len(storage))).clone())
    assert_without(held[1], held[0])


# --- resumption ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["s", "s.h5", "s.zarr"])
def test_a_resumed_run_excludes_the_same_columns(name: str, tmp_path: Path) -> None:
    for exclude in ((), EXCLUDE):
        path = tmp_path / f"{len(exclude)}" / name
        path.parent.mkdir()
        run = {"storage": path, "exclude": exclude}
        with collector(SAME, 0, **run) as made:
            made.collect(40)
        take(collector(SAME, 0, **run, resume=True), collects=False)
    with_all, without = (tmp_path / each / name for each in ("0", "2"))
    assert_without(rows_in(without), rows_in(with_all))
    assert len(rows_in(without)) == 87
    before = rows_in(without)
    for other, said in (
        ((), r"img is not a column here.*exclude was \['img', 'inner/code'\], is None"),
        (("img",), r"exclude was \['img', 'inner/code'\], is \['img'\]"),
    ):
        run = {"storage": without, "resume": True, "total_frames": 100, "exclude": other}
        with pytest.raises(SchemaMismatch, match=said):
            collector(SAME, 0, **run)
    assert_same(rows_in(without), before)
    # The order and the spelling of the names do not matter.
    again = {"exclude": [CODE, "img"], "resume": True, "total_frames": 100, "storage": without}
    take(collector(SAME, 0, **again), collects=True)
    assert len(rows_in(without)) == 100


def test_a_killed_run_is_resumed(tmp_path: Path) -> None:
    path, run = tmp_path / "s", {**RUN, **TO_CHECK, "total_frames": -1}
    oracle = {"kind": "dict"}
    child = os.fork()
    if not child:
        try:
            acts = policy(pos="observation")
            made = sync_collector(NEXT, acts, oracle=oracle, storage=path, **run)
            made.collect(203)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(rows_in(path)) == 203
    run = {**run, "total_frames": 300, "storage": path, "resume": True}
    take(sync_collector(NEXT, policy(pos="observation"), oracle=oracle, **run), collects=False)
    rows = rows_in(path)
    check_rows(rows[:203], LENGTHS, ends="mixed", from_start=True)
    check_rows(rows[203:], LENGTHS, ends="mixed", contiguous=False)
    assert len(rows) == 300
    assert verify(path).sound


def test_checkpoints_restore_rows_and_run(tmp_path: Path) -> None:
    rows = []
    for exclude in ((), EXCLUDE):
        path, saved = tmp_path / f"s{len(rows)}", tmp_path / f"c{len(rows)}"
        with collector(SAME, 0, storage=path, exclude=exclude) as made:
            made.collect(40)
            save_checkpoint(saved, collector=made)
            made.collect(20)
        with collector(SAME, 0, storage=path, exclude=exclude, resume=True) as made:
            load_checkpoint(saved, collector=made)
            assert made.ledger.stored == 40
            while made.collect(LANES):
                pass
        rows.append(rows_in(path))
        names = [each.name for each in saved.rglob("*")]
        assert not [name for name in names if exclude and "img" in name]
    assert_without(rows[1], rows[0])
    assert len(rows[1]) == 87


# --- readers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a storage of rows without images and codes."""
    path = tmp_path_factory.mktemp("excluded") / "s"
    take(collector(SAME, 0, storage=path, exclude=EXCLUDE), collects=False)
    return path


def test_copies_packs_exports_and_tensordict_read_what_is_there(
    stored: Path, tmp_path: Path
) -> None:
    rows = rows_in(stored)
    assert_same(TensorDict.load_memmap(stored)[: len(rows)], rows)
    with open_storage(stored) as storage:
        storage.pack(tmp_path / "p")
        storage.export(tmp_path / "rows.parquet", "parquet")
        storage.export(tmp_path / "d4rl.h5", "d4rl")
        with MemmapStorage(tmp_path / "copy") as copy:
            copy.extend(storage[:])
    for path in (tmp_path / "p", tmp_path / "copy"):
        assert_same(in_order(rows_in(path)), in_order(rows))
        assert verify(path).sound
        with open_storage(path) as storage, pytest.raises(ColumnsMissing, match=NAMED):
            storage.get(slice(0, 4), ["img"])


def test_errors_name_the_column_and_say_that_it_was_excluded(stored: Path) -> None:
    out = stored.parent / "rows.npz"
    with open_storage(stored) as storage:
        goals = partial(HindsightSampler, reward=lambda *_: 0, desired="img", achieved="pos")
        calls: list[tuple[type[Exception], Any]] = [
            (KeyError, lambda: storage["img"]),
            (KeyError, lambda: storage["next", "img"]),
            (KeyError, lambda: storage.reader.column(("img",))),
            (ColumnsMissing, lambda: storage.get(slice(None), ["img"])),
            (ColumnsMissing, lambda: storage.get(slice(None), ["pos", ("next", "img")])),
            (ColumnsMissing, lambda: storage.statistics(["img"])),
            (ColumnsMissing, lambda: storage.dataset(["img"])),
            (ColumnsMissing, lambda: n_step(storage, [0], 2, 0.9, reward_key="img")),
            (ColumnsMissing, lambda: goals(storage)),
            (ColumnsMissing, lambda: storage.export(out, "npz", columns=["img"])),
        ]
        for error, call in calls:
            with pytest.raises(error, match=f"img.*{NAMED}"):
                call()
        with pytest.raises(ColumnsMissing, match="nothing") as caught:
            storage.get(slice(None), ["nothing"])
        assert "exclude" not in str(caught.value)
        with pytest.raises(KeyError, match=r"inner.*excluded inner/code \("):
            storage["inner"]
        assert n_step(storage, [0], 2, 0.9)["next", "pos"].shape == (1, 3)


def test_a_group_with_other_columns_is_read_without_the_excluded_one(tmp_path: Path) -> None:
    given = {"storage": tmp_path / "s", "exclude": [("observation", "1")]}
    take(collector(SAME, 0, "tuple", **given), collects=False)
    with open_storage(tmp_path / "s") as storage:
        assert {*storage["observation"].keys()} == {"0", "2"}
        with pytest.raises(KeyError, match="excluded observation/1"):
            storage["observation", "1"]


def test_formats_of_episodes_and_unions_say_why_there_are_no_observations(tmp_path: Path) -> None:
    every = ["pos", "img", "inner"]
    take(collector(SAME, 0, storage=tmp_path / "none", exclude=every), collects=False)
    take(collector(SAME, 0, storage=tmp_path / "all"), collects=False)
    said = r"excluded img, inner/code, pos \(Columns"
    with open_storage(tmp_path / "none") as storage:
        assert storage.schema.keys[0] == ("action",)
        with pytest.raises(InvalidSchema, match=f"no observation.*{said}"):
            storage.export(tmp_path / "d4rl.h5", "d4rl")
    with pytest.raises(SchemaMismatch, match=f"img is not in .*none.*{said}"):
        open_storage([tmp_path / "none", tmp_path / "all"])
    report = verify(tmp_path / "none")
    assert report.sound
    assert "excluded img, inner/code, pos" in report.skipped["observations"]


def test_inspect_and_replay_name_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s"
    make = factory(SAME, 0, LANES, kind="dict")
    take(collector(SAME, 0, storage=path, exclude=EXCLUDE), collects=False)
    assert main(["inspect", str(path)]) == 0
    assert "excluded by the run that collected the rows: img, inner/code" in capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["excluded"] == found["runs"][0]["call"]["exclude"] == ["img", "inner/code"]
    assert {each["name"] for each in found["columns"]} >= {"pos", "next/pos"}
    report = replay(path, "all", create_env_fn=make)
    assert report.same, report
    assert report.excluded == ("img", "inner/code")
    assert {"pos", "next/pos", "next/reward"} <= {*report.largest}
    assert not {"img", "inner/code"} & {*report.largest}
    assert report.to_dict()["excluded"] == ["img", "inner/code"]
    with pytest.raises(ArgumentError, match="makes columns that are not stored"):
        replay(path, "all", create_env_fn=factory(SAME, 0, LANES, kind="tuple"))


def test_the_command_excludes_repeatedly_and_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "s")
    words = ["collect", "CartPole-v1", "--frames", "60", "--out", path, "--seed", "1"]
    words += ["--max-frames-per-traj", "9"]
    assert main([*words, "--exclude", "observation", "--exclude", "step_count"]) == 0
    capsys.readouterr()
    with open_storage(path) as storage:
        assert {("observation",), ("step_count",)}.isdisjoint(storage.reader.keys)
        run = storage.manifest["runs"][0]
        assert run["call"]["exclude"] == ["observation", "step_count"]
        assert {*run["spaces"]} == {"action"}
        again = Plan.of_run(run).command("data")
        assert "--exclude observation --exclude step_count" in again
    assert main(["collect", "--resume", "--frames", "100", "--out", path]) == 0
    assert main(["collect", "--resume", "--frames", "120", "--out", path, "--exclude", "nope"]) == 1
    assert "exclude: expected the names of columns, got 'nope'" in capsys.readouterr().err
    assert main(["replay", path]) == 0
    out = capsys.readouterr().out
    assert "not compared, for the run excluded them: observation, step_count" in out


# --- refusals -----------------------------------------------------------------------------------

BAD = [
    (["image"], r"expected the names of columns, got 'image'\. .* are img, inner/code, pos\.$"),
    (["inner/cod"], "got 'inner/cod'"),
    (["action"], r"got 'action'. .* needs action, which is an action"),
    (["reward"], r"got 'reward'. .* needs next/reward, which is a reward"),
    (["done"], r"got 'done'. .* next/done, which is a flag of ends"),
    (["truncated"], r"got 'truncated'. .* next/truncated, which is a flag of ends"),
    (["collector"], r"collector/traj_ids, which is a column of the collector"),
    (["img", ("collector", "step")], r"collector/step, which is a column of the collector"),
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("exclude", "said"), BAD)
def test_names_that_cannot_be_excluded(
    exclude: Any, said: str, workers: int, tmp_path: Path
) -> None:
    with in_threads(), pytest.raises(ArgumentError, match=f"exclude: .*{said}"):
        collector(DISABLED, workers, storage=tmp_path / "s", exclude=exclude)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("exclude", "said"),
    [
        (["red"], "red/action, which is an action"),
        ([("red", "mask")], "red/mask, which is a mask of agents"),
        (["green"], r"left out are blue/observation, red/observation\.$"),
    ],
)
def test_groups_of_agents_keep_actions_and_masks(exclude: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        SyncCollector(lambda: GroupsEnv(2, LENGTHS), **RUN, columns=Columns(exclude=exclude))


def test_a_column_that_no_storage_can_name_may_be_excluded(tmp_path: Path) -> None:
    names = {"pos": "observation", "img": ("..",)}
    run = {**RUN, "storage": tmp_path / "s", "rename": names, "exclude": ["..", "inner"]}
    made = SyncCollector(lambda: OracleEnv(0, LENGTHS, kind="dict"), **run)
    take(made, collects=False)
    check_rows(rows_in(tmp_path / "s"), LENGTHS, ends="terminated")
