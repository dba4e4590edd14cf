"""Test conditions on the flags that the viewer writes, from Python and in every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tallyroll.collector.cli import main
from tallyroll.collector.ext.viewer.flags import Flags
from tallyroll.storage import MemmapStorage, open_storage
from tallyroll.storage.errors import InvalidExpression
from tallyroll.storage.ext.testing.reader_contract import assert_same_rows, collected

FLAGS = {0: "bad", 2: "it's \u2713\n", 5: "bad"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "rows"
    with MemmapStorage(path) as storage:
        storage.extend(collected().exclude(("agents", "observation"), ("next", "agents")))
    return path


@pytest.fixture
def flags(source: Path, tmp_path: Path) -> Path:
    """Write flags as the viewer does: some of another storage, some replaced, one removed."""
    path = tmp_path / "flags.jsonl"
    written = Flags(str(path), [str(source)])
    with open_storage(source) as storage:
        name = storage.reader.id
    assert name
    for id in FLAGS:
        written.set(name, str(source), id, "first")
        written.set("another", "elsewhere", id + 1, "bad")
    written.set(name, str(source), 3, "bad")
    written.set(name, str(source), 3, "")
    for id, flag in FLAGS.items():
        written.set(name, str(source), id, flag)
    return path


@pytest.mark.parametrize(
    ("condition", "ids"),
    [
        ("flag == 'bad'", {0, 5}),
        ("flag != '' and id != 5", {0, 2}),
        ("flag in ('bad', '') and id < 3", {0, 1}),
        ("flag != flag", set()),
    ],
)
def test_flags_select_trajectories(
    source: Path, flags: Path, condition: str, ids: set[int]
) -> None:
    with open_storage(source) as storage:
        view = storage.trajectories.where(condition, flags=flags)
        assert set(view.trajectories.ids.tolist()) == ids
        table = storage.trajectories.matching(condition, flags=flags)
        assert set(table["id"].tolist()) == ids
        with pytest.raises(InvalidExpression, match=r"expected '', 'bad' or .* got 'first'"):
            storage.trajectories.where("flag == 'first'", flags=flags)
        rows = storage.get(slice(None))
        own = [id in ids for id in rows["collector", "traj_ids"].reshape(-1).tolist()]
        assert_same_rows(view.get(slice(None)), rows[torch.tensor(own)])
        others = storage.trajectories.where(f"not ({condition})", flags=str(flags))
        assert len(view) + len(others) == len(storage)


def test_a_flag_without_a_file_is_an_unknown_name(source: Path) -> None:
    with open_storage(source) as storage, pytest.raises(InvalidExpression, match="flag"):
        storage.trajectories.where("flag == 'bad'")


COMMANDS = {
    "select": ["select", "SRC", "DST"],
    "copy": ["copy", "SRC", "DST"],
    "export": ["export", "SRC", "npz:DST.npz"],
    "split": ["split", "SRC", "DST", "--train", "1"],
    "stats": ["stats", "SRC", "--json"],
    "inspect": ["inspect", "SRC", "--json"],
    "trajectories": ["inspect", "SRC", "--trajectories", "--json"],
}


def command(name: str, source: Path, folder: Path, *options: str) -> list[str]:
    places = {"SRC": str(source), "DST": str(folder / "dst"), "npz:DST.npz": f"npz:{folder}/d.npz"}
    return [*(places.get(word, word) for word in COMMANDS[name]), *options]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_with_a_condition_takes_flags(
    name: str, source: Path, flags: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--where", "flag == 'bad'", "--flags", str(flags)]
    assert main(command(name, source, tmp_path, *options)) == 0
    out = capsys.readouterr().out
    with open_storage(source) as storage:
        rows = len(storage.trajectories.where("id in (0, 5)"))
    if name in ("select", "copy", "split"):
        with open_storage(tmp_path / "dst" / ("train" if name == "split" else "")) as found:
            assert set(found.trajectories.ids.tolist()) == {0, 5}
    elif name == "export":
        assert f"{rows:,} rows" in out
    elif name == "trajectories":
        assert {each["id"] for each in json.loads(out)["trajectories"]} == {0, 5}
    else:
        assert json.loads(out)["rows"] == rows


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("content", "where", "message"),
    [
        (None, "flag != ''", "No such file"),
        ("[1]", "flag != ''", "line 1 is not a flag"),
        ('{"storage": "a", "trajectory": 1e999, "flag": ""}', "True", "line 1 is not a flag"),
        ('{"storage": ["a"], "trajectory": 1, "flag": ""}', "True", "line 1 is not a flag"),
        ('{"storage": "a", "trajectory": 1, "flag": 2}', "True", "line 1 is not a flag"),
        ('{"storage": "a", "trajectory": 1, "flag": ""}', "True", "got flags of a"),
        ("", "True", "got flags of no storage"),
        ("", None, "--flags: expected --where"),
    ],
)
def test_unsuitable_flags_are_refused(
    name: str,
    content: str | None,
    where: str | None,
    message: str,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if name == "select" and where is None:
        where, message = "flag", "expected flags of the storage"
    file = tmp_path / "flags"
    if content is not None:
        file.write_text(content)
    options = ["--flags", str(file), *(["--where", where] if where is not None else [])]
    try:
        status = main(command(name, source, tmp_path, *options))
    except SystemExit as error:  # a usage error
        status = int(error.code or 0)
    assert status in (1, 2)
    assert message in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir() if each.name != "flags"] == []


def test_a_word_that_is_no_flag_is_refused_with_a_few_flags(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "flags"
    with open_storage(source) as storage:
        ids = storage.trajectories.ids.tolist()[:12]
        lines = [{"storage": storage.reader.id, "trajectory": id, "flag": f"n{id}"} for id in ids]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(InvalidExpression, match="one of 5 others, got 'none'"):
            storage.trajectories.where("flag == 'none'", flags=file)
