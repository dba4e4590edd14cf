"""Test versions of the format.

An older storage is used as it is, a later one is reported, and nonsense is refused.
"""

from __future__ import annotations

import json
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.storage import (
    CorruptStorage,
    H5Storage,
    MemmapStorage,
    StorageError,
    ZarrStorage,
    open_storage,
    verify,
)
from tallyroll.storage.errors import FormatVersionMismatch, NotAStorage
from tallyroll.storage.files.commit_header import HEADER_NBYTES
from tallyroll.storage.files.format_versions import FORMAT_VERSION, READABLE
from tallyroll.storage.files.manifest import sealed
from tallyroll.storage.formats.hdf5.user_block import (
    USER_BLOCK_NBYTES,
    newest_manifest,
    write_manifest,
)
from tallyroll.storage.storages import DiskStorage

from storage_contract import files_of, rows
from storage_damage import damage

OLD = Path(__file__).parent / "data" / "version-2.tar.xz"
KINDS = (
    "memmap-closed", "memmap-killed", "memmap-ring", "memmap-ring-killed", "closed.h5",
    "killed.h5", "finalized.h5", "closed.zarr", "killed.zarr",
)  # fmt: skip
MARK = slice(192, 224)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(OLD) as tar:
        tar.extractall(folder, filter="data")
    return folder / "version-2"


@pytest.fixture
def old(unpacked: Path, tmp_path: Path) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """Return a copy of an old storage, and the rows that it holds."""

    def make(name: str) -> tuple[Path, dict[str, Any]]:
        source, path = unpacked / name, tmp_path / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, path)
        return path, json.loads((unpacked / "rows.json").read_text())[name]

    return make


Old = Callable[[str], tuple[Path, dict[str, Any]]]


def assert_holds(storage: DiskStorage, wanted: dict[str, Any], skip: int = 0) -> None:
    """Check the first rows, except for ``skip`` rows that were overwritten meanwhile."""
    assert storage.span.start == wanted["first_row"] + skip
    slots = storage.slots_of(np.arange(storage.span.start, wanted["head"]))
    for name, values in wanted["columns"].items():
        expected = np.array(values[skip:])
        found = storage.column(tuple(name.split("/")))[slots]
        np.testing.assert_array_equal(found, expected.astype(found.dtype).reshape(found.shape))


def versions_in(path: Path) -> tuple[int, int]:
    """Return the versions of the manifest and of the header."""
    with open_storage(path) as storage:
        version, header = storage.manifest["format_version"], storage.writer.files.header_path
    return version, int.from_bytes(header.read_bytes()[8:16], "little")


