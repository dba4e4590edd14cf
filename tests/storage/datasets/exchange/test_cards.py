"""Test dataset cards for a hub: ``tallyroll card``, `DiskStorage.card` and `export_card`."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensordict import TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.collector.cli import main
from tallyroll.storage import (
    Card,
    MemmapStorage,
    content_hash,
    export_card,
    import_dataset,
    open_storage,
)
from tallyroll.storage.errors import InvalidDataset, NotInitialised, StorageMissing
from tallyroll.storage.ext.card.page import size_category
from tallyroll.storage.ext.testing.exchange_contract import file_size_limit
from tallyroll.storage.ext.testing.reader_contract import collected
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.storages import DiskStorage


def front(page: str) -> dict[str, Any]:
    """Return the front matter, parsed as YAML."""
    _, text, _ = page.split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def table(page: str, head: str) -> list[list[str]]:
    """Return the cells of the table below a heading, starting with the column names."""
    part = page.split(f"\n## {head}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line[2:-2].split(" | ")] for line in [lines[0], *lines[2:]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a storage with rows of two runs and statistics."""
    path = tmp_path_factory.mktemp("made") / "pole"
    with MemmapStorage(path) as storage:
        for seed in (5, 6):
            with SyncCollector(
                "CartPole-v1",
                num_envs=2,
                frames_per_batch=50,
                total_frames=150,
                seed=seed,
                storage=storage,
            ) as collector:
                collector.collect(150)
    with open_storage(path) as storage:
        storage.statistics(["observation", ("next", "reward")])
    return path


class Policies:
    @staticmethod
    def left(observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(observation), dtype=torch.int64)

    @staticmethod
    def right(observation: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(observation), dtype=torch.int64)


def test_policies_of_one_file_keep_their_names_in_a_copy(tmp_path: Path) -> None:
    names = ["left", "right"]
    for name in names:
        with SyncCollector(
            "CartPole-v1",
            partial(getattr(Policies, name)),
            num_envs=2,
            frames_per_batch=20,
            total_frames=20,
            storage=tmp_path / name,
        ) as collector:
            collector.collect(20)
    open_storage([tmp_path / name for name in names]).copy_to(tmp_path / "both")
    with open_storage(tmp_path / "both") as storage:
        storage.export(tmp_path / "hub", "hf")
        cards = [storage.card(), export_card(tmp_path / "hub", "hf")]
    for card in cards:
        rows = table(str(card), "How it was made")
        assert [row[rows[0].index("policy")] for row in rows[1:]] == [
            f"Policies.{name}" for name in names
        ]
        for run in card.runs:  # runs of earlier versions name the type only
            del run["made"]["policy"]["name"]
        assert table(str(card), "How it was made")[1][rows[0].index("policy")] == "partial"


def test_a_copy_and_an_export_keep_100_runs(tmp_path: Path) -> None:
    for seed in range(100):
        with MemmapStorage(tmp_path / f"run-{seed}") as storage:
            rows = trajectory_rows(seed * 3, 3, steps=3)
            about = {"environment": {"id": "Pole"}, "seed": seed, "text": "x" * 1_200}
            storage.initialise(Schema.of(rows), about)
            storage.extend(rows)
    cards = []
    with open_storage(tmp_path / "run-*") as union:
        for path in (tmp_path / "all", tmp_path / "all.h5"):
            union.copy_to(path)
            export = path.with_name(f"{path.name}.npz")
            with open_storage(path) as storage:
                storage.export(export, "npz")
                cards += [storage.card(), export_card(export, "npz")]
            import_dataset(export, back := path.with_name(f"back_{path.name}"), "npz")
            with open_storage(back) as storage:
                cards.append(storage.card())
    for card in cards:
        assert [run["seed"] for run in card.runs] == [*range(100)]
        assert card.runs_omitted == 0


@pytest.mark.parametrize("kind", ["npz", "torchrl", "d4rl", "parquet", "hf", "lerobot", "rlds"])
def test_an_export_keeps_runs_of_nested_arguments(tmp_path: Path, kind: str) -> None:
    """Nested lists grow most if JSON is indented: 12 runs of 84 KB."""
    if kind in ("parquet", "hf", "lerobot"):
        pytest.importorskip("pyarrow")
    if kind == "rlds":
        pytest.importorskip("google.protobuf")
    maze = {"id": "Maze", "kwargs": {"walls": [[1] * 200] * 140}}
    export = tmp_path / "export"
    with MemmapStorage(tmp_path / "runs") as storage:
        for seed in range(12):
            rows = trajectory_rows(seed * 3, 3, steps=3)
            rows["action"] = torch.zeros(3, 1)
            storage.initialise(Schema.of(rows), {"environment": maze, "seed": seed})
            storage.extend(rows)
        storage.export(export, kind)
    import_dataset(export, tmp_path / "back", kind)
    with open_storage(tmp_path / "back") as storage:
        for card in (export_card(export, kind), storage.card()):
            assert [run["seed"] for run in card.runs] == [*range(12)]


