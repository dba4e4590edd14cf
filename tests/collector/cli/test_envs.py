"""``tallyroll envs``, and ``tallyroll collect SYSTEM:ID``."""

from __future__ import annotations

import json
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tallyroll.collector.cli import main
from tallyroll.collector.envs import registry
from tallyroll.storage import open_storage, verify

from registered_kit import install
from toy_systems import First, Toy

MINE = Path(__file__).stem


class Absent(Toy):
    package = "no_such_package"
    extra = "envpool"
    conflicts = "no_such_package and numpy 3: install one of them."
    about = "an end is final; seeds at each reset"


class Present(Toy):
    package = "rich.console"
    about = "never imported"


class ThirdParty(Toy):
    package = "no_such_package_either"


class WithKwargs(First):
    def __init__(self, lanes: int, seeds: Any = None, length: int = 6) -> None:
        super().__init__(lanes, seeds)
        self.longest = length

    def start(self, lane: int) -> None:
        super().start(lane)
        self.length[lane] = min(self.length[lane], self.longest)

    made: ClassVar[list[Any]] = []

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Any, **kwargs: Any) -> WithKwargs:
        cls.made.append((name, lanes))
        return cls(lanes, seeds, **kwargs)


@pytest.fixture(autouse=True)
def here(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Change to an empty directory with systems installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, MINE, sys.modules[__name__])
    install(
        tmp_path_factory.mktemp("site"),
        monkeypatch,
        toy="toy_systems:Toy",
        absent=f"{MINE}:Absent",
        present=f"{MINE}:Present",
        third=f"{MINE}:ThirdParty",
        broken="no_such_package:Toy",
        wrong="toy_systems:ReadOnly",
        kwargs=f"{MINE}:WithKwargs",
    )
    return tmp_path


def tallyroll(*words: object) -> int:
    return main([str(word) for word in words])


def listed(capsys: pytest.CaptureFixture[str], *names: str) -> dict[str, dict[str, Any]]:
    tallyroll("envs", "--json", *names)
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)}


# --- envs -----------------------------------------------------------------------------------------


def test_all_that_are_registered(capsys: pytest.CaptureFixture[str]) -> None:
    assert tallyroll("envs") == 0
    said = capsys.readouterr()
    assert said.err == ""
    there, _, rest = said.out.partition("\nnot installed\n")
    absent, _, conflicts = rest.partition("\nknown conflicts\n")
    for name in registry.names():
        assert (f"\n{name} " in there) != (f"\n{name} " in f"\n{absent}"), name
    assert "\ntoy " in there
    assert "Gymnasium ids" in there
    (line,) = (line for line in absent.splitlines() if line.startswith("absent "))
    assert 'pip install "tallyroll[envpool]"' in line
    assert "an end is final; seeds at each reset" in line
    assert "absent: no_such_package and numpy 3: install one of them." in conflicts


def test_what_is_said_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    found = listed(capsys)
    assert list(found) == registry.names()
    assert found["absent"] == {
        "name": "absent",
        "installed": False,
        "package": "no_such_package",
        "version": "",
        "extra": "envpool",
        "conflicts": Absent.conflicts,
        "about": Absent.about,
        "fault": "",
    }
    assert found["present"]["installed"]
    assert found["present"]["version"].startswith("rich ")
    assert found["toy"]["installed"], "it needs nothing"
    assert not found["third"]["installed"]
    for name, fault in (("broken", "a package that is not installed"), ("wrong", "name a System")):
        assert not found[name]["installed"]
        assert fault in found[name]["fault"]


def test_one_that_no_extra_brings(capsys: pytest.CaptureFixture[str]) -> None:
    assert tallyroll("envs", "third", "broken") == 1
    said = capsys.readouterr().out
    assert "needs the package no_such_package_either" in said
    assert "No module named 'no_such_package'" in said


@pytest.mark.parametrize(
    ("names", "status"), [("toy", 0), ("toy present", 0), ("absent", 1), ("toy absent", 1)]
)
def test_named_ones(capsys: pytest.CaptureFixture[str], names: str, status: int) -> None:
    assert tallyroll("envs", *names.split()) == status
    said = capsys.readouterr().out
    assert [name for name in ("toy", "present", "absent") if f"\n{name} " in said] == names.split()


def test_a_name_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert tallyroll("envs", "nope") == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "tallyroll: error: expected one of the systems absent, " in said.err
    assert ", got nope" in said.err
    assert tallyroll("envs", "thrd") == 1
    assert capsys.readouterr().err.endswith("; did you mean third?\n")


def test_nothing_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    heavy = {"brax", "dm_control", "envpool", "gym3", "jax", "pettingzoo", "pyspiel", "vmas"}
    before = heavy & sys.modules.keys()
    tallyroll("envs")
    assert heavy & sys.modules.keys() == before


