"""The list of a pushed dataset's objects, with their sizes and checksums. Pure."""

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
"""The object that holds the list. It is written first, and the list does not name it."""
ROOT: Final = "zarr.json"
"""The object by which other libraries find the dataset."""
LAST: Final = f"{OURS}/{MANIFEST}"
"""The object by which Tallyroll finds the dataset. It is written last."""
_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """The size and checksum of an object."""

    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PushPlan:
    """The objects of a dataset by name, and the id of the dataset."""

    id: str
    objects: dict[str, PlannedObject]

    @property
    def nbytes(self) -> int:
        """The total size of all objects."""
        return sum(each.nbytes for each in self.objects.values())

    @property
    def order(self) -> list[str]:
        """The names of all objects in the order of writing: rows first, the manifest last."""
        ends = {ROOT: 2, LAST: 3}
        return sorted(self.objects, key=lambda name: (ends.get(name, name.endswith(".json")), name))

    def to_json(self) -> bytes:
        """Serialize the list."""
        objects = {name: [each.nbytes, each.sha256] for name, each in self.objects.items()}
        return json.dumps({"id": self.id, "objects": objects}).encode()


def parsed(content: bytes, place: object) -> PushPlan:
    """Parse the list in an object.

    Raises:
        CorruptStorage: the content is not a list, or names an invalid object.
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
            f"{place} is damaged: it is not a list of a dataset's objects. Push the dataset again "
            "with replace=True (--replace), or remove this list and read the dataset without it."
        )
    return PushPlan(said["id"], objects)


def is_inside(name: Any) -> bool:
    """Return True if a name is a relative path that stays below its folder."""
    parts = name.split("/") if isinstance(name, str) else [""]
    return not {"", ".", ".."} & {*parts} and "\0" not in name and "\\" not in name


def files_of(layout: Layout, manifest: Manifest) -> dict[str, bool]:
    """Return the files of packed rows by name, with True for the required ones."""
    found = {str(place / ROOT): True for place in documents(layout, manifest)}
    for array in layout.arrays:
        for number in range(array.shards):
            name = ".".join(["c", str(number), *("0" for _ in array.shape)])
            found["/".join((*array.path, name))] = True
    return found | {LAST: True, f"{OURS}/{EPISODES}": False, f"{OURS}/{INDEX}": False}
