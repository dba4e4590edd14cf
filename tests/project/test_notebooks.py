"""Tests that run the notebooks of the examples, and show the results of their cells."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"


def results_of(name: str) -> list[Any]:
    """Run the code cells as Jupyter does, and return the value of each last expression."""
    names: dict[str, Any] = {"__name__": "__main__"}
    found = []
    for cell in json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, name, "exec"), names)
            if isinstance(last, ast.Expr):
                found.append(eval(compile(ast.Expression(last.value), name, "eval"), names))
    return found


def test_each_notebook_has_its_test() -> None:
    assert {path.stem for path in NOTEBOOKS.iterdir()} == {"look_at_a_storage", "compare_runs"}


def test_a_storage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tallyroll.collector.ext.progress.LINE_SECONDS", 0.0)
    ledger, _, _, whole, some, statistics, ranges, checked, closed = results_of("look_at_a_storage")
    assert "tallyroll: 4,000 of 4,000 frames (100 %)" in capsys.readouterr().err
    assert ledger.stored == 4_000
    assert "<td>4,000</td>" in statistics._repr_html_()
    counts = [len(figure.axes[0].lines[0].get_xdata()) for figure in (whole, some)]
    assert 0 < counts[1] < counts[0]
    assert [axes.get_title() for axes in ranges.axes] == [*statistics]
    assert checked.sound
    assert "sound" in checked._repr_html_()
    assert closed is None


def test_runs() -> None:
    found, figure, cleaned = results_of("compare_runs")
    assert [group.name.rpartition(" ")[2] for group in found.groups] == ["leaning", "random"]
    assert "leaning" in found._repr_html_()
    assert len(figure.axes[0].lines) == 2
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert cleaned is None
