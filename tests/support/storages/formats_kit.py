"""Storage formats by the name of a path, for tests that treat all formats alike."""

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage
from tallyroll.storage.storages import DiskStorage

KINDS: dict[str, type[DiskStorage]] = {
    "rows": MemmapStorage,
    "rows.h5": H5Storage,
    "rows.zarr": ZarrStorage,
}