def test_every_system_of_ours_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    everything = listed(capsys)
    own = metadata.entry_points(group="tallyroll.envs").select()
    ours = [each.name for each in own if each.module.startswith("tallyroll.collector.ext.systems")]
    assert len(ours) >= 15
    for each in map(everything.__getitem__, ours):
        assert each["about"], each
        assert len(each["about"]) <= 80, each


def test_two_distributions_of_pygame_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = metadata.packages_distributions()
    said = []
    for these in (["pygame"], ["pygame-ce"], ["pygame-ce", "pygame"]):
        monkeypatch.setattr(
            metadata, "packages_distributions", lambda these=these: {**there, "pygame": these}
        )
        assert tallyroll("envs") == 0
        said.append("both installed" in " ".join(capsys.readouterr().out.split()))
    assert said == [False, False, True]


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    pages = dict.fromkeys([("envs", "--help"), ("collect", "--help")], "tallyroll envs")
    for words, said in {("--help",): "  envs  ", **pages}.items():
        with pytest.raises(SystemExit) as end:
            tallyroll(*words)
        assert end.value.code == 0
        assert said in capsys.readouterr().out


# --- collect --------------------------------------------------------------------------------------


def rows(path: str, name: Any = "observation") -> Any:
    with open_storage(path) as storage:
        return np.array(storage.column(name))


def test_collect_from_a_system(capsys: pytest.CaptureFixture[str]) -> None:
    for out, seed in (("a", 5), ("b", 5), ("c", 6)):
        words = ("kwargs:any", "--frames", 101, "--num-envs", 3, "--seed", seed, "--out", out)
        assert tallyroll("collect", *words, "--env-kwargs", '{"length": 2}') == 0
    assert "101 frames of kwargs:any" in capsys.readouterr().out
    assert WithKwargs.made[-1] == ("any", 3)
    assert len(rows("a")) == 101
    assert rows("a")[:, 2].max() == 1, "no episode is longer than 2"
    assert (rows("a") == rows("b")).all()
    assert not (rows("a") == rows("c")).all()
    assert verify("a").sound
    with open_storage("a") as storage:
        made = storage.manifest["runs"][0]["environment"]
    assert (made["id"], made["kwargs"]) == ("kwargs:any", {"length": 2})


@pytest.mark.parametrize("kind", ["Toy", "SeededWhenMade", "WithResetSlots"])
def test_resume_names_it_again(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    words = ("--frames", 50, "--num-envs", 2, "--seed", 1, "--out", "data", "--quiet")
    assert tallyroll("collect", f"toy:{kind}", *words) == 0
    assert tallyroll("collect", "--resume", "--frames", 131, "--out", "data") == 1
    said = capsys.readouterr().err
    assert (
        "an environment system. Tallyroll does not run code only because a storage names it" in said
    )
    again = shlex.split(said.strip().splitlines()[-1])
    assert again[:3] == ["tallyroll", "collect", f"toy:{kind}"]
    assert tallyroll(*again[1:], "--frames", 131) == 0
    assert len(rows("data")) == 131
    assert verify("data").sound
    other = ("collect", "toy:First", "--resume", "--frames", 200, "--num-envs", 3)
    assert tallyroll(*other, "--out", "data") == 1
    assert "--resume: the run has 2 lanes, but --num-envs 3 was given" in capsys.readouterr().err


def test_other_options_reach_a_system() -> None:
    words = "--rename observation=obs --max-frames-per-traj 2 --episodes 7 --num-envs 2"
    assert tallyroll("collect", "toy:Toy", *words.split(), "--out", "data", "--quiet") == 0
    assert rows("data", "obs")[:, 2].max() == 1
    assert int(rows("data", ("collector", "step")).max()) == 1


ERRORS = {
    "broken:X": "broken: its environments need a package that is not installed (No module named "
    "'no_such_package')",
    "wrong:X": "wrong: expected the entry point toy_systems:ReadOnly to name a System",
    "kwargs:X --env-kwargs '{\"nope\": 1}'": "cannot make 'kwargs:X' with {'nope': 1}: ",
    "toy:First --info-keys lives": "info_keys: ['lives'] are not columns of First, whose "
    "infos are not kept. Add",
    "toi:First": "toi:First: there is neither a module nor an environment system called toi. "
    "`tallyroll envs` lists the systems",
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors_are_one_line(here: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert tallyroll("collect", *shlex.split(words), "--frames", 5, "--out", "data") == 1
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("tallyroll: error: ")
    assert ERRORS[words] in line
    assert not (here / "data").exists()
