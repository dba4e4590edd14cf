"""Compare statistics of columns with NumPy over all rows."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import GymEnv, TransformedEnv, check_env_specs

from tallyroll.collector.cli import main
from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, open_storage, verify
from tallyroll.storage.errors import ColumnsMissing, NotInitialised
from tallyroll.storage.ext.statistics import computation, moments
from tallyroll.storage.ext.statistics.computation import sampled
from tallyroll.storage.ext.statistics.moments import QUANTILES, merged, moments_of, nothing
from tallyroll.storage.ext.statistics.normaliser import Normaliser
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.rewinds import rewind_to


def rows_of(count: int, seed: int = 0) -> TensorDict:
    """Return rows with columns of many dtypes, NaNs and infinities, in four lanes."""
    random = torch.Generator().manual_seed(seed)
    at = torch.arange(count)
    wild = torch.randn(count, 3, generator=random)
    wild[at % 7 == 2, 1] = torch.nan
    wild[:, 2] = torch.nan
    far = torch.randn(count, 2, generator=random, dtype=torch.float64) + 1e9
    endless = torch.randn(count, generator=random)
    endless[at == 5] = torch.inf
    return TensorDict(
        {
            "wild": wild,
            "far": far,
            "endless": endless,
            "byte": torch.randint(-128, 128, (count, 2), generator=random, dtype=torch.int8),
            "image": torch.randint(0, 256, (count, 20, 20), generator=random, dtype=torch.uint8),
            "wide": torch.randn(count, 300, generator=random).bfloat16(),
            "whole": torch.randint(-(2**40), 2**40, (count,), generator=random),
            "flag": (torch.rand(count, 1, generator=random) < 0.2),
            "complex": torch.complex(wild[:, 0], wild[:, 0]),
            "next": {"terminated": at >= count - 4},
            "collector": {"traj_ids": at % 4, "step": at // 4, "lane": (at % 4).int()},
        },
        [count],
    )


def check(storage: DiskStorage, found: Any, rows: slice = slice(None)) -> None:
    """Compare statistics with values that NumPy computes."""
    for name, each in found.items():
        values = storage.get(rows, keys=[tuple(name.split("/"))])[tuple(name.split("/"))]
        values = values.double().numpy()
        values = values.reshape(len(values), -1)
        values = values.reshape(-1, 1) if values.shape[1] > 256 else values
        for place, column in enumerate(values.T):
            there = column[~np.isnan(column)]
            got = {
                name: np.asarray(getattr(each, name)).reshape(-1)[place]
                for name in ("count", "mean", "std", "min", "max", "nan")
            }
            assert got["count"] == len(there)
            assert got["nan"] == pytest.approx(1 - len(there) / len(column))
            if not len(there):
                assert all(np.isnan(got[name]) for name in ("mean", "std", "min", "max"))
                continue
            assert (got["min"], got["max"]) == (there.min(), there.max())
            with np.errstate(invalid="ignore"):
                mean, std = there.mean(), there.std()
            np.testing.assert_allclose([got["mean"]], [mean], rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose([got["std"]], [std], rtol=1e-6, atol=1e-12)
            for share, quantile in each.quantiles.items():
                wanted = np.quantile(there, share, method="inverted_cdf")
                assert quantile.reshape(-1)[place] == wanted, (name, share)


@pytest.fixture(params=["all", "ring"])
def storage(request: Any, tmp_path: Path) -> Iterator[DiskStorage]:
    ring = {"max_size": 350} if request.param == "ring" else {}
    with MemmapStorage(tmp_path / "rows", **ring) as storage:
        for part in rows_of(500).split(100):
            storage.extend(part, ids="fresh")
        yield storage


def test_they_are_those_of_numpy(storage: DiskStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computation, "_AT_ONCE", 97)
    found = storage.statistics()
    assert found.rows == len(storage)
    assert {*found} == {"/".join(key) for key in storage.reader.keys} - {"complex"}
    assert found["wild"].mean.shape == (3,)
    assert found["image"].mean.shape == found["wide"].mean.shape == ()
    assert found["collector", "step"] is found["collector/step"]
    assert [*found["whole"].quantiles] == [*QUANTILES]
    check(storage, found)
    assert found["far"].std.max() < 2, "a deviation that is small beside the mean stays right"


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=40),
    cuts=st.lists(st.integers(1, 39), max_size=3),
)
def test_parts_are_put_together_as_one(values: list[float], cuts: list[int]) -> None:
    column = np.array(values)[:, None]
    found = nothing(1)
    for part in np.split(column, sorted({cut for cut in cuts if cut < len(values)})):
        found = merged(found, moments_of(part))
    there = column[~np.isnan(column)]
    assert (found["count"], found["nans"]) == (len(there), len(column) - len(there))
    if len(there):
        assert (found["least"], found["most"]) == (there.min(), there.max())
        np.testing.assert_allclose(found["mean"], there.mean(), rtol=1e-12, atol=1e-6)
        squares = ((there - there.mean()) ** 2).sum()
        np.testing.assert_allclose(found["squares"], squares, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("kind", [MemmapStorage, H5Storage, ZarrStorage])
def test_only_rows_that_came_are_read(kind: type[DiskStorage], tmp_path: Path) -> None:
    rows = rows_of(400).exclude("wide", "complex", "image")
    read: list[int] = []

    def progress(done: int, total: int) -> None:
        assert 0 < done <= total
        read[:] = [done, total]

    with kind(tmp_path / "rows", capacity=400) as storage:
        nbytes = None
        for stop in (150, 151, 400):
            storage.extend(rows[storage.head : stop])
            check(storage, storage.statistics(progress=progress))
            nbytes = storage.schema.row_nbytes
            assert read == [nbytes * (stop - {150: 0, 151: 150, 400: 151}[stop])] * 2
        read.clear()
        check(storage, storage.statistics(progress=progress))
        assert not read, "they are all there"
        storage.statistics("far", keep=False, progress=progress)
        assert read == [400 * 16] * 2
        assert storage.writer.files.statistics_path.exists()
    assert verify(tmp_path / "rows", skip=["nan"]).sound
    read.clear()
    with open_storage(tmp_path / "rows") as storage:
        check(storage, storage.statistics(["far", "flag"], progress=progress))
        assert not read


def test_columns_may_be_asked_for_in_turn(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows_of(100))
        storage.statistics("far")
        storage.extend(rows_of(100, 1), ids="renumber")
        storage.statistics("byte")
        done: list[int] = []
        check(storage, storage.statistics(["far", "byte"], progress=lambda n, of: done.append(of)))
        assert {*done} == {100 * 16}


def test_a_file_that_cannot_be_used_is_counted_again(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "other") as other:
        other.extend(rows_of(300, 3))
        other.statistics()
    path = tmp_path / "rows"
    with MemmapStorage(path) as storage:
        storage.extend(rows_of(300))
        storage.statistics()
    file = path / "columns.statistics"
    content = file.read_bytes()
    line = content.split(b"\n")[1]
    bad = [content[:-1], content[: len(content) // 2], b"", b"tallyroll statistics 1\n", b"\0" * 99]
    bad += [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in (3, 40, 900)]
    bad.append((tmp_path / "other" / file.name).read_bytes())
    said = json.loads(line)
    for change in (
        {"id": "0"},
        {"rewinds": 1},
        {"columns": None},
        {"columns": [[*said["columns"][0][:3], 10**9, 1], *said["columns"][1:]]},
        {"columns": [[*said["columns"][0][:3], -1, 1], *said["columns"][1:]]},
        {"columns": [["nothing", *said["columns"][0][1:]]]},
        {"columns": [said["columns"][0][:2]]},
    ):
        bad.append(resealed(content, line, json.dumps({**said, **change}).encode()))
    for wrong in bad:
        file.write_bytes(wrong)
        with open_storage(path) as storage:
            check(storage, storage.statistics())
        assert file.read_bytes() == content


def resealed(content: bytes, line: bytes, instead: bytes) -> bytes:
    """Replace a line of a file and update its checksum."""
    from hashlib import sha256

    body = content[:-32].replace(line, instead, 1)
    return body + sha256(body).digest()


def test_moments_that_rows_contradict_are_counted_again(tmp_path: Path) -> None:
    """Rows of another file replace these rows, while the checksum of the statistics is valid."""
    path = tmp_path / "rows"
    with MemmapStorage(path) as storage:
        storage.extend(rows_of(300))
        storage.statistics()
    values = np.memmap(path / "far.memmap", np.float64, "r+")
    values += 5
    values.flush()
    with open_storage(path) as storage:
        check(storage, storage.statistics())


def test_rows_that_were_taken_back(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows_of(300))
        storage.statistics()
        rewind_to(storage.writer, 200, None)
        storage.extend(rows_of(100, 5), ids="renumber")
        check(storage, storage.statistics())


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows_of(50))

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "no space")

        with monkeypatch.context() as patch:
            patch.setattr(type(storage.writer.files.inside), "write_atomically", full)
            check(storage, storage.statistics())
        assert not storage.writer.files.statistics_path.exists()


def test_by_run_and_of_views(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "a") as one, MemmapStorage(tmp_path / "b") as other:
        one.extend(rows_of(100))
        other.extend(rows_of(60, 1))
        one.extend(other.in_order(), ids="renumber")
        one.statistics()
        one.extend(other.in_order()[:20], ids="renumber")
        found = one.statistics()
        assert len(found.runs) == len(one.runs) > 1
        begins = [run["first_row"] for run in one.runs]
        for run, start, stop in zip(found.runs, begins, [*begins[1:], 180], strict=True):
            check(one, run, slice(start, stop))
            assert not any(each.quantiles for each in run.values())
        view = one.trajectories.where("lane == 1")
        check(view, view.statistics())
        assert len(view.statistics("far")) == 1
        assert one.trajectories.where("False").statistics()["far"].count.tolist() == [0, 0]


def test_a_sample_is_one_of_each_stretch() -> None:
    assert sampled(range(5, 9), 4).tolist() == [5, 6, 7, 8]
    for rows in (range(7, 1007), range(1017)):
        found = sampled(rows, 100)
        ends = rows.start + np.arange(101) * len(rows) // 100
        assert ((ends[:-1] <= found) & (found < ends[1:])).all()
        assert len(set((found - ends[:-1]).tolist())) > 5


def test_quantiles_of_many_rows_are_as_near_as_they_say(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values = random.exponential(size=(200_000, 2)).astype(np.float32)
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend({("x",): values})
        found = storage.statistics()["x"]
    for share, quantile in found.quantiles.items():
        for place in (0, 1):
            assert (values[:, place] <= quantile[place]).mean() == pytest.approx(share, abs=0.015)


def test_memory_is_bounded(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        for _ in range(4):
            storage.extend({("x",): np.zeros((500_000, 8), np.float32)})
        storage.statistics("x", keep=False)
        tracemalloc.start()
        storage.statistics("x", keep=False)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 40e6


def test_wrong_columns(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        with pytest.raises(NotInitialised):
            storage.statistics()
        storage.extend(rows_of(10))
        with pytest.raises(ColumnsMissing, match=r"got wid; did you mean wide\?"):
            storage.statistics(["wid"])
        with pytest.raises(ValueError, match="got complex of dtype complex64"):
            storage.statistics("complex")


# --- normaliser -----------------------------------------------------------------------------------


@pytest.fixture
def pole(tmp_path: Path) -> Path:
    args = ["collect", "CartPole-v1", "--frames", "300", "--seed", "0", "--quiet"]
    assert main([*args, "--out", str(tmp_path / "pole")]) == 0
    return tmp_path / "pole"


def _called(module: torch.nn.Module, state: TensorDict, given: torch.Tensor) -> torch.Tensor:
    with state.to_module(module):
        found: torch.Tensor = module(given)
    return found


def test_a_normaliser_of_flags(pole: Path) -> None:
    with open_storage(pole) as storage:
        key = ("next", "terminated")
        normaliser = storage.normaliser(key)
        flags = torch.from_numpy(storage.column(key).copy())
        numbers = flags.double()
        wanted = (numbers - numbers.mean()) / numbers.std(correction=0)
        torch.testing.assert_close(normaliser(flags).double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_normaliser(pole: Path) -> None:
    with open_storage(pole) as storage:
        normaliser = storage.normaliser("observation")
        observed = torch.from_numpy(storage.column("observation").copy())
        mean, std = observed.double().mean(0), observed.double().std(0, correction=0)
        wanted = ((observed - mean) / std).clamp(-10, 10)
        torch.testing.assert_close(normaliser(observed).double(), wanted, rtol=1e-4, atol=1e-5)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=16, transform=normaliser)
        batch = buffer.sample()
        at = batch["index"]
        torch.testing.assert_close(batch["observation"].double(), wanted[at], rtol=1e-4, atol=1e-5)
        following = torch.from_numpy(storage.column(("next", "observation")).copy())[at]
        torch.testing.assert_close(
            batch["next", "observation"], normaliser(following), rtol=0, atol=0
        )
        near = storage.normaliser("observation", clip=0.5)
        assert near(observed).abs().max() == 0.5
    copies = [TensorDict.from_module(normaliser).data for _ in range(2)]  # as TorchRL's losses do
    for each in torch.vmap(lambda state: _called(normaliser, state, observed))(torch.stack(copies)):
        torch.testing.assert_close(each, normaliser(observed))
    fresh = Normaliser("observation", torch.zeros(4), torch.ones(4), clip=1)
    fresh.load_state_dict(normaliser.state_dict())
    assert (fresh(observed) == normaliser(observed)).all()


def test_a_normaliser_of_an_environment(pole: Path) -> None:
    with open_storage(pole) as storage:
        normaliser = storage.normaliser("observation")
    env = TransformedEnv(GymEnv("CartPole-v1"), normaliser)
    check_env_specs(env)
    bare = GymEnv("CartPole-v1")
    env.set_seed(3), bare.set_seed(3)
    first = bare.reset()["observation"]
    torch.testing.assert_close(env.reset()["observation"], normaliser(first))
    action = bare.rand_action()
    following = [each.step(action.clone())["next", "observation"] for each in (env, bare)]
    torch.testing.assert_close(following[0], normaliser(following[1]))


def test_a_normaliser_of_what_does_not_vary(tmp_path: Path) -> None:
    rows = torch.stack([torch.full((50,), 3.0), torch.arange(50.0)], 1)
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(TensorDict({"x": rows, "bad": rows / 0}, [50]))
        normaliser = storage.normaliser("x", clip=5)
        assert normaliser(rows)[:, 0].tolist() == [0.0] * 50
        assert normaliser(torch.tensor([[4.0, 0.0]]))[0, 0] == 5
        assert storage.normaliser("x", clip=None)(torch.tensor([[4.0, 0.0]]))[0, 0] > 1e5
        with pytest.raises(ValueError, match="expected finite numbers in bad"):
            storage.normaliser("bad")
        for wrong in ({"eps": 0}, {"clip": -1}, {"clip": "a"}, {"eps": True}):
            with pytest.raises(ValueError, match="expected a number above 0"):
                storage.normaliser("x", **wrong)  # type: ignore[arg-type]
        with pytest.raises(ColumnsMissing):
            storage.normaliser("y")


# --- the command ----------------------------------------------------------------------------------


def test_the_command(pole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["stats", str(pole)]
    assert main([*command, "--json", "--by-run"]) == 0
    told = json.loads(capsys.readouterr().out)
    with open_storage(pole) as storage:
        found = storage.statistics()
        chosen = len(storage.trajectories.where("length > 20"))
    assert told["rows"] == 300
    assert told["columns"]["observation"]["std"] == found["observation"].std.tolist()
    assert told["columns"]["next/reward"]["quantiles"]["0.5"] == [1.0]
    assert told["runs"][0]["action"]["mean"] == found["action"].mean.tolist()
    assert main([*command, "--column", "observation", "--by-run"]) == 0
    said = capsys.readouterr().out
    assert "observation[3]" in said
    assert "Run 0" in said
    assert "action" not in said
    assert main([*command, "--where", "length > 20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == chosen
    assert main(["inspect", str(pole), "--where", "length > 20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == chosen
    assert main(["inspect", str(pole), "--where", "length > 20", "--trajectories", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["trajectories"]
    assert sum(line["length"] for line in lines) == chosen


@pytest.mark.parametrize("command", ["stats", "inspect"])
def test_the_command_shows_the_place_of_a_fault(
    command: str, pole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(pole), "--where", "length > 9 and retrun > 5"]) == 2
    error = capsys.readouterr().err
    assert "did you mean return?" in error
    assert error.endswith("    length > 9 and retrun > 5\n                   ^\n")
    assert main(["stats", str(pole), "--column", "observaton"]) == 1
    assert "did you mean observation?" in capsys.readouterr().err
    assert not os.path.exists("nowhere")
    assert main(["stats", "nowhere"]) == 1
    shutil.rmtree(pole)


def test_bytes_in_an_order_of_their_own() -> None:
    values = np.array([5, -3, 0], np.int8).view(np.uint8).view(np.int8).astype(float)
    counts = np.array([[2, 1, 1]])
    found = moments.quantiles_of_counts(counts, values)
    assert found[:, 0].tolist() == [-3, -3, -3, 0, 5, 5, 5]
