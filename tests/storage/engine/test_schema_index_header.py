"""Test parts that are independent of the format: schemas, indices and the header."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tallyroll.storage import CorruptStorage, Schema
from tallyroll.storage.errors import IndexOutOfRange, InvalidSchema, NotAnAppend
from tallyroll.storage.files.commit_header import Header, header_bytes
from tallyroll.storage.files.record_slots import RECORD_LIMIT
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.rows.indexing import consecutive, resolve
from tallyroll.storage.rows.schema import Column

NAMES = st.text(min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..") and "/" not in name and "\0" not in name
)
DTYPES = st.sampled_from([torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex64])
COLUMNS = st.builds(
    Column,
    key=st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    dtype=DTYPES,
    shape=st.lists(st.integers(1, 9), max_size=3).map(tuple),
)


def is_tree(columns: list[Column]) -> bool:
    keys = [column.key for column in columns]
    groups = {key[:depth] for key in keys for depth in range(1, len(key))}
    return len(set(keys)) == len(keys) and not groups & set(keys)


SCHEMAS = st.lists(COLUMNS, min_size=1, max_size=6).filter(is_tree).map(tuple).map(Schema)


@settings(deadline=None)
@given(SCHEMAS)
def test_a_schema_survives_json(schema: Schema) -> None:
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    assert schema.differences(schema) == []


@settings(deadline=None)
@given(SCHEMAS, SCHEMAS)
def test_schemas_differ_unless_they_have_the_same_columns(one: Schema, other: Schema) -> None:
    same = set(one.columns) == set(other.columns)
    assert (one.differences(other) == []) is same


def test_the_order_of_columns_is_no_difference() -> None:
    columns = tuple(Column((name,), torch.float32, ()) for name in "abc")
    assert Schema(columns).differences(Schema(columns[::-1])) == []


def test_row_nbytes() -> None:
    columns = (Column(("a",), torch.float32, (84, 84)), Column(("b",), torch.bfloat16, ()))
    assert Schema(columns).row_nbytes == 84 * 84 * 4 + 2


@pytest.mark.parametrize(
    ("keys", "wording"),
    [
        ([], "at least one column"),
        ([("a",), ("a",)], "named twice: a"),
        ([("a",), ("a", "b")], "a is both a column and a group"),
        ([("a", "")], "cannot be a name"),
        ([("\ud800",)], "cannot be a name"),
        ([()], "a tuple of names"),
    ],
)
def test_keys_that_make_no_tree_are_refused(keys: list[Any], wording: str) -> None:
    with pytest.raises(InvalidSchema, match=wording):
        Schema(tuple(Column(key, torch.float32, ()) for key in keys))


def test_a_dtype_that_no_file_holds_is_refused() -> None:
    with pytest.raises(InvalidSchema, match=r"x has dtype torch.complex32; a storage holds bool"):
        Column(("x",), torch.complex32, ())


@pytest.mark.parametrize("value", [None, {}, [3], [{"key": ["a"]}], [{"key": 1, "dtype": "int8"}]])
def test_json_that_is_no_schema_is_refused(value: Any) -> None:
    with pytest.raises(InvalidSchema, match=r"a list of columns|expected a column with key"):
        Schema.from_json(value)


@pytest.mark.parametrize(
    ("make", "wording"),
    [
        (
            lambda: Column(("x",), torch.int8, (1,) * 65),
            "has 65 dimensions per row, more than the maximum of 64",
        ),
        (lambda: Column(("x",), torch.int8, (3, 0)), r"has shape \[3, 0\], which holds no values"),
        (lambda: Column(("x",), torch.int8, (3, -1)), r"has shape \[3, -1\], which holds no val"),
        (
            lambda: Column(("x",), torch.int8, (2**47 + 1,)),
            f"would have {2**47 + 1} bytes, more than",
        ),
        (
            lambda: Column(("x",) * 33, torch.int8, ()),
            "at most 32 names of 4096 characters, got 33",
        ),
        (lambda: Column(("x" * 4097,), torch.int8, ()), "got 1 of up to 4097"),
        (lambda: Schema.of(TensorDict({"x": torch.ones(())}, [])), r"needs a batch size \[N\]"),
        (lambda: Schema.from_json([{}] * (2**14 + 1)), "holds at most 16384 columns, got 16385"),
        (lambda: Schema.of({("x",): np.ones(())}), r"must be an array \[N, ...\], got ndarray"),
        (lambda: Schema.of({("x",): [1, 2]}), r"must be an array \[N, ...\], got list"),
        (lambda: Schema.of({("x",): np.ones(2, "U3")}), "x has dtype <U3; a storage holds bool"),
    ],
)
def test_columns_beyond_the_limits_of_a_schema_are_refused(
    make: Callable[[], object], wording: str
) -> None:
    with pytest.raises(InvalidSchema, match=wording):
        make()


def test_columns_within_the_limits_of_a_schema_are_not_refused() -> None:
    Column(("x",), torch.int8, (1,) * 64)
    Column(("x",), torch.int8, (2**47,))
    Column(("x" * 4096,) * 32, torch.int8, ())
    columns = tuple(Column((str(number),), torch.int8, ()) for number in range(2**14))
    assert len(Schema(columns).keys) == 2**14
    with pytest.raises(InvalidSchema, match="got 16385"):
        Schema((*columns, Column(("x",), torch.int8, ())))


# -- indices


@settings(deadline=None)
@given(st.integers(0, 20), st.lists(st.integers(-25, 25), max_size=10))
def test_rows_resolve_as_in_a_list(length: int, index: list[int]) -> None:
    numbers = list(range(length))
    try:
        expected = [numbers[i] for i in index]
    except IndexError:
        with pytest.raises(IndexError, match="is out of range"):
            resolve(index, length)
        return
    got = resolve(index, length)
    assert isinstance(got, np.ndarray)
    assert got.tolist() == expected


@pytest.mark.parametrize("number", [5, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**70, -6, -(2**63)])
def test_no_row_has_such_a_number(number: int) -> None:
    """Such numbers include ones beyond the range of int64."""
    given: list[Any] = [number]
    for dtype in (np.int64, np.uint64):
        if np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
            array = np.array([3, number], dtype)
            given += [array, array[1], array.reshape(2, 1), torch.from_numpy(array)]
    for index in given:
        with pytest.raises(
            IndexOutOfRange, match=f"row {number} is out of range: the storage has 5"
        ):
            resolve(index, 5)


BOUNDS = st.none() | st.integers(-25, 25) | st.integers(-(2**70), 2**70)


@settings(deadline=None)
@given(st.integers(0, 20), BOUNDS, BOUNDS, BOUNDS.filter(lambda step: step != 0))
def test_slices_and_ranges_resolve_as_in_a_list(
    length: int, start: int | None, stop: int | None, step: int | None
) -> None:
    """Bounds and steps may exceed 64 bits."""
    numbers = list(range(length))
    got = resolve(slice(start, stop, step), length)
    found = numbers[got] if isinstance(got, slice) else np.asarray(got).tolist()
    assert found == numbers[start:stop:step]
    rows = range(*slice(start, stop, step).indices(length))
    assert np.asarray(resolve(rows, length)).tolist() == [*rows]
    if start is not None and abs(start) > length:
        with pytest.raises(IndexOutOfRange, match=f"row {start} is out of range: the storage has"):
            resolve(range(start, start + 2**70, 2**69), length)


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
def test_values_that_are_no_row_numbers_are_named() -> None:
    wrong = (
        torch.ones(2),
        torch.ones(2, requires_grad=True),
        torch.ones(2).bfloat16(),
        torch.ones(2, dtype=torch.int64, device="meta"),
        torch.ones(2, dtype=torch.int64).to_sparse(),
        None,
        1.0,
        "1",
    )
    for index in wrong:
        with pytest.raises(TypeError, match="rows are indexed by whole numbers, got"):
            resolve(index, 5)


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 100))
def test_consecutive_rows_are_recognised(start: int, count: int) -> None:
    expected = range(start, start + count)
    tensor = torch.arange(start, start + count)
    for cursor in (tensor, tensor.numpy(), expected, slice(start, start + count), list(expected)):
        assert consecutive(cursor) == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=6))
def test_only_consecutive_rows_are(numbers: list[int]) -> None:
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        assert consecutive(torch.tensor(numbers)) == range(numbers[0], numbers[-1] + 1)
    else:
        with pytest.raises(NotAnAppend, match="not consecutive"):
            consecutive(torch.tensor(numbers))


# -- the header


def new_header(path: Path) -> Header:
    path.write_bytes(header_bytes(7))
    return opened_header(path, schema_crc=7, writable=True)


def opened_header(path: Path, **options: Any) -> Header:
    return Header(partial(Inside(path.parent).open, path), path, **options)


def test_counts_and_records_lie_where_the_layout_says(tmp_path: Path) -> None:
    file = tmp_path / "header"
    header = new_header(file)
    header.set_reserve(2**40 + 5)
    header.set_head(2**40 + 3)
    header.write_record(b"abc", 2**40)
    header.close()
    content = file.read_bytes()
    assert content[:8] == b"TALLYROL"
    assert int.from_bytes(content[64:70], "little") == 2**40 + 5
    assert int.from_bytes(content[128:134], "little") == 2**40 + 3
    assert content.index(b"abc") >= 4096


def test_a_record_counts_from_its_commit_on(tmp_path: Path) -> None:
    header = new_header(tmp_path / "header")
    header.set_reserve(10)
    header.write_record(b"zero", 0)
    header.write_record(b"ten", 10)
    assert header.record == (0, b"zero")
    header.set_head(10)
    assert header.record == (10, b"ten")
    header.close()


def test_records_of_rows_that_were_lost_are_forgotten(tmp_path: Path) -> None:
    header = new_header(tmp_path / "header")
    header.write_record(b"zero", 0)
    header.write_record(b"lost", 10)
    header.forget_uncommitted()
    header.set_reserve(20)
    header.set_head(20)
    assert header.record == (0, b"zero")
    for number in range(5):
        payload = os.urandom(RECORD_LIMIT - number)
        header.write_record(payload, 20)
        assert header.record == (20, payload)
    header.close()


def test_a_header_of_another_schema_is_refused(tmp_path: Path) -> None:
    new_header(tmp_path / "header").close()
    with pytest.raises(CorruptStorage, match="a different schema than its manifest"):
        opened_header(tmp_path / "header", schema_crc=8, writable=False)


# -- exit of the process


@pytest.mark.slow
def test_a_storage_left_open_is_closed_at_the_end_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    script = (
        "import numpy as np\n"
        "from tallyroll.storage import MemmapStorage\n"
        f"storage = MemmapStorage({str(path)!r})\n"
        "storage.extend({('a',): np.arange(7)})\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "ResourceWarning: unclosed storage" in done.stderr
    assert "Exception ignored" not in done.stderr
    assert TensorDict.load_memmap(path)["a"].tolist() == list(range(7))


@pytest.mark.parametrize("shape", [3, "33", None, {"0": 3}])
@pytest.mark.parametrize("field", ["key", "shape"])
def test_a_column_whose_key_or_shape_is_no_list_is_refused(field: str, shape: Any) -> None:
    column = {"key": ["x"], "dtype": "float32", "shape": [3], field: shape}
    with pytest.raises(InvalidSchema, match="expected a column with lists for key and shape"):
        Schema.from_json([column])
