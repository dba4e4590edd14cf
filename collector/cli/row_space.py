"""Disk space that the rows of a run will take, and how to make large rows smaller."""

from dataclasses import dataclass
from typing import Any, Self

from rich.filesize import decimal

from tallyroll.collector.batches.stored.storing_plan import stored_size, whole_images
from tallyroll.storage.rows.keys import format_key
from tallyroll.storage.storages import DiskStorage, MemmapStorage, ZarrStorage

LARGE_NBYTES = 10**9
"""Disk space of a run from which a hint about images is shown."""


@dataclass(frozen=True)
class RowSpace:
    """Disk space of the rows of a run."""

    row_nbytes: int
    rows: int | None
    """Number of rows that the run will add; None if the budget does not give it."""
    ring: int
    """Rows of the full ring; 0 if the storage keeps every row."""
    once: tuple[str, ...]
    """Columns whose frames are stored once."""
    measured: bool
    """True if the bytes a row were measured, False if frames stored once may shrink."""
    shards_store_once: bool
    """True if each shard of the run stores frames once, in a size that is not known yet."""
    images: tuple[str, ...]
    """Columns of images that are stored whole."""
    image_nbytes: int
    """Bytes of these images in a row."""
    can_store_once: bool
    """True if ``--once yes`` applies to the format of the storage."""

    @classmethod
    def of(cls, storage: DiskStorage, rows: int | None) -> Self:
        """Return the space for ``rows`` rows of a storage whose columns are known."""
        size, schema = stored_size(storage), storage.schema
        images = whole_images(storage)
        return cls(
            row_nbytes=schema.row_nbytes if size is None else size.row_nbytes,
            rows=rows,
            ring=storage.ring or 0,
            once=() if size is None else tuple(map(format_key, size.once)),
            measured=size is None or not size.once or size.measured,
            shards_store_once=storage.sharded and storage.stores_once,
            images=tuple(map(format_key, images)),
            image_nbytes=sum(each.row_nbytes for each in schema.columns if each.key in images),
            can_store_once=isinstance(storage, MemmapStorage | ZarrStorage),
        )

    @property
    def most_rows(self) -> int | None:
        """Rows that exist at the same time; None if the budget does not give their number."""
        return min(filter(None, (self.ring, self.rows)), default=None)

    @property
    def takes(self) -> str:
        """Describe the space."""
        said, each = f"{self.row_nbytes:,} bytes a row", self.row_nbytes
        if self.ring:
            said = (
                f"a full ring of {self.ring:,} rows of {each:,} bytes: {decimal(self.ring * each)}"
            )
        elif self.rows is not None:
            said = f"{self.rows:,} rows of {each:,} bytes: {decimal(self.rows * each)}"
        frames = f"frames of {', '.join(self.once)} are stored once"
        if self.once and self.measured:
            said = f"{said}, because {frames}"
        elif self.once:
            later = "which `tallyroll inspect` measures after the first rows"
            said = f"{said} before compression ({frames} and compressed, {later})"
        elif self.shards_store_once:
            said = f"{said} at most, because the shards store frames once and compress them"
        return said

    @property
    def hint(self) -> str:
        """Hint on how to make rows smaller; "" if they are small or have no images."""
        if not self.images or (self.most_rows or 0) * self.row_nbytes < LARGE_NBYTES:
            return ""
        once = "--once yes stores each frame once, " if self.can_store_once else ""
        return (
            f"images ({', '.join(self.images)}) take {self.image_nbytes:,} of {self.row_nbytes:,} "
            f"bytes a row, {decimal((self.most_rows or 0) * self.image_nbytes)} in all. {once}"
            "--exclude KEY leaves columns out, and `tallyroll pack` compresses rows after the run"
        )

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "row_bytes": self.row_nbytes,
            "rows": self.rows,
            "bytes": None if self.rows is None else (self.most_rows or 0) * self.row_nbytes,
            "ring": self.ring or None,
            "full_ring_bytes": self.ring * self.row_nbytes if self.ring else None,
            "once": [*self.once],
            "measured": self.measured,
            "images": [*self.images],
            "hint": self.hint or None,
        }
