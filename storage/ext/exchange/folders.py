"""Read small files of a folder, and expand the path templates in its metadata."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any, Final

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.base import refused
from tallyroll.storage.ext.exchange.readme import LIMIT
from tallyroll.storage.files.safe_files import Inside

_FIELD: Final = re.compile(r"\{([A-Za-z_]{1,40})(?::0?([0-9]))?d?\}")
_MOST_PATH: Final = 4096


def expand_template(template: Any, **values: int | str) -> str:
    """Expand a path template that may contain ``values``, with zero-padded numbers.

    The function does not use ``str.format``, whose fields can read attributes or request gigabytes
    of zeros.

    Raises:
        InvalidDataset: the template is invalid, or the path leads out of the folder.
    """
    if not isinstance(template, str) or len(template) > _MOST_PATH:
        raise InvalidDataset(
            f"expected a path as text of at most {_MOST_PATH:,} characters, got {template!r:.80}"
        )

    def value(found: re.Match[str]) -> str:
        name, width = found.groups()
        if name not in values:
            raise InvalidDataset(f"a path has the unknown field {name}: {template!r:.200}")
        said = values[name]
        return said if isinstance(said, str) else f"{said:0{int(width or 1)}d}"

    path = _FIELD.sub(value, template)
    parts = PurePosixPath(path).parts
    if (
        re.search(r"[{}]", _FIELD.sub("", template))
        or "\0" in path
        or path.startswith("/")
        or ".." in parts
        or not parts
    ):
        raise InvalidDataset(f"a path leads out of the dataset: {template!r:.200}")
    return path


def read_text(inside: Inside, name: str, place: Path, limit: int = LIMIT) -> bytes:
    """Return the content of a small file. Raises `InvalidDataset` if it cannot be read."""
    try:
        return inside.read(place / name, limit)
    except OSError as error:
        raise refused(place, f"{name} cannot be read ({error})") from error


def read_json(inside: Inside, name: str, place: Path, limit: int = LIMIT) -> Any:
    """Return the JSON value in a file. Raises `InvalidDataset` if it cannot be read or parsed."""
    try:
        return json.loads(read_text(inside, name, place, limit))
    except (ValueError, RecursionError) as error:
        raise refused(place, f"{name} cannot be read ({error})") from error
