"""Creation of HDF5 files with h5py, and lookup of the offsets of their datasets.

h5py closes the file before a row is written. This module writes no rows.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tallyroll.storage.errors import CorruptStorage, ForeignContent
from tallyroll.storage.files.manifest import Manifest, attributes_of
from tallyroll.storage.files.safe_files import write_all
from tallyroll.storage.formats.hdf5.guarded_file import guarded_hdf5
from tallyroll.storage.formats.hdf5.moved_attributes import value_places
from tallyroll.storage.formats.hdf5.user_block import USER_BLOCK_NBYTES
from tallyroll.storage.formats.optional_libraries import needed
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.schema import Column, Schema

PROVENANCE_NBYTES = 48 * 1024
"""Bytes of the attribute ``provenance``. An HDF5 attribute holds less than 64 KiB."""

ATTRIBUTES = ("capacity", "provenance", "rows", "schema")
"""The attributes of the root that Tallyroll writes."""

_ALIGNMENT = 4096
_SIGNATURE_NBYTES = 64
_SCHEMA_LIMIT = 60_000  # the same limit applies as for provenance
_LARGEST_FILE = 2**62
DAMAGE = (
    OSError,
    RuntimeError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
)
"""Errors that h5py raises for damaged files."""


@dataclass(frozen=True, slots=True)
class AttributePlace:
    """The place of an attribute's value: its offset, and the bytes directly before it."""

    at: int
    before: bytes

    def is_current(self, file: int) -> bool:
        """Return True if the value is still in its place. Other programs may have moved it."""
        return os.pread(file, len(self.before), self.at - len(self.before)) == self.before


@dataclass(frozen=True, slots=True)
class DatasetOffsets:
    """The offsets of the datasets, in the order of the schema, and the number of rows of each."""

    offsets: tuple[int, ...] = ()
    capacity: int = 0


@dataclass(frozen=True, slots=True)
class FilePlaces:
    """The places of attributes and rows in a file, as its manifest records them."""

    rows: AttributePlace
    """The place of the value of the attribute ``rows``, an int64."""
    provenance: AttributePlace
    """The place of the value of the attribute ``provenance``, of `PROVENANCE_NBYTES` bytes."""
    layout: DatasetOffsets

    def show_rows(self, file: int, rows: int) -> None:
        """Write the attribute ``rows``."""
        write_all(file, rows.to_bytes(8, "little"), self.rows.at)

    def rows_shown(self, file: int) -> int:
        """Return the value of the attribute ``rows``."""
        return int.from_bytes(os.pread(file, 8, self.rows.at), "little", signed=True)

    def show_manifest(self, file: int, manifest: Manifest) -> None:
        """Write the attribute ``provenance``."""
        write_all(file, _provenance(manifest), self.provenance.at)

    def shows_manifest(self, file: int, manifest: Manifest) -> bool:
        """Return True if the attribute ``provenance`` matches the manifest."""
        return os.pread(file, PROVENANCE_NBYTES, self.provenance.at) == _provenance(manifest)

    def moved(self, file: int, path: Path) -> FilePlaces:
        """Return the places after another program added attributes and may have moved ours.

        Raises:
            CorruptStorage: our attributes are missing, or have another length.
        """
        shown = shown_attributes(file, path)
        try:
            places = value_places(file)
            rows, provenance = places["rows"], places["provenance"]
        except (ValueError, KeyError) as error:
            raise _not_there(path) from error
        found = replace(self, rows=_place(file, rows), provenance=_place(file, provenance))
        text = os.pread(file, PROVENANCE_NBYTES, provenance)
        if found.rows_shown(file) != shown.get("rows") or (
            text.decode(errors="replace").rstrip() != shown.get("provenance")
            or len(text) != PROVENANCE_NBYTES
        ):
            raise _not_there(path)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return {
            "rows": [self.rows.at, self.rows.before.hex()],
            "provenance": [self.provenance.at, self.provenance.before.hex()],
            "offsets": list(self.layout.offsets),
            "capacity": self.layout.capacity,
        }

    @classmethod
    def from_json(cls, value: Any) -> FilePlaces:
        """Return the places from the result of `to_json`.

        Raises:
            ValueError: ``value`` is something else.
        """
        try:
            rows, provenance = (
                AttributePlace(
                    _whole(value[name][0], USER_BLOCK_NBYTES), bytes.fromhex(value[name][1])
                )
                for name in ("rows", "provenance")
            )
            if any(len(place.before) != _SIGNATURE_NBYTES for place in (rows, provenance)):
                raise ValueError(f"expected {_SIGNATURE_NBYTES} bytes before an attribute")
            offsets = tuple(_whole(at, 0) for at in value["offsets"])
            return cls(rows, provenance, DatasetOffsets(offsets, _whole(value["capacity"], 0)))
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"expected places in a file, got {value!r:.200}") from error


