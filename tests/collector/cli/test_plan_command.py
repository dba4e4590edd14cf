"""``tallyroll plan``: the plan and the space of `collect`, nothing written, hints on images."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from rich.filesize import decimal

from tallyroll.collector.cli import main
from tallyroll.storage import open_storage

SIDE = 40


class Screens(gymnasium.Env[Any, Any]):
    """Images of SIDE x SIDE pixels, and a few numbers."""

    def __init__(self) -> None:
        images = spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
        self.observation_space = spaces.Dict({"pixels": images, "speed": spaces.Box(-1, 1, (2,))})
        self.action_space = spaces.Discrete(2)

    def _observation(self) -> dict[str, Any]:
        image = np.full((SIDE, SIDE), self._steps, np.uint8)
        return {"pixels": image, "speed": np.zeros(2, np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self._observation(), 0.0, self._steps >= 7, False, {}


gymnasium.register("plan/Screens-v0", Screens, disable_env_checker=True)
POLICY = "def policy(td):\n    return td.set('action', td['speed'][..., 0].long())\n"
CHOICES = {
    "CartPole-v1 --frames 300": "data",
    "CartPole-v1 --frames 300 --num-envs 4 --max-size 100": "ring",
    "CartPole-v1 --frames 5_000 --num-envs 8 --durability power": "data.h5",
    "CartPole-v1 --episodes 5 --num-envs 2 --frames-per-batch 8": "data.zarr",
    "CartPole-v1 --frames 400 --num-envs 4 --seed 0 --shard 1/2": "part.h5",
    "CartPole-v1 --frames 100 --num-envs 2 --workers 2 --transport thread": "data",
    "plan/Screens-v0 --frames 60 --max-size 50 --policy acts.py:policy": "ring",
    "plan/Screens-v0 --frames 60": "data",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which is empty but for a policy, and has the temporary files."""
    (tmp_path / "acts.py").write_text(POLICY)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def facts_of(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    assert main(["plan", *shlex.split(words), "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


@pytest.mark.parametrize("words", CHOICES)
def test_it_is_the_plan_of_the_run(
    words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*words.split(), "--out", CHOICES[words]]
    assert main(["plan", *command]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    facts = facts_of(capsys, shlex.join(command))
    files = [each for each in folder.rglob("*") if "__pycache__" not in each.parts]
    assert sorted(each.name for each in files) == ["acts.py", "scratch"]
    assert main(["collect", *command, "--plan"]) == 0
    of_run = capsys.readouterr().err
    plan, space, *_ = said.out.rpartition("\n\n")[0], said.out.rpartition("\n\n")[2]
    assert plan in of_run
    assert [line.split()[0] for line in plan.splitlines()] == [*facts["plan"]]
    assert space.partition("; ")[0] in of_run
    with open_storage(CHOICES[words]) as storage:
        if not facts["once"]:
            assert facts["row_bytes"] == storage.schema.row_nbytes
        if facts["rows"] is not None:
            most = min(facts["rows"], facts["ring"] or facts["rows"])
            assert facts["bytes"] == most * facts["row_bytes"]
            assert facts["rows"] == storage.head
        assert (facts["ring"] or 0) == (storage.ring or 0)
    main(["inspect", CHOICES[words], "--json"])
    inspected = json.loads(capsys.readouterr().out)
    assert (facts["full_ring_bytes"] is None) == (inspected["full_ring_bytes"] is None)
    assert facts["once"] == [each["name"] for each in inspected["once"]]


def test_a_run_that_does_not_fit_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    facts = facts_of(capsys, "CartPole-v1 --frames 1e15 --out data.h5")
    assert facts["bytes"] == 75 * 10**15
    assert facts["free_bytes"] < facts["bytes"]
    assert facts["plan"]["batches"]["way"] == "gathered"


IMAGES = 2 * SIDE**2


@pytest.mark.parametrize(
    ("words", "hinted"),
    [
        ("--frames 1e6", True),
        ("--frames 1e6 --out x.zarr", True),
        ("--frames 1e9 --max-size 1e6 --once no", True),
        ("--frames 1e9 --max-size 1e5 --once no", False),
        ("--frames 1e3 --max-size 1e6 --once no", False),
        ("--frames 1e5", False),
        ("--frames 1e6 --once yes", False),
        ("--frames 1e6 --max-size 1e6", False),
        ("--frames 1e6 --exclude pixels", False),
        ("--episodes 1e6", False),
    ],
)
def test_large_images_get_a_hint(
    words: str, hinted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = facts_of(capsys, f"plan/Screens-v0 {words}")
    assert bool(facts["hint"]) == hinted
    main(["plan", "plan/Screens-v0", *words.split()])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("images (pixels, next/pixels) take") == hinted
    if not hinted:
        return
    assert facts["images"] == ["pixels", "next/pixels"]
    whole = decimal(10**6 * IMAGES)
    assert f"take {IMAGES:,} of {facts['row_bytes']:,} bytes a row, {whole} in all" in lines[-1]
    assert "--once yes stores each frame once" in lines[-1]
    assert "--exclude KEY" in lines[-1]
    assert "`tallyroll pack`" in lines[-1]


@pytest.mark.parametrize(
    ("id", "hint"),
    [
        ("ALE/MadeUp-v5", "ale:made_up makes the game of ALE/MadeUp-v5 as DQN sees it, "),
        ("ALE/MadeUp-ram-v5", None),
    ],
)
def test_a_game_of_gymnasium_names_the_vector(
    id: str, hint: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kwargs = {"game": "made_up", "obs_type": "ram" if "ram" in id else "rgb"}
    spec = EnvSpec(id, lambda **_: Screens(), kwargs=kwargs, disable_env_checker=True)
    monkeypatch.setitem(gymnasium.registry, id, spec)
    assert (facts_of(capsys, f"{id} --frames 60")["hint"] or "").startswith(hint or "")
    assert main(["plan", id, "--frames", "60"]) == 0
    assert ("DQN" in capsys.readouterr().out) == (hint is not None)


def test_collect_gives_the_same_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tallyroll.collector.cli.row_space.LARGE_NBYTES", 60 * IMAGES)
    hint = facts_of(capsys, "plan/Screens-v0 --frames 60")["hint"]
    assert hint
    for frames, times in ((60, 1), (50, 0)):
        words = ["collect", "plan/Screens-v0", "--frames", str(frames), "--out", f"of-{frames}"]
        assert main(words) == 0
        assert capsys.readouterr().err.count(f"tallyroll: {hint}\n") == times
    assert main([*words[:4], "--out", "quiet", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "the following arguments are required: ENV"),
        ("CartPole-v1", "one of the arguments --frames --episodes is required"),
        ("CartPole-v1 --frames 0", "argument --frames: expected a whole number above 0"),
        ("CartPole-v1 --frames 5 --episodes 5", "not allowed with argument"),
        ("CartPole-v1 --frames 5 --num-envs 1 --workers 2", "--workers: expected at most"),
        ("CartPole-v1 --frames 5 --resume", "unrecognized option --resume"),
        ("CartPole-v1 --frames 5 --mode sync", "--mode needs workers. Give --workers."),
        ("CartPole-v1 --frames 5 --log x", "unrecognized option --log"),
        ("CartPole-v1 --frames 5 --shard 0/2", "expected the same --seed for each of the shards"),
    ],
)
def test_wrong_arguments(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *words.split()])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("Nothing-v9 --frames 5", "Nothing"),
        ("CartPole-v1 --frames 5 --policy none.py:act", "none.py is not a file"),
        ("CartPole-v1 --frames 5 --out x.h5 --once yes", "--once: expected a MemmapStorage"),
        ("CartPole-v1 --frames 5 --out x.h5 --format zarr", "--format"),
    ],
)
def test_invalid_runs_are_refused(
    words: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split()]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert "scratch" not in shown.err
    assert [*(folder / "scratch").iterdir()] == []
