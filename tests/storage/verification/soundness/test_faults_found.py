"""Test that each listed fault is found, by the check and at the place that the list names."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import d4rl_faults
import minari_faults
import pytest
import torchrl_faults
from fault_kit import ROWS, Fault

from tallyroll.storage import verify_dataset

Sound = Callable[[Path], None]
SUFFIX = {"d4rl": ".hdf5"}


def formats() -> dict[str, tuple[str, Sound, list[Fault]]]:
    """Return the kind, the sound dataset and the faults of each format."""
    found: dict[str, tuple[str, Sound, list[Fault]]] = {
        "d4rl": ("d4rl", d4rl_faults.sound, d4rl_faults.FAULTS),
        "minari": ("minari", minari_faults.sound, minari_faults.FAULTS),
        "torchrl": ("torchrl", torchrl_faults.sound, torchrl_faults.FAULTS),
    }
    if all(map(importlib.util.find_spec, ("PIL", "google", "google_crc32c"))):
        import rlds_faults

        found["rlds"] = ("rlds", rlds_faults.sound, rlds_faults.FAULTS)
    if all(map(importlib.util.find_spec, ("av", "pyarrow"))):
        import lerobot_faults
        import lerobot_recordings

        found["lerobot-v2"] = ("lerobot", lerobot_recordings.sound_v2, lerobot_faults.V2)
        found["lerobot-v3"] = ("lerobot", lerobot_recordings.sound_v3, lerobot_faults.V3)
    return found


FORMATS = formats()
CASES = [(name, fault) for name, (_, _, faults) in FORMATS.items() for fault in faults]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a sound dataset of each format."""
    folder = tmp_path_factory.mktemp("sound")
    for name, (_, write, _) in FORMATS.items():
        write(folder / f"{name}{SUFFIX.get(name, '')}")
    return folder


def made(name: str, sound: Path, tmp_path: Path) -> Path:
    """Copy the sound dataset of a format."""
    source = sound / f"{name}{SUFFIX.get(name, '')}"
    place = tmp_path / f"data{SUFFIX.get(name, '')}"
    if source.is_dir():
        shutil.copytree(source, place)
    else:
        shutil.copy(source, place)
    return place


@pytest.mark.parametrize("name", FORMATS)
def test_sound_datasets_are_sound(name: str, sound: Path, tmp_path: Path) -> None:
    report = verify_dataset(made(name, sound, tmp_path))
    assert (report.findings, report.rows, report.format) == ((), ROWS, FORMATS[name][0])
    assert len(report.checked) >= 7


@pytest.mark.parametrize("name", FORMATS)
def test_there_are_25_faults(name: str) -> None:
    names = [fault.name for fault in FORMATS[name][2]]
    assert len(names) >= 25
    assert len({*names}) == len(names)


@pytest.mark.parametrize(("name", "fault"), CASES, ids=lambda each: getattr(each, "name", each))
def test_the_fault_is_found(name: str, fault: Fault, sound: Path, tmp_path: Path) -> None:
    place = made(name, sound, tmp_path)
    fault.inject(place)
    report = verify_dataset(place, FORMATS[name][0])
    assert not report.sound
    found = [each for each in report.findings if each.check == fault.check]
    assert found, [str(each) for each in report.findings]
    if fault.at:
        places = [place for each in found for place in each.places]
        assert any(
            all(getattr(each, field) == value for field, value in fault.at.items())
            for each in places
        ), [str(each) for each in places]
