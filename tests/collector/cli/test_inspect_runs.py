"""`inspect` by run, policy version and trajectory, compared with plain Python."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.collector.cli.inspection import trajectories
from tallyroll.storage import MemmapStorage, content_hash, open_storage
from tallyroll.storage.files.manifest import sealed

from collect_kit import ByObservation
from worker_kit import DISABLED, LANES, factory

Found = dict[str, Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Collect two runs, of which the first updates its policy twice."""
    path = tmp_path_factory.mktemp("runs") / "rows"
    for seed, mode in ((1, "create"), (2, "append")):
        with (
            MemmapStorage(path, mode=mode) as storage,  # type: ignore[arg-type]
            SyncCollector(
                factory(DISABLED, 0, LANES),
                ByObservation(),
                frames_per_batch=20,
                total_frames=60,
                storage=storage,
                seed=seed,
            ) as collector,
        ):
            for _ in collector:
                if seed == 1:
                    collector.update_policy_weights_()
    return path


def episodes_in(path: Path) -> list[Found]:
    """Assemble whole episodes row by row."""
    going: dict[int, Found] = {}
    ended = []
    with open_storage(path) as storage:
        for number, row in enumerate(storage[:]):
            id = row["collector", "traj_ids"].item()
            one = going.setdefault(id, {"id": id, "first": number, "return": 0.0, "length": 0})
            one["return"] += row["next", "reward"].item()
            one["length"] += 1
            one["policy"] = row.get(("collector", "policy_id"), torch.zeros(())).item()
            one["version"] = row["collector", "policy_version"].item()
            if row["next", "done"].item():
                ended.append(going.pop(id))
    return ended


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["inspect", *words]) == 0
    out: str = capsys.readouterr().out
    return out


def test_returns_by_run_and_by_version(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(shown(capsys, str(path), "--json"))
    episodes = episodes_in(path)
    groups = [
        (facts["runs"][0], [each for each in episodes if each["first"] < 60]),
        (facts["runs"][1], [each for each in episodes if each["first"] >= 60]),
        *(
            (found, [each for each in episodes if each["version"] == found["policy_version"]])
            for found in facts["by_policy_version"]
        ),
    ]
    assert len(groups) == 5
    for found, wanted in groups:
        for name, values in (("returns", "return"), ("lengths", "length")):
            numbers = [each[values] for each in wanted]
            assert found[name]["episodes"] == len(numbers) > 0
            assert found[name]["mean"] == pytest.approx(np.mean(numbers))
            assert found[name]["max"] == pytest.approx(max(numbers))
    assert "host" not in facts["runs"][0]["made"]
    text = shown(capsys, str(path))
    assert "Returns by the policy's version" in text
    assert f"   {len(groups[1][1])} episodes ended, mean return" in text


@pytest.mark.parametrize("rows", [None, 40])
def test_returns_of_several_policies_are_apart(
    rows: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The policies have equal versions. The ring has lost the first rows of some trajectories."""
    path = tmp_path / "rows"
    with (
        MemmapStorage(path, max_size=rows) as storage,
        SyncCollector(
            factory(DISABLED, 0, LANES),
            [([0, 3], ByObservation()), ("rest", ByObservation())],
            frames_per_batch=20,
            total_frames=100,
            storage=storage,
            seed=1,
        ) as collector,
    ):
        for number, _ in enumerate(collector):
            if number == 2:
                collector.update_policy_weights_(policy_id=1)
    facts = json.loads(shown(capsys, str(path), "--json"))["by_policy_version"]
    keys = [(found["policy_id"], found["policy_version"]) for found in facts]
    assert keys == ([(0, 0), (1, 0), (1, 1)] if rows is None else [(0, 0), (1, 1)])
    if rows is None:
        for found, key in zip(facts, keys, strict=True):
            own = [each for each in episodes_in(path) if (each["policy"], each["version"]) == key]
            assert found["lengths"]["episodes"] == len(own) > 0
            assert found["returns"]["mean"] == pytest.approx(np.mean([o["return"] for o in own]))
    assert re.search(r"policy +version +episodes", shown(capsys, str(path)))


def test_runs_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_storage(path) as storage:
        runs = storage.runs
    facts = json.loads(shown(capsys, str(path), "--runs", "--json"))
    assert {*facts} == {"path", "runs"}
    assert [run["made"] for run in facts["runs"]] == [run["made"] for run in runs]
    hashed = json.loads(shown(capsys, str(path), "--runs", "--hash", "--json"))
    assert hashed == {**facts, "content": content_hash(path)}
    assert f"content {hashed['content']}\n" in shown(capsys, str(path), "--runs", "--hash")
    text = shown(capsys, str(path), "--runs")
    for run in runs:
        assert f"made {run['made']['at']}, on {run['made']['host']}" in text
        assert f"policy's code {run['made']['policy']['code']}" in text
    assert "Columns" not in text


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_json_does_not_have(
    number: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend({("x",): np.zeros(3)})
    manifest = tmp_path / "rows" / "manifest.json"
    found = json.loads(manifest.read_bytes())
    found.pop("crc32")
    found["runs"][0]["shard"] = {"run": "r", "index": number, "of": 2}
    manifest.write_text(json.dumps(sealed(found)))
    for more in ((), ("--runs",)):
        said = json.loads(shown(capsys, str(tmp_path / "rows"), "--json", *more))
        assert said["runs"][0]["shard"]["index"] == str(number)


def test_trajectories_alone(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectories, "_AT_ONCE", 7)
    found = json.loads(shown(capsys, str(path), "--trajectories", "--json"))["trajectories"]
    with open_storage(path) as storage:
        table = storage.trajectories.table
    assert [line["id"] for line in found] == table["id"].tolist()
    ended = {line["id"]: line for line in found if line["end"] in ("terminated", "truncated")}
    wanted = {each["id"]: (each["return"], each["length"]) for each in episodes_in(path)}
    assert {id: (one["return"], one["length"]) for id, one in ended.items()} == wanted
    text = shown(capsys, str(path), "--trajectories")
    assert len(re.findall(r"^\d", text, re.MULTILINE)) == len(table)


def test_rows_without_trajectories_and_storages_of_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that no collector made have neither trajectory ids nor a record of their origin."""
    with MemmapStorage(tmp_path / "plain") as storage:
        storage.extend(TensorDict({"x": torch.arange(3)}, [3]))
    facts = json.loads(shown(capsys, str(tmp_path / "plain"), "--json"))
    assert facts["trajectories"] is None
    assert facts["by_policy_version"] == []
    assert "no record of where it was made" in shown(capsys, str(tmp_path / "plain"), "--runs")
    assert main(["inspect", str(tmp_path / "plain"), "--trajectories"]) == 1
    assert "have no trajectory ids" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "plain"), "--trajectories", "--runs"])
