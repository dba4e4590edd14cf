"""Ask a server without credentials whether it redirects to another host.

obstore follows redirects, and sends the header ``x-amz-security-token`` to wherever they lead; it
has no option against that. So each kind of request is made once before, without credentials.
"""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

_REDIRECTS: Final = {301, 302, 303, 307, 308}
_PORTS: Final = {"http": 80, "https": 443}


class _NotFollowed(urllib.request.HTTPRedirectHandler):
    """Returns a redirect as the error that it is."""

    def redirect_request(self, *_: Any) -> None:
        return None


def redirected_host(method: str, url: str, timeout: float) -> str | None:
    """Return the other host (HOST:PORT) that a URL redirects to; None if it leads to none.

    None, too, where the server does not answer: the request that follows has its error.

    Args:
        method: the method of the request.
        url: an ``http://`` or ``https://`` URL.
        timeout: seconds.
    """
    opener = urllib.request.build_opener(_NotFollowed)
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
    """Return the host and the port of a URL."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or _PORTS.get(parts.scheme)}"
