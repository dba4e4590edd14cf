"""Each example runs for a few steps, as a user runs it, and prints what it promises."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tallyroll.storage import MemmapStorage

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# As in pyproject.toml: warnings are errors, but for the one that importing torchrl gives.
WARNINGS = ("-W", "error", "-W", "ignore:Creating:DeprecationWarning")


def run(name: str, directory: Path, **options: int | str) -> str:
    """What the example prints, run in ``directory``."""
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    done = subprocess.run(
        [sys.executable, *WARNINGS, str(EXAMPLES / name), *arguments],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[int]:
    """The groups of the only match of ``pattern`` in ``text``."""
    (match,) = re.finditer(pattern, text)
    return [int(group) for group in match.groups()]


def cells(label: str, table: str) -> list[str]:
    """The cells of the table's only row that begins with ``label``."""
    (line,) = (line for line in table.splitlines() if line.startswith(f"│ {label} "))
    return [cell.strip() for cell in line.strip("│").split("│")[1:]]


def counts(label: str, table: str) -> list[int]:
    return [int(cell) for cell in cells(label, table)]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_help_names_every_option_with_its_default(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    options = re.findall(r"^  --([a-z-]+)", text, re.MULTILINE)
    assert len(options) >= 5
    assert " ".join(text.split()).count("(default: ") == len(options)
    assert f"python examples/{path.name}" in text


def test_collect_to_disk_leaves_exactly_the_rows_it_was_asked_for(tmp_path: Path) -> None:
    out = run(
        "collect_to_disk.py",
        tmp_path,
        frames=1001,
        frames_per_batch=300,
        num_envs=3,
        out="rows",
        sample=32,
    )
    with MemmapStorage(tmp_path / "rows", mode="read") as storage:
        assert len(storage) == 1001
    assert out.startswith("1001 transitions in ")
    # 334 steps of 3 lanes; a lane that is reset by mask spends no slot on it.
    assert "ledger: 1002 slots = 1002 executed + 0 resets" in out
    assert "1002 executed = 1001 stored + 1 discarded" in out
    assert "rows: 1001 rows, " in out
    assert "a sample of 32:" in out
    assert re.search(r"^  next\.observation +torch\.float32 +\[32, 4\]$", out, re.MULTILINE)


def test_ppo_trains_on_exactly_its_budget(tmp_path: Path) -> None:
    out = run(
        "ppo.py",
        tmp_path,
        total_frames=300,
        frames_per_batch=128,
        num_envs=4,
        epochs=1,
        minibatch=64,
        eval_episodes=3,
    )
    sizes = re.findall(r"^batch +(\d+)  frames +(\d+) ", out, re.MULTILINE)
    assert sizes == [("128", "128"), ("128", "256"), ("44", "300")]
    stored, slots, resets, beyond = numbers(
        r"(\d+) transitions, exactly: (\d+) slots - (\d+) reset slots - (\d+) beyond", out
    )
    assert stored == 300 == slots - resets - beyond
    assert resets > 0
    (episodes,) = numbers(r"evaluation: mean return [\d.]+ over (\d+) episodes", out)
    assert episodes == 3


def test_exact_benchmark_gives_both_policies_the_same_budget(tmp_path: Path) -> None:
    out = run("exact_benchmark.py", tmp_path, frames=1001, frames_per_batch=300, episodes=3)
    slots, resets = counts("slots", out), counts("- reset slots", out)
    executed, discarded = counts("= executed", out), counts("- discarded", out)
    assert counts("= stored", out) == [1001, 1001]
    assert [a - b for a, b in zip(slots, resets, strict=True)] == executed
    assert [a - b for a, b in zip(executed, discarded, strict=True)] == [1001, 1001]
    assert resets[0] > resets[1]
    mean_random, mean_balance = map(float, cells("mean return, 3 whole episodes", out))
    assert mean_random < 100 < mean_balance
