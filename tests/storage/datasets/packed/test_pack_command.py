"""Test ``tallyroll pack``, and the commands that read packed storages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tallyroll.collector.cli import main
from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.ext.testing.reader_contract import collected


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(collected())
    return tmp_path / "rows"


def test_the_command(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = rows.with_name("packed.h5")
    assert main(["pack", str(rows), str(packed)]) == 0
    said = capsys.readouterr().out
    assert f"{packed}: 141 rows of " in said
    assert "observations stored once: observation, pixels, agents/observation" in said
    for words in (["verify"], ["inspect"], ["diff", str(rows)]):
        assert main([*words, str(packed)]) == 0, words
    assert "tallyroll.packed.hdf5" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.h5", "a.HDF5", "a.zarr", "a", "a.rows"])
def test_the_suffix_says_the_format(rows: Path, name: str) -> None:
    with open_storage(rows) as storage:
        is_file = name.lower().endswith(("h5", "hdf5"))
        storage.pack(rows.with_name(name))
        assert rows.with_name(name).is_file() == is_file
        other = rows.with_name(f"other-{name}")
        if "." in name and name != "a.rows":
            with pytest.raises(
                ValueError, match=r"format: expected .* from the suffix of .*other-a"
            ):
                storage.pack(other, format="zarr" if is_file else "hdf5")
            assert not other.exists()
        else:
            storage.pack(other, format="hdf5")
            assert other.is_file()
    with open_storage(rows.with_name(name)) as packed:
        assert len(packed) == 141


def test_overlays_are_named(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_storage(rows, mode="append") as storage:
        storage.overlay("value", "float32")[:] = 2
        storage.with_overlays("value").pack(rows.with_name("with"))
    with open_storage(rows.with_name("with")) as packed:
        assert packed.get(slice(None))["value"].unique().tolist() == [2]
    for more, wanted in (([], f"not packed: overlay {rows}: value\n"), (["--json"], ": value")):
        assert main(["pack", str(rows), str(rows.with_name(f"packed{len(more)}")), *more]) == 0
        said = capsys.readouterr().out
        assert wanted in said
    assert json.loads(said)["overlays_left_out"] == [f"{rows}: value"]


def test_its_options(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, options in enumerate(
        (
            ["--codec", "zstd:9", "--stack", "pixels:2:-1"],
            ["--codec", "action=none", "--codec", "next/reward=shuffle", "--rows-as-they-are"],
        )
    ):
        packed = rows.with_name(f"packed{number}")
        assert main(["pack", str(rows), str(packed), "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["path"], found["rows"]) == (str(packed), 141)
        assert found["stacks"] == ({} if number else {"pixels": 2})
        assert bool(found["once"]) is not bool(number)
        with open_storage(packed) as storage:
            assert storage.reader.layout.arrays[0].codec.level in (0, 5, 9)


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--codec", "lz4"], 1, "expected one of zstd, shuffle, none, got 'lz4'"),
        (
            ["--codec", "zstd", "--codec", "action=none"],
            1,
            "expected one codec for all columns, or a codec for each",
        ),
        (["--codec", "action="], 2, "expected CODEC, or COLUMN=CODEC, got 'action='"),
        (["--stack", "pixels:x"], 2, "such as pixels:4:-1, got 'pixels:x'"),
        (["--stack", "pixels", "--rows-as-they-are"], 1, "Leave one of them out"),
    ],
)
def test_words_that_are_wrong(
    rows: Path, capsys: pytest.CaptureFixture[str], options: list[str], status: int, said: str
) -> None:
    try:
        found = main(["pack", str(rows), str(rows.with_name("new")), *options])
    except SystemExit as error:
        found = error.code  # type: ignore[assignment]
    assert found == status
    assert said in capsys.readouterr().err
    assert [each.name for each in rows.parent.iterdir()] == ["rows"]


def test_a_destination_that_is_there(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", str(rows), str(rows)]) == 1
    assert f"{rows} already exists" in capsys.readouterr().err
