"""Compare the files and batches of a fixed run, byte for byte, with those recorded in `golden/`.

The environment's numbers are whole, the policy is arithmetic and the seed is fixed. A change here
is either a fault or deliberate. A deliberate change gets its own commit, which says why and is made
with `TALLYROLL_GOLDEN=write`.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import pytest
from tensordict import TensorDictBase

import tallyroll.collector
import tallyroll.collector.errors
import tallyroll.storage
import tallyroll.storage.errors
from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, fast_paths
from tallyroll.storage.storages import DiskStorage

from collect_kit import ByObservation
from worker_kit import DISABLED, LANES, NEXT, QUICK, SAME, factories, factory

GOLDEN = Path(__file__).parent / "golden"
WRITE = os.environ.get("TALLYROLL_GOLDEN") == "write"
RUN = {"frames_per_batch": 32, "total_frames": 120, "init_random_frames": 20, "seed": 5}
SOURCES = (DISABLED, NEXT, SAME, "avoided", "native", "torch")
STORAGES: dict[str, tuple[type[DiskStorage], dict[str, int]]] = {
    "memmap": (MemmapStorage, {}),
    "ring": (MemmapStorage, {"max_size": 48}),
    "hdf5": (H5Storage, {"capacity": 120}),
    "zarr": (ZarrStorage, {}),
}
WORKERS = (0, 1, 3)
"""Numbers of workers; 0 collects in this process."""
OTHERS = (
    *("manifest.json", "tallyroll.header", "tallyroll.lock"),
    *("tallyroll/manifest.json", "tallyroll/c.0", "tallyroll/lock"),
)
"""Files that contain ids, times and inodes."""


def digest(*parts: bytes) -> str:
    """Return the first half of the SHA-256 of the parts."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def of_batch(batch: TensorDictBase) -> str:
    """Digest a batch: its keys, shapes, dtypes and values."""
    parts = [str(tuple(batch.batch_size)).encode()]
    leaves = {str(key): leaf for key, leaf in batch.items(True, True)}
    for key, leaf in sorted(leaves.items()):
        parts += [f"{key} {leaf.dtype} {tuple(leaf.shape)}".encode(), leaf.numpy().tobytes()]
    return digest(*parts)


def of_manifest(manifest: dict[str, Any]) -> str:
    """Digest a manifest without its id, times, hosts, commits and versions."""
    left_out = ("versions", "made")
    runs = [{k: v for k, v in run.items() if k not in left_out} for run in manifest["runs"]]
    rest = {k: v for k, v in manifest.items() if k not in ("id", "created", "runs")}
    return digest(json.dumps([rest, runs]).encode())


def of_files(path: Path) -> dict[str, str]:
    """Digest each file of columns and their descriptions, or each dataset of a single file."""
    if path.is_file():
        found: dict[str, str] = {}
        with h5py.File(path, "r", locking=False) as file:
            file.visititems(
                lambda name, item: found.update(
                    {name: digest(str((item.shape, item.dtype)).encode(), item[:].tobytes())}
                    if isinstance(item, h5py.Dataset)
                    else {}
                )
            )
        return found
    found = {}
    for file in path.rglob("*"):
        name = str(file.relative_to(path))
        if file.is_dir() or name in OTHERS:
            continue
        content = file.read_bytes()
        if name == "zarr.json":  # the group also records which library wrote the rows
            group = json.loads(content)
            del group["attributes"]["provenance"]
            content = json.dumps(group).encode()
        found[name] = digest(content)
    return found


def made(source: str, kind: str, workers: int, folder: Path) -> dict[str, Any]:
    """Run one configuration and return digests of its batches and files."""
    storage_class, options = STORAGES[kind]
    path = folder / {"hdf5": "data.h5", "zarr": "data.zarr"}.get(kind, "data")
    with storage_class(path, **options) as storage:
        policy = ByObservation()
        if workers:
            envs = factories(source, workers, kind="multidiscrete")
            collector: Any = MultiprocessCollector(envs, policy, storage=storage, **RUN, **QUICK)
        else:
            env = factory(source, 0, LANES, kind="multidiscrete")
            collector = SyncCollector(env, policy, storage=storage, **RUN)
        with collector:
            batches = [of_batch(batch) for batch in collector]
        assert storage.record is not None
        head, record = storage.record
        left = {"record": digest(f"{head} ".encode(), record)}
        left["manifest"] = of_manifest(storage.manifest)
    return {"batches": digest(*map(str.encode, batches)), **left, **of_files(path)}


