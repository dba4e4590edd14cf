"""Hold storages whose columns are stored once to the contracts of all storages and readers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import Phase, settings
from once_kit import OnceStorage, OnceZarr
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, ZarrStorage
from tallyroll.storage.files.format_versions import ONCE_VERSION

from storage_contract import StorageContract
from storage_machine import RowsModel, StorageMachine


class TestOnceContract(StorageContract):
    storage_class = OnceStorage
    opened_class = MemmapStorage
    format_version = ONCE_VERSION


class TestOnceZarrContract(StorageContract):
    storage_class = OnceZarr
    opened_class = ZarrStorage
    holds_bfloat16 = False
    format_version = ONCE_VERSION


class OnceMachine(StorageMachine):
    storage_class = OnceStorage


class OnceZarrMachine(StorageMachine):
    storage_class = OnceZarr


class OnceRingMachine(StorageMachine):
    storage_class = OnceStorage
    max_size = 9


TestOnce = OnceMachine.TestCase
TestOnceRing = OnceRingMachine.TestCase
TestOnceZarr = OnceZarrMachine.TestCase
for case in (TestOnce, TestOnceRing, TestOnceZarr):
    case.settings = settings(
        max_examples=10,
        stateful_step_count=20,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )
del case  # otherwise pytest would run it again


def test_the_machine_has_columns_that_are_stored_once(tmp_path: Path) -> None:
    rows: TensorDict = RowsModel(0, 3).next_rows(4)
    with OnceStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        assert [each.key for each in storage.reader.once] == [("observation",)]
        assert (tmp_path / "rows" / "observation.frames").stat().st_size > 0
        np.testing.assert_array_equal(storage.column("observation"), rows["observation"])
