"""Ways to reach an object store, and what is kept of it; no credentials."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from tallyroll.storage.errors import InvalidAddress
from tallyroll.storage.ext.remote.address import HOW


@dataclass(frozen=True)
class S3Options:
    """A store that speaks S3, and how it is read. It holds no credentials, and can be pickled.

    What is None is taken from the environment (``AWS_ENDPOINT_URL``, ``AWS_REGION``), as are
    credentials; the library obstore reads it.

    Raises:
        InvalidAddress: the endpoint has credentials in it.
        ValueError: a number is not above 0.

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
    """The most bytes of blocks, as they are stored, that a reader keeps in memory."""
    disk_nbytes: int = 2**32
    """The most bytes of blocks that all readers together keep in ``folder``."""
    folder: str | os.PathLike[str] | None = None
    """A folder for blocks that several readers share, on this machine; None keeps none there."""
    block_nbytes: int = 2**18
    """The bytes of a block: the range of an object that a request asks for."""
    requests: int = 16
    """The most requests at a time."""
    timeout: float = 30.0
    """The most seconds that a request may take."""
    patience: float = 60.0
    """Seconds after which no request that failed is tried again."""

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
        """The server's URL, given or of the environment; None for the store of the region."""
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
                    "the endpoint (not repeated here) is no http://HOST:PORT or https://HOST, or "
                    f"has credentials or a query in it. {HOW}."
                )
        return found
