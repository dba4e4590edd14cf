"""``tallyroll prove``: verdicts on sound, damaged, unfinished and doubled runs, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from tallyroll.collector import SyncCollector, load_checkpoint, save_checkpoint
from tallyroll.collector.cli import main
from tallyroll.collector.cli.output import visible
from tallyroll.storage import MemmapStorage, content_hash, open_storage

FRAMES = 200


def collected(path: Path, seed: int = 0, env: Any = "CartPole-v1", **more: Any) -> Path:
    budget = {"total_frames": FRAMES} | more
    with SyncCollector(
        env, num_envs=2, frames_per_batch=50, seed=seed, storage=path, **budget
    ) as run:
        for _ in run:
            pass
    return path


def pole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


def proof(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    status = main(["prove", *map(str, words), "--json"])
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, facts


def only(facts: dict[str, Any]) -> dict[str, Any]:
    (found,) = facts["storages"]
    return dict(found)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of frames, and a run of episodes in another format."""
    folder = tmp_path_factory.mktemp("proved")
    collected(folder / "pole-0")
    collected(folder / "pole-1.zarr", 1, total_frames=None, total_episodes=6)
    return folder


def edited(path: Path, call: dict[str, Any]) -> None:
    """Change the call in the manifest of a storage."""
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest.pop("crc32", None)
    manifest["runs"][-1]["call"] |= call
    file.write_text(json.dumps(manifest))


