"""Access to the objects below an address, with limits on time, retries and bytes.

This module is the only place that reads the errors of the library obstore. The texts of these
errors may contain requests, which may include a signature or a key. None of the errors is passed
on, as a text or as a cause.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, BinaryIO, Final, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from tallyroll.storage.errors import (
    CorruptStorage,
    MissingLibrary,
    ObjectChanged,
    ObjectStoreFailed,
)
from tallyroll.storage.ext.remote.address import HOW, S3Path
from tallyroll.storage.ext.remote.options import S3Options

_REDIRECTS: Final = {301, 302, 303, 307, 308}
_PORTS: Final = {"http": 80, "https": 443}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that reports a redirect as an error instead of following it."""

    def redirect_request(self, *_: Any) -> None:
        return None


def redirected_host(method: str, url: str, timeout: float) -> str | None:
    """Return the other host (HOST:PORT) that a URL redirects to, or None.

    The result is also None if the server does not answer. The next request then reports the error.

    Args:
        method: the method of the request.
        url: an ``http://`` or ``https://`` URL.
        timeout: the timeout in seconds.
    """
    opener = urllib.request.build_opener(_NoRedirects)
    request = urllib.request.Request(url, method=method)  # noqa: S310  S3Options checks the scheme
    with contextlib.suppress(OSError, ValueError):
        try:
            opener.open(request, timeout=timeout).close()
        except urllib.error.HTTPError as answer:
            with answer:
                location = answer.headers.get("Location")
                if answer.code in _REDIRECTS and location:
                    there = host_of(urljoin(url, location))
                    return None if there == host_of(url) else there
    return None