def _place(file: int, at: int) -> AttributePlace:
    return AttributePlace(at, os.pread(file, _SIGNATURE_NBYTES, at - _SIGNATURE_NBYTES))


def _not_there(path: Path) -> CorruptStorage:
    return CorruptStorage(
        f"the attributes rows and provenance of {path} are missing: another program changed them, "
        "or the file is damaged. Its rows can still be read. Copy them to a new storage to "
        "continue."
    )


def _provenance(manifest: Manifest) -> bytes:
    text = attributes_of(manifest, PROVENANCE_NBYTES)["provenance"].encode()
    return text[:PROVENANCE_NBYTES].ljust(PROVENANCE_NBYTES)


def _whole(value: Any, least: int) -> int:
    if type(value) is not int or not least <= value <= _LARGEST_FILE:
        raise ValueError(
            f"expected a whole number from {least} to {_LARGEST_FILE}, got {value!r:.200}"
        )
    return value


def h5py_module() -> Any:
    """Return h5py, or raise MissingLibrary if it is not installed."""
    return needed("h5py", "hdf5", "HDF5 storages need")


def nbytes_of_file(schema: Schema, capacity: int) -> int:
    """Return an estimate of the size of a file with these datasets, in bytes."""
    aligned = (-(-column.row_nbytes * capacity // _ALIGNMENT) for column in schema.columns)
    groups = {key[:depth] for key in schema.keys for depth in range(len(key))}
    objects = len(groups) * 4 + len(schema.columns)
    return USER_BLOCK_NBYTES + 3 * 65536 + _ALIGNMENT * (sum(aligned) + objects)


def make_file(
    made: int, path: Path, schema: Schema, capacity: int, like: int | None = None
) -> FilePlaces:
    """Create an HDF5 file with attributes and one dataset [capacity, ...] per column.

    The user block is empty, and the space is not reserved yet.

    Args:
        made: a descriptor of the empty file.
        path: the path of the file, for messages.
        schema: the schema of the storage.
        capacity: the number of rows of the datasets.
        like: a descriptor of the file that will be replaced, or None. Attributes that other
            programs added to the root, the groups and the datasets of that file are copied.

    Raises:
        ForeignContent: an attribute of another program cannot be copied.
        MissingLibrary: h5py is not installed.
        OSError: the file system refuses.
    """
    # Random bytes, by which the attributes are found in the file afterwards.
    marks = {"rows": os.urandom(8), "provenance": os.urandom(32)}
    try:
        _make(h5py_module(), made, marks, schema, capacity)
        if like is not None:
            _copy_attributes(h5py_module(), like, made, path, schema)
    except OSError:
        raise
    except DAMAGE as error:  # after an error of the file system h5py may raise anything
        raise OSError(errno.EIO, f"h5py cannot create the file ({error!s:.300})") from error
    layout = layout_of(made, path, schema)
    rows, provenance = (_find(made, each, schema, layout) for each in marks.values())
    return FilePlaces(rows, provenance, layout)


def _make(h5py: Any, made: int, marks: Mapping[str, bytes], schema: Schema, capacity: int) -> None:
    # Use the descriptor, because the path may have become a link.
    with guarded_hdf5(
        made,
        "w",
        libver="earliest",  # no checksums over values that change later
        userblock_size=USER_BLOCK_NBYTES,
        alignment_threshold=1,
        alignment_interval=_ALIGNMENT,
    ) as (file, _):
        file.attrs.create("rows", np.frombuffer(marks["rows"], "<i8")[0])
        blank = marks["provenance"].ljust(PROVENANCE_NBYTES)
        text = h5py.string_dtype("utf-8", PROVENANCE_NBYTES)
        file.attrs.create("provenance", np.array(blank, text), dtype=text)
        file.attrs.create("capacity", np.int64(capacity))
        _describe(h5py, file, schema)
        for column in schema.columns:
            _make_dataset(h5py, file, column, capacity)


def _copy_attributes(h5py: Any, source: int, target: int, path: Path, schema: Schema) -> None:
    nodes = {key[:depth] for key in schema.keys for depth in range(len(key) + 1)}
    with guarded_hdf5(target, "r+") as (new, _), _opened(source, path) as old:
        for node in sorted(nodes):
            name = "/" + "/".join(node)
            attributes = old[name].attrs
            for each in attributes:
                if node or each not in ATTRIBUTES:
                    _copy_attribute(h5py, attributes, new[name].attrs, each, path)


def _copy_attribute(h5py: Any, source: Any, target: Any, name: str, path: Path) -> None:
    try:
        kind = source.get_id(name)
        if h5py.check_ref_dtype(kind.dtype) is not None:
            raise TypeError("it refers to objects in the old file")
        value = source[name]
        shape = None if isinstance(value, h5py.Empty) else kind.shape
        target.create(name, value, shape=shape, dtype=kind.dtype)
    except DAMAGE as error:
        raise ForeignContent(
            f"{path} must be replaced by a new file, but its attribute {_text(name)} cannot be "
            f"copied ({error!s:.200}). Move that attribute to another file first."
        ) from error


def _describe(h5py: Any, file: Any, schema: Schema) -> None:
    described = json.dumps(schema.to_json()).encode()
    if len(described) <= _SCHEMA_LIMIT:  # otherwise only the manifest has the schema
        text = h5py.string_dtype("utf-8", len(described))
        file.attrs.create("schema", np.array(described, text), dtype=text)


def _make_dataset(h5py: Any, file: Any, column: Column, capacity: int) -> None:
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_layout(h5py.h5d.CONTIGUOUS)
    plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    *groups, name = column.key
    group = file.require_group("/".join(groups)) if groups else file
    kind = h5py.h5t.py_create(column.numpy_dtype.newbyteorder("<"), logical=True)
    space = h5py.h5s.create_simple((capacity, *column.shape))
    h5py.h5d.create(group.id, name.encode(), kind, space, dcpl=plan)


def _find(file: int, mark: bytes, schema: Schema, layout: DatasetOffsets) -> AttributePlace:
    found = []
    for start, stop in _between(file, schema, layout):
        content = os.pread(file, stop - start, start)
        at = content.find(mark)
        while at >= 0:
            found.append(start + at)
            at = content.find(mark, at + 1)
    if len(found) != 1:
        raise OSError(f"expected h5py to write an attribute once, found it {len(found)} times.")
    return _place(file, found[0])


def _between(file: int, schema: Schema, layout: DatasetOffsets) -> Iterator[tuple[int, int]]:
    """Yield the parts of the file that contain no rows."""
    start = USER_BLOCK_NBYTES
    for at, nbytes in _extents(schema, layout):
        yield start, at
        start = at + nbytes
    yield start, os.fstat(file).st_size


def _extents(schema: Schema, layout: DatasetOffsets) -> list[tuple[int, int]]:
    sizes = (column.row_nbytes * layout.capacity for column in schema.columns)
    return sorted(zip(layout.offsets, sizes, strict=True)) if layout.capacity else []


def layout_of(file: int, path: Path, schema: Schema) -> DatasetOffsets:
    """Return the offsets of the datasets in an open file; ``path`` is for messages.

    Raises:
        CorruptStorage: a dataset is missing, or not as it was created.
        MissingLibrary: h5py is not installed.
    """
    with _opened(file, path) as opened:
        datasets = [_dataset(opened, path, column) for column in schema.columns]
        rows = {int(dataset.shape[0]) for dataset in datasets}
        offsets = [dataset.id.get_offset() or 0 for dataset in datasets]
    if len(rows) != 1:
        raise CorruptStorage(
            f"the datasets in {path} have different numbers of rows, {sorted(rows)}: the file is "
            "damaged. Restore it from a copy."
        )
    layout = DatasetOffsets(tuple(offsets), rows.pop())
    _require_disjoint(file, path, schema, layout)
    return layout


def shown_attributes(file: int, path: Path) -> dict[str, int | str]:
    """Return our attributes, as h5py reads them in an open file.

    Raises:
        CorruptStorage: the attributes cannot be read.
    """
    with _opened(file, path) as opened:
        values = {name: opened.attrs[name] for name in ATTRIBUTES if name in opened.attrs}
        return {
            name: value.decode(errors="replace").rstrip()
            if isinstance(value, bytes)
            else int(value)
            for name, value in values.items()
        }


@contextmanager
def _opened(file: int, path: Path) -> Iterator[Any]:
    """Yield an h5py file over a descriptor; convert errors in the context to CorruptStorage."""
    h5py = h5py_module()
    try:
        # Use the descriptor, because the path may be another file by now. A Python file is
        # independent of HDF5's locks and of files that this process has open in h5py.
        with open(file, "rb", buffering=0, closefd=False) as raw, h5py.File(raw, "r") as opened:
            yield opened
    except DAMAGE as error:
        raise CorruptStorage(
            f"{path} cannot be read as HDF5 any more ({error!s:.300}): the file was cut short or "
            "is damaged. Restore it from a copy."
        ) from error


def _dataset(opened: Any, path: Path, column: Column) -> Any:
    h5py = h5py_module()
    node = opened
    for part in column.key:
        # A link of another kind may lead to another place, even another file.
        if not isinstance(node.get(part, getlink=True), h5py.HardLink):
            raise CorruptStorage(
                f"{path} has no dataset {format_key(column.key)}, which is a column in the "
                "manifest, or has only a link. Restore the file from a copy."
            )
        node = node[part]
    if not isinstance(node, h5py.Dataset) or not _is_plain(h5py, node, column):
        raise CorruptStorage(
            f"{format_key(column.key)} in {path} should be a contiguous dataset of "
            f"{column.dtype_name}, shape {['rows', *column.shape]}, but is {node!r}: another "
            "program wrote it, or it is damaged. Restore the file from a copy."
        )
    return node


def _is_plain(h5py: Any, node: Any, column: Column) -> bool:
    plan = node.id.get_create_plist()
    contiguous = plan.get_layout() == h5py.h5d.CONTIGUOUS and not plan.get_external_count()
    shaped = node.ndim == 1 + len(column.shape) and tuple(node.shape[1:]) == column.shape
    return bool(contiguous and shaped and node.dtype == column.numpy_dtype.newbyteorder("<"))


def _require_disjoint(file: int, path: Path, schema: Schema, layout: DatasetOffsets) -> None:
    end, size = USER_BLOCK_NBYTES, os.fstat(file).st_size
    for at, nbytes in _extents(schema, layout):
        if at < end or at + nbytes > size:
            raise CorruptStorage(
                f"{path} should have the rows of each column in a separate part between bytes "
                f"{USER_BLOCK_NBYTES} and {size}, but has rows at {at} to {at + nbytes}: the file "
                "was cut short or is damaged. Restore it from a copy."
            )
        end = at + nbytes


def foreign_names(file: int, path: Path, schema: Schema) -> list[str]:
    """Return the names of objects that another program added to the file.

    Raises:
        CorruptStorage: the file cannot be read.
    """
    ours: set[Key] = {key[:depth] for key in schema.keys for depth in range(1, len(key) + 1)}
    with _opened(file, path) as opened:
        names: list[str | bytes] = []
        opened.visit_links(names.append)
    return [name for name in map(_text, names) if tuple(name.split("/")) not in ours]


def _text(name: str | bytes) -> str:
    # h5py returns names that are not UTF-8 as bytes.
    return name.decode(errors="backslashreplace") if isinstance(name, bytes) else name
