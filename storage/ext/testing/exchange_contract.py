"""Tests that every exchange format must pass: subclass `ExchangeContract`."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tallyroll.storage import (
    ExportReport,
    Follow,
    MemmapStorage,
    diff,
    import_dataset,
    open_storage,
    verify,
    verify_dataset,
)
from tallyroll.storage.errors import (
    InvalidDataset,
    MissingLibrary,
    NotEnoughMemory,
    NotInitialised,
    PathIsTaken,
    StorageError,
    StorageFull,
    StorageLocked,
)
from tallyroll.storage.ext.atomic_create import atomic_creation
from tallyroll.storage.ext.dataset_checks.verify_dataset import kinds
from tallyroll.storage.ext.testing.reader_contract import collected
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import format_key
from tallyroll.storage.storages import DiskStorage

_MORE = int(os.environ.get("TALLYROLL_EXCHANGES", "1"))
"""Factor for the number of random schemas and of random damages."""
_SETTINGS = settings(
    max_examples=6 * _MORE,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    deadline=None,
)
_NAMES = st.text("abXY_0 é-", min_size=1, max_size=4).filter(lambda name: name.strip() == name)


@st.composite
def _schemas(draw: st.DrawFn) -> dict[tuple[str, ...], tuple[torch.dtype, tuple[int, ...]]]:
    """Draw additional columns for transitions, with their dtypes and shapes."""
    names = draw(st.lists(_NAMES, max_size=4, unique=True))
    found = {}
    for number, name in enumerate(names):
        key = (f"{name}{number}", *draw(st.lists(_NAMES, max_size=1)))
        shape = draw(st.lists(st.integers(1, 3), max_size=2))
        found[key] = draw(st.sampled_from([*NUMPY])), tuple(shape)
    return found


def _random(generator: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, shape).astype(bool))
    width = NUMPY[dtype].itemsize
    content = generator.integers(0, 256, (*shape[:-1], shape[-1] * width), np.uint8)
    return torch.from_numpy(content).view(dtype)  # any bits: NaN with a payload, -0.0, subnormals


def same(one: RowReader, other: RowReader) -> None:
    """Assert that both readers have the same rows in the same order, bit for bit."""
    assert one.schema.differences(other.schema) == []
    rows = [np.arange(each.span.start, each.span.stop) for each in (one, other)]
    assert len(rows[0]) == len(rows[1])
    for key in one.keys:
        left, right = (r.copies(n, [key])[0] for r, n in zip((one, other), rows, strict=True))
        assert left.tobytes() == right.tobytes(), format_key(key)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


class ExchangeContract:
    """Contract of an exchange format; subclasses set ``kind`` to its name."""

    kind: ClassVar[str]
    suffix: ClassVar[str] = ""
    """The suffix of the path of an export."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Modules that are required to write rows."""
    lossless: ClassVar[bool] = True
    """True if an export of `collected` loses nothing, so that all counts of the report are 0."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Iterator[DiskStorage]:
        """A storage with several lanes, nested keys, images, bfloat16, and cut trajectories."""
        with MemmapStorage(tmp_path / "source") as storage:
            storage.extend(collected())
        with open_storage(tmp_path / "source") as storage:
            yield storage

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """A free path."""
        return tmp_path / f"out{self.suffix}"

    def test_out_and_back(self, source: DiskStorage, place: Path, tmp_path: Path) -> None:
        report = source.export(place, self.kind)
        assert (report.rows, report.trajectories, report.cut) == (len(source), 27, 3)
        assert bool(report.lost) is not self.lossless
        assert report.nbytes > 0
        back = import_dataset(place, tmp_path / "back", self.kind)
        assert (back.rows, back.lost, back.numbered) == (len(source), {}, False)
        found = diff(tmp_path / "source", tmp_path / "back")
        assert (found.equal, found.schema, found.only) == (len(source), (), (0, 0))
        assert verify(tmp_path / "back").sound
        with open_storage(tmp_path / "back") as storage:
            (run,) = storage.reader.runs
            assert run["imported_from"]["kind"] == self.kind
            assert run["imported_from"]["path"] == str(place)
            assert run["copied_from"]["id"] == source.reader.id
            assert storage.schema.batch_dims == source.schema.batch_dims
        assert not [each for each in tmp_path.iterdir() if each.name.endswith(".written-aside")]

    @_SETTINGS
    @given(_schemas(), st.integers(1, 7), st.integers(1, 9), st.integers(0, 2**32))
    def test_any_columns(
        self,
        columns: dict[tuple[str, ...], tuple[torch.dtype, tuple[int, ...]]],
        steps: int,
        rows: int,
        seed: int,
    ) -> None:
        generator = np.random.default_rng(seed)
        batch = trajectory_rows(0, rows, steps=steps)
        batch["action"] = torch.arange(rows) % 3
        for key, (dtype, shape) in columns.items():
            batch[("next", *key)] = _random(generator, dtype, (rows, *shape, 1))
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder, f"out{self.suffix}")
            with MemmapStorage(Path(folder, "source")) as storage:
                storage.extend(batch)
                storage.export(place, self.kind)
                import_dataset(place, Path(folder, "back"), self.kind)
                with open_storage(Path(folder, "back")) as back:
                    same(storage.reader, back.reader)

    @pytest.mark.parametrize("rows", [0, 1])
    def test_none_and_one(self, rows: int, place: Path, tmp_path: Path) -> None:
        batch = trajectory_rows(0, 1, steps=3)
        batch["action"] = torch.zeros(1, dtype=torch.int64)
        with MemmapStorage(tmp_path / "source") as storage:
            storage.extend(batch) if rows else storage.initialise(storage_schema(batch))
            report = storage.export(place, self.kind)
            assert (report.rows, report.cut) == (rows, rows)
            import_dataset(place, tmp_path / "back", self.kind)
            with open_storage(tmp_path / "back") as back:
                same(storage.reader, back.reader)

    def test_a_storage_without_columns(self, place: Path, tmp_path: Path) -> None:
        with MemmapStorage(tmp_path / "source") as storage, pytest.raises(NotInitialised):
            storage.export(place, self.kind)
        assert not place.exists()

    def test_paths_as_users_write_them(
        self, source: DiskStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Relative paths refer to the working directory of the call."""
        for name in ("home", "one/real/above", "two"):
            (tmp_path / name).mkdir(parents=True)
        (tmp_path / "one" / "link").symlink_to(tmp_path / "one" / "real" / "above")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        for name in ("out", "~/out", "new/é and spaces/out", "link/../out"):
            monkeypatch.chdir(tmp_path / "one")
            written = f"{name}{self.suffix or '/'}"
            report = source.export(written, self.kind)
            assert Path(os.path.expanduser(written)).exists()
            monkeypatch.chdir(tmp_path / "two")
            if not written.startswith("~"):
                written = f"../one/{written}"
            assert import_dataset(written, "back", self.kind).rows == report.rows
            with open_storage("back") as storage:
                monkeypatch.chdir(tmp_path)
                assert len(storage.get(slice(None))) == len(source)
            shutil.rmtree(tmp_path / "two" / "back")
        assert not [*tmp_path.rglob("*.written-aside")]

    def test_a_missing_file_is_named(
        self, source: DiskStorage, place: Path, tmp_path: Path
    ) -> None:
        """An import of a dataset that lacks a file gives all rows or is refused."""
        source.export(place, self.kind)
        for file in [each for each in place.rglob("*") if each.is_file()]:
            file.rename(tmp_path / "elsewhere")
            try:
                report = import_dataset(place, tmp_path / "back", self.kind)
            except InvalidDataset as error:
                assert file.name in str(error) or file.suffix in str(error) or "info" in str(error)
            else:
                assert report.rows == len(source)
                shutil.rmtree(tmp_path / "back")
            (tmp_path / "elsewhere").rename(file)

    def test_values_that_are_not_finite(self, place: Path, tmp_path: Path) -> None:
        """The export of a sound storage is sound, and its text files are strict JSON."""
        rows = collected()
        ends = (rows["next", "terminated"] | rows["next", "truncated"]).reshape(-1).nonzero()[:, 0]
        valid = torch.ones(len(rows), dtype=torch.bool)
        valid[ends[:3]] = False
        rows["collector", "next_valid"] = valid
        rows["next", "observation"][ends[:2]] = float("nan")  # like lost observations
        rows["next", "observation"][ends[2], 0] = -float("inf")
        rows["logits"] = torch.full((len(rows), 2), -float("inf"))
        with MemmapStorage(tmp_path / "rows") as storage:
            storage.extend(rows)
            storage.statistics()
            assert verify(tmp_path / "rows").sound
            storage.export(place, self.kind)
        if self.kind in kinds():
            report = verify_dataset(place, self.kind)
            assert report.sound, report.findings
        for text in place.rglob("*.json") if place.is_dir() else ():
            json.loads(text.read_text(), parse_constant=_refuse)

    def test_cuts(self, source: DiskStorage, place: Path, tmp_path: Path) -> None:
        wanted = {"drop": 24, "truncate": 27}
        for cuts, trajectories in wanted.items():
            report = source.export(place, self.kind, cuts=cuts)  # type: ignore[arg-type]
            assert (report.trajectories, report.cut) == (trajectories, 3)
            left = 3 if cuts == "drop" else 0
            assert report.lost.get("cut_trajectories", 0) == left
            assert report.lost.get("cuts_written_as_truncated", 0) == 3 - left
            assert len(source) - report.rows == report.lost.get("rows_of_cut_trajectories", 0)
            import_dataset(place, tmp_path / cuts, self.kind)
            assert verify(tmp_path / cuts).sound
            with open_storage(tmp_path / cuts) as back:
                ends = dict(zip(source.trajectories.ids, source.trajectories.ends, strict=True))
                if cuts == "truncate":
                    ends = {i: "truncated" if e == "cut" else e for i, e in ends.items()}
                found = dict(zip(back.trajectories.ids, back.trajectories.ends, strict=True))
                assert found == {i: e for i, e in ends.items() if e != "cut"}
            shutil.rmtree(place) if place.is_dir() else place.unlink()

    def test_chosen_rows(self, source: DiskStorage, place: Path, tmp_path: Path) -> None:
        chosen = source.trajectories.where("length > 3")
        report = chosen.export(place, self.kind)
        assert report.rows == len(chosen) < len(source)
        import_dataset(place, tmp_path / "back", self.kind)
        with open_storage(tmp_path / "back") as back:
            assert sorted(back.trajectories.ids) == sorted(chosen.trajectories.ids)

    def test_versions_of_it(self, source: DiskStorage, tmp_path: Path) -> None:
        """Each version has the rows of its export, and the link points to the newest version."""
        again, more = tmp_path / "again", collected()
        source.copy_to(again)
        more["collector", "traj_ids"] += 1000

        def on(report: ExportReport) -> None:
            link = tmp_path / "out" / f"current{self.suffix}"
            assert report.path == str(link)
            back = tmp_path / f"back{report.rows}"
            import_dataset(os.path.realpath(link), back, self.kind)
            found = diff(again, back)
            assert (found.equal, found.only[1], found.schema) == (report.rows, 0, ())
            if len(writer) == len(source):
                writer.extend(more)
            else:
                writer.close()

        with MemmapStorage(again, mode="append") as writer, open_storage(again) as storage:
            report = storage.export(
                tmp_path / "out", self.kind, follow=Follow(every=0, on_version=on)
            )
        assert (report.versions, report.rows) == (2, 2 * len(source))

    def test_what_is_there_is_kept(self, source: DiskStorage, place: Path, tmp_path: Path) -> None:
        place.write_text("mine")
        with pytest.raises(PathIsTaken, match="already exists"):
            source.export(place, self.kind)
        assert place.read_text() == "mine"
        place.unlink()
        source.export(place, self.kind)
        with pytest.raises(PathIsTaken, match="already exists"):
            import_dataset(place, tmp_path / "source", self.kind)

    def test_two_at_once(self, source: DiskStorage, place: Path, tmp_path: Path) -> None:
        with pytest.raises(StorageLocked), atomic_creation(place):
            source.export(place, self.kind)
        source.export(place, self.kind)
        back = tmp_path / "back"
        with pytest.raises(StorageLocked), atomic_creation(back):
            import_dataset(place, back, self.kind)
        assert not back.exists()

    def test_one_that_is_interrupted(
        self, source: DiskStorage, place: Path, tmp_path: Path
    ) -> None:
        def stop(done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            source.export(place, self.kind, progress=stop)
        assert [each.name for each in tmp_path.iterdir()] == ["source"]
        source.export(place, self.kind)
        with pytest.raises(KeyboardInterrupt):
            import_dataset(place, tmp_path / "back", self.kind, progress=stop)
        assert {each.name for each in tmp_path.iterdir()} == {"source", place.name}

    def test_a_full_disk(self, source: DiskStorage, place: Path, tmp_path: Path) -> None:
        with file_size_limit(4096), pytest.raises(StorageFull):
            source.export(place, self.kind)
        assert not place.exists()
        source.export(place, self.kind)
        with file_size_limit(4096), pytest.raises(StorageFull):
            import_dataset(place, tmp_path / "back", self.kind)
        assert {each.name for each in tmp_path.iterdir()} == {"source", place.name}

    def test_a_damaged_source(self, source: DiskStorage, place: Path, tmp_path: Path) -> None:
        """Damaged files raise only Tallyroll's errors, and leave no files behind."""
        source.export(place, self.kind)
        generator = np.random.default_rng(0)
        files = [place] if place.is_file() else [f for f in place.rglob("*") if f.is_file()]
        refused = 0
        for number in range(16 * _MORE):
            file = files[number % len(files)]
            content = file.read_bytes()
            broken = bytearray(content)
            if number % 2:
                del broken[generator.integers(len(broken)) :]
            else:
                for at in generator.integers(0, len(broken), 8):
                    broken[at] = generator.integers(256)
            file.write_bytes(broken)
            back = tmp_path / f"back{number}"
            try:
                import_dataset(place, back, self.kind)
            except (StorageError, NotEnoughMemory):
                refused += 1
                assert not back.exists()
            file.write_bytes(content)
        assert refused >= 4
        import_dataset(place, tmp_path / "back", self.kind)

    def test_links_are_not_followed(self, source: DiskStorage, place: Path, tmp_path: Path) -> None:
        source.export(place, self.kind)
        files = [place] if place.is_file() else [f for f in place.rglob("*") if f.is_file()]
        refused = 0
        for file in files:
            elsewhere = tmp_path / "elsewhere"
            file.rename(elsewhere)
            file.symlink_to(elsewhere)
            try:
                import_dataset(place, tmp_path / "back", self.kind)
                shutil.rmtree(tmp_path / "back")
            except StorageError:
                refused += 1
            file.unlink()
            elsewhere.rename(file)
        assert refused >= len(files) - 1, "at most one file, which is not read, may be a link"
        assert refused

    def test_another_thing(self, place: Path, tmp_path: Path) -> None:
        """A folder, a text file, an empty file, a pipe and a missing path are refused."""
        place.mkdir()
        with pytest.raises(StorageError):
            import_dataset(place, tmp_path / "back", self.kind)
        place.rmdir()
        for content in (b"", b"text", b"PK\x05\x06" + bytes(18), bytes(4096)):
            place.write_bytes(content)
            with pytest.raises(StorageError):
                import_dataset(place, tmp_path / "back", self.kind)
            place.unlink()
        os.mkfifo(place)
        with pytest.raises(StorageError):
            import_dataset(place, tmp_path / "back", self.kind)
        place.unlink()
        with pytest.raises(StorageError, match="does not exist"):
            import_dataset(place, tmp_path / "back", self.kind)
        assert not [*tmp_path.iterdir()]

    def test_without_its_library(
        self, source: DiskStorage, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in self.libraries:
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, name, None)
                with pytest.raises(MissingLibrary, match=r'pip install "tallyroll\[') as caught:
                    source.export(place, self.kind)
                assert "\n" not in str(caught.value)
        assert not place.exists()


def storage_schema(batch: TensorDict) -> Any:
    """Return the schema of a batch."""
    from tallyroll.storage import Schema

    return Schema.of(batch)


@contextmanager
def file_size_limit(most: int) -> Iterator[None]:
    """Limit the size of files to ``most`` bytes, to simulate a full disk.

    Meanwhile Python writes no bytecode: CPython 3.11 does not notice that the limit cuts a file of
    it short, and every later process that imports the module fails.
    """
    before, bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = bytecode
