"""Files of a report for papers: a LaTeX table, points of curves and figures."""

from __future__ import annotations

import csv
import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.collector import ArgumentError, report
from tallyroll.collector.cli import main
from tallyroll.collector.ext.report.page import number
from tallyroll.collector.ext.report.paper import latex_table

FILES = {"latex": "t.tex", "curves": "c.csv", "png": "f.png", "pdf": "f.pdf"}


@pytest.fixture(scope="module")
def found(made: Any) -> Any:
    return report(made[0], window=3)


def cells(line: str) -> list[str]:
    """Return the cells of a line of a LaTeX table."""
    assert line.endswith(r" \\")
    return re.split(r" (?<!\\)& ", line.removesuffix(r" \\"))


def plain(cell: str) -> str:
    """Return a number of a table as `number` writes it."""
    return cell.replace("$", "").replace("{,}", ",")


def test_the_table_has_the_numbers_of_the_groups(found: Any, tmp_path: Path) -> None:
    found.to_latex(tmp_path / "t.tex")
    lines = (tmp_path / "t.tex").read_text().splitlines()
    assert r"\usepackage{booktabs}" in lines[0]
    assert "last 3 episodes" in lines[1]
    begin, top, heads, mid, *rows, bottom, end = lines[3:]
    assert (top, mid, bottom, end) == (r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}")
    columns = begin.removeprefix(r"\begin{tabular}{").removesuffix("}")
    assert cells(heads)[:3] == ["environment", "label", "runs"]
    for row, group in zip(rows, found.groups, strict=True):
        environment, label, runs, *estimates = cells(row)
        assert [environment, label] == [*group.fields.values()]
        assert int(runs) == len(group.runs)
        for at, each in enumerate((group.interquartile_mean, group.mean)):
            value, interval = estimates[2 * at : 2 * at + 2]
            assert plain(value) == number(each)
            assert plain(interval) == f"[{number(each.low)}, {number(each.high)}]"
        assert len(cells(row)) == len(cells(heads)) == len(columns)


def test_latex_characters_are_escaped(found: Any) -> None:
    group = found.groups[0]
    low = replace(group.mean, value=-1234.5, low=None, high=None)
    odd = replace(group, fields={"a_b": "50 % & #1 {x} \\y ~ ^ $z\x1b"}, mean=low)
    heads, row = (cells(latex_table([odd], 3).splitlines()[at]) for at in (5, 7))
    assert heads[0] == r"a\_b"
    escaped = r"50 \% \& \#1 \{x\} \textbackslash{}y \textasciitilde{} \textasciicircum{} \$z"
    assert row[0] == escaped + r"\textbackslash{}x1b"
    assert row[-2:] == ["$-1{,}234$", "--"]
    assert r"\end{tabular}" in latex_table([], 3)


def test_points_are_those_of_the_curves(found: Any, tmp_path: Path) -> None:
    found.to_curves(tmp_path / "c.csv")
    lines = [*csv.DictReader(io.StringIO((tmp_path / "c.csv").read_text()))]
    for group in found.groups:
        own = [line for line in lines if line["group"] == group.name]
        assert {line["runs"] for line in own} == {str(len(group.runs))}
        known = ~np.isnan(group.curve.value)
        assert [int(line["transitions"]) for line in own] == group.curve.at[known].tolist()
        for name, values in (
            ("interquartile_mean", group.curve.value),
            ("low", group.curve.low),
            ("high", group.curve.high),
        ):
            read = [float(line[name] or "nan") for line in own]
            assert np.array_equal(read, values[known], equal_nan=True)
        assert not known[0], "no run has an episode yet"
    assert {line["group"] for line in lines} == {group.name for group in found.groups}


def test_figures_are_the_plot(found: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    found.to_png(tmp_path / "f.png")
    found.plot().savefig(tmp_path / "plot.png", dpi=200)
    assert np.array_equal(image.imread(tmp_path / "f.png"), image.imread(tmp_path / "plot.png"))
    found.to_pdf(tmp_path / "f.pdf")
    first = (tmp_path / "f.pdf").read_bytes()
    assert first.startswith(b"%PDF-")
    assert first.rstrip().endswith(b"%%EOF")
    found.to_pdf(tmp_path / "f.pdf")
    assert (tmp_path / "f.pdf").read_bytes() == first


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_program_stays(found: Any, tmp_path: Path, name: str) -> None:
    if name in ("png", "pdf"):
        pytest.importorskip("matplotlib")
    file, write = tmp_path / FILES[name], getattr(found, f"to_{name}")
    found.plot().savefig(file, format=name) if name in ("png", "pdf") else file.write_text("mine")
    before = file.read_bytes()
    with pytest.raises(ArgumentError, match="exists and is not a report"):
        write(file)
    assert file.read_bytes() == before
    write(file, force=True)
    write(file)  # the file is part of a report now
    assert file.read_bytes() != before
    with pytest.raises(ArgumentError, match="is not a folder"):
        write(tmp_path / "none" / FILES[name])


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_what_python_writes(
    found: Any, made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    words = ["report", str(made[0]), "--window", "3", "--json"]
    for name, file in FILES.items():
        words += [f"--{name}", str(tmp_path / file)]
        getattr(found, f"to_{name}")(tmp_path / f"python-{file}")
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    for file in FILES.values():
        assert (tmp_path / file).read_bytes() == (tmp_path / f"python-{file}").read_bytes()


def test_two_options_of_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(SystemExit) as end:
        main(["report", "runs", "--latex", str(tmp_path / "x"), "--curves", str(tmp_path / "link")])
    assert end.value.code == 2
    assert "expected a file of its own for each option" in capsys.readouterr().err


@pytest.mark.parametrize("option", FILES)
def test_a_file_that_cannot_be_written(
    made: Any, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if option in ("png", "pdf"):
        pytest.importorskip("matplotlib")
    (tmp_path / "mine").write_text("mine")
    for place, why in ((tmp_path / "none/x", "is not a folder"), (tmp_path / "mine", "--force")):
        assert main(["report", str(made[0]), f"--{option}", str(place)]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        (line,) = said.err.splitlines()
        assert why in line
    assert (tmp_path / "mine").read_text() == "mine"
    with pytest.raises(SystemExit) as end:
        main(["report", str(made[0]), f"--{option}", ""])
    assert end.value.code == 2
    assert f"argument --{option}: expected a path, got ''" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["png", "pdf"])
def test_a_figure_without_its_extra(
    tmp_path: Path,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(tmp_path), f"--{option}", str(tmp_path / "f")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "plots need the package matplotlib, which is not installed" in line
    assert "tallyroll[plot]" in line
    assert not (tmp_path / "f").exists()
