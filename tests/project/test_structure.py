"""Tests of module sizes, folder depth, and the modules that an import loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
WINGS = ("collector", "storage")
MOST_LINES = {"module": 800, "class": 400, "function": 70}
LARGER = {
    "storage/replay/disk_storage.py",  # the storage of users, with every method's docstring
    "storage/ext/sampling/prioritized.py:PrioritizedSampler",  # TorchRL's sampler interface
    "storage/trajectories/blocks/lane_blocks.py:LaneBlocks",  # one structure with its reasoning
}
"""Public faces and hard cases that may be larger."""
OPTIONAL = {"av", "google_crc32c", "h5py", "jax", "jinja2", "matplotlib", "minari", "obstore"}
OPTIONAL |= {"pandas", "PIL", "pyarrow", "ray", "rich", "scipy", "stable_baselines3", "starlette"}
OPTIONAL |= {"tensorboard", "uvicorn", "wandb", "zarr", "zstandard"}


def _sizes() -> Iterator[tuple[str, str, int]]:
    for path in (each for wing in WINGS for each in (ROOT / wing).rglob("*.py")):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
        yield name, "module", text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                yield f"{name}:{node.name}", "class", _code_lines_of(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.name}", "function", _code_lines_of(node)


def _code_lines_of(node: ast.stmt) -> int:
    """Return the lines of a class or function without docstrings and texts below attributes."""
    texts = (each for each in ast.walk(node) if isinstance(each, ast.Expr))
    texts = (each for each in texts if isinstance(each.value, ast.Constant))
    return _lines_of(node) - sum(map(_lines_of, texts))


def _lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_modules_classes_and_functions_can_be_read_at_once() -> None:
    too_large = {name for name, kind, lines in _sizes() if lines > MOST_LINES[kind]}
    assert too_large == LARGER


def test_folders_are_at_most_three_deep() -> None:
    modules = [each.relative_to(ROOT) for wing in WINGS for each in (ROOT / wing).rglob("*.py")]
    assert [str(each) for each in modules if len(each.parts) > 5] == []


def test_the_core_loads_no_extension_and_no_optional_library() -> None:
    code = (
        "import sys, tallyroll.collector as c, tallyroll.storage as s; "
        "c.SyncCollector, c.MultiprocessCollector, s.open_storage, s.MemmapStorage; "
        "print(*sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    loaded = run.stdout.split()
    assert "tallyroll.collector.sync" in loaded
    assert [each for each in loaded if each.startswith("tallyroll.") and ".ext." in each] == []
    assert OPTIONAL & {each.partition(".")[0] for each in loaded} == set()


def test_tools_see_one_tree_of_imports() -> None:
    """The links below src/ must not hide imports from one package into the other."""
    graph = grimp.build_graph("tallyroll", cache_dir=None)
    across = Counter(
        (wing, *found.split(".")[1:2])
        for wing in WINGS
        for module in graph.find_descendants(f"tallyroll.{wing}")
        for found in graph.find_modules_directly_imported_by(module)
    )
    assert across["collector", "storage"] > 200
    assert across["storage", "collector"] == 0


def test_no_two_files_of_tests_have_one_name() -> None:
    """Test modules have no packages, so pytest would confuse two files with the same name."""
    files = {*(ROOT / "tests").rglob("*.py")} - {*(ROOT / "tests/systems").rglob("*.py")}
    names = Counter(each.name for each in files if each.name not in ("__init__.py", "conftest.py"))
    assert [name for name, count in names.items() if count > 1] == []