def test_proved(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, facts = proof(capsys, runs, "--all")
    assert (status, facts["verdict"]) == (0, "proved")
    for found, name in zip(facts["storages"], ("pole-0", "pole-1.zarr"), strict=True):
        assert found["path"] == str(runs / name)
        assert (found["verdict"], found["faults"], found["gaps"]) == ("proved", [], [])
        assert found["content"] == content_hash(runs / name)
        with open_storage(runs / name) as storage:
            rows = len(storage)
            assert found["replay"]["replayed"] == len(storage.trajectories.table)
        assert found["replay"]["trajectories"] == found["replay"]["replayed"]
        assert found["rows"]["rows"] == found["replay"]["rows"] == rows
        assert found["rows"]["sound"]
        assert found["ledger_balanced"]
        (run,) = found["runs"]
        ledger = run["ledger"]
        assert ledger["stored"] == run["stored"] == rows
        assert ledger["executed"] == rows + ledger["discarded"]
        assert run["versions"] == facts["versions"]
    frames, episodes = (found["runs"][0] for found in facts["storages"])
    assert (frames["asked"], frames["asked_episodes"], frames["stored"]) == (FRAMES, None, FRAMES)
    assert (episodes["asked"], episodes["asked_episodes"]) == (None, 6)
    assert episodes["ledger"]["episodes_complete"] == 6


def test_the_statement(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", str(runs)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert f"exact: {FRAMES} of {FRAMES} transitions" in said.out
    assert "exact: 6 of 6 episodes" in said.out
    assert f"sha256 {content_hash(runs / 'pole-0')}" in said.out
    assert "verdict: proved (2 proved, 0 refuted, 0 incomplete)" in said.out
    assert "checks of rows: files, metadata, runs, record" in said.out
    assert main(["prove", str(runs), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_changed_action_is_found_by_the_replay_alone(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "pole-0", path := tmp_path / "pole")
    (file,) = path.rglob("action.memmap")
    actions = np.memmap(file, np.int64, "r+")
    actions[70] = 1 - actions[70]
    actions.flush()
    status, facts = proof(capsys, path, "--all")
    found = only(facts)
    assert (status, facts["verdict"], found["rows"]["sound"]) == (1, "refuted", True)
    (fault,) = found["faults"]
    assert "(row 70), next/observation: stored" in fault
    assert found["content"] != content_hash(runs / "pole-0")


def test_a_difference_under_other_versions_refutes_nothing(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "pole-0", path := tmp_path / "pole")
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest.pop("crc32", None)
    manifest["runs"][-1]["versions"]["gymnasium"] = "0.1"
    file.write_text(json.dumps(manifest))
    status, facts = proof(capsys, path, "--all")
    assert (status, facts["verdict"]) == (0, "proved")
    (file,) = path.rglob("action.memmap")
    actions = np.memmap(file, np.int64, "r+")
    actions[70] = 1 - actions[70]
    actions.flush()
    status, facts = proof(capsys, path, "--all")
    assert (status, facts["verdict"], only(facts)["faults"]) == (2, "incomplete", [])
    not_replayed, difference, reason = only(facts)["gaps"]
    assert not_replayed.startswith("not replayed: 2 trajectories")
    assert difference.startswith("replay: ")
    assert reason == "the differing rows were made with other versions: gymnasium 0.1"


def test_damaged_rows_are_a_fault(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "pole-0", path := tmp_path / "pole\x1b")
    (file,) = path.rglob("step.memmap")
    steps = np.memmap(file, np.int64, "r+")
    steps[70] += 1
    steps.flush()
    status, facts = proof(capsys, path)
    assert (status, only(facts)["rows"]["sound"]) == (1, False)
    assert any(each.startswith("steps: ") for each in only(facts)["faults"])
    assert main(["prove", str(path)]) == 1
    assert f"{visible(str(path))}: refuted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [(FRAMES - 1, 1, f"{FRAMES} of {FRAMES - 1}"), (FRAMES + 1, 2, f"{FRAMES} of {FRAMES + 1}")],
)
def test_rows_that_do_not_match_the_budget(
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    asked: int,
    status: int,
    said: str,
) -> None:
    shutil.copytree(runs / "pole-0", path := tmp_path / "pole")
    edited(path, {"total_frames": asked})
    found, facts = proof(capsys, path)
    assert found == status
    verdict, name = {1: ("refuted", "faults"), 2: ("incomplete", "gaps")}[status]
    assert only(facts)["verdict"] == verdict
    (line,) = only(facts)[name]
    assert said in line


def test_the_same_rows_twice(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pole-0", "pole-1"):
        shutil.copytree(runs / "pole-0", tmp_path / name)
    status, facts = proof(capsys, tmp_path)
    first, second = facts["storages"]
    assert (status, first["faults"]) == (1, [])
    (fault,) = second["faults"]
    assert fault == f"it has the same rows as {first['path']}, so the two are one run"


def test_two_runs_with_the_same_seed_and_rows(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "pole-0", tmp_path / "pole-0")
    collected(tmp_path / "pole-1", 0)
    status, facts = proof(capsys, tmp_path)
    first, second = facts["storages"]
    assert (status, facts["verdict"], first["notes"], second["faults"]) == (0, "proved", [], [])
    note = f"it has the same rows as {first['path']}, a run with the same seed"
    assert second["notes"] == [note]
    main(["prove", str(tmp_path)])
    assert f"  note     {note}\n" in capsys.readouterr().out


def test_a_copy_is_proved_by_its_sources(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [runs / "pole-0", runs / "pole-1.zarr"]
    with open_storage(sources) as union:
        union.trajectories.where("length > 12").copy_to(tmp_path / "all.h5", sort=True)
    with open_storage(tmp_path / "all.h5") as both:
        keys = [key for key in both.schema.keys if key != ("observation",)]
        both.copy_to(tmp_path / "half", columns=keys)
    status, facts = proof(capsys, tmp_path / "all.h5", *sources[:1])
    found, _ = facts["storages"]
    assert (status, found["verdict"], found["sources"]) == (2, "incomplete", [])
    assert "Give the original storages" in found["gaps"][0]
    words = ["half", "all.h5"]
    status, facts = proof(capsys, *(tmp_path / word for word in words), *sources)
    half, both_found, *_ = facts["storages"]
    assert (status, facts["verdict"]) == (0, "proved"), facts
    assert half["sources"] == [str(tmp_path / "all.h5")]
    assert both_found["sources"] == [*map(str, sources)]
    assert main(["prove", str(tmp_path / "all.h5"), *map(str, sources)]) == 0
    said = f"is equal to a row of its source, bit for bit: {sources[0]}, {sources[1]}\n"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("value", 1, "row 70 differs from {source} in action"),
        ("rows", 1, "row 150 is not a row of {source}"),
        ("moved", 2, "rows 0 to 199 are not numbered as in {source}"),
        ("far", 2, "rows 0 to 199 are not numbered as in {source}"),
        ("source", 2, "its source {source} is incomplete"),
        ("circle", 2, "its source {copy} is not proved"),
    ],
)
def test_a_copy_that_its_source_does_not_prove(
    what: str, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, copy = collected(tmp_path / "pole"), tmp_path / "copy"
    with open_storage(source) as storage:
        storage.copy_to(copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest.pop("crc32")
    copied = manifest["runs"][0]["copied_from"]
    if what == "value":
        actions = np.memmap(copy / "action.memmap", np.int64, "r+")
        actions[70] = 1 - actions[70]
        actions.flush()
    elif what == "source":
        edited(source, {"total_frames": FRAMES + 1})
    else:
        copied |= {
            "rows": {"rows": [0, 149]},
            "moved": {"ids_moved_by": None},
            "far": {"ids_moved_by": -(2**63)},
            "circle": {"id": manifest["id"]},
        }[what]
        (copy / "manifest.json").write_text(json.dumps(manifest))
    found = proof(capsys, copy, source)[1]["storages"][0]
    assert [*found["faults"], *found["gaps"]] == [said.format(source=source, copy=copy)]
    assert found["verdict"] == {1: "refuted", 2: "incomplete"}[status]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("renumbered", "row 200 is not a row of {source}"),
        ("rewound", "row 100 is not a row of {source}, from which rows were removed after the co"),
        ("overlay", "{source} has no column score"),
    ],
)
def test_an_honest_copy_that_cannot_be_proved_is_not_refuted(
    what: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, copy, first = tmp_path / "pole", tmp_path / "copy", tmp_path / "first"
    options: dict[str, Any] = {"frames_per_batch": 50, "total_frames": FRAMES, "seed": 0}
    with MemmapStorage(source) as storage, SyncCollector(pole, storage=storage, **options) as run:
        run.collect(FRAMES // 2)
        save_checkpoint(tmp_path / "checkpoint", collector=run)
        run.collect(FRAMES)
        if what == "renumbered":
            collected(first, seed=1)
            with MemmapStorage(copy) as other, open_storage(first) as before:
                other.extend(before.get(slice(None)), ids="renumber")
                other.extend(storage.get(slice(None)), ids="renumber")
        elif what == "overlay":
            storage.overlay("score", torch.float32, fill=0.5)
            storage.with_overlays("score").copy_to(copy)
        else:
            storage.copy_to(copy)
    if what == "rewound":
        with (
            MemmapStorage(source, mode="append") as storage,
            SyncCollector(pole, storage=storage, resume=True, **options) as run,
        ):
            load_checkpoint(tmp_path / "checkpoint", collector=run)
            run.collect(FRAMES)
    sources = [first, source] if what == "renumbered" else [source]
    found = proof(capsys, copy, *sources)[1]["storages"][0]
    assert found["faults"] == []
    assert any(gap.startswith(said.format(source=source)) for gap in found["gaps"]), found["gaps"]
    assert found["verdict"] == "incomplete"


def test_a_shard_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(2):
        collected(tmp_path / f"part-{index}", shard=f"{index}/2", seed=3)
    status, facts = proof(capsys, tmp_path)
    assert (status, facts["verdict"]) == (0, "proved")
    assert sum(each["runs"][0]["stored"] for each in facts["storages"]) == FRAMES
    status, facts = proof(capsys, tmp_path / "part-1")
    assert (status, only(facts)["gaps"]) == (2, ["shards 0 of 2 were not given"])


def test_an_environment_that_the_manifest_cannot_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    collected(tmp_path / "own", 0, pole)
    status, facts = proof(capsys, tmp_path)
    (gap,) = only(facts)["gaps"]
    assert (status, only(facts)["replay"]) == (2, None)
    assert gap.startswith("not replayed: ")
    assert proof(capsys, tmp_path, "--env", "CartPole-v1")[0] == 0
    (tmp_path / "broken_pole.py").write_text("def make():\n    raise OSError('no display')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    status, facts = proof(capsys, tmp_path, "--env-factory", "broken_pole:make")
    assert status == 2
    assert any("OSError: no display" in each for each in only(facts)["gaps"])


def test_overwritten_and_unreadable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MemmapStorage(tmp_path / "ring", max_size=100) as storage:
        collected(storage)  # type: ignore[arg-type]
    status, facts = proof(capsys, tmp_path / "ring", tmp_path / "gone")
    ring, gone = facts["storages"]
    assert status == 2
    assert ring["runs"][0]["stored"] == FRAMES
    assert any("overwritten the oldest rows" in each for each in ring["gaps"])
    assert gone["gaps"] == [
        f"not read: {tmp_path / 'gone'} does not exist. Give the path of a storage."
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: PATH"),
        (["a", "--sample", "0"], "argument --sample: expected a whole number above 0"),
        (["a", "--sample", "3", "--all"], "not allowed with argument"),
        (["a", "--env", "X", "--env-factory", "a:b"], "not allowed with argument"),
        (["a", "--jsn"], "unrecognized option --jsn; did you mean --json?"),
        (["a", "--trajectory", "3"], "unrecognized option --trajectory"),
        ([""], "argument PATH: expected a path, got ''"),
    ],
)
def test_wrong_arguments(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["prove", *words])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_nothing_to_prove(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(
        "tallyroll: error: paths: expected storages that can be read, got none: not read: "
    )
    assert said.err.endswith(".\n")
    assert not said.err.endswith("..\n")
