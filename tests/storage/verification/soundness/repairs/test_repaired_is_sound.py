"""Test that the repair of a damaged dataset is a sound storage or refused.

`repair_kit.repair` asserts it, also for LeRobot in `test_repair_lerobot.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import d4rl_faults
import h5py
import minari_faults
import numpy as np
import pytest
from fault_kit import ENDS, ROWS, Fault, rewrite
from repair_kit import repair

from tallyroll.storage import InvalidDataset, MemmapStorage, open_storage
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows

_COLUMNS = {"observations": 3, "actions": 2, "rewards": 0, "terminals": 0, "timeouts": 0}


_ALL = bool(os.environ.get("TALLYROLL_REPAIRS"))


def _d4rl(place: Path) -> Path:
    d4rl_faults.sound(place / "rows.hdf5")
    return place / "rows.hdf5"


def _without(*names: str) -> Callable[[Path], Path]:
    def write(place: Path) -> Path:
        file = _d4rl(place)
        with h5py.File(file, "r+") as rows:
            for name in names:
                del rows[name]
        return file

    return write


def _minari(place: Path) -> Path:
    minari_faults.sound(place / "rows")
    return place / "rows"


def _rlds(place: Path) -> Path:
    rlds_faults.sound(place / "rows")
    return place / "rows"


_WRITERS: dict[str, tuple[Callable[[Path], Path], str, list[Fault]]] = {
    "d4rl": (_d4rl, "d4rl", d4rl_faults.FAULTS),
    "no next": (_without("next_observations"), "d4rl", d4rl_faults.FAULTS),
    "no timeouts": (_without("next_observations", "timeouts"), "d4rl", d4rl_faults.FAULTS),
    "minari": (_minari, "minari", minari_faults.FAULTS),
}
if all(map(importlib.util.find_spec, ("PIL", "google", "google_crc32c"))):
    import rlds_faults

    _WRITERS["rlds"] = (_rlds, "rlds", rlds_faults.FAULTS)


@pytest.mark.parametrize("name", _WRITERS)
def test_of_every_fault_of_the_lists(name: str, tmp_path: Path) -> None:
    write, kind, faults = _WRITERS[name]
    telling = ("ends", "observations", "zeros")  # faults that a repair must detect itself
    faults = [f for at, f in enumerate(faults) if _ALL or f.check in telling or at % 4 == 0]
    made = 0
    for number, fault in enumerate(faults):
        folder = tmp_path / str(number)
        folder.mkdir()
        place = write(folder)
        try:
            fault.inject(place)
        except KeyError:
            continue  # it damages a column that does not exist
        with contextlib.suppress(InvalidDataset):
            repair(place, folder / "out", kind)
            made += 1
    assert made > len(faults) // 3


def _gaps(seed: int) -> Iterator[tuple[int, str]]:
    """Yield chunks of four rows, and the columns that lack them."""
    draws = np.random.default_rng(seed)
    for _ in range(draws.integers(1, 6)):
        yield int(draws.integers(ROWS // 4)), str(draws.choice([*_COLUMNS]))


@pytest.mark.parametrize("own", [False, True], ids=["shifted", "next"])
def test_of_gaps_anywhere(own: bool, tmp_path: Path) -> None:
    """Exactly the rows that are readable with their next observations are kept."""
    sound = _d4rl(tmp_path)
    names = [*_COLUMNS, *(["next_observations"] if own else [])]
    for seed in range(100 if _ALL else 8):
        place, lost = tmp_path / f"{seed}.hdf5", np.zeros(ROWS, bool)
        gaps = set(_gaps(seed))
        for chunk, _ in gaps:
            lost[4 * chunk : 4 * chunk + 4] = True
        with h5py.File(sound) as source, h5py.File(place, "w") as file:
            for name in names:
                values = source[name]
                data = file.create_dataset(
                    name, values.shape, values.dtype, chunks=(4, *values.shape[1:])
                )
                for chunk in range(-(-ROWS // 4)):
                    if (chunk, name) not in gaps:
                        part = slice(4 * chunk, 4 * chunk + 4)
                        data[part] = values[part]
            observations, rewards = source["observations"][()], source["rewards"][()]
        report = repair(place, tmp_path / f"out{seed}", "d4rl")
        after = np.append(lost[1:], True)
        after[ENDS] = False  # another episode follows an end
        kept = np.flatnonzero(~lost if own else ~lost & ~after)
        assert (report.rows, report.lost_rows) == (len(kept), ROWS - len(kept))
        with open_storage(tmp_path / f"out{seed}") as storage:
            for key, wanted in ((("observation",), observations), (("next", "reward"), rewards)):
                assert storage.reader.shown(key).tobytes() == wanted[kept].tobytes()


@pytest.mark.parametrize("finalize", [True, False], ids=["checksums", "none"])
def test_of_zeros_in_ours(finalize: bool, tmp_path: Path) -> None:
    """Columns of a storage have sectors of zeros, some of them adjacent."""
    draws, made = np.random.default_rng(7), 0
    for number in range(30 if _ALL else 6):
        place = tmp_path / f"rows{number}"
        with MemmapStorage(place) as storage:
            storage.extend(trajectory_rows(0, 600, steps=20))
            if finalize:
                storage.finalize()
        sound = np.ones(600, bool)
        for at in draws.integers(1, 580, size=2).tolist():
            rewrite(place / "observation.memmap", at * 4, bytes(4 * 16))
            sound[at : at + 16] = False
        with contextlib.suppress(InvalidDataset):  # if each block with a checksum has a bad sector
            rows = repair(place, tmp_path / f"out{number}").rows
            with open_storage(tmp_path / f"out{number}") as storage:
                kept = storage.reader.shown(("observation",))[:, 0].astype(int)
            assert sound[kept].all()
            assert 0 < rows == len({*kept.tolist()}) < 600
            made += 1
    assert made >= 3
