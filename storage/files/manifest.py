"""The manifest: a storage's format, columns and runs, as JSON."""

from __future__ import annotations

import errno
import json
import os
import uuid
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.errors import CorruptStorage, InvalidProvenance, NotAStorage
from tallyroll.storage.files.format_versions import (
    FORMAT_VERSION,
    ONCE_VERSION,
    READABLE,
    require_readable,
)
from tallyroll.storage.files.paths import failed, translated
from tallyroll.storage.files.run_events import without_events
from tallyroll.storage.files.safe_files import JSON_LIMIT, Inside
from tallyroll.storage.rows.schema import Schema

Manifest = dict[str, Any]
"""Mapping with ``format``, ``format_version``, ``id``, ``created``, ``schema``, ``runs``."""

MANIFEST_LIMIT = JSON_LIMIT // 2
"""Maximum size of a manifest in bytes."""

_SEAL = "crc32"
_SEPARATOR = ", "

_MOST_ROWS = 2**48 - 1
_FIELDS = {"format": str, "format_version": int, "id": str, "created": str, "runs": list}


SHARDED: Final = "tallyroll.sharded"
"""The format of a storage in which each worker writes rows to its own shard."""
SHARD: Final = "shard"
"""The field of a run's entry that describes which shard of the run the storage holds.

The field contains ``index``, the index of the shard; ``of``, the number of shards; ``asked``, the
number of transitions requested from all shards together; and ``run``, an id that all shards of the
run share.
"""
UNVERSIONED: Final = "unversioned_weights"
"""The field of a run's entry that records weights that changed without a new policy version."""


def new_manifest(
    format_name: str,
    schema: Schema,
    runs: list[Any],
    id: str | None = None,
    once: list[dict[str, Any]] | None = None,
) -> Manifest:
    """Return the manifest of a new storage.

    Args:
        format_name: the name of the format.
        schema: the schema of the rows.
        runs: the entries of the runs.
        id: the id of the original, for a copy.
        once: the columns that are stored once, as JSON.
    """
    return {
        "format": format_name,
        "format_version": ONCE_VERSION if once else FORMAT_VERSION,
        "id": id or uuid.uuid4().hex,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "schema": schema.to_json(),
        **({"once": once} if once else {}),
        "runs": runs,
    }


