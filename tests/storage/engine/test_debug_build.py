"""Test that a debug build aborts the process before an access outside an array.

See CONTRIBUTING.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest

from tallyroll.storage.engine.kernel import EXTENSION, copy_table, table_of

COPY = """
import ctypes, struct, sys
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("_kernel", sys.argv[1])
kernel = module_from_spec(spec)
spec.loader.exec_module(kernel)
room, rows = ctypes.create_string_buffer(128), ctypes.create_string_buffer(512)
words = [ctypes.addressof(room), ctypes.addressof(rows), 64]
sizes = [kernel.TABLE_WITH_SIZES, 128, 512, -1] if sys.argv[2] == "sizes" else []
kernel.copy_rows(struct.pack(f"={len(sizes + words)}q", *sizes, *words), *map(int, sys.argv[3:]))
print("copied")
"""


@pytest.fixture(scope="module")
def library() -> str:
    """Return the path of a debug build that this process has loaded."""
    if not hasattr(EXTENSION.module, "TABLE_WITH_SIZES"):
        pytest.skip("the extensions are no debug build")
    path: str = EXTENSION.module.__file__
    return path


def copied(library: str, *arguments: object) -> str:
    """Copy rows in another process, which reports to its own output. Return all of its output."""
    own = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-c", COPY, library, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert (done.returncode == 0) == ("copied" in done.stdout), done.stderr
    return done.stdout + done.stderr


def test_rows_within_both_arrays_are_copied(library: str) -> None:
    for sizes in ("sizes", "none"):
        assert copied(library, sizes, 0, 6, 2) == "copied\n"


@pytest.mark.parametrize(
    ("slot", "first", "count", "wrong"),
    [
        (0, 0, 3, "0 to 192 of an array, got 128"),
        (2, 0, 1, "128 to 192 of an array, got 128"),
        (-1, 0, 1, "-64 to 0 of an array, got 128"),
        (0, 7, 2, "448 to 576 of an array, got 512"),
    ],
)
def test_bytes_beyond_an_array_of_known_size_are_named(
    library: str, slot: int, first: int, count: int, wrong: str
) -> None:
    told = copied(library, "sizes", slot, first, count)
    assert re.search(rf"_rows\.h:\d+: expected bytes {wrong}\n", told), told


@pytest.mark.parametrize(("slot", "first", "count"), [(0, 0, 3), (2, 0, 1), (0, 7, 2)])
def test_bytes_beyond_memory_are_found_by_the_sanitizer(
    library: str, slot: int, first: int, count: int
) -> None:
    assert "heap-buffer-overflow" in copied(library, "none", slot, first, count)


def test_a_table_has_the_sizes_of_its_arrays(library: str) -> None:
    one, other = np.zeros((3, 2), np.float32), np.zeros(5, np.int8)
    words = np.frombuffer(table_of([one, 7, other]), np.int64).tolist()
    addresses = [one.ctypes.data, 7, other.ctypes.data]
    assert words == [EXTENSION.module.TABLE_WITH_SIZES, 24, -1, 5, *addresses]
    assert table_of([]) == b""
    table = np.frombuffer(copy_table([one], [other.ctypes.data], [8]), np.int64)
    assert table[1:4].tolist() == [24, -1, -1]


def test_without_sizes_a_table_has_its_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXTENSION, "module", None)
    arrays = [np.zeros(4), np.zeros(4)]
    words = chain.from_iterable((each, 8, True) for each in arrays)
    found = np.frombuffer(table_of(words), np.int64).tolist()
    assert found == [arrays[0].ctypes.data, 8, 1, arrays[1].ctypes.data, 8, 1]