@pytest.fixture
def source(made: Path) -> Iterator[DiskStorage]:
    with open_storage(made) as storage:
        yield storage


def test_the_card_of_a_storage(source: DiskStorage, made: Path) -> None:
    card = source.card(licence="apache-2.0")
    page = str(card)
    found = front(page)
    assert found == {
        "license": "apache-2.0",
        "pretty_name": "pole",
        "task_categories": ["reinforcement-learning"],
        "size_categories": ["n<1K"],
        "tags": ["tallyroll", "CartPole-v1"],
    }
    count = len(source.trajectories)
    assert f"\n300 rows of {count} trajectories, a transition each (memmap).\n" in page
    assert card.hashes == {"content": content_hash(made)}
    assert content_hash(made) in page
    assert sum(card.ends.values()) == count
    assert card.ends["terminated"] == list(source.trajectories.ends).count("terminated")
    names, *lines = table(page, "Columns")
    assert names == ["column", "dtype", "shape", "space", "mean", "std", "min", "max"]
    assert [line[0].strip("`") for line in lines] == ["/".join(k) for k in source.schema.keys]
    assert [line[1] for line in lines] == [c.dtype_name for c in source.schema.columns]
    reward = next(line for line in lines if line[0] == "`next/reward`")
    assert reward == ["`next/reward`", "float32", "[1]", "", "[1]", "[0]", "[1]", "[1]"]
    action = next(line for line in lines if line[0] == "`action`")
    assert action[3:] == ["Discrete(2)"] + [""] * 4
    _, *runs = table(page, "How it was made")
    assert [line[:6] for line in runs] == [
        [str(number), "CartPole-v1", "", str(seed), "2", "random"]
        for number, seed in enumerate((5, 6))
    ]
    assert all("gymnasium " in line[7] and "torch " in line[7] for line in runs)
    assert page.endswith(f"`{content_hash(made)}`\n")
    assert "\n`apache-2.0`\n" in page


def test_how_to_load_it(source: DiskStorage, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made.parent)
    names: dict[str, Any] = {}
    exec(source.card().loading, names)
    assert len(names["rows"]) == 10


def test_without_a_licence(source: DiskStorage) -> None:
    page = str(source.card())
    assert front(page)["license"] == "unknown"
    assert "Unknown: no licence was given" in page


@pytest.mark.parametrize("kind", ["npz", "torchrl", "d4rl", "parquet", "hf", "lerobot", "rlds"])
def test_the_card_of_an_export(source: DiskStorage, tmp_path: Path, kind: str) -> None:
    """The card describes rows, runs and statistics as the storage's own card does."""
    if kind in ("parquet", "hf", "lerobot"):
        pytest.importorskip("pyarrow")
    if kind == "rlds":
        pytest.importorskip("google.protobuf")
    place = tmp_path / "out"
    report = source.export(place, kind)
    card, ours = export_card(place, kind), source.card()
    assert (card.kind, card.name, card.rows) == (kind, "out", 300)
    assert card.trajectories == ours.trajectories == report.trajectories
    assert (card.ends, card.runs, card.statistics) == (ours.ends, ours.runs, ours.statistics)
    assert [each["said"] for each in card.columns] == [each["name"] for each in ours.columns]
    lines = [table(str(each), "Columns")[1:] for each in (card, ours)]
    assert [line[1:] for line in lines[0]] == [line[1:] for line in lines[1]]
    assert table(str(card), "How it was made") == table(str(ours), "How it was made")
    assert "out" in card.loading
    # sha256sum prints the same hash.
    if place.is_file():
        assert card.hashes == {"files": hashlib.sha256(place.read_bytes()).hexdigest()}
    else:
        words = "find * -type f ! -path README.md | LC_ALL=C sort | xargs sha256sum | sha256sum"
        done = subprocess.run(["bash", "-c", words], cwd=place, capture_output=True, check=True)
        assert card.hashes == {"files": done.stdout.decode().split()[0]}