@pytest.mark.parametrize("name", KINDS)
def test_a_storage_of_version_2_is_read(
    old: Old, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, wanted = old(name)
    before = files_of(path)
    with open_storage(path) as storage:
        assert storage.head == wanted["head"]
        assert_holds(storage, wanted)
        assert len(storage.trajectories.ids)
    report = verify(path)
    assert report.sound, report.findings
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == len(wanted["columns"]["action"])
    assert main(["verify", str(path), "--quiet"]) == 0
    assert files_of(path) == before


@pytest.mark.parametrize("name", KINDS)
def test_a_storage_of_version_2_is_gone_on_with_and_stays_one(old: Old, name: str) -> None:
    path, wanted = old(name)
    frames = 90
    with (
        open_storage(path, "append", capacity=200) as storage,
        SyncCollector(
            "CartPole-v1", None, num_envs=2, frames_per_batch=12, total_frames=frames, seed=None,
            storage=storage, resume=True,
        ) as collector,
    ):  # fmt: skip
        assert sum(map(len, collector)) == frames - wanted["head"]
    assert versions_in(path) == (2, 2)
    skip = frames - 40 - wanted["first_row"] if "ring" in name else 0
    with open_storage(path) as storage:
        assert storage.head == frames
        assert_holds(storage, wanted, skip)
        header = storage.writer.files.header_path
        runs = storage.manifest["runs"]
        assert [run["incarnation"] for run in runs] == [0, 1]
    # A Tallyroll that does not know the mark leaves it unchanged.
    assert header.read_bytes()[MARK] == bytes(32)
    assert verify(path).sound
    with open_storage(path, "append") as storage:
        storage.finalize()
    assert versions_in(path) == (2, 2)
    report = verify(path)
    assert report.sound
    assert "checksums" in report.checked
    with open_storage(path) as storage:
        assert_holds(storage, wanted, skip)


def test_an_open_storage_of_version_2_can_be_copied_as_before(old: Old, tmp_path: Path) -> None:
    path, wanted = old("memmap-closed")
    with open_storage(path, "append"):
        shutil.copytree(path, tmp_path / "copy")
    with open_storage(tmp_path / "copy") as storage:
        assert_holds(storage, wanted)


# -- later versions, and invalid ones


LATER = max(READABLE) + 1
CLASSES = {"memmap": MemmapStorage, "hdf5": H5Storage, "zarr": ZarrStorage}


@pytest.fixture(params=CLASSES)
def five(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"rows.{request.param}"
    with CLASSES[request.param](path, capacity=10) as storage:
        storage.extend(rows(0, 5))
        assert storage.manifest["format_version"] == FORMAT_VERSION
    return path


def kind_of(path: Path) -> type[DiskStorage]:
    return CLASSES[path.suffix[1:]]


def change_manifest(path: Path, manifest: dict[str, Any], *, seal: bool = True) -> None:
    if path.is_file():
        with open(path, "r+b") as file:
            write_manifest(file.fileno(), json.dumps(manifest).encode())
        return
    content = sealed(manifest) if seal else manifest
    kind_of(path)._format_class(path).manifest_path.write_text(json.dumps(content))


def assert_told(
    path: Path, error: type[Exception] = FormatVersionMismatch, wording: str = f"version {LATER}"
) -> None:
    """Check that every operation reports the version, and that nothing is changed."""
    kind, before = kind_of(path), files_of(path)
    acts: list[Callable[[], object]] = [
        lambda: open_storage(path),
        lambda: open_storage(path, "append"),
        lambda: open_storage(path, "append", capacity=100),
        lambda: kind(path, mode="read"),
        lambda: kind(path, mode="append"),
    ]
    if error is not CorruptStorage:  # `verify` reports it as a finding
        acts.append(lambda: verify(path))
    for act in acts:
        with pytest.raises(error, match=wording):
            act()
    with pytest.raises(StorageError):
        kind(path, mode="create", capacity=10)
    with pytest.raises(StorageError, match=wording):
        SyncCollector(
            "CartPole-v1", None, frames_per_batch=5, total_frames=5, storage=path, resume=True
        )
    status = 1 if error is CorruptStorage else 2
    assert main(["verify", str(path), "--quiet"]) == status
    assert main(["inspect", str(path)]) == 1
    assert files_of(path) == before


LATER_MANIFESTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a field more": lambda m: {**m, "codec": "zstd"},
    "fields less": lambda m: {"format": m["format"]},
    "of other types": lambda m: {**m, "schema": {"all": "new"}, "runs": "elsewhere", "id": 7},
    "for other chunks": lambda m: {**m, "chunk_rows": "auto", "places": None},
}


@pytest.mark.parametrize("change", LATER_MANIFESTS)
@pytest.mark.parametrize("seal", [True, False])
def test_a_later_manifest_is_told(five: Path, change: str, seal: bool) -> None:
    with open_storage(five) as storage:
        manifest = LATER_MANIFESTS[change](storage.manifest)
    change_manifest(five, {**manifest, "format_version": LATER}, seal=seal)
    assert_told(five)


IDENTITY = struct.Struct("<8sqqq")
LATER_HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "as ours": lambda old: _with_version(old, LATER),
    "without a checksum": lambda old: _with_version(old, LATER)[:32] + bytes(4) + old[36:],
    "with other fields": lambda old: old[:8] + LATER.to_bytes(8, "little") + bytes(range(1, 121)),
    "shorter": lambda old: _with_version(old, LATER)[:100],
}


def _with_version(header: bytes, version: int) -> bytes:
    magic, _, ring, crc = IDENTITY.unpack_from(header)
    identity = IDENTITY.pack(magic, version, ring, crc)
    return identity + zlib.crc32(identity).to_bytes(4, "little") + header[36:]


@pytest.mark.parametrize("change", LATER_HEADERS)
def test_a_later_header_is_told(five: Path, change: str) -> None:
    header = kind_of(five)._format_class(five).header_path
    content = header.read_bytes()
    new = LATER_HEADERS[change](content[:HEADER_NBYTES])
    if header == five:  # the bytes after it stay
        new = new + content[len(new) :]
    header.write_bytes(new)
    assert_told(five)


@pytest.mark.parametrize("without", ["manifest", "user block"])
def test_a_later_user_block_is_told(tmp_path: Path, without: str) -> None:
    path = tmp_path / "rows.hdf5"
    with H5Storage(path, capacity=10) as storage:
        storage.extend(rows(0, 5))
    content = path.read_bytes()
    header = LATER_HEADERS["with other fields"](content[:HEADER_NBYTES])
    if without == "manifest":
        new = header.ljust(USER_BLOCK_NBYTES, b"\0") + content[USER_BLOCK_NBYTES:]
    else:
        new = header
    path.write_bytes(new)
    assert_told(path)


def test_a_later_zarr_group_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.zarr"
    with ZarrStorage(path) as storage:
        storage.extend(rows(0, 5))
    shutil.rmtree(path / "tallyroll")
    with pytest.raises(NotAStorage):
        open_storage(path)
    change_shown(path, LATER)
    for act in (open_storage, lambda where: ZarrStorage(where, mode="append"), verify):
        with pytest.raises(FormatVersionMismatch, match=f"version {LATER}"):
            act(path)


