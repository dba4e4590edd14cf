"""Test `tallyroll upgrade` of storages that an older version left in various states."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tallyroll.collector.cli import main
from tallyroll.storage import content_hash, diff, open_storage, verify
from tallyroll.storage.files.format_versions import FORMAT_VERSION

OLD = Path(__file__).parents[1] / "formats" / "data" / "version-2.tar.xz"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(OLD) as tar:
        tar.extractall(folder, filter="data")
    return folder / "version-2"


@pytest.mark.parametrize(
    "name", ["memmap-killed", "memmap-ring", "killed.h5", "finalized.h5", "killed.zarr"]
)
def test_an_old_storage_is_copied_to_the_newest_version(
    old: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, new = old / name, tmp_path / "new"
    assert main(["upgrade", str(source), str(new)]) == 0
    assert " rows of " in capsys.readouterr().out
    with open_storage(source) as before, open_storage(new) as after:
        assert before.reader.manifest["format_version"] < FORMAT_VERSION
        assert after.reader.manifest["format_version"] == FORMAT_VERSION
        assert after.reader.manifest["format"] == before.reader.manifest["format"]
        assert (after.in_order() == before.in_order()).all()
        made = [run for copied in after.runs for run in copied["runs"]]
        assert [run["seed"] for run in made] == [run["seed"] for run in before.runs]
    assert content_hash(new) == content_hash(source)
    assert diff(source, new, ids="relative").equal
    assert verify(new).sound
    again = ["upgrade", str(new), str(tmp_path / "other")]
    assert main(again) == 0
    assert "the newest: nothing to do" in capsys.readouterr().out
    assert main([*again, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"upgraded": False, "format_version": FORMAT_VERSION}
    assert not (tmp_path / "other").exists()
