"""Checkpoints as files: plain values, whole after a kill, damage told, nothing executed."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tallyroll.collector import load_checkpoint, save_checkpoint
from tallyroll.collector.batches.state.checkpoints import folder
from tallyroll.collector.batches.state.checkpoints.plain import from_plain, to_plain
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.storage import MemmapStorage
from tallyroll.storage.errors import StorageError, StorageFull
from tallyroll.storage.files.manifest import sealed

from killed_storages_kit import Told, forked, in_a_process, lines_of, oracle

KILLS = int(os.environ.get("TALLYROLL_KILLS", "50"))

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.sampled_from([np.arange(6.0).reshape(2, 3), np.uint32([7, 2**32 - 1]), np.array(True)])
    | st.sampled_from([{"tallyroll": "array"}, {"tallyroll": "mapping", "values": 1}]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and np.array_equal(one, other)
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=True)
        return type(one) is type(other) and all(same(*pair) for pair in pairs)
    return type(one) is type(other) and one == other


@given(plain)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    file = io.BytesIO()
    torch.save({"value": to_plain(value, "value")}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)["value"]
    assert same(from_plain(found), value)


class Danger:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "value", [Danger(), {"a": [Danger()]}, {Danger(): 1}, {1, 2}, np.array(["text"]), len]
)
def test_what_is_not_plain_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    class Part:
        def state_dict(self) -> Any:
            return {"deep": value}

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(StateError, match=r"parts.*'thing'.*'deep'.*expected tensors"):
        save_checkpoint(tmp_path / "c", thing=Part())
    with pytest.raises(ArgumentError, match="thing: expected something with state_dict"):
        save_checkpoint(tmp_path / "c", thing=value)
    assert not (tmp_path / "c").exists()


def test_generators_and_modules_are_parts(tmp_path: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        parts = {
            "torch_rng": torch.Generator().manual_seed(seed),
            "numpy_rng": np.random.default_rng(seed),
            "python_rng": random.Random(seed),
            "net": torch.nn.Linear(3, 2),
        }
        parts["adam"] = torch.optim.Adam(parts["net"].parameters())
        parts["net"](torch.ones(3)).sum().backward()
        parts["adam"].step()
        return parts

    def drawn(parts: dict[str, Any]) -> list[Any]:
        return [
            float(torch.rand((), generator=parts["torch_rng"])),
            parts["numpy_rng"].random(),
            parts["python_rng"].random(),
            parts["net"].weight.tolist(),
            parts["adam"].state_dict()["state"][0]["exp_avg"].tolist(),
        ]

    one, other = made(1), made(2)
    save_checkpoint(tmp_path / "c", **one, best=np.float64(2.5))
    loaded = load_checkpoint(tmp_path / "c", **other)
    assert drawn(one) == drawn(other)
    assert loaded.values == {"best": 2.5}
    loaded = load_checkpoint(tmp_path / "c", net=other["net"])
    assert loaded.unused == ("adam", "numpy_rng", "python_rng", "torch_rng")
    with pytest.raises(StateError, match="net: expected what was saved, a state_dict, got a torch"):
        load_checkpoint(tmp_path / "c", net=torch.Generator())


# --- files ----------------------------------------------------------------------------------------


def damaged(path: Path, how: str, tmp_path: Path) -> None:
    state, about = path / "state.pt", path / "checkpoint.json"
    if how == "bit":
        content = bytearray(state.read_bytes())
        content[len(content) // 2] ^= 4
        state.write_bytes(content)
    elif how == "short":
        state.write_bytes(state.read_bytes()[:-9])
    elif how == "gone":
        state.unlink()
    elif how == "link":
        shutil.move(state, tmp_path / "elsewhere")
        state.symlink_to(tmp_path / "elsewhere")
    elif how == "json":
        about.write_text("{")
    elif how == "other":
        about.write_text('{"format": "theirs"}')
    elif how == "newer":
        about.write_text(json.dumps({**json.loads(about.read_text()), "version": 9}))
    elif how == "code":
        torch.save({"parts": Danger()}, state)
        found = {"nbytes": state.stat().st_size, "sha256": folder._sha256(state)}
        found = {**json.loads(about.read_text()), **found}
        about.write_text(
            json.dumps(sealed({name: found[name] for name in found if name != "crc32"}))
        )
    elif how == "digit":
        found = about.read_text().replace('"transitions": 0', '"transitions": 1')
        assert found != about.read_text()
        about.write_text(found)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("bit", "fails its check"),
        ("short", "bytes were written|were written"),
        ("gone", "state.pt is missing"),
        ("link", "link"),
        ("json", "no JSON"),
        ("other", "another program's"),
        ("newer", "of version 9"),
        ("digit", "checkpoint.json fails its check"),
        ("code", "cannot be read"),
    ],
)
def test_damage_is_told(how: str, match: str, tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    save_checkpoint(tmp_path / "c", net=net, keep_last=None)
    path = save_checkpoint(tmp_path / "c", net=net, keep_last=None)
    assert path is not None
    before = net.weight.tolist()
    damaged(path, how, tmp_path)
    with pytest.raises((StateError, StorageError), match=match):
        load_checkpoint(tmp_path / "c", net=net)
    assert net.weight.tolist() == before
    load_checkpoint(tmp_path / "c" / "000001-at-0", net=net)


def test_where_nothing_is(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(StateError, match="holds no checkpoint"):
            load_checkpoint(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        save_checkpoint(tmp_path / "file")
    for wrong in ({"every": 0}, {"keep_last": 0}, {"copy_rows": True}, {"collector": 3}):
        with pytest.raises(ArgumentError):
            save_checkpoint(tmp_path / "c", **wrong)  # type: ignore[arg-type]


def test_a_full_disk_leaves_the_ones_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = torch.nn.Linear(2, 2)
    first = save_checkpoint(tmp_path / "c", net=net)
    before = net.weight.tolist()
    with torch.no_grad():
        net.weight += 1

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageFull):
            save_checkpoint(tmp_path / "c", net=net)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [".lock", "000001-at-0"]
    assert first == tmp_path / "c" / "000001-at-0"
    load_checkpoint(tmp_path / "c", net=net)
    assert net.weight.tolist() == before


def test_two_processes_save_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "c", number=1)
    monkeypatch.setattr(folder, "_PATIENCE_SECONDS", 0.05)
    saving = pytest.raises(StateError, match="another process has been saving")
    with folder.locked(tmp_path / "c"), saving:
        save_checkpoint(tmp_path / "c", number=2)
    save_checkpoint(tmp_path / "c", number=2)
    assert load_checkpoint(tmp_path / "c").values == {"number": 2}


def save_often(path: Path, told: Told) -> None:
    """Save checkpoint after checkpoint, each of rows that were committed before; say which is."""
    with MemmapStorage(path / "rows", mode="append") as storage:
        for _ in range(3):
            storage.extend(oracle(storage.head, 20))
            save_checkpoint(path / "c", storage=storage, head=storage.head, keep_last=2)
            told.head = storage.head


def kill_while_saving(base: Path, points: int, seed: int) -> list[int]:
    """Kill a saver at lines all over; how many rows the newest checkpoint had each time."""
    (base / "start").mkdir()
    with MemmapStorage(base / "start" / "rows") as storage:
        storage.extend(oracle(0, 20))
        save_checkpoint(base / "start" / "c", storage=storage, head=20, keep_last=2)
    pick, found, total = random.Random(seed), [], 0
    for number in range(points + 1):
        work, told = base / "work", Told()
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base / "start", work)
        told.head = 20
        line = 0
        if number:  # one in each part of the run, so that few meet all of it
            first = 1 + (number - 1) * total // points
            line = pick.randrange(first, max(first, number * total // points) + 1)

        def act(work: Path = work, told: Told = told, line: int = line) -> None:
            told.lines = lines_of(lambda: save_often(work, told), line, folder.__file__)

        _, status = os.waitpid(forked(act), 0)
        assert status == 0 or (line and os.WIFSIGNALED(status)), status
        total = total or told.lines
        loaded = load_checkpoint(work / "c")
        head = loaded.values["head"]
        assert head in (told.head, told.head + 20), f"killed at line {line}"
        assert 1 <= len(folder.entries_of(work / "c")) <= 3
        with MemmapStorage(work / "rows", mode="append") as storage:
            assert load_checkpoint(work / "c", storage=storage).transitions == head
            assert storage.head == head
            save_checkpoint(work / "c", storage=storage, head=0, keep_last=2)
        left = sorted(os.listdir(work / "c"))
        assert [name for name in left if name.startswith(".")] == [".lock"]
        assert len(left) == 3
        found.append(head)
    return found


@pytest.mark.timeout(60 + 4 * KILLS)
def test_kill_9_while_saving_leaves_the_old_one_or_the_new(tmp_path: Path) -> None:
    seed, points = random.randrange(2**32), max(10, KILLS // 5)
    found = in_a_process(kill_while_saving, tmp_path, points, seed, seconds=60 + 4 * KILLS)
    assert {20, 40, 60} <= {*found}
