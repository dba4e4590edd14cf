"""Storages that all tests of replays read, and none changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from replay_kit import KINDS, collect


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the path of a storage of one of `KINDS`, which is made once."""
    folder, made = tmp_path_factory.mktemp("replayed"), dict[str, Path]()

    def path_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = collect(folder / kind.replace(" ", "-"), **KINDS[kind])
        return made[kind]

    return path_of
