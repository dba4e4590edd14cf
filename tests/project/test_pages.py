"""Tests of the site's pages: their code prints the output shown, and their links resolve."""

from __future__ import annotations

import doctest
import re
import runpy
import shlex
import tempfile
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from warm_cli import WarmServer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SHM = Path("/dev/shm")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
PAGES["README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "=== the next block ==="
LANGUAGES = {"python", "console", "text", "bash", "{toctree}", "{eval-rst}", "diff"}
INSTALLING = re.compile(r"python3? -m |\.venv/bin/pip |pip |\./check\.sh|python benchmarks/")
"""Commands in bash blocks that install, build, test or measure. The tests do not run them."""


class Block(NamedTuple):
    """A code block of a page, and the output that the page shows below it."""

    language: str
    code: str
    shown: str


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page that the tests run."""
    found = FENCE.findall(PAGES[page])
    assert {language for language, _ in found} <= LANGUAGES, "a language that nothing tests"
    following = [*found, ("", "")][1:]
    return [
        Block(language, code, next_code if next_language == "text" else "")
        for (language, code), (next_language, next_code) in zip(found, following, strict=True)
        if language in ("python", "console")
    ]


RUN = [page for page in PAGES if blocks_of(page)]


@pytest.fixture(autouse=True)
def environment(server: WarmServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as scratch:
        more = {"TMPDIR": scratch, "PYTHONWARNINGS": "ignore", "COLUMNS": "120"}
        monkeypatch.setattr(server, "environment", more)
        yield


def same(shown: str, printed: str) -> bool:
    """Compare outputs; `...` in the page's output matches anything."""
    return doctest.OutputChecker().check_output(
        shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )


def run_python(blocks: list[Block], server: WarmServer, folder: Path) -> None:
    """Run all blocks in one process, as one script."""
    script = f'if __name__ == "__main__":\n    print("{MARK}", flush=True)\n'.join(
        block.code for block in blocks
    )
    (folder / "page.py").write_text(script, encoding="utf-8")
    done = server.start(folder, "python", folder / "page.py")
    assert done.wait(100) == 0, done.err
    printed = done.out.split(MARK + "\n")
    for block, out in zip(blocks, printed, strict=True):
        assert same(block.shown, out), f"{block.code}\nshows\n{block.shown}\nbut prints\n{out}"


def run_console(blocks: list[Block], server: WarmServer, folder: Path) -> None:
    """Run each line that begins with a dollar sign, and compare the lines that follow it."""
    for block in blocks:
        assert block.code.startswith("$ ")
        for part in block.code.removeprefix("$ ").split("\n$ "):
            command, _, shown = part.replace("\\\n", "").partition("\n")
            name, *argv = shlex.split(command, comments=True)
            assert name == "tallyroll"
            out = server.run(folder, *argv).out
            assert same(shown, out) or not shown, f"{command} prints\n{out}"


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_prints_what_it_shows(
    page: str, server: WarmServer, tmp_path: Path
) -> None:
    kinds = [(key, [*some]) for key, some in groupby(blocks_of(page), lambda each: each.language)]
    assert len(kinds) <= 2, "code first, then commands, or the other way round: one process runs it"
    for language, blocks in kinds:
        (run_python if language == "python" else run_console)(blocks, server, tmp_path)


def test_commands_that_are_not_run_install_build_or_measure() -> None:
    for page, text in PAGES.items():
        for language, code in FENCE.findall(text):
            if language == "bash":
                assert all(INSTALLING.match(line) for line in code.splitlines()), (page, code)


def test_extras_are_installed_in_one_form() -> None:
    form = re.compile(r'pip install (-c constraints.txt "\.|"tallyroll)\[[A-Za-z0-9,-]+\]"')
    for page, text in PAGES.items():
        assert len(re.findall(r"pip install .*\[", text)) == len(form.findall(text)), page
        for _, code in FENCE.findall(text):  # a script of the repository needs what is beside it
            assert "python benchmarks/" not in code or '"tallyroll[' not in code, page
    for top in ("benchmarks", "collector", "docs", "examples", "storage"):
        for path in (ROOT / top).rglob("*.*"):
            if path.suffix in (".py", ".md", ".ipynb", ".sh"):  # single quotes fail in Windows' cmd
                text = path.read_text(encoding="utf-8")
                assert not re.search(r"'(tallyroll|\.)\[[^']*\]'", text), path


def test_the_drawings_are_those_that_their_script_makes() -> None:
    made = {
        name: draw() for name, draw in runpy.run_path(str(DOCS / "drawings.py"))["DRAWINGS"].items()
    }
    kept = {path.name: path.read_text("utf-8") for path in (DOCS / "drawings").iterdir()}
    assert made == kept, "python docs/drawings.py"
    for drawing in kept.values():
        ElementTree.fromstring(drawing)
        assert "prefers-color-scheme: dark" in drawing


def anchors_of(page: str) -> set[str]:
    """Return the anchors of a page's headings for which GitHub and Sphinx agree."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", PAGES[page]), re.MULTILINE)
    github = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]
    sphinx = [re.sub(r"[^a-z0-9]+", "-", each.lower()).strip("-") for each in headings]
    return {*github} & {*sphinx}


def test_links_lead_to_pages_and_headings() -> None:
    dead, count = [], 0
    for page, text in PAGES.items():
        folder = ROOT if page == "README.md" else DOCS
        for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
            path, _, anchor = link.partition("#")
            count += 1
            there = (folder / path if path else folder / page).is_file()
            known = not anchor or anchor in anchors_of(Path(path).name or page)
            if not (there and known) or ":" in link:
                dead.append(f"{page}: {link}")
    assert dead == []
    assert count > 50


def test_faults_of_the_built_site_are_found(tmp_path: Path) -> None:
    check = runpy.run_path(str(DOCS / "site_check.py"))["check"]
    start, other = tmp_path / "start.html", tmp_path / "other.html"
    (tmp_path / "a.css").touch()
    start.write_text(
        '<link rel="stylesheet" href="a.css"><a href="other.html#there">1</a><a href="#">2</a>'
        '<a href="https://example.org">3</a><img alt="4" src="data:image/png;base64,">'
    )
    other.write_text('<h1 id="there">1</h1><a href="start.html">2</a>')
    assert [*check(tmp_path)] == []
    start.write_text(
        '<script src="https://example.org/a.js"></script><img src="none.png"><p id="a"><p id="a">'
        '<a href="other.html#here">1</a><a href="#b">2</a><a href="third.html">3</a>'
    )
    assert [*check(tmp_path)] == [
        "start.html: an image has no text: none.png",
        "start.html: two elements have the id a",
        "start.html: loads https://example.org/a.js from the network",
        "start.html: none.png is not there",
        "start.html: other.html#here leads to no heading",
        "start.html: #b leads to no heading",
        "start.html: third.html is not there",
    ]
    start.unlink(), other.unlink()
    assert [each.partition(" in ")[0] for each in check(tmp_path)] == ["no page is"]


def test_every_page_is_in_the_table_of_contents() -> None:
    trees = [code for page in ("index.md", "api.md") for _, code in FENCE.findall(PAGES[page])]
    listed = re.findall(r"^(\w+)$", "".join(trees), re.MULTILINE)
    assert sorted(f"{name}.md" for name in listed) == sorted({*PAGES} - {"index.md", "README.md"})


def test_readme_and_site_have_the_same_front_page() -> None:
    readme, site = PAGES["README.md"], PAGES["index.md"]
    headings = re.findall(r"^## .*$", site, re.MULTILINE)
    assert headings == re.findall(r"^## .*$", readme, re.MULTILINE)[: len(headings)]
    for name in headings[1:]:
        one, other = (
            page.partition(f"{name}\n")[2].partition("\n## ")[0].replace("](docs/", "](")
            for page in (readme, site)
        )
        assert {*re.findall(r"\]\(([\w/]+\.(?:svg|md))\)", other)} <= {
            *re.findall(r"\]\(([\w/]+\.(?:svg|md))\)", one)
        }, name
    at = [readme.index(mark) for mark in ORDER]
    assert at == sorted(at)
    assert len(readme.splitlines()) <= 100
    assert "python3 -m venv .venv && .venv/bin/pip install" in readme
    assert "./check.sh\n" in readme


ORDER = (
    "exact",  # the sentence
    "At a time limit",
    "pip install",
    "```python",
    "```text",
    "pictures/view-light.png",
    *("memory.svg", "speed.svg", "losses.svg"),
    *("TorchRL: the collector", "Stable-Baselines3: the environment", "CleanRL: the same"),
    *("**On-policy**", "**Off-policy**", "**Datasets**", "**Papers**"),
)
"""Parts of the front page, in their order."""


def test_the_bars_show_the_figures_of_the_pages() -> None:
    drawings = runpy.run_path(str(DOCS / "drawings.py"))
    figure, bars = drawings["figure"], drawings["bars"]
    page = PAGES["pixels.md"]
    (row,) = re.findall(r"^\| Breakout \| (\d+) \| ([\d,]+) \|$", page, re.MULTILINE)
    read = [figure("docs/pixels.md", "Breakout", f"{name}") for name in ("whole", STORED_ONCE)]
    assert read == [float(row[1].replace(",", "")), float(row[0])]
    with pytest.raises(LookupError, match="no table with a row 'Pong'"):
        figure("docs/truth.md", "Pong", "bytes a row")
    widths = [
        float(width)
        for width in re.findall(
            r'width="([\d.]+)" height="20"',
            bars("A title", [("Tallyroll", 0, "0"), ("a", 50, "50"), ("b", 100, "100")], (), 100),
        )
    ]
    assert widths == [0, 90, 180]


STORED_ONCE = "bytes a row, stored once"


def test_pictures_are_small_and_shown() -> None:
    pictures = [*(DOCS / "pictures").iterdir()]
    assert {path.name for path in pictures} == {"view-light.png", "view-dark.png"}
    assert sum(path.stat().st_size for path in pictures) < 200_000
    for path in pictures:
        assert path.read_bytes().startswith(b"\x89PNG\r\n")
        assert f"docs/pictures/{path.name}" in PAGES["README.md"]
        assert f"pictures/{path.name}" in PAGES["index.md"]


@pytest.mark.parametrize("package", ["tallyroll.collector", "tallyroll.storage"])
def test_every_public_name_has_its_place(package: str) -> None:
    """The API pages list every public name, and the troubleshooting page lists every error."""
    errors = import_module(f"{package}.errors").__all__
    pages = "".join(text for name, text in PAGES.items() if name.startswith("api_"))
    api = {*re.findall(r"^\.\. auto\w+:: (\w+)$", pages, re.MULTILINE)}
    assert {*import_module(package).__all__} - api == set()
    assert {*errors} - {*re.findall(r"`(\w+)`", PAGES["troubleshooting.md"])} == set()


@pytest.mark.slow
def test_the_system_of_a_page_passes_the_contract(tmp_path: Path, server: WarmServer) -> None:
    code = "".join(block.code for block in blocks_of("own_system.md"))
    (tmp_path / "test_walk.py").write_text(code, encoding="utf-8")
    done = server.start(tmp_path, "python", "-m", "pytest", "-q", "test_walk.py")
    assert done.wait(100) == 0, done.out
    assert "17 passed" in done.out
