"""Reports agree with ledgers, episodes and logs of collectors, and name unreadable storages."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.collector import ArgumentError, MissingExtra, SyncCollector, report
from tallyroll.collector.cli import main
from tallyroll.collector.ext.report.group_fields import label_of
from tallyroll.collector.ext.report.statistics import interquartile_mean, mean_of_last
from tallyroll.storage import MemmapStorage, open_storage

from fork_server import warm_fork_server
from ledger_legs import RUN, Leg, lead
from report_kit import EVERY, FRAMES, POLICIES, SEEDS, collected, poisoned
from worker_kit import NEXT

COUNTS = ("executed", "discarded", "carried", "lost", "reset_slots", "episodes_complete")


def test_counts_are_those_of_the_ledgers(made: Any) -> None:
    folder, runs = made
    found = report(folder)
    assert (found.problems, found.notes) == ((), ())
    assert [Path(line["run"]).name for line in found.table] == [*runs]
    assert {line["policy"] for line in found.table} == {"left", "random"}
    for line in found.table:
        _, episodes, ledger = runs[Path(line["run"]).name]
        assert (line["asked"], line["stored"], line["state"]) == (FRAMES, FRAMES, "complete")
        assert {name: line[name] for name in COUNTS} == {n: getattr(ledger, n) for n in COUNTS}
        assert line["seed"] == ledger.seed
        assert line["episodes"] == len(episodes["length"])
        assert line["return"] == pytest.approx(np.mean(episodes["total_return"][-100:]))


def test_curves_are_those_of_the_logs_and_scores_their_ends(made: Any) -> None:
    folder, runs = made
    for run in report(folder).runs:
        rows, episodes, _ = runs[Path(run.path).name]
        # Compared in batches of 50, because rows within a batch are ordered by lane.
        both = [
            sorted(zip((np.asarray(at) - 1) // 50, returns, strict=True))
            for at, returns in (
                (run.ended_at, run.returns),
                (episodes["ended_at"], episodes["total_return"]),
            )
        ]
        assert both[0] == both[1]
        at = np.array([row["frames"] for row in rows])
        assert at.tolist() == [*range(EVERY, FRAMES + 1, EVERY)]
        found = mean_of_last(run.ended_at, run.returns, at, 100)
        np.testing.assert_allclose(found, [row["return_mean"] for row in rows])


def test_groups_are_of_an_environment_and_a_label(made: Any) -> None:
    folder, runs = made
    found = report(folder, window=5)
    assert [group.name for group in found.groups] == [f"CartPole-v1 · {p}" for p in POLICIES]
    for group, policy in zip(found.groups, POLICIES, strict=True):
        scores = [np.mean(runs[f"{policy}-{seed}"][1]["total_return"][-5:]) for seed in SEEDS]
        assert [*group.scores.values()] == pytest.approx(scores)
        for each in (group.mean, group.interquartile_mean):  # the two means of three runs are equal
            assert each is not None
            assert each.value == pytest.approx(np.mean(scores))
            assert (each.low, each.high) == pytest.approx((min(scores), max(scores)))
        assert group.curve is not None
        by_hand = [mean_of_last(run.ended_at, run.returns, group.curve.at, 5) for run in group.runs]
        np.testing.assert_allclose(group.curve.value, interquartile_mean(np.stack(by_hand, -1)))
        assert group.curve.at[-1] == FRAMES
    assert f"left: {len(SEEDS)} runs, return " in repr(found)


def test_other_groups(made: Any) -> None:
    folder, _ = made
    by = {
        "policy": {"left", "random"},
        "call.frames_per_batch": {"50"},
        "folder": {folder.name},
        ("environment", "seed"): {f"CartPole-v1 · {seed}" for seed in SEEDS},
    }
    for fields, names in by.items():
        found = report(folder, group_by=fields)
        assert {group.name for group in found.groups} == names
    with pytest.raises(ArgumentError, match=r"a run's entry, .*, got 'sed'; did you mean seed\?"):
        report(folder, group_by="sed")


@pytest.mark.parametrize(
    ("path", "label"),
    {
        "runs/ppo-3": "ppo",
        "runs/ppo_seed3.h5": "ppo",
        "runs/ppo/3": "ppo",
        "runs/ppo/seed_3.zarr": "ppo",
        "runs/dqn-lr0.001-s12": "dqn-lr0.001",
        "runs/dqn-lr0.001": "dqn-lr0.001",
        "runs/CartPole-v1": "CartPole-v1",
        "runs/td3": "td3",
        "/1": "-",
    }.items(),
)
def test_labels(path: str, label: str) -> None:
    assert label_of(path) == label


def test_several_environments_need_a_scale(tmp_path: Path, made: Any) -> None:
    folder, _ = made
    for seed in SEEDS:
        shutil.copytree(folder / f"left-{seed}", tmp_path / f"left-{seed}")
        other = tmp_path / f"left-{seed + 3}"
        shutil.copytree(folder / f"random-{seed}", other)
        poisoned(other, {"environment": {"id": "Other-v0"}})
    assert [group.name for group in report(tmp_path).groups] == [
        "CartPole-v1 · left",
        "Other-v0 · left",
    ]
    found = report(tmp_path, group_by="label")
    (problem,) = found.problems
    assert "CartPole-v1, Other-v0, and their returns have no common mean" in problem.why
    assert (found.groups[0].mean, found.groups[0].curve) == (None, None)
    scale = {"CartPole-v1": (0, 10), "Other-v0": (-20, 80)}
    (group,) = report(tmp_path, group_by="label", scale=scale).groups
    raw = {line["run"]: line["return"] for line in found.table}
    for run in group.runs:
        low, high = scale[run.environment]
        assert group.scores[run.path] == pytest.approx((raw[run.path] - low) / (high - low))
    assert group.mean is not None
    assert group.mean.value == pytest.approx(np.mean([*group.scores.values()]))


def test_a_run_that_was_killed_and_one_that_went_on(tmp_path: Path) -> None:
    path = tmp_path / "killed-5"
    warm_fork_server()
    context: Any = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    child = context.Process(target=lead, args=(Leg("new", 4), NEXT, path, None, theirs))
    child.start()
    for _ in range(5):
        ours.recv()
        ours.send(None)
    child.join(30)
    before = report(path)
    (line,) = before.table
    assert (line["stored"], line["asked"], line["state"]) == (28, RUN["total_frames"], "killed")
    assert [each.why for each in before.notes] == [
        "killed: the run has 28 transitions, and its budget is 90 transitions"
    ]
    from collect_kit import ByObservation
    from worker_kit import LANES, factory

    with SyncCollector(
        factory(NEXT, 0, LANES), ByObservation(), storage=path, resume=True, **RUN
    ) as collector:
        for _ in collector:
            pass
    found = report(path)
    (line,), (run,) = found.table, found.runs
    assert (line["stored"], line["state"], line["resumed"]) == (90, "complete", 1)
    assert (run.resumed_at, line["executed"]) == ((28,), collector.ledger.executed)
    assert line["executed"] == 90 + line["discarded"] + line["lost"]
    assert found.notes == ()
    with open_storage(path) as storage:
        ended = storage[:]["next", "done"].reshape(-1).nonzero().reshape(-1) + 1
    assert {*run.ended_at.tolist()} <= {*ended.tolist()}


# --- unreadable storages --------------------------------------------------------------------------


def _empty_folder(path: Path) -> None:
    path.mkdir()


def _text(path: Path) -> None:
    path.write_text("frames,seconds\n")


def _without_rows(path: Path) -> None:
    SyncCollector("CartPole-v1", frames_per_batch=5, total_frames=5, storage=path).shutdown()


def _rows(path: Path, **columns: torch.Tensor) -> None:
    with MemmapStorage(path) as storage:
        storage.extend(TensorDict({"x": torch.arange(3), **columns}, [3]))


def _no_end(path: Path) -> None:
    collected(path, "left", 9, total_frames=3, num_envs=3)


def _copied(path: Path) -> None:
    collected(path.with_name("source-9"), "left", 9)
    with open_storage(path.with_name("source-9")) as source, MemmapStorage(path) as storage:
        storage.extend(source[:])
    shutil.rmtree(path.with_name("source-9"))


def _rewards(value: float) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        collected(path, "left", 9)
        (file,) = path.rglob("reward.memmap")
        rewards = np.memmap(file, np.float32, "r+")
        rewards[5] = value
        rewards.flush()
        (path / "episodes.npy").unlink(missing_ok=True)
        for table in path.glob("*episodes*"):
            table.unlink()

    return make


def _cut_short(path: Path) -> None:
    collected(path, "left", 9)
    os.truncate(next(path.rglob("*.memmap")), 8)


def _manifest(path: Path) -> None:
    collected(path, "left", 9)
    (path / "manifest.json").write_text("{")


def _no_run(path: Path) -> None:
    collected(path, "left", 9)
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["crc32"]
    file.write_text(json.dumps(manifest | {"runs": []}))
    assert main(["inspect", str(path)]) == 0


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "does not exist"),
    "an empty folder": (_empty_folder, "not a Tallyroll storage"),
    "another file": (_text, "not a Tallyroll storage"),
    "rows of no trajectory": (_rows, "have no trajectory ids"),
    "no episode that ended": (_no_end, "the run has no complete episode"),
    "copied rows": (_copied, "were copied from other storages"),
    "NaN": (_rewards(np.nan), "returns are not finite numbers"),
    "infinity": (_rewards(np.inf), "returns are not finite numbers"),
    "a column that was cut": (_cut_short, "wrong-9"),
    "no run": (_no_run, "not contain the run that made the rows"),
    "a damaged manifest": (_manifest, "is not valid JSON"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_read_is_said_and_the_rest_is_reported(
    tmp_path: Path, made: Any, kind: str
) -> None:
    make, why = WRONG[kind]
    wrong = tmp_path / "wrong-9"
    make(wrong)
    folder, runs = made
    found = report([wrong, *(folder / name for name in runs)])
    assert len(found.problems) >= 1
    assert {each.where.partition(" (run")[0] for each in found.problems} == {str(wrong)}
    assert any(why in str(each) for each in found.problems), found.problems
    assert [
        group.mean and group.mean.value for group in found.groups if len(group.scores) == 3
    ] == [group.mean and group.mean.value for group in report(folder).groups]


def test_a_copy_counts_once_and_a_seed_twice_is_said(tmp_path: Path, made: Any) -> None:
    folder, _ = made
    shutil.copytree(folder / "left-0", tmp_path / "left-7")
    collected(tmp_path / "left-8", "left", 0)
    found = report([folder / "left-0", tmp_path / "left-7", tmp_path / "left-8"])
    (problem,) = found.problems
    assert problem.where == str(tmp_path / "left-7")
    assert "the run is a copy of the run in" in problem.why
    assert [each.why.partition(" have ")[2][:16] for each in found.notes] == ["the same seed, 0"]
    assert len(report([folder / "left-0", folder / "left-0", folder]).runs) == 6


def test_two_runs_of_a_storage_and_a_ring(tmp_path: Path) -> None:
    for seed in (1, 2):
        with MemmapStorage(tmp_path / "two", mode="create" if seed == 1 else "append") as storage:
            collected(storage, "left", seed)  # type: ignore[arg-type]
    with MemmapStorage(tmp_path / "ring-1", max_size=100) as storage:
        collected(storage, "left", 1)  # type: ignore[arg-type]
    found = report(tmp_path)
    first, second = (run for run in found.runs if Path(run.place).name == "two")
    assert (first.path, second.seed) == (f"{tmp_path / 'two'} (run 0)", 2)
    assert (first.counts, first.stored, second.stored) == (None, FRAMES, FRAMES)
    (ring,) = (run for run in found.runs if Path(run.place).name == "ring-1")
    assert (ring.stored, ring.state) == (FRAMES, "complete")
    assert 0 < len(ring.returns) < 15
    # only episodes with all their rows
    assert {*ring.ended_at.tolist()} < {*first.ended_at.tolist()}
    assert min(ring.ended_at) > FRAMES - 100
    assert any("oldest rows were overwritten" in each.why for each in found.notes)


# --- arguments, files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "more", "said"),
    [
        ([], {}, "paths: expected at least one path of a storage, got none"),
        ("", {}, "paths: expected at least one path of a storage, got none"),
        ([3], {}, "paths: expected paths of storages, got 3"),
        (3, {}, "paths: expected paths of storages, got 3"),
        ("a\0b", {}, "paths: expected paths of storages, got 'a\\x00b'"),
        ("x", {"window": 0}, "window: expected a number of episodes above 0, got 0"),
        ("x", {"group_by": ""}, "group_by: expected names such as environment, label, got"),
        ("x", {"scale": {"A": (2, 1)}}, "scale: expected two numbers, the lower first, for A"),
        ("x", {"scale": {"A": 3}}, "scale: expected two numbers"),
    ],
)
def test_wrong_arguments(paths: Any, more: Any, said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        report(paths, **more)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("package", ["scipy", "jinja2"])
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in (package, f"{package}.stats"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(MissingExtra) as caught:
        report("x")
    assert str(caught.value) == (
        f"reports need the package {package}, which is not installed: "
        'pip install "tallyroll[report]"'
    )


def test_a_table_as_csv_and_json(tmp_path: Path, made: Any) -> None:
    folder, _ = made
    found = report(folder)
    found.to_csv(tmp_path / "runs.csv")
    lines = [*csv.DictReader(io.StringIO((tmp_path / "runs.csv").read_text()))]
    assert [line["run"] for line in lines] == [line["run"] for line in found.table]
    assert [float(line["return"]) for line in lines] == [line["return"] for line in found.table]
    facts = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert facts["runs"] == found.table
    assert facts["groups"][0]["curve"]["transitions"][-1] == FRAMES
    assert facts["differences"]["call.policy"].keys() == {"function", "-"}


def test_a_file_that_is_no_report_stays(tmp_path: Path, made: Any) -> None:
    found = report(made[0])
    for write, name in ((found.to_html, "a.html"), (found.to_csv, "a.csv")):
        file = tmp_path / name
        file.write_text("my own\n")
        with pytest.raises(ArgumentError, match=r"exists and is not a report.*--force"):
            write(file)
        assert file.read_text() == "my own\n"
        write(file, force=True)
        first = file.read_text()
        write(file)  # the file is a report now
        assert file.read_text()[:500] == first[:500] != "my own\n"
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ArgumentError, match=r"is not one\. Give another"):
            found.to_html(place, force=True)
    with pytest.raises(ArgumentError, match="is not a folder"):
        found.to_html(tmp_path / "none/a.html")


def test_a_page_is_there_whole_or_as_before(
    tmp_path: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, file = report(made[0]), tmp_path / "a.html"
    found.to_html(file)
    before = file.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        found.to_html(file)
    assert file.read_bytes() == before
    assert [*tmp_path.iterdir()] == [file]
