"""Addresses of datasets in object stores: ``s3://bucket/key``, without credentials."""

from __future__ import annotations

import os
import re
from pathlib import PosixPath
from typing import Any, Final

from tallyroll.storage.errors import InvalidAddress

_SCHEME: Final = "s3://"
_COLLAPSED: Final = re.compile(r"s3:/+", re.IGNORECASE)
_PATTERN: Final = re.compile(r"\*|\[!?.-.\]")
"""Brackets count as a pattern only with a range: an object may be named "run[1]"."""
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_LONGEST: Final = 1024
HOW: Final = (
    "Credentials come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
    "AWS_SESSION_TOKEN) or from the machine's role, never from an address"
)


class S3Path(PosixPath):
    """A location in a bucket. It is joined and compared as a path, and printed as an address."""

    __slots__ = ()

    def __str__(self) -> str:
        return _SCHEME + "/".join(self.parts[1:])

    @property
    def bucket(self) -> str:
        """The name of the bucket."""
        return self.parts[1]

    @property
    def key(self) -> str:
        """The part after the bucket; empty for the whole bucket."""
        return "/".join(self.parts[2:])


def s3_path(path: object) -> S3Path | None:
    """Return the location that an address names, or None for a path of a file system.

    Raises:
        InvalidAddress: the address contains credentials, or is invalid. The message repeats no part
            of the address, which may be a secret.
    """
    if isinstance(path, S3Path):
        return path
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or _COLLAPSED.match(text) is None:
        return None
    rest = _COLLAPSED.sub("", text, count=1)  # pathlib collapses two slashes into one
    bucket, _, key = rest.partition("/")
    if "@" in rest or "?" in rest or ":" in bucket:
        raise InvalidAddress(
            "the address (hidden here) seems to contain credentials or a query: expected "
            f"s3://BUCKET/KEY, without '@', '?', or ':' in the bucket's name. {HOW}."
        )
    if _PATTERN.search(rest):
        raise InvalidAddress(
            "the address contains a pattern, and Tallyroll does not match patterns in a store. "
            "Give the address of each dataset: open_storage([...]) joins several."
        )
    parts = [part for part in key.split("/") if part]
    if not _BUCKET.fullmatch(bucket) or {".", ".."} & {*parts} or len(key) > _LONGEST:
        raise InvalidAddress(
            "the address is not of the form s3://BUCKET/KEY. A bucket's name has 3 to 63 "
            f"lower-case letters, digits, dots and hyphens. A key has at most {_LONGEST} "
            "characters and no part '.' or '..'."
        )
    return S3Path("s3:", bucket, *parts)


def reopened_as(path: Any) -> str:
    """Return the path under which another process finds a dataset."""
    return str(path) if isinstance(path, S3Path) else os.path.abspath(path)
