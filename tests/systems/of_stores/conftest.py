"""Provide the object store for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from object_store_kit import Proxy, environment, store_and_proxy


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    """Return a proxy to a store, with the environment variables set for it."""
    with store_and_proxy() as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(proxy.url).items():
            patch.setenv(name, value)
        yield proxy