def test_the_card_of_lerobots_names_its_features(source: DiskStorage, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    source.export(tmp_path / "robot", "lerobot")
    card = export_card(tmp_path / "robot", "lerobot")
    info = json.loads((tmp_path / "robot/meta/info.json").read_text())
    assert {each["name"] for each in card.columns} <= {*info["features"]}
    assert "observation.state" in {each["name"] for each in card.columns}
    assert [*(tmp_path / "robot").glob(card.data_files)]


def test_an_export_for_the_hub_has_its_card(source: DiskStorage, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    source.export(tmp_path / "hub", "hf")
    page = (tmp_path / "hub" / "README.md").read_text()
    assert page == str(export_card(tmp_path / "hub", "hf"))
    (config,) = front(page)["configs"]
    (files,) = config["data_files"]
    found = [*(tmp_path / "hub").glob(files["path"])]
    assert (config["config_name"], files["split"], len(found)) == ("default", "train", 1)
    assert "`next.reward`" in page


def test_ends_as_they_are_written(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(collected())
    with open_storage(tmp_path / "rows") as storage:
        ends = storage.card().ends
        for cuts in ("keep", "drop", "truncate"):
            storage.export(tmp_path / cuts, "torchrl", cuts=cuts)  # type: ignore[arg-type]
            found = export_card(tmp_path / cuts, "torchrl").ends
            import_dataset(tmp_path / cuts, tmp_path / f"{cuts}-back", "torchrl")
            with open_storage(tmp_path / f"{cuts}-back") as back:
                assert found == back.card().ends, cuts
        assert ends == Counter(storage.trajectories.ends.tolist())


def test_rows_that_say_nothing_of_trajectories(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(TensorDict({"x": torch.zeros(5, 2)}, [5]))
        card = storage.card()
        assert (card.trajectories, card.hashes, card.ends) == (None, {}, {})
        page = str(card)
        assert "5 rows, a transition each (memmap)." in page
        assert "No run is known" in page
        storage.export(tmp_path / "out.npz", "npz")
        assert export_card(tmp_path / "out.npz", "npz").trajectories is None
    with MemmapStorage(tmp_path / "none") as storage, pytest.raises(NotInitialised):
        storage.card()


def test_imported_rows_name_the_runs_that_made_them(source: DiskStorage, tmp_path: Path) -> None:
    source.export(tmp_path / "out.npz", "npz")
    import_dataset(tmp_path / "out.npz", tmp_path / "back", "npz")
    with open_storage(tmp_path / "back") as back:
        assert [each["seed"] for each in back.card().runs] == [5, 6]


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (0, "n<1K"),
        (999, "n<1K"),
        (1000, "1K<n<10K"),
        (9999, "1K<n<10K"),
        (10_000, "10K<n<100K"),
        (1_000_000, "1M<n<10M"),
        (10**9 - 1, "100M<n<1B"),
        (10**12 - 1, "100B<n<1T"),
        (10**12, "n>1T"),
        (10**15, "n>1T"),
    ],
)
def test_words_for_sizes(rows: int, word: str) -> None:
    assert size_category(rows) == word


# --- text from other sources ----------------------------------------------------------------------


def crafted(place: Path, about: Any) -> Path:
    """Make an export whose text was altered."""
    with MemmapStorage(place / "rows") as storage:
        storage.extend(trajectory_rows(0, 4, steps=2))
        storage.export(place / "out", "torchrl")
    said = place / "out" / "tallyroll.json"
    found = json.loads(said.read_text())
    said.write_text(json.dumps({**found, **about}))
    return place / "out"


EVIL = "x | y\n---\n# <script>`[a](javascript:b)`\x1b[31m\u202e" + "z" * 1000


@pytest.mark.parametrize(
    "about",
    [
        {"ends": {"terminated": -1, "cut": "3", EVIL: 5}, "statistics": [1], "rows": 3},
        {"ends": 7, "statistics": {"observation": 3, EVIL: {}}, "rows": {"runs": 5}},
        {"statistics": {"observation": {"mean": EVIL, "std": [[EVIL] * 9] * 9, "max": 10**999}}},
        {
            "rows": {
                "copied_from": {"id": "i", "rows": [0, 3]},
                "runs": [
                    {"environment": {"id": EVIL, "kwargs": {EVIL: EVIL}}, "seed": EVIL},
                    {"environment": 3, "call": [], "made": {"policy": EVIL}, "versions": {EVIL: 3}},
                    {"call": {"policy": {EVIL: EVIL}, "total_frames": EVIL}, "lanes": [EVIL]},
                    3,
                ],
            }
        },
    ],
)
def test_text_of_others_stays_in_its_cell(tmp_path: Path, about: Any) -> None:
    page = str(export_card(crafted(tmp_path, about), "torchrl"))
    assert front(page)["pretty_name"] == "out"
    assert not re.search(r"<script|\x1b|\u202e|\]\(javascript", page)
    assert [line for line in page.splitlines() if line.startswith("# ")] == ["# out"]
    assert len(page) < 20_000
    for head in ("Columns", "How it was made"):
        if "\n| " in page.split(f"## {head}")[1].split("## ")[0]:
            names, *lines = table(page, head)
            assert {len(line) for line in lines} <= {len(names)}


def test_text_that_is_nested_too_deep(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(60):
        deep = {"x": deep}
    with pytest.raises(InvalidDataset, match="nested too deep"):
        export_card(crafted(tmp_path, {"statistics": deep}), "torchrl")


def test_a_link_is_not_followed(source: DiskStorage, tmp_path: Path) -> None:
    source.export(tmp_path / "out", "torchrl")
    (tmp_path / "out" / "more").symlink_to("/etc")
    with pytest.raises(InvalidDataset, match="cannot be hashed"):
        export_card(tmp_path / "out", "torchrl")
    with pytest.raises(StorageMissing):
        export_card(tmp_path / "nothing", "torchrl")


def test_many_runs_and_columns(tmp_path: Path) -> None:
    columns = [{"name": f"c{n}", "dtype": "uint8", "shape": []} for n in range(300)]
    runs = [{"environment": {"id": f"E-{n}"}, "seed": n} for n in range(300)]
    page = str(Card("many", "memmap", 10, columns, runs=runs))
    assert len(table(page, "Columns")) == 257
    assert [line[0] for line in table(page, "How it was made")[1:]] == [
        str(number) for number in range(44, 300)
    ]
    assert page.count("44 more are not shown.") == 2
    assert len(front(page)["tags"]) == 9


def test_the_card_of_an_export_counts_the_runs_that_its_text_omits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tallyroll.storage.ext.exchange.readme.COPIES_NBYTES", 2**14)
    paths = [tmp_path / f"run{number}" for number in range(18)]
    for seed, path in enumerate(paths):
        options: dict[str, Any] = {"frames_per_batch": 4, "total_frames": 4, "seed": seed}
        with SyncCollector("CartPole-v1", storage=path, **options) as collector:
            collector.collect(4)
    with open_storage(paths) as union:
        union.export(tmp_path / "out", "torchrl")
    page = str(export_card(tmp_path / "out", "torchrl"))
    listed = len(table(page, "How it was made")) - 1
    assert 0 < listed < 18
    assert f"The metadata omit {18 - listed} earlier run" in page


def test_an_environment_without_an_id_has_the_name_of_its_class() -> None:
    run = {"environment": {"id": None, "type": "SyncVectorEnv"}}
    made = {"made": {"environment": ["my_envs:Catch"]}}
    several = {"made": {"environment": ["my_envs:Catch", "my_envs:Throw"]}}
    page = str(Card("own", "memmap", 10, [], runs=[run, run | made, run | several]))
    found = [line[1] for line in table(page, "How it was made")[1:]]
    assert found == ["SyncVectorEnv", "my_envs:Catch", "SyncVectorEnv"]


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_it(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_storage(made) as storage:
        page = str(storage.card(licence="mit"))
    assert main(["card", str(made), "--licence", "mit"]) == 0
    assert capsys.readouterr().out == page
    assert main(["card", str(made), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["hashes"]) == (300, {"content": content_hash(made)})


def test_the_command_replaces_nothing(
    source: DiskStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.export(tmp_path / "out.npz", "npz")
    out = tmp_path / "README.md"
    words = ["card", f"npz:{tmp_path / 'out.npz'}", "--out", str(out)]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{out}: a card of 300 rows written\n"
    page = out.read_text()
    assert page == str(export_card(tmp_path / "out.npz", "npz"))
    out.write_text("mine")
    assert main(words) == 1
    assert "already exists, and is not replaced" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main([*words, "--force", "--quiet"]) == 0
    assert (out.read_text(), capsys.readouterr().out) == (page, "")
    out.unlink()
    out.symlink_to(tmp_path / "elsewhere")
    assert main(words) == 1
    assert not (tmp_path / "elsewhere").exists()
    assert main([*words[:-1], str(tmp_path / "nowhere" / "README.md")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert {each.name for each in tmp_path.iterdir()} == {"out.npz", "README.md"}


def test_a_full_disk(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with file_size_limit(100):
        assert main(["card", str(made), "--out", str(tmp_path / "README.md")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_words_that_are_wrong(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["card", str(made.with_name("nothing"))]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["card", f"npz:{made}"]) == 1
    assert "it is not a file" in capsys.readouterr().err
    assert main(["card", f"rlds_of_others:{made}"]) == 1