def host_of(url: str) -> str:
    """Return the host and port of a URL, as ``HOST:PORT``."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or _PORTS.get(parts.scheme)}"


_T = TypeVar("_T")
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
_MOST_TRIES: Final = 8
_LOOK_SECONDS: Final = 5.0
_MOST_OBJECTS: Final = 2**20
_PART_NBYTES: Final = 2**23
_STATUS: Final = re.compile(r"status(?: code)?: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_FINAL_STATUS: Final = {"301", "307", "400", "401", "403", "404", "405", "409", "416", "501"}
_SIGNS: Final = (
    ("TimedOut", "the store did not answer in time"),
    ("Timeout", "the store did not answer in time"),
    ("ConnectionRefused", "the connection was refused"),
    ("ConnectionReset", "the connection broke"),
    ("IncompleteMessage", "the connection broke"),
    ("dns error", "the host name is unknown"),
    ("ertificate", "the server's certificate is not trusted"),
    ("kind: Connect", "the connection failed"),
    ("169.254.169.254", "there are no credentials in the environment, and the machine has no role"),
    ("missing credentials", "there are no credentials"),
    ("body", "the answer was incomplete"),
)


@dataclass(frozen=True, slots=True)
class ListedObject:
    """The size and ETag of an object when it was listed."""

    nbytes: int
    etag: str | None


class Objects:
    """The objects below an address.

    An instance is thread-safe, but cannot be used in a forked child. Every call ends within the sum
    of the options ``patience`` and ``timeout``.

    Raises:
        MissingLibrary: the extra ``s3`` is not installed.
        InvalidAddress: the endpoint contains credentials.
    """

    def __init__(self, place: S3Path, options: S3Options) -> None:
        self.place, self.options = place, options
        try:
            import obstore
            import obstore.exceptions
            import obstore.store
        except ImportError as error:
            raise MissingLibrary(
                f'{place} needs obstore, which is not installed: pip install "tallyroll[s3]".'
            ) from error
        self._calls: Any = obstore
        self._process = os.getpid()
        self._looked = set[str]()
        self._turn = threading.Lock()
        self._url = url = options.url
        config: dict[str, Any] = {
            "endpoint": url,
            "aws_endpoint_url_s3": url,
            "region": options.region,
        }
        self._store = self._calls.store.S3Store(
            place.bucket,
            prefix=place.key or None,
            config={name: value for name, value in config.items() if value is not None},
            client_options={
                "allow_http": url is not None and url.startswith("http://"),
                "timeout": timedelta(seconds=options.timeout),
                "connect_timeout": timedelta(seconds=min(10.0, options.timeout)),
            },
            # Retries are counted in `_tried`, which also retries a body that is too short.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=options.timeout)},
        )

    @property
    def is_of_this_process(self) -> bool:
        """True if this process created the instance, False in a forked child."""
        return os.getpid() == self._process

    def require_own_process(self) -> None:
        """Raise `ObjectStoreFailed` in a forked child, which lacks the library's threads."""
        if not self.is_of_this_process:
            raise ObjectStoreFailed(
                f"{self.place} was opened before this process was forked, and the library's "
                "threads do not survive a fork. Open the dataset again in the child, or start the "
                "child with 'spawn'."
            )

    def listed(self) -> dict[str, ListedObject]:
        """Return all objects by their names below the address; the result may be empty."""

        def every() -> dict[str, ListedObject]:
            found: dict[str, ListedObject] = {}
            for page in self._calls.list(self._store):
                for each in page:
                    found[each["path"]] = ListedObject(each["size"], each["e_tag"])
                if len(found) > _MOST_OBJECTS:
                    raise CorruptStorage(
                        f"{self.place} has more than {_MOST_OBJECTS:,} objects, too many for a "
                        "dataset. Give the address of a dataset."
                    )
            return found

        return self._tried("list", "", every)

    def read(self, name: str, begin: int, stop: int, listed: ListedObject) -> bytes:
        """Read a range of bytes from an object.

        Raises:
            ObjectChanged: the object differs from the one that was listed.
            ObjectStoreFailed: the store does not return the bytes.
        """
        if begin >= stop:
            return b""

        def some() -> bytes:
            got = self._calls.get(self._store, name, options={"range": (begin, stop)})
            meta = got.meta
            if meta["size"] != listed.nbytes or listed.etag not in (None, meta["e_tag"]):
                raise ObjectChanged(
                    f"{self.place / name} was replaced while it was read: its size "
                    f"({listed.nbytes:,} bytes before, {meta['size']:,} now) or its content "
                    "differs. Open the dataset again."
                )
            content = bytes(got.bytes())
            if got.range != (begin, stop) or len(content) != stop - begin:
                raise _TooShort(f"the store returned {len(content)} of {stop - begin} bytes")
            return content

        try:
            return self._tried("read", name, some)
        except FileNotFoundError as error:
            raise ObjectChanged(
                f"{self.place / name} was removed while it was read. Open the dataset again."
            ) from error

    def note(self, name: str, key: str) -> str | None:
        """Return the attribute ``key`` that `put` stored with an object, or None."""
        found = self._tried(
            "read", name, lambda: self._calls.get(self._store, name, options={"head": True})
        )
        value: str | None = found.attributes.get(key)
        return value

    def put(self, name: str, content: BinaryIO | bytes, notes: dict[str, str]) -> None:
        """Write an object, completely or not at all."""

        def all_of_it() -> None:
            if not isinstance(content, bytes):
                content.seek(0)
            self._calls.put(
                self._store, name, content, attributes=notes, chunk_size=_PART_NBYTES,
                max_concurrency=4,
            )  # fmt: skip

        self._tried("write", name, all_of_it)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, one after another. Missing objects are not an error."""
        for name in names:
            self._tried("remove", name, partial(self._calls.delete, self._store, name))

    def _tried(self, verb: str, name: str, call: Callable[[], _T]) -> _T:
        """Return the result of ``call``, and retry it while a retry may help."""
        self.require_own_process()
        place, end = self.place / name, time.monotonic() + self.options.patience
        self._refuse_redirects(verb, name)
        wait = _FIRST_WAIT
        for tries in range(1, _MOST_TRIES + 1):
            missing = False
            try:
                return call()
            except FileNotFoundError:
                missing, why, final = True, "the object does not exist", True
            except _TooShort as error:
                why, final = str(error), False
            except (self._calls.exceptions.BaseError, OSError, ValueError) as error:
                why, final = _reason(error)
            # Raise outside of `except`, so that the library's error is not the context of ours.
            if missing:
                raise FileNotFoundError(f"{place} does not exist")
            if final or tries == _MOST_TRIES or time.monotonic() + wait > end:
                more = f" Tallyroll tried {tries} times." if tries > 1 else ""
                raise ObjectStoreFailed(
                    f"cannot {verb} {place}: {why}.{more} Check the endpoint, "
                    f"the region and the permissions. {HOW}."
                )
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, _LONGEST_WAIT)
        raise AssertionError

    def _refuse_redirects(self, verb: str, name: str) -> None:
        """Raise `ObjectStoreFailed` if the endpoint redirects this kind of request to another host.

        Without an endpoint, the store is Amazon's, which redirects only to its own hosts.
        """
        if self._url is None:
            return
        with self._turn:
            if verb in self._looked:
                return
            bucket = f"{self._url.rstrip('/')}/{quote(self.place.bucket)}"
            key = quote(f"{self.place.key}/{name}".strip("/"))
            url, method = f"{bucket}/{key}", "HEAD"
            if verb == "list":
                url, method = f"{bucket}?list-type=2&prefix={key}", "GET"
            there = redirected_host(method, url, min(_LOOK_SECONDS, self.options.timeout / 2))
            if there is not None:
                raise ObjectStoreFailed(
                    f"cannot {verb} {self.place / name}: "
                    f"{host_of(self._url)} redirects to {there}, and Tallyroll does not send "
                    "credentials to another host. Give the endpoint of the host that has the "
                    f"objects. {HOW}."
                )
            self._looked.add(verb)


class _TooShort(Exception):
    """Raised if the store returned fewer bytes than requested."""


def _reason(error: Exception) -> tuple[str, bool]:
    """Return the reason of a failed request in our own words, and True if a retry cannot help."""
    text = str(error)
    kind = type(error).__name__
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        said = f" ({code[1]})" if code else ""
        return f"the store answers with status {status[1]}{said}", status[1] in _FINAL_STATUS
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return "the store rejects these credentials", True
    for sign, words in _SIGNS:
        if sign in text:
            return words, words.startswith(("there are no", "the server's"))
    return f"obstore reports {kind}", kind in ("InvalidPathError", "NotSupportedError")
