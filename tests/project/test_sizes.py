"""Folders and classes stay small enough to be read in one sitting."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

MOST_ENTRIES, MOST_LINES, MOST_METHODS = 16, 300, 20

WINGS = (
    "collector/batches",
    "collector/envs",
    "collector/rollout",
    "collector/workers",
    "storage/engine",
    "storage/stores",
)
"""Folders whose classes are held to the sizes."""

STREETS = {"collector/envs/systems", "tests/systems"}
"""Folders with a file for each environment system, however many there are."""

# What is larger for now. A number may fall, and a line may go; none may rise, and none may come.
LARGE_FOLDERS = {
    "benchmarks": 26,
    "collector": 17,
    "storage": 18,
}
LARGE_CLASSES = {
    # The users' face: each method is a line that asks a reader or a writer, and has a public name.
    "storage/stores/row_store.py:RowStore": (231, 28),
}
"""Lines and methods."""


def entries() -> Iterator[tuple[str, int]]:
    """Yield every folder with the number of its Python files and folders."""
    for top in ("benchmarks", "collector", "examples", "storage", "tests"):
        for folder in (ROOT / top, *(each for each in (ROOT / top).rglob("*") if each.is_dir())):
            found = [
                each.name
                for each in folder.iterdir()
                if (each.is_dir() or each.suffix == ".py") and not each.name.startswith(("__", "."))
            ]
            yield str(folder.relative_to(ROOT)), len(found)


def classes() -> Iterator[tuple[str, int, int]]:
    """Yield every class of `WINGS` with the numbers of its lines and methods."""
    for wing in WINGS:
        for file in sorted((ROOT / wing).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.ClassDef):
                    assert node.end_lineno is not None
                    methods = sum(isinstance(each, ast.FunctionDef) for each in node.body)
                    name = f"{file.relative_to(ROOT)}:{node.name}"
                    yield name, node.end_lineno - node.lineno + 1, methods


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest takes the second for the first: they are modules without packages."""
    files = {*(ROOT / "tests").rglob("*.py")} - {*(ROOT / "tests/systems").rglob("*.py")}
    names = Counter(each.name for each in files if each.name not in ("__init__.py", "conftest.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_folder_has_more_than_16_entries() -> None:
    limits = dict.fromkeys(STREETS, 99) | LARGE_FOLDERS
    assert {
        folder: count for folder, count in entries() if count > limits.get(folder, MOST_ENTRIES)
    } == {}


def test_no_class_has_more_than_300_lines_or_20_methods() -> None:
    limits = (MOST_LINES, MOST_METHODS)
    large = {}
    for name, lines, methods in classes():
        most_lines, most_methods = LARGE_CLASSES.get(name, limits)
        if lines > max(MOST_LINES, most_lines) or methods > max(MOST_METHODS, most_methods):
            large[name] = (lines, methods)
    assert large == {}
