"""The progress display of a collector: only with ``progress=True``, and closed at every end."""

from __future__ import annotations

import builtins
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.ext import progress
from tallyroll.storage import MemmapStorage

from collect_kit import assert_same, joined

POLE: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 100, "total_frames": 300, "seed": 0}


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    require_closed()


def require_closed() -> None:
    """Wait until the thread that refreshes the bar has noticed that it is closed."""
    until = time.monotonic() + 20
    while any("rich" in type(each).__module__ for each in threading.enumerate()):
        assert time.monotonic() < until, "the bar is still refreshed"
        time.sleep(0.01)


@pytest.fixture
def each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show every call, as if the calls took seconds."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "BAR_SECONDS", 1e-3)


def _iterated(collector: Any) -> Any:
    with collector:
        return joined([*collector])


def test_lines_on_stderr_have_the_counts_of_the_ledger(
    each_call: None, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = _iterated(SyncCollector("CartPole-v1", **POLE))
    assert capsys.readouterr() == ("", "")
    collector = SyncCollector("CartPole-v1", **POLE, progress=True)
    assert_same(_iterated(collector), plain)
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    found = [re.match(r"tallyroll: (\d+) of 300 frames \((\d+) %\), ", each) for each in lines]
    assert all(found)
    counts = [(int(each[1]), int(each[2])) for each in found if each]
    # A call shows the run at its begin and at its end, and the end of the run only once.
    assert counts == [(0, 0), *[(100, 33)] * 2, *[(200, 66)] * 2, (300, 100)]
    metrics = collector.metrics()
    assert f", {metrics['episodes']} ep, return {metrics['return_mean']:.4g}, " in lines[-1]


@pytest.mark.parametrize("budget", ["frames", "episodes", "none"])
def test_calls_of_collect(budget: str, each_call: None, capsys: pytest.CaptureFixture[str]) -> None:
    total: dict[str, int] = {"frames": {"total_frames": 40}, "episodes": {"total_episodes": 2}}.get(
        budget, {"total_frames": -1}
    )
    with (
        MemmapStorage() as storage,
        SyncCollector(
            "CartPole-v1", frames_per_batch=10, storage=storage, seed=0, progress=True, **total
        ) as collector,
    ):
        for _ in range(4):
            collector.collect(10)
    ledger = collector.ledger
    last = capsys.readouterr().err.splitlines()[-1]
    wanted = {
        "frames": "tallyroll: 40 of 40 frames (100 %), ",
        "episodes": f"tallyroll: {ledger.episodes_complete} of 2 episodes (",
        "none": "tallyroll: 40 frames, ",
    }
    assert last.startswith(wanted[budget])
    assert last.endswith(" left") == (budget != "none")


def test_one_long_call_of_collect(each_call: None, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        MemmapStorage() as storage,
        SyncCollector("CartPole-v1", **POLE, storage=storage, progress=True) as collector,
    ):
        collector.collect(300)
    lines = capsys.readouterr().err.splitlines()
    counts = [int(each.split()[1]) for each in lines]
    assert (counts[0], counts[-1]) == (0, 300)
    assert len({*counts}) >= 3
    assert counts.count(300) == 1


def test_a_run_that_is_over_shows_its_last_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Its lines are seconds apart, except the last one, which is always shown."""
    with SyncCollector("CartPole-v1", **POLE, progress=True) as collector:
        assert len([*collector]) == 3
        assert [*collector] == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tallyroll: 300 of 300 frames (100 %), ")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers(mode: Any, each_call: None, capsys: pytest.CaptureFixture[str]) -> None:
    collector = MultiprocessCollector(
        "CartPole-v1", num_workers=2, mode=mode, transport="thread", progress=True, **POLE
    )
    assert len(_iterated(collector)) == 300
    assert "tallyroll: 300 of 300 frames (100 %), " in capsys.readouterr().err


def test_workers_with_their_own_shards(
    each_call: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with MultiprocessCollector(
        "CartPole-v1",
        num_workers=2,
        mode="async",
        sharded=True,
        transport="thread",
        storage=tmp_path / "rows",
        progress=True,
        **POLE,
    ) as collector:
        collector.collect(300)
    counts = [int(each.split()[1]) for each in capsys.readouterr().err.splitlines()]
    assert (counts[0], counts[-1]) == (0, 300)
    assert counts == sorted(counts)


def test_a_bar_on_a_terminal(
    each_call: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    _iterated(SyncCollector("CartPole-v1", **POLE, progress=True))
    said = capsys.readouterr()
    assert "frames" in said.err
    assert "300/300" in said.err
    assert "tallyroll:" not in said.err


class ZMQInteractiveShell:
    """Jupyter's shell, which rich knows by its name."""


class _Output:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def clear_output(self, wait: bool = False) -> None: ...


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook(
    widgets: bool,
    each_call: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With ipywidgets, rich draws its bar; without them there are lines."""
    shown: list[Any] = []
    modules = {"IPython": {}, "IPython.display": {"display": shown.append}}
    modules |= {"ipywidgets": {"Output": _Output}} if widgets else {}
    for name, names in modules.items():
        made = types.ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, made)
    if not widgets:
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    _iterated(SyncCollector("CartPole-v1", **POLE, progress=True))
    assert ("tallyroll: 300 of 300 frames" in capsys.readouterr().err) == (not widgets)
    assert any(isinstance(each, _Output) for each in shown) == widgets


@pytest.mark.parametrize("stored", [True, False])
def test_an_error_closes_the_bar(
    stored: bool, each_call: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")

    def run(collect: Callable[[], object]) -> None:
        with pytest.raises(ValueError, match="mine"):
            collect()

    with MemmapStorage() as storage:
        collector = SyncCollector("CartPole-v1", Failing(), **POLE, storage=storage, progress=True)
        run(lambda: collector.collect(100)) if stored else run(lambda: [*collector])
        require_closed()
        collector.shutdown()


class Failing:
    """Policy that fails once it has acted a few times."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, td: Any) -> Any:
        self.calls += 1
        if self.calls > 20:
            raise ValueError("mine")
        return td.set("action", td["observation"][..., 0].long() * 0)
