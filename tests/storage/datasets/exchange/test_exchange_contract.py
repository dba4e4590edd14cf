"""Run the exchange contract for the formats whose libraries are small."""

from __future__ import annotations

import pytest

from tallyroll.storage.testing import ExchangeContract


class TestNpz(ExchangeContract):
    kind, suffix = "npz", ".npz"


class TestParquet(ExchangeContract):
    kind, suffix, libraries = "parquet", ".parquet", ("pyarrow",)

    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("pyarrow")


class TestHf(ExchangeContract):
    kind, libraries = "hf", ("pyarrow",)

    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("pyarrow")


class TestD4rl(ExchangeContract):
    kind, suffix, libraries = "d4rl", ".hdf5", ("h5py",)


class TestTorchrl(ExchangeContract):
    kind = "torchrl"


class TestRlds(ExchangeContract):
    kind, libraries = "rlds", ("google.protobuf.descriptor_pb2", "google_crc32c")

    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("google.protobuf")
        pytest.importorskip("google_crc32c")


class TestLeRobot(ExchangeContract):
    kind, libraries = "lerobot", ("pyarrow",)

    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("pyarrow")