@pytest.mark.parametrize("source", SOURCES)
def test_a_run_is_what_it_was(source: str, tmp_path: Path) -> None:
    """Run every third configuration, so that each storage meets each number of workers twice."""
    found = {}
    runs = [*itertools.product(STORAGES, WORKERS)]
    if not WRITE:
        at = SOURCES.index(source)
        runs = [run for number, run in enumerate(runs) if (number + number // 3 + at) % 3 == 0]
    for kind, workers in runs:
        name = f"{kind}, {workers} workers"
        (tmp_path / name).mkdir()
        found[name] = made(source, kind, workers, tmp_path / name)
    compare(source.lower(), found, *found)


@pytest.mark.parametrize("off", [(), ("kernel",)], ids=["kernel", "numpy"])
def test_a_header_and_its_records_are_what_they_were(off: tuple[str, ...], tmp_path: Path) -> None:
    """Compare the last record's text, and every byte of the header except the file's identity."""
    path, found = tmp_path / "rows", {}
    with fast_paths.switched_off(*off), MemmapStorage(path, max_size=48) as storage:
        env = factory(DISABLED, 0, LANES)
        with SyncCollector(env, ByObservation(), storage=storage, finals="kept", **RUN) as run:
            for calls in range(1, 30):
                run.collect(LANES)
                if calls in (1, 12, 13, 29):
                    header = bytearray((path / "tallyroll.header").read_bytes())
                    header[192:224] = bytes(32)
                    found[f"header after {calls} calls"] = digest(header)
            assert storage.record is not None
            found["record"] = storage.record[1].decode()
    compare("header", found)


def compare(name: str, found: dict[str, Any], *parts: str) -> None:
    """Compare with a golden file or with some of its parts. In write mode, write the file."""
    file = GOLDEN / f"{name}.json"
    if WRITE:
        file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    golden = json.loads(file.read_text())
    assert found == {part: golden[part] for part in parts or golden}


# --- public names ---------------------------------------------------------------------------------


def public(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield public names of a module and of its classes, with their signatures."""
    classes = [n for n, c in vars(module).items() if inspect.isclass(c)]  # without `__all__`
    for name in sorted(getattr(module, "__all__", classes)):
        thing = getattr(module, name)
        if not isinstance(thing, type):
            yield name, takes(thing)
            continue
        bases = [c.__name__ for c in thing.__mro__[1:] if "tallyroll" not in c.__module__]
        yield name, f"{takes(thing)} a {bases[0]}"
        for member, value in inspect.getmembers_static(thing):
            ours = any(member in vars(c) for c in thing.__mro__ if "tallyroll" in c.__module__)
            if ours and not member.startswith("_"):
                yield f"{name}.{member}", takes(getattr(value, "__func__", value))


def takes(thing: Any) -> str:
    made = thing.__init__ if isinstance(thing, type) else thing
    try:
        # A class's name is public, but its current module is not.
        return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z]\w+)", "", str(inspect.signature(made)))
    except (TypeError, ValueError):
        return type(thing).__name__


def test_public_names_and_what_they_take() -> None:
    modules = (
        tallyroll.collector,
        tallyroll.collector.errors,
        tallyroll.storage,
        tallyroll.storage.errors,
    )
    found = {module.__name__: dict(public(module)) for module in modules}
    compare("public", found)


def test_every_case_has_its_file() -> None:
    cases = {f"{source.lower()}.json" for source in SOURCES}
    assert {file.name for file in GOLDEN.iterdir()} == {*cases, "header.json", "public.json"}