def change_shown(path: Path, version: int) -> None:
    document = json.loads((path / "zarr.json").read_text())
    provenance = json.loads(document["attributes"]["provenance"])
    provenance["format_version"] = version
    document["attributes"]["provenance"] = json.dumps(provenance)
    (path / "zarr.json").write_text(json.dumps(document))


def test_later_attributes_of_hdf5_are_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.hdf5"
    for version, error in ((LATER, FormatVersionMismatch), (FORMAT_VERSION, NotAStorage)):
        shown = {"format": "tallyroll.hdf5", "format_version": version}
        with h5py.File(path, "w") as file:
            file.attrs["provenance"] = np.bytes_(json.dumps(shown))
        for act in (open_storage, lambda where: H5Storage(where, mode="append"), verify):
            with pytest.raises(error):
                act(path)


@pytest.mark.parametrize("provenance", ["", "text", "3", "[]", "{}", '{"format": "theirs"}', 7])
def test_another_programs_provenance_is_none_of_ours(tmp_path: Path, provenance: object) -> None:
    document = {"zarr_format": 3, "node_type": "group", "attributes": {"provenance": provenance}}
    (tmp_path / "theirs.zarr").mkdir()
    (tmp_path / "theirs.zarr" / "zarr.json").write_text(json.dumps(document))
    with h5py.File(tmp_path / "theirs.h5", "w") as file:
        file.attrs["provenance"] = np.bytes_(provenance) if provenance != 7 else 7
    for name in ("theirs.zarr", "theirs.h5"):
        with pytest.raises(NotAStorage):
            open_storage(tmp_path / name)


def test_files_of_a_later_tallyroll_without_a_manifest_are_not_removed(tmp_path: Path) -> None:
    for kind in (MemmapStorage, ZarrStorage):
        path = tmp_path / kind.__name__
        with kind(path) as storage:
            storage.extend(rows(0, 5))
        format = kind._format_class(path)
        format.manifest_path.unlink()
        content = format.header_path.read_bytes()
        format.header_path.write_bytes(LATER_HEADERS["with other fields"](content))
        before = files_of(path)
        with pytest.raises(FormatVersionMismatch):
            kind(path, mode="create")
        assert files_of(path) == before


def test_a_later_header_beside_a_manifest_that_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "five.memmap"
    with MemmapStorage(path) as storage:
        storage.extend(rows(0, 5))
    format = MemmapStorage._format_class(path)
    content = format.header_path.read_bytes()
    format.header_path.write_bytes(LATER_HEADERS["with other fields"](content))
    format.manifest_path.write_bytes(b"is not valid JSON")
    assert_told(path, FormatVersionMismatch, f"version {LATER}")
    format.header_path.write_bytes(content)
    assert_told(path, CorruptStorage, "is not valid JSON")


@pytest.mark.parametrize("version", [-1, 0, "4", True, None, 4.0, 10**30, 2**16, [4], {}])
def test_a_version_that_cannot_be_is_damage(five: Path, version: object) -> None:
    with open_storage(five) as storage:
        manifest = storage.manifest
    change_manifest(five, {**manifest, "format_version": version})
    assert_told(five, CorruptStorage, "has the impossible format version")


@pytest.mark.parametrize("version", [-1, 0, 2**62])
def test_a_header_of_a_version_that_cannot_be_is_damage(five: Path, version: int) -> None:
    header = kind_of(five)._format_class(five).header_path
    damage(header, 0, _with_version(header.read_bytes()[:HEADER_NBYTES], version)[:36])
    assert_told(five, CorruptStorage, "has the impossible format version")


def test_an_older_header_than_is_read_is_told(five: Path) -> None:
    """The manifest's version is still supported."""
    header = kind_of(five)._format_class(five).header_path
    damage(header, 0, _with_version(header.read_bytes()[:HEADER_NBYTES], 1)[:36])
    assert_told(five, FormatVersionMismatch, "version 1, .* reads versions 2, 3, 4")


def test_a_damaged_version_is_no_later_one(five: Path) -> None:
    header = kind_of(five)._format_class(five).header_path
    damage(header, 8, bytes([LATER]))
    assert_told(five, CorruptStorage, "first bytes are damaged")
    damage(header, 8, bytes([FORMAT_VERSION]))
    if five.is_file():
        with open(five, "rb") as file:
            assert newest_manifest(file.fileno())
        return
    manifest = kind_of(five)._format_class(five).manifest_path
    text = manifest.read_text()
    for version in (LATER, 2, 1, 33):
        changed = text.replace(
            f'"format_version": {FORMAT_VERSION}', f'"format_version": {version}'
        )
        assert changed != text
        manifest.write_text(changed)
        assert_told(five, CorruptStorage, "fails its check")
