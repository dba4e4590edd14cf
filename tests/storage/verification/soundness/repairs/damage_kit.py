"""Small sound datasets of every kind that can be repaired, and the ways to damage them."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import d4rl_faults
import h5py
import minari_faults
import numpy as np
import pytest
import torch
from fault_kit import LENGTHS, walk

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage
from tallyroll.storage.ext.dataset_checks import disk
from tallyroll.storage.ext.repair import ours as working_copy
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows

SECTOR = 128
"""Bytes per unreadable sector of a disk in these tests."""


@dataclass(frozen=True)
class Source:
    """Kind of source.

    Args:
        kind: the name of the kind.
        write: a function that writes the source below a folder and returns its place.
        most: the largest number of rows that one sector may cost.
        vital: patterns of files of which any part may be needed for all rows.
        columns: patterns of files that contain a part of every row.
        needs: modules that the source requires.
        blind: whether some values have no checksums, so that zeros may be valid.
    """

    kind: str
    write: Callable[[Path], Path]
    most: int
    vital: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    blind: bool = False

    @property
    def there(self) -> bool:
        """Whether the required libraries are installed."""
        return all(map(importlib.util.find_spec, self.needs))


# --- sources --------------------------------------------------------------------------------------


def _d4rl(folder: Path, *, packed: bool) -> Path:
    place = folder / "rows.hdf5"
    d4rl_faults.sound(place)
    if not packed:
        with h5py.File(place) as file:
            names = [*(n for n in file if n not in ("infos", "metadata")), "infos/qpos"]
            values = {name: file[name][()] for name in names if name != "next_observations"}
        with h5py.File(place, "w") as file:
            for name, each in values.items():
                file[name] = each
    return place


def _minari(folder: Path) -> Path:
    minari_faults.sound(folder / "rows")
    return folder / "rows"


def _table(folder: Path, kind: str) -> Path:
    """Write the episodes of the kit as Minari writes tables."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    place = _minari(folder)
    data = place / "data"
    minari_faults.say(place, data_format=kind)

    def fixed(values: np.ndarray, rows: int) -> Any:
        pad = np.zeros((rows - len(values), *values.shape[1:]), values.dtype)
        values = np.concatenate([values, pad])
        if values.ndim == 1:
            return arrow.array(values)
        flat = arrow.array(values.reshape(-1))
        return arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])

    with h5py.File(data / "main_data.hdf5") as file:
        for number, count in enumerate(LENGTHS):
            group, rows = file[f"episode_{number}"], count + 1
            columns = {
                top: arrow.StructArray.from_arrays(
                    [fixed(group[top][name][()], rows) for name in group[top]], [*group[top]]
                )
                for top in ("observations", "infos")
            }
            for name in ("actions", "rewards", "terminations", "truncations"):
                columns[name] = fixed(group[name][()], rows)
            columns["infos"] = columns.pop("infos")  # last, as in Minari
            table = arrow.table(columns)
            (data / str(number)).mkdir()
            path = data / str(number) / f"part-0.{kind}"
            if kind == "parquet":
                parquet.write_table(table, path)
            else:
                with arrow.ipc.new_file(path, table.schema) as out:
                    out.write_table(table)
            said = {"id": number, "total_steps": count, "seed": 100 + number}
            (data / str(number) / "metadata.json").write_text(json.dumps(said))
    (data / "main_data.hdf5").unlink()
    return place


def _lerobot(folder: Path, version: int) -> Path:
    import lerobot_recordings as recordings

    (recordings.sound_v2 if version == 2 else recordings.sound_v3)(folder / "rows")
    return folder / "rows"


def _rlds(folder: Path) -> Path:
    import rlds_faults

    rlds_faults.sound(folder / "rows")
    return folder / "rows"


def ours(count: int) -> Any:
    """Return rows in trajectories of 20. All rows differ in every column of floats."""
    rows = trajectory_rows(0, count, steps=20)
    rows["action"] = torch.from_numpy(walk(3, count, 3))
    # These fill chunks of a MiB, so that the starts of chunks are damaged, too.
    rows["wide"] = torch.from_numpy(walk(4, count, 2 if count > 1000 else 500))
    return rows


def _ours(folder: Path, storage: Any, *, finalize: bool = True, pack: str = "") -> Path:
    end = ".h5" if storage is H5Storage or pack == "hdf5" else ""
    place, packed = folder / f"plain{end if not pack else ''}", folder / f"rows{end}"
    with storage(place, **({"capacity": 600} if storage is H5Storage else {})) as target:
        target.extend(ours(5000 if pack else 600))
        if pack:
            target.pack(packed, format=pack)
        elif finalize:
            target.finalize()
    if pack:
        shutil.rmtree(place)
        return packed
    return place


def _tallyroll(write: Callable[[Path], Path], most: int, *columns: str, **more: Any) -> Source:
    return Source("tallyroll", write, most, ("manifest.json", "tallyroll.header"), columns, **more)


