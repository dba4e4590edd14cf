"""Figures hold the numbers of trajectories, statistics and reports, and change no global state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.collector import SyncCollector, report
from tallyroll.collector.errors import MissingExtra
from tallyroll.storage import DiskStorage, MemmapStorage, open_storage
from tallyroll.storage.errors import InvalidExpression, MissingLibrary
from tallyroll.storage.ext.notebook.figures import mean_of_last
from tallyroll.storage.trajectories.episodes import END_NAMES

from oracles import OracleEnv
from warm_cli import WarmServer

WINDOW = 7


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    for seed in range(3):
        with SyncCollector(
            "CartPole-v1",
            num_envs=2,
            frames_per_batch=200,
            total_frames=600,
            seed=seed,
            storage=folder / f"$p_{{ole-{seed}",
        ) as collector:
            collector.collect(600)
    return folder


@pytest.fixture
def storage(runs: Path) -> Iterator[DiskStorage]:
    with open_storage(runs / "$p_{ole-0") as opened:
        yield opened


def drawn(figure: Any, panel: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the data of the lines of a panel by label."""
    return {line.get_label(): line.get_data() for line in figure.axes[panel].lines}


@pytest.mark.parametrize("where", [None, "length > 20"])
def test_returns_lengths_and_ends(storage: DiskStorage, where: str | None) -> None:
    trajectories = storage.trajectories
    figure = trajectories.plot(where, window=WINDOW)
    assert [each.get_title() for each in figure.axes] == ["returns", "lengths", "ends"]
    chosen = trajectories.lengths > (0 if where is None else 20)
    ended = np.isin(trajectories.ends, ["terminated", "truncated"]) & chosen
    order = np.argsort(trajectories.table["last_row"][ended])
    at = trajectories.table["last_row"][ended][order] + 1
    for panel, values in ((0, trajectories.returns), (1, trajectories.lengths)):
        values = values[ended][order].astype(np.float64)
        lines = drawn(figure, panel)
        for line in lines.values():
            np.testing.assert_array_equal(line[0], at)
        np.testing.assert_array_equal(lines["episodes"][1], values)
        means = [values[max(0, n + 1 - WINDOW) : n + 1].mean() for n in range(len(values))]
        np.testing.assert_allclose(lines[f"mean of the last {WINDOW}"][1], means)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert [each.get_xlabel() for each in figure.axes] == ["transitions", "transitions", ""]
    assert [each.get_ylabel() for each in figure.axes] == ["return", "transitions", "trajectories"]
    heights = {bar.get_x() + 0.4: bar.get_height() for bar in figure.axes[2].patches}
    assert sum(heights.values()) == chosen.sum()
    assert sorted(heights.values()) == sorted(
        (trajectories.ends[chosen] == name).sum() for name in END_NAMES
    )


def test_a_storage_and_a_view(storage: DiskStorage) -> None:
    whole = drawn(storage.plot(window=WINDOW))
    np.testing.assert_array_equal(
        whole["episodes"][1], drawn(storage.trajectories.plot(window=WINDOW))["episodes"][1]
    )
    view = storage.trajectories.where("lane == 1")
    assert 0 < len(drawn(view.plot())["episodes"][1]) < len(whole["episodes"][1])
    with pytest.raises(InvalidExpression):
        storage.trajectories.plot("lane ==")
    with pytest.raises(ValueError, match="window"):
        storage.plot(window=0)


def test_means_of_the_last() -> None:
    values = np.array([1.0, 3.0, np.inf, 2.0, 4.0])
    assert mean_of_last(values, 2).tolist() == [1.0, 2.0, np.inf, np.inf, 3.0]
    assert mean_of_last(values[:2], 1).tolist() == [1.0, 3.0]
    assert mean_of_last(values[:0], 3).tolist() == []
    assert mean_of_last(values[:2], 9).tolist() == [1.0, 2.0]


def test_ranges_and_declared_bounds(storage: DiskStorage) -> None:
    found = storage.statistics()
    figure = found.plot()
    assert [each.get_title() for each in figure.axes] == [*found]
    for panel, name in enumerate(found):
        lines = drawn(figure, panel)
        wanted = {"min": found[name].min, "max": found[name].max}
        wanted |= {"q05": found[name].quantiles[0.05], "median": found[name].quantiles[0.5]}
        for label, values in wanted.items():
            np.testing.assert_array_equal(lines[label][1], values.reshape(-1))
    space = gymnasium.make("CartPole-v1").observation_space
    assert isinstance(space, gymnasium.spaces.Box)
    lines = drawn(figure, [*found].index("observation"))
    for label, bound in (("declared low", space.low), ("declared high", space.high)):
        np.testing.assert_array_equal(lines[label][1], np.where(np.isfinite(bound), bound, np.nan))
    assert found.bounds["action"] == (0, 1)
    assert "next/reward" not in found.bounds


