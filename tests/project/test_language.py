"""Tests for plain English in prose and in names, as far as a machine can check it.

Docstrings begin with a verb or a noun phrase, nouns name modules and classes, and headings have a
noun or a verb.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BEGINNINGS = re.compile(r"\s*(What|Who|Of|Those|They|As|It)\b")
WORDS = re.compile(r"\b(nobody|whoever|somebody|told|anew)\b", re.IGNORECASE)
CLAUSES = re.compile(r"(?:^|(?<=[.;:] )|(?<=\n\n))(What|Whatever|Whoever|Who)\b[^.?!]*[.;](?:\s|$)")
"""Sentences that begin with such a word and are not questions."""
NAMES = re.compile(r"`+[^`]*`+|^ +\w+:", re.MULTILINE)
"""Code in backquotes, and the names in a list of arguments."""


def faults_in(file: Path) -> Iterator[str]:
    """Yield the place of every docstring and comment in a file that is not plain English."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                if found := BEGINNINGS.match(text):
                    yield f"{file}:{node.lineno}: a docstring begins with {found[1]}"
                yield from words_in(text, f"{file}:{node.lineno}: a docstring")
    with tokenize.open(file) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type == tokenize.COMMENT:
                yield from words_in(token.string, f"{file}:{token.start[0]}: a comment")


def words_in(text: str, place: str) -> Iterator[str]:
    """Yield each unwanted word of a text, outside of code, and each headless clause."""
    yield from (f"{place} says {word!r}" for word in WORDS.findall(NAMES.sub("", text)))
    code = re.compile(r"`+[^`]*`+")
    for found in CLAUSES.finditer(code.sub("x", text)):
        yield f"{place} begins with {found[1]}: {found[0]!r:.80}"


@pytest.mark.parametrize("wing", ["collector", "storage", "tests/support"])
def test_docstrings_and_comments_are_plain_english(wing: str) -> None:
    files = sorted((ROOT / wing).rglob("*.py"))
    assert files
    assert not [fault for file in files for fault in faults_in(file)]


@pytest.mark.parametrize("wing", ["collector", "storage"])
def test_messages_are_plain_english(wing: str) -> None:
    assert not [
        f"{file}: {message!r}"
        for file in sorted((ROOT / wing).rglob("*.py"))
        for message in messages_in(file)
        if WORDS.search(message) or "behind" in message
    ]


def test_pages_are_plain_english() -> None:
    code = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert len(pages) > 15
    assert not [
        fault
        for page in pages
        for fault in words_in(code.sub("", page.read_text("utf-8")), f"{page.name}: a sentence")
    ]


def messages_in(file: Path) -> Iterator[str]:
    """Yield every string of several words, including parts of f-strings, except docstrings."""
    nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)) if " " in text and id(node) not in docstrings:
                yield text


# --- names ----------------------------------------------------------------------------------------

PARTICIPLES = re.compile(
    r"(?i)(ed|ing|given|told|held|kept|seen|made|found|drawn|done|gone|lost|own|taken|left|written"
    r"|chosen|known|said|heard|aside|beside|behind|ahead)$"
)
TERMS = {
    *("Seed", "EpisodeRing", "LaneEncoding", "OrderEncoding", "TableEncoding", "BitEncoding"),
    *("TrajectoryNumbering", "LeafNumbering", "Listing", "Finding"),
    *("counting", "stepping", "sampling", "testing", "training", "numbering", "sharding"),
    *("indexing", "mapping", "listing", "video_encoding", "episode_ring", "ring"),
    *("deferred", "admitted"),  # context managers
    *("packed", "sharded", "joined", "mixed", "prioritized", "stored", "numbered"),
}
"""Nouns that look like participles, and terms of the glossary."""
PUBLIC = {"Done", "Ended", "Given", "Gone", "Incoming", "Loaded", "Numbered", "Versioned"}
"""Names of classes that other people's code imports."""


@pytest.mark.parametrize("wing", ["collector", "storage"])
def test_modules_and_classes_are_named_by_nouns(wing: str) -> None:
    found = []
    for file in sorted((ROOT / wing).rglob("*.py")):
        if file.name == "errors.py":
            continue
        module = file.parent.name if file.stem == "__init__" else file.stem
        classes = [
            node.name
            for node in ast.walk(ast.parse(file.read_bytes()))
            if isinstance(node, ast.ClassDef) and not _is_warning(node)
        ]
        found += [
            f"{file}: {name}"
            for name in (module, *classes)
            if PARTICIPLES.search(name) and name not in TERMS | PUBLIC
        ]
    assert not found


def _is_warning(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith(("Warning", "Error")) for base in node.bases)
