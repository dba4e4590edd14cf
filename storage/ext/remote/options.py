"""Options of object stores: connection, caches and limits. They hold no credentials."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from tallyroll.storage.errors import InvalidAddress
from tallyroll.storage.ext.remote.address import HOW


@dataclass(frozen=True)
class S3Options:
    """Options of an S3 store and its reader. They hold no credentials and can be pickled.

    The library obstore takes the credentials from the environment or from the machine's role. The
    endpoint (``AWS_ENDPOINT_URL``) and the region (``AWS_REGION``) come from the environment if
    they are None.

    Raises:
        InvalidAddress: the endpoint contains credentials.
        ValueError: ``memory_nbytes`` or ``disk_nbytes`` is negative, or another number is not
            above 0.

    Examples:
        >>> from tallyroll.storage import S3Options
        >>> S3Options(endpoint="http://127.0.0.1:9000", memory_nbytes=2**26).patience
        60.0
    """

    endpoint: str | None = None
    """The URL of the server."""
    region: str | None = None
    """The region of the bucket."""
    memory_nbytes: int = 2**27
    """The maximum size in bytes of the stored blocks that a reader keeps in memory."""
    disk_nbytes: int = 2**32
    """The maximum size in bytes of the blocks that all readers together keep in ``folder``."""
    folder: str | os.PathLike[str] | None = None
    """A local folder of blocks that several readers share. None keeps no blocks on disk."""
    block_nbytes: int = 2**18
    """The size of a block in bytes: the range of an object that a request reads."""
    requests: int = 16
    """The maximum number of concurrent requests."""
    timeout: float = 30.0
    """The timeout of a request in seconds."""
    patience: float = 60.0
    """The time in seconds after which failed requests are not retried."""

    def __post_init__(self) -> None:
        for name in ("memory_nbytes", "disk_nbytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {getattr(self, name)!r}.")
        for name in ("block_nbytes", "requests", "timeout", "patience"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a number above 0, got {getattr(self, name)!r}.")
        _ = self.url

    @property
    def url(self) -> str | None:
        """The URL of the server, from `endpoint` or the environment.

        None selects Amazon's store of the region.
        """
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
        found = self.endpoint or next((os.environ[n] for n in names if os.environ.get(n)), None)
        if found is not None:
            try:
                parts = urlsplit(found)
                plain = not (parts.username or parts.password or parts.query or "@" in found)
            except ValueError:
                plain = False
            if not plain or parts.scheme not in ("http", "https") or not parts.hostname:
                raise InvalidAddress(
                    "endpoint (its value is hidden, because it may contain credentials): expected "
                    f"http://HOST:PORT or https://HOST, without credentials or a query. {HOW}."
                )
        return found
