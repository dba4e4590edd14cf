"""Storages that the tests of replays share and do not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from replay_kit import KINDS, collect


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that collects a storage of one of `KINDS` once and returns its path."""
    folder, made = tmp_path_factory.mktemp("replayed"), dict[str, Path]()

    def path_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = collect(folder / kind.replace(" ", "-"), **KINDS[kind])
        return made[kind]

    return path_of
