"""Make the storages that are kept here, in the format version that this Tallyroll writes.

Run it before a format version changes, so that later versions can show that they still read it::

    python tests/storage/formats/data/make_storages.py

It writes ``version-N.tar.xz``: a storage of each kind, and ``rows.json`` with the rows that they
hold. A header takes 140 KB, nearly all zeros, so the files are compressed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tallyroll.collector import SyncCollector
from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage
from tallyroll.storage.files.commit_header import FORMAT_VERSION
from tallyroll.storage.storages import DiskStorage

HERE = Path(__file__).parent
FRAMES = 60
RING = 40
KINDS: dict[str, tuple[type[DiskStorage], str, dict[str, Any]]] = {
    "memmap-closed": (MemmapStorage, "closed", {}),
    "memmap-killed": (MemmapStorage, "killed", {}),
    "memmap-ring": (MemmapStorage, "closed", {"max_size": RING}),
    "memmap-ring-killed": (MemmapStorage, "killed", {"max_size": RING}),
    "closed.h5": (H5Storage, "closed", {"capacity": 2 * FRAMES}),
    "killed.h5": (H5Storage, "killed", {"capacity": 2 * FRAMES}),
    "finalized.h5": (H5Storage, "finalized", {"capacity": 2 * FRAMES}),
    "closed.zarr": (ZarrStorage, "closed", {}),
    "killed.zarr": (ZarrStorage, "killed", {}),
}


def collect(path: Path, kind: type[DiskStorage], end: str, options: dict[str, Any]) -> None:
    storage = kind(path, **options)
    with SyncCollector(
        "CartPole-v1", None, num_envs=2, frames_per_batch=12, total_frames=FRAMES, seed=0,
        storage=storage,
    ) as collector:  # fmt: skip
        for number, _ in enumerate(collector):
            if end == "killed" and number == 3:
                os._exit(0)  # without closing any file
    if end == "finalized":
        storage.finalize()
    else:
        storage.close()


def in_a_fork(path: Path, kind: type[DiskStorage], end: str, options: dict[str, Any]) -> None:
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        assert status == 0, f"making {path.name} failed"
        return
    try:
        collect(path, kind, end, options)
    finally:
        sys.stderr.flush()
        os._exit(1 if sys.exc_info()[0] else 0)


def rows_of(path: Path, kind: type[DiskStorage]) -> dict[str, Any]:
    with kind(path, mode="read") as storage:
        slots = storage.slots_of(np.array(storage.span))
        return {
            "first_row": storage.span.start,
            "head": storage.head,
            "columns": {
                "/".join(key): storage.column(key)[slots].tolist() for key in storage.schema.keys
            },
        }


def main() -> None:
    name = f"version-{FORMAT_VERSION}"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / name
        root.mkdir()
        for file, (kind, end, options) in KINDS.items():
            in_a_fork(root / file, kind, end, options)
            # Read a copy, so that the archived storage stays as its writer left it.
            copy = Path(folder) / file
            (shutil.copytree if (root / file).is_dir() else shutil.copy)(root / file, copy)
            found[file] = rows_of(copy, kind)
        (root / "rows.json").write_text(json.dumps(found) + "\n")
        with tarfile.open(HERE / f"{name}.tar.xz", "w:xz", preset=9) as tar:
            tar.add(root, name)


if __name__ == "__main__":
    main()
