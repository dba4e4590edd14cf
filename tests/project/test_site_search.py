"""Tests of the built site: it has no faults, and a search finds the right page first."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
RIGHT = {
    "PER": "prioritized",
    "HER": "hindsight",
    "GAE": "on_policy",
    "n-step": "n_step",
    "offline": "training_from",
    "frame stack": "pixels",
    "resume": "checkpoints",
    "GPU": "devices",
}
TITLE, TERM, PART_OF_TITLE, PART_OF_TERM = 15, 5, 7, 2
NAME, PART_OF_NAME, PRIORITIES = 11, 6, {0: 15, 1: 5, 2: -5}
"""Scores in Sphinx's `searchtools.js`."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. A warning, as of a dead link, is an error."""
    folder = tmp_path_factory.mktemp("site")
    options = ("-n", "-W", "-q", "--keep-going", "-b", "html")
    command = [sys.executable, "-m", "sphinx", *options, DOCS, folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def index(site: Path) -> dict[str, Any]:
    """Return the search index of the site."""
    text = (site / "searchindex.js").read_text("utf-8")
    found: dict[str, Any] = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    return found


class SphinxSearch:
    """The ranking of `Search._performSearch` in Sphinx's `searchtools.js`."""

    def __init__(self, index: dict[str, Any]) -> None:
        self._index = index
        self._names: list[str] = index["docnames"]

    def pages(self, query: str) -> list[str]:
        """Return the pages that a query finds, the best first. A page may come several times."""
        found = [*self._titles(query), *self._entries(query), *self._objects(query)]
        ranked = sorted([*found, *self._terms(query)], key=lambda each: (-each[0], each[1]))
        return [page for _, _, page in ranked]

    def _titles(self, query: str) -> Iterator[tuple[float, str, str]]:
        wanted = query.lower().strip()
        for title, places in self._index["alltitles"].items():
            if wanted in title.lower() and len(wanted) >= len(title) / 2:
                for page, _ in places:
                    whole = self._index["titles"][page]
                    shown = title if whole == title else f"{whole} > {title}"
                    score = round(TITLE * len(wanted) / len(title)) + (whole == title)
                    yield score, shown.lower(), self._names[page]

    def _entries(self, query: str) -> Iterator[tuple[float, str, str]]:
        wanted = query.lower().strip()
        for entry, places in self._index["indexentries"].items():
            if wanted in entry and len(wanted) >= len(entry) / 2:
                for page, _, is_main in places:
                    score = round(100 * len(wanted) / len(entry)) if is_main else -100
                    yield score, self._index["titles"][page].lower(), self._names[page]

    def _objects(self, query: str) -> Iterator[tuple[float, str, str]]:
        words = re.findall(r"\w+", query.lower())
        for prefix, objects in self._index["objects"].items():
            for page, kind, priority, _, name in objects:
                full = f"{prefix}.{name}".lower().lstrip(".")
                last = full.rpartition(".")[2]
                about = f"{prefix} {name} {self._index['objnames'][str(kind)][2]} "
                about = f"{about}{self._index['titles'][page]}".lower()
                for word in words:
                    if word in full and all(each in about for each in words if each != word):
                        score = NAME if word in (full, last) else PART_OF_NAME * (word in last)
                        score += PRIORITIES.get(priority, 0)
                        yield score, full, self._names[page]

    def _terms(self, query: str) -> Iterator[tuple[float, str, str]]:
        from sphinx.search.en import SearchEnglish

        language = SearchEnglish({})
        words = [each.lower() for each in re.findall(r"\w+", query)]
        words = [language.stem(each) for each in words if each not in language.stopwords]
        scores: dict[int, dict[str, int]] = {}
        for word in words:
            for table, whole, part in (
                ("terms", TERM, PART_OF_TERM),
                ("titleterms", TITLE, PART_OF_TITLE),
            ):
                of = self._index[table]
                exact = [(word, whole)] if word in of else []
                parts = [(each, part) for each in of if word in each and len(word) > 2]
                for term, score in exact or parts:
                    pages = of[term]
                    for page in pages if isinstance(pages, list) else [pages]:
                        scores.setdefault(page, {})[word] = score
        needed = {len({*words}), len({each for each in words if len(each) > 2})}
        for page, by_word in scores.items():
            if len(by_word) in needed:
                title = self._index["titles"][page]
                yield max(by_word.values()), title.lower(), self._names[page]


@pytest.mark.parametrize("query", RIGHT)
def test_a_search_finds_the_right_page_first(index: dict[str, Any], query: str) -> None:
    assert SphinxSearch(index).pages(query)[0] == RIGHT[query]
    assert SphinxSearch(index).pages(query.lower())[0] == RIGHT[query]


def test_words_of_the_field_lead_to_their_page(index: dict[str, Any]) -> None:
    words = runpy.run_path(str(DOCS / "conf.py"))["SEARCH_WORDS"]
    assert {f"{page}.md" for page in words} <= {path.name for path in DOCS.glob("*.md")}
    search = SphinxSearch(index)
    missed = [
        (word, page, search.pages(word)[0])
        for page, each in words.items()
        for word in each
        if search.pages(word)[0] != page
    ]
    assert missed == []


def test_without_index_entries_the_ranking_is_that_of_titles_and_text(
    index: dict[str, Any],
) -> None:
    bare = SphinxSearch({**index, "indexentries": {}})
    assert bare.pages("GAE")[0] == "on_policy"  # by its title
    assert bare.pages("HER")[0] != "hindsight"  # a stop word: the entry finds it
    assert bare.pages("zzz") == []


def test_the_site_has_no_faults(site: Path) -> None:
    assert [*runpy.run_path(str(DOCS / "site_check.py"))["check"](site)] == []


def test_pages_have_copy_buttons_and_the_version(site: Path) -> None:
    from tallyroll import __version__

    page = (site / "index.html").read_text("utf-8")
    assert "copybutton.js" in page
    assert f"Tallyroll {__version__}" in page
    assert (site / "_static/copybutton.js").is_file()


def test_parameters_have_types_and_methods_a_return_type(site: Path) -> None:
    page = (site / "api_sampling.html").read_text("utf-8")
    entry = page.partition('id="tallyroll.storage.n_step"')[2].partition('<dl class="py')[0]
    text = re.sub(r"<[^>]+>", "", entry)
    assert re.search(r"n \(int\) \S ", text)
    assert re.search(r"Return type:\s*TensorDict", text)