def test_axes_and_marks_of_statistics_have_names(storage: DiskStorage) -> None:
    found = storage.statistics(["observation", "action"])
    figure = found.plot()
    figure.canvas.draw()
    vector, scalar = figure.axes
    ticks = [text.get_text() for text in vector.get_xticklabels()]
    assert {"0", "1", "2", "3"} <= {*ticks}, "one for each element, without fractions"
    assert not any("." in text for text in ticks)
    assert (vector.get_xlabel(), vector.get_ylabel()) == ("element", "value")
    assert (scalar.get_xlabel(), [*scalar.get_xticks()]) == ("", [])
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {
        *("min", "max", "q05", "median", "q95", "declared low", "declared high")
    }


@pytest.mark.parametrize("rows", [9_000, 90_000_000])
def test_numbers_below_a_panel_do_not_touch(storage: DiskStorage, rows: int) -> None:
    figure = storage.plot()
    figure.axes[0].set_xlim(0, rows)
    figure.canvas.draw()
    texts = figure.axes[0].get_xticklabels()
    assert f"{0:,}" in [text.get_text() for text in texts]
    boxes = [text.get_window_extent() for text in texts]
    assert len(boxes) >= 3
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_large_values_have_one_bound(tmp_path: Path) -> None:
    with SyncCollector(
        lambda: OracleEnv(0, [5], kind="image"),
        frames_per_batch=20,
        total_frames=20,
        storage=tmp_path / "s",
    ) as collector:
        collector.collect(20)
    with open_storage(tmp_path / "s") as storage:
        found = storage.statistics("observation")
        assert found.bounds["observation"] == (0, 255)
        assert drawn(found.plot())["declared high"][1].tolist() == [255]


def test_names_are_no_formulas(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        rows = {f"$\\frac{{{n}\x1b": torch.full((3,), float("nan")) for n in range(30)}
        storage.extend(TensorDict(rows, [3]))
        figure = storage.statistics().plot()
    figure.canvas.draw()
    assert len(figure.axes) == 25
    assert figure.axes[0].get_title() == r"$\frac{0\x1b"
    assert figure.axes[-1].get_title() == "6 more columns"


def test_learning_curves_with_intervals(runs: Path) -> None:
    found = report(runs)
    (group,) = found.groups
    assert group.curve is not None
    figure = found.plot()
    figure.canvas.draw()
    (axes,) = figure.axes
    (line,) = axes.lines
    np.testing.assert_array_equal(line.get_xdata(), group.curve.at)
    np.testing.assert_array_equal(line.get_ydata(), group.curve.value)
    (band,) = axes.collections
    known = np.isfinite(group.curve.low)
    corners = band.get_paths()[0].vertices
    for bound in (group.curve.low, group.curve.high):
        pairs = {(x, y) for x, y in zip(group.curve.at[known], bound[known], strict=True)}
        assert pairs <= {(x, y) for x, y in corners}
    (text,) = axes.get_legend().get_texts()
    assert text.get_text() == group.name


@pytest.mark.parametrize("kind", ["storage", "statistics", "report"])
def test_without_matplotlib_the_error_names_the_extra(
    kind: str, storage: DiskStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: dict[str, Callable[[], Any]] = {
        "storage": storage.plot,
        "statistics": storage.statistics().plot,
        "report": report(storage.path).plot,
    }
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra if kind == "report" else MissingLibrary) as error:
        make[kind]()
    assert 'pip install "tallyroll[plot]"' in str(error.value)
    assert "\n" not in str(error.value)


def test_pyplot_is_not_touched(storage: DiskStorage, server: WarmServer, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys; from tallyroll.storage import open_storage\n"
        "with open_storage(sys.argv[1]) as storage:\n"
        "    assert 'matplotlib' not in sys.modules\n"
        "    storage.plot().savefig(sys.argv[2]); storage.statistics().plot()\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    server.run(tmp_path, "python", "script.py", storage.path, "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