_ARROW = ("pyarrow",)
_FILMS = ("pyarrow", "av")
_RLDS = ("PIL", "google", "google_crc32c")
_INFO = ("info.json",)
SOURCES: dict[str, Source] = {
    "d4rl": Source("d4rl", lambda f: _d4rl(f, packed=False), 61, ("*",), blind=True),
    "d4rl, packed": Source("d4rl", lambda f: _d4rl(f, packed=True), 61, ("*",)),
    "minari, hdf5": Source("minari", _minari, 61, ("*.hdf5",), blind=True),
    "minari, arrow": Source("minari", lambda f: _table(f, "arrow"), 30, needs=_ARROW, blind=True),
    "minari, parquet": Source(
        "minari", lambda f: _table(f, "parquet"), 30, needs=_ARROW, blind=True
    ),
    "lerobot, 2": Source("lerobot", lambda f: _lerobot(f, 2), 30, _INFO, needs=_FILMS, blind=True),
    "lerobot, 3": Source(
        "lerobot", lambda f: _lerobot(f, 3), 61, _INFO, ("*.parquet",), needs=_FILMS, blind=True
    ),
    "rlds": Source("rlds", _rlds, 51, ("features.json",), needs=_RLDS),
    "memmap": _tallyroll(lambda f: _ours(f, MemmapStorage), 256, "*.memmap"),
    "memmap, open": _tallyroll(
        lambda f: _ours(f, MemmapStorage, finalize=False), 256, "*.memmap", blind=True
    ),
    "hdf5": _tallyroll(lambda f: _ours(f, H5Storage), 256, "*.h5"),
    "zarr": _tallyroll(lambda f: _ours(f, ZarrStorage), 256, "c.0*"),
    "packed": _tallyroll(lambda f: _ours(f, MemmapStorage, pack="zarr"), 5000, "c.0*"),
    "packed, hdf5": _tallyroll(lambda f: _ours(f, MemmapStorage, pack="hdf5"), 2048, "*.h5"),
}


# --- damages --------------------------------------------------------------------------------------


class Disk:
    """Disk that cannot read some byte ranges of files, and reads whole blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, block: int = disk.BLOCK) -> None:
        self.bad: dict[str, range] = {}
        self.failed = 0
        self._read = disk.read_at
        monkeypatch.setattr(disk, "BLOCK", block)
        for module in (disk, working_copy):
            monkeypatch.setattr(module, "read_at", self.read_at)

    def read_at(self, file: int, nbytes: int, at: int) -> bytes:
        bad = self.bad.get(os.readlink(f"/proc/self/fd/{file}"), range(0))
        if at < bad.stop and at + nbytes > bad.start:
            self.failed += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._read(file, nbytes, at)


def files_of(place: Path) -> list[Path]:
    """Return the files of a dataset."""
    if place.is_file():
        return [place]
    return sorted(each for each in place.rglob("*") if each.is_file())


Damage = Callable[[Path, np.random.Generator, Disk], Path | None]
"""Function that damages a file and returns it, or None if the file is too small."""


def _one(place: Path, draws: np.random.Generator) -> Path:
    """Draw a file. Half of the draws are in proportion to size."""
    files = files_of(place)
    if draws.random() < 0.5:
        return files[int(draws.integers(len(files)))]
    sizes = np.asarray([each.stat().st_size for each in files])
    return files[int(draws.choice(len(files), p=sizes / sizes.sum()))]


def _cut(place: Path, draws: np.random.Generator, disk: Disk) -> Path | None:
    path = _one(place, draws)
    os.truncate(path, int(draws.integers(path.stat().st_size))) if path.stat().st_size else None
    return path


def _cut_end(place: Path, draws: np.random.Generator, disk: Disk) -> Path | None:
    path = _one(place, draws)
    size = path.stat().st_size
    os.truncate(path, max(0, size - int(draws.integers(1, 64))))
    return path


def _sector(path: Path, draws: np.random.Generator) -> range:
    at = int(draws.integers(max(1, path.stat().st_size))) // SECTOR * SECTOR
    return range(at, min(at + SECTOR, path.stat().st_size))


def _zeros(place: Path, draws: np.random.Generator, disk: Disk) -> Path | None:
    path = _one(place, draws)
    sector = _sector(path, draws)
    content = bytearray(path.read_bytes())
    if not any(content[sector.start : sector.stop]):
        return None
    content[sector.start : sector.stop] = bytes(len(sector))
    path.write_bytes(content)
    return path


def _unreadable(place: Path, draws: np.random.Generator, disk: Disk) -> Path | None:
    path = _one(place, draws)
    disk.bad = {str(path.resolve()): _sector(path, draws)}
    return path


def _missing(place: Path, draws: np.random.Generator, disk: Disk) -> Path | None:
    if place.is_file():
        return None
    path = _one(place, draws)
    path.unlink()
    return path


def _link(place: Path, draws: np.random.Generator, disk: Disk) -> Path | None:
    if place.is_file():
        return None
    path = _one(place, draws)
    shutil.move(path, place.parent / "elsewhere")
    path.symlink_to(place.parent / "elsewhere")
    return path


def _empty(place: Path, draws: np.random.Generator, disk: Disk) -> Path | None:
    path = _one(place, draws)
    path.write_bytes(b"")
    return path


DAMAGES: dict[str, Damage] = {
    "cut": _cut,
    "cut near its end": _cut_end,
    "zeros": _zeros,
    "unreadable": _unreadable,
    "missing": _missing,
    "a link": _link,
    "empty": _empty,
}