def run_of(first_row: int, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's entry: ``provenance`` as JSON, with the first row of the run.

    Raises:
        InvalidProvenance: ``provenance`` cannot be serialized as JSON.
    """
    try:
        run = json.loads(json.dumps(dict(provenance), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidProvenance(
            f"provenance must be JSON (text, whole and finite numbers, lists, mappings): {error}. "
            "Convert other values, for example with str()."
        ) from error
    return {**run, "first_row": first_row}


def schema_crc(schema: Schema, once: list[dict[str, Any]] | None = None) -> int:
    """Return the CRC-32 that binds a header to the schema and to ``once`` in its manifest."""
    bound = [schema.to_json(), once] if once else schema.to_json()
    return zlib.crc32(json.dumps(bound).encode())


def sealed(manifest: Manifest) -> Manifest:
    """Return the manifest with a checksum, which `parse_manifest` checks and removes."""
    plain = json.loads(json.dumps(manifest))
    return {**plain, _SEAL: _crc(plain)}


def seal_fits(manifest: Manifest) -> bool:
    """Return True if the checksum of a sealed mapping matches."""
    rest = {name: value for name, value in manifest.items() if name != _SEAL}
    return bool(manifest.get(_SEAL) == _crc(rest))


def _crc(manifest: Manifest) -> str:
    return f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"


def read_manifest(inside: Inside, path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        NotAStorage: the manifest is missing, or another program wrote it.
        CorruptStorage: the manifest is damaged.
        FormatVersionMismatch: another version wrote the manifest.
    """
    try:
        content = inside.read(path, MANIFEST_LIMIT)
    except FileNotFoundError as error:
        remedy = (
            "Give the path of a storage. If its writer has just started, try again. If its "
            "creation was interrupted, create it again."
        )
        if inner := _storages_in(path):
            remedy = (
                f"It contains storages, such as {inner[0]}. Give the path of one, or for all of "
                f"them the pattern '{path.parent}/*', in quotes."
            )
        raise NotAStorage(
            f"{path.parent} is not a Tallyroll storage: it has no {path.name}. {remedy}"
        ) from error
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise failed(path, error, 0) from error
        raise CorruptStorage(
            f"{path} cannot be read: {error.strerror}. Restore it from a copy."
        ) from error
    return parse_manifest(content, path)


def _storages_in(path: Path) -> list[str]:
    """Return the names of folders beside a missing manifest that are storages."""
    try:
        with os.scandir(path.parent) as entries:
            few = [entry.name for entry in islice(entries, 100)]
        return [name for name in sorted(few) if (path.parent / name / path.name).is_file()]
    except OSError:
        return []


def parse_manifest(content: bytes, path: Path) -> Manifest:
    """Parse the content of a manifest, read from ``path``; raise as `read_manifest` does."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorruptStorage(
            f"{path} is not valid JSON ({error}): the file is damaged. Restore it from a copy."
        ) from error
    if not isinstance(manifest, dict) or not str(manifest.get("format")).startswith("tallyroll."):
        raise NotAStorage(
            f"{path} does not describe a Tallyroll storage: another program wrote it. Give the "
            "path of a storage."
        )
    version = manifest.get("format_version")
    if type(version) is not int or version not in READABLE:
        if _fits_another_version(manifest):
            raise _unsealed(path)
        require_readable(version, path)
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(manifest.get(name), kind)]
    if not wrong and not all(map(_is_run, manifest["runs"])):
        wrong = ["the first row of a run"]
    if wrong:
        raise CorruptStorage(
            f"{path} lacks a valid value for {', '.join(wrong)}. Restore it from a copy."
        )
    seal = manifest.pop(_SEAL, None)  # a user who changes a manifest on purpose removes the seal
    if seal is not None and seal != _crc(manifest):
        raise _unsealed(path)
    return manifest


def _fits_another_version(manifest: Manifest) -> bool:
    """Return True if the checksum matches another version, so that the version must be damaged."""
    rest = {name: value for name, value in manifest.items() if name != _SEAL}
    return manifest.get(_SEAL) in [_crc({**rest, "format_version": known}) for known in READABLE]


def _unsealed(path: Path) -> CorruptStorage:
    return CorruptStorage(
        f"{path} fails its check: its content has changed since it was written. Restore it from a "
        f"copy. If you changed it yourself, remove {_SEAL} from it."
    )


def _is_run(run: Any) -> bool:
    first = run.get("first_row") if isinstance(run, dict) else None
    return type(first) is int and 0 <= first <= _MOST_ROWS


def environment_of(run: Mapping[str, Any]) -> str:
    """Return the id of a run's environment, else its class, else its type, or an empty string."""
    environment, made = run.get("environment"), run.get("made")
    environment = environment if isinstance(environment, dict) else {}
    classes = made.get("environment") if isinstance(made, dict) else None
    found = environment.get("id") or environment.get("type")
    if not environment.get("id") and isinstance(classes, list) and len(classes) == 1:
        found = classes[0]
    return found if isinstance(found, str) else ""


def policy_of(run: Mapping[str, Any]) -> str:
    """Return the name of a run's policy, or an empty string if the entry does not record one.

    It is the argument of a command, else the function or class without its module. Random actions
    have the name ``"random"``.
    """
    command, call, made = (
        each if isinstance(each := run.get(name), dict) else {}
        for name in ("command", "call", "made")
    )
    source = made.get("policy")
    name = source.get("name") if isinstance(source, dict) else None
    found = name.rpartition(":")[2] if isinstance(name, str) else call.get("policy")
    found = command.get("policy") or found
    if not found:
        return "random" if command or "policy" in call else ""
    return found if isinstance(found, str) else ""


def exported(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's entry for other programs, without the host and the folder of a policy's file.

    Nested entries, of runs whose rows were copied, are treated in the same way.
    """
    entry = dict(run)
    if isinstance(made := entry.get("made"), dict):
        entry["made"] = {name: value for name, value in made.items() if name != "host"}
    command = entry.get("command")
    if isinstance(command, dict) and isinstance(policy := command.get("policy"), str):
        entry["command"] = {**command, "policy": policy.rpartition("/")[2]}
    if isinstance(runs := entry.get("runs"), list):
        entry["runs"] = [exported(each) if isinstance(each, dict) else each for each in runs]
    return entry


def attributes_of(manifest: Manifest, limit: int | None = None) -> dict[str, str]:
    """Return the attributes that show a manifest to other libraries, as JSON texts.

    ``schema`` is the schema. ``provenance`` has the identity of the storage and the runs that wrote
    it, without their events. If ``limit`` is given, only the newest runs are kept, as many as fit
    into that number of bytes.
    """
    provenance = {name: manifest[name] for name in _FIELDS}
    provenance["runs"] = [exported(without_events(run)) for run in provenance["runs"]]
    if limit is not None:
        left = limit + len(_SEPARATOR) - len(json.dumps({**provenance, "runs": []}))
        kept = []
        for run in reversed(provenance["runs"]):
            left -= len(json.dumps(run)) + len(_SEPARATOR)
            if left < 0:
                break
            kept.append(run)
        provenance["runs"] = kept[::-1]
    return {"schema": json.dumps(manifest["schema"]), "provenance": json.dumps(provenance)}


def write_manifest(
    inside: Inside, path: Path, manifest: Manifest, *, durable: bool = False
) -> None:
    """Replace the manifest at ``path`` atomically.

    Raises:
        InvalidProvenance: the manifest has more than `MANIFEST_LIMIT` bytes.
    """
    content = json.dumps(sealed(manifest)).encode()
    if len(content) > MANIFEST_LIMIT:
        raise InvalidProvenance(
            f"the manifest {path}, with the provenance of all runs: expected at most "
            f"{MANIFEST_LIMIT} bytes, got {len(content)}. Give less provenance."
        )
    with translated(path, len(content)):
        inside.write_atomically(path, content, durable=durable)
