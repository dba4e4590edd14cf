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


FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        a an the this that these those some any all both each every either neither no none other
        others another such same own only i you he she it we they me him her us them mine yours
        his hers its ours theirs my your our their who whom whose what which whatever whoever when
        where why how whether if then else than as so and or but nor not yet because while until
        unless although though about above across after again against ahead along alone among anew
        apart around aside at away back before behind below beneath beside besides between beyond
        by down during else elsewhere ever except far for from here hence hereby however in inside
        instead into later maybe meanwhile moreover near never next nevertheless now nowhere of
        off often on once onto otherwise out outside over perhaps rather since somehow sometimes
        soon still there therefore through throughout thus to together too toward towards twice
        under up upon very with within without am is are was were be been being has have had do
        does did will would shall should can could may might must one two three four few many much
        more most less least enough several exact true false fast slow new old different good bad
        """,
    )
)
"""Pronouns, prepositions, adverbs, auxiliaries, numbers and common adjectives.

A heading needs a noun or a verb in addition to them.
"""
PARTICIPLE = re.compile(
    r"\w*[^e]ed|done|drawn|given|gone|held|kept|known|left|lost|made|said|seen|sent|stored|taken|told"
    r"|written"
)
SECTION = re.compile(r"^ *# --- (.+?) -+$", re.MULTILINE)
"""The heading of a section of a module."""


def lacks_noun_and_verb(heading: str) -> bool:
    """Return True if every word of a heading is a function word or a participle.

    Code in backquotes counts as a noun. A word that is in neither list is assumed to be a noun or a
    verb, so a heading may lack both and pass.
    """
    words = re.findall(r"[\w'-]+", re.sub(r"`+[^`]*`+", "code", heading).lower())
    return all(word in FUNCTION_WORDS or PARTICIPLE.fullmatch(word) for word in words)


def test_headings_have_a_noun_or_a_verb() -> None:
    heading = re.compile(r"^#+ (.+)$", re.MULTILINE)
    code = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    pages.remove(ROOT / "CHANGELOG.md")  # headings by Keep a Changelog
    found = [
        (page.relative_to(ROOT), text)
        for page in pages
        for text in heading.findall(code.sub("", page.read_text("utf-8")))
    ]
    assert len(found) > 200
    for wing in ("collector", "storage", "tests", "benchmarks", "examples"):
        for file in sorted((ROOT / wing).rglob("*.py")):
            sections = SECTION.findall(file.read_text("utf-8"))
            found += [(file.relative_to(ROOT), text) for text in sections]
    assert not [f"{place}: {text}" for place, text in found if lacks_noun_and_verb(text)]


@pytest.mark.parametrize(
    ("heading", "bare"),
    [
        *((heading, True) for heading in ("Beside", "Aside", "Otherwise", "With one", "Drawn")),
        *((heading, True) for heading in ("What is not there", "Told and kept", "Why")),
        *((heading, False) for heading in ("Speed", "Start", "Sync or async", "`collect`")),
        *((heading, False) for heading in ("Where not to use it", "Packed rows", "Run them")),
    ],
)
def test_a_bare_heading_is_recognized(heading: str, bare: bool) -> None:
    assert lacks_noun_and_verb(heading) is bare


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
