"""The list of a pushed dataset's objects: which they are, their bytes and checksums. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.ext.packed.archives import EPISODES, INDEX, MANIFEST, OURS
from tallyroll.storage.ext.packed.documents import documents
from tallyroll.storage.ext.packed.layout import Layout
from tallyroll.storage.files.manifest import Manifest

PLAN: Final = f"{OURS}/objects.json"
"""The list's own object: the first that is written, and never one of those that it names."""
ROOT: Final = "zarr.json"
"""By which other libraries find the dataset."""
LAST: Final = f"{OURS}/{MANIFEST}"
"""By which ours does: the last that is written."""
_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """An object of a dataset."""

    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PushPlan:
    """The objects of a dataset by name, and the id of the dataset."""

    id: str
    objects: dict[str, PlannedObject]

    @property
    def nbytes(self) -> int:
        """The bytes of all."""
        return sum(each.nbytes for each in self.objects.values())

    @property
    def order(self) -> list[str]:
        """The names of all objects as they are written: rows first, what shows them last."""
        ends = {ROOT: 2, LAST: 3}
        return sorted(self.objects, key=lambda name: (ends.get(name, name.endswith(".json")), name))

    def to_json(self) -> bytes:
        """Return it as it is stored."""
        objects = {name: [each.nbytes, each.sha256] for name, each in self.objects.items()}
        return json.dumps({"id": self.id, "objects": objects}).encode()


def parsed(content: bytes, place: object) -> PushPlan:
    """Return the list in an object.

    Raises:
        CorruptStorage: it is none, or names what no dataset has.
    """
    try:
        said = json.loads(content)
        objects = {name: PlannedObject(*said["objects"][name]) for name in said["objects"]}
        sound = isinstance(said["id"], str) and all(
            is_inside(name)
            and type(each.nbytes) is int
            and each.nbytes >= 0
            and isinstance(each.sha256, str)
            and len(each.sha256) == 64
            and _HEX.issuperset(each.sha256)
            for name, each in objects.items()
        )
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise CorruptStorage(
            f"{place} is not the list of a dataset's objects: it is damaged. Push the dataset "
            "again with replace=True (--replace), or remove that object to read without it."
        )
    return PushPlan(said["id"], objects)


def is_inside(name: Any) -> bool:
    """Return whether a name is of a file below a folder, wherever that is."""
    parts = name.split("/") if isinstance(name, str) else [""]
    return not {"", ".", ".."} & {*parts} and "\0" not in name and "\\" not in name


def files_of(layout: Layout, manifest: Manifest) -> dict[str, bool]:
    """Return the files of packed rows by name, and whether each has to be there."""
    found = {str(place / ROOT): True for place in documents(layout, manifest)}
    for array in layout.arrays:
        for number in range(array.shards):
            name = ".".join(["c", str(number), *("0" for _ in array.shape)])
            found["/".join((*array.path, name))] = True
    return found | {LAST: True, f"{OURS}/{EPISODES}": False, f"{OURS}/{INDEX}": False}
