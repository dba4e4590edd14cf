"""The ``minari`` format: a Minari folder with an HDF5 group or a table for each episode."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.ext.exchange.base import ExchangeFormat, Incoming, refused
from tallyroll.storage.ext.exchange.export_rows import ExportEpisode, ExportRows
from tallyroll.storage.ext.exchange.hdf5_files import (
    as_stored,
    opened_hdf5,
)
from tallyroll.storage.ext.exchange.minari_parts.arrow_episodes import (
    KINDS,
    ArrowEpisodes,
)
from tallyroll.storage.ext.exchange.minari_parts.episode_rows import (
    EpisodesIn,
    Hdf5Episodes,
    MinariEpisodes,
)
from tallyroll.storage.ext.exchange.minari_parts.pictures import pictures_of
from tallyroll.storage.ext.exchange.minari_parts.spaces import (
    Spaces,
    entry_of,
    known_in,
    nested,
    spaces_in,
)
from tallyroll.storage.ext.exchange.readme import LIMIT, recorded_schema
from tallyroll.storage.ext.exchange.roles import Roles, Successors
from tallyroll.storage.files.safe_files import Inside, closing, open_file
from tallyroll.storage.formats.hdf5.guarded_file import GuardedFile
from tallyroll.storage.formats.optional_libraries import needed
from tallyroll.storage.rows.keys import (
    NEXT,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Key,
    format_key,
)
from tallyroll.storage.rows.schema import Column, Schema

_DATA, _FILE, _METADATA, _ABOUT = "data", "main_data.hdf5", "metadata.json", "tallyroll.json"


class MinariFormat(ExchangeFormat):
    """A dataset of Minari, with each observation stored once, from the first to the final one.

    Columns for which Minari has no place become infos. Minari's own writer writes the files, in
    HDF5 and without JPEG. Reading does not use Minari. The files store bfloat16 as float32.
    """

    name, extra, sorted = "minari", "minari", True
    loading = 'from minari import MinariDataset\n\ndataset = MinariDataset(PATH + "/data")'

    def check(self, schema: Schema) -> None:
        """Raise `InvalidSchema` for rows that are not transitions, and for complex numbers.

        Minari has no space of complex numbers, so observations and actions cannot be complex.
        """
        roles = Roles.of(schema, self.name)
        for each in (*roles.observations, *roles.actions):
            if each.dtype.is_complex:
                raise InvalidSchema(
                    f"{format_key(each.key)}: expected real numbers, got complex ones, for which "
                    "Minari has no space. Use columns= to leave this column out."
                )

    def write(self, rows: ExportRows, place: Path) -> Mapping[str, int]:
        """Write one episode after another."""
        minari = needed("minari", "minari", "an export to Minari needs")
        roles = Roles.of(rows.schema, self.name)
        data = place / _DATA
        data.mkdir(parents=True)
        from minari.dataset.minari_storage import MinariStorage

        spaces = Spaces(rows, roles)
        storage = MinariStorage.new(
            data, *spaces.of_episodes(roles), data_format="hdf5", jpeg_encoding=False
        )
        successors = Successors(roles)
        with _guarded(storage, data / _FILE) as guard:
            storage.update_episodes(_buffers(rows, roles, successors, guard))
        name = re.sub(r"[^A-Za-z0-9_-]+|-v[0-9]+$", "-", rows.title).strip("-") or "rows"
        storage.update_metadata(
            {"dataset_id": f"tallyroll/{name}-v0", "minari_version": minari.__version__}
        )
        (data / _ABOUT).write_text(json.dumps(rows.about))
        every = (*roles.observations, *roles.actions, *roles.others, roles.reward)
        dtypes = sum(each.dtype is torch.bfloat16 for each in every)
        return {**successors.lost, "dtypes": dtypes, "spaces": spaces.lost}

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Open the files and check the shape of each dataset."""
        data = place / _DATA if (place / _DATA).is_dir() else place
        metadata = _json(data, _METADATA, place)
        about = _json(data, _ABOUT, place) if (data / _ABOUT).exists() else None
        if not isinstance(metadata, dict):
            raise refused(place, f"{_METADATA} is not a JSON object")
        kind, spaces = metadata.get("data_format", "hdf5"), spaces_in(metadata)
        jpeg = metadata.get("jpeg_encoding") and about is None
        known = known_in(spaces)
        pictures = pictures_of(known) if jpeg else {}
        episodes: MinariEpisodes
        with contextlib.ExitStack() as stack:
            if kind == "hdf5":
                file = stack.enter_context(opened_hdf5(data / _FILE))
                episodes = Hdf5Episodes(file, place, pictures)
            elif kind in KINDS:
                episodes = ArrowEpisodes(data, kind, known, pictures)
            else:
                raise refused(
                    place, f"its data_format is {kind!r:.80}, expected hdf5, arrow or parquet"
                )
            version = f"{metadata.get('minari_version', '')!s:.40}"
            found = EpisodesIn(episodes, place, recorded_schema(about)).incoming(about, version)
            if found.about is None:
                found.spaces = entry_of(spaces, found.schema)
                found.lost["lossy_frames"] = len(pictures) * (found.rows + len(episodes.numbers))
            yield found


def _json(data: Path, name: str, place: Path) -> Any:
    try:
        return json.loads(Inside(data).read(data / name, LIMIT))
    except (ValueError, OSError, RecursionError) as error:
        raise refused(place, f"{name} cannot be read ({error})") from error


# --- export ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _guarded(storage: Any, path: Path) -> Iterator[GuardedFile]:
    """Make Minari's writer write to a guarded file instead of the path.

    The writer passes its path attribute to h5py, which accepts a file object as well. If a write
    failed, leaving the context raises that error in place of the error of h5py or Minari.
    """
    with closing(open_file(path, os.O_RDWR)) as file:
        guard, before = GuardedFile(file), storage._file_path  # noqa: SLF001
        storage._file_path = guard  # noqa: SLF001
        try:
            yield guard
        finally:
            storage._file_path = before  # noqa: SLF001
            guard.check()


def _buffers(
    rows: ExportRows, roles: Roles, successors: Successors, guard: GuardedFile
) -> Iterator[Any]:
    for each in rows.episodes():
        guard.check()
        yield _buffer(each, roles, successors)


def _buffer(episode: ExportEpisode, roles: Roles, successors: Successors) -> Any:
    from minari.data_collector import EpisodeBuffer

    rows = episode.rows
    successors.count(rows)

    def all_of(each: Column) -> np.ndarray:
        last = rows[(NEXT, *each.key)][-1:]
        return as_stored(np.concatenate([rows[each.key], last]), each)

    count = len(rows[TERMINATED])
    ended = np.zeros(count, bool)
    return EpisodeBuffer(
        seed=episode.seed if episode.seed >= 0 else None,
        observations=_whole({each.key: all_of(each) for each in roles.observations}),
        actions=_whole({each.key: as_stored(rows[each.key], each) for each in roles.actions}),
        rewards=as_stored(rows[REWARD], roles.reward, flat=True),
        terminations=rows[TERMINATED].reshape(count),
        truncations=rows.get(TRUNCATED, ended).reshape(count),
        infos=nested({each.key: as_stored(rows[each.key], each) for each in roles.others}),
    )


def _whole(values: Mapping[Key, Any]) -> Any:
    """Return values nested by name, or the value itself if there is only one."""
    if len(values) == 1 and len(next(iter(values))) == 1:
        return next(iter(values.values()))
    return nested(values)
