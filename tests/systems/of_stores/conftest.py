"""The store that all tests of this folder have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from object_store_kit import Proxy, environment, store_and_proxy


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    """The way to a store, of which the environment of this process tells."""
    with store_and_proxy() as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(proxy.url).items():
            patch.setenv(name, value)
        yield proxy
