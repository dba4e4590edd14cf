"""Images from an environment to a ring on disk, by Tallyroll's collectors and by bare copies."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from common import Contender, Tally
from loops import Case, Tallyroll, Work
from processes import Apart
from storage_work import Floor, Rows, Spec, image_rows
from worker_envs import IMAGE, IMAGES, Images, images
from worker_ours import AHEAD, MODES, name_of, workers_collecting

if TYPE_CHECKING:
    from pathlib import Path

RING_BATCHES = 4


def image_case(workers: int, lanes: int, frames: int) -> Case:
    """Return a case with this number of lanes and frames per worker."""
    return Case("images", lanes=workers * lanes, native=False, frames=workers * frames)


class TwoCopies(Contender):
    """Copies each image into a slab, and the slab's rows into memory maps of a ring of files.

    In the slab, an observation and the next observation of the previous step share memory. In the
    files they are two columns. An image is therefore written once there and twice here. The other
    columns, which are small, are constant.
    """

    name = "copies, one process (floor)"

    def __init__(self, case: Case, scratch: Path) -> None:
        """Create the slab and the files."""
        self.case = case
        self.images = images(case.lanes)
        self.slab = np.ones((case.block + 1, case.lanes, *IMAGE), np.uint8)
        rows = self.rows()
        self.store = Floor(Spec(rows, rows, RING_BATCHES * case.frames, scratch))
        self.store.fill()
        self.given = self.store.given(rows)

    def rows(self) -> Rows:
        """The rows of a batch. Their observations are views of the slab."""
        rows = image_rows(self.case.frames)
        for key, part in ((("observation",), slice(-1)), (("next", "observation"), slice(1, None))):
            rows[key] = self.slab[part].reshape(self.case.frames, *IMAGE)
        return rows

    def advance(self) -> None:
        """Copy a batch."""
        slab = self.slab
        slab[0] = slab[-1]
        for slot in range(self.case.block):
            slab[slot + 1] = self.images[slot % IMAGES]
        self.store.write(self.given)

    def tally(self) -> Tally:
        """Return the work of one batch."""
        return Tally(self.case.frames, self.case.block)

    def close(self) -> None:
        """Close the files."""
        self.store.close()


def contenders(work: Work, workers: int) -> list[Contender]:
    """Return the bare copies, and collectors of one process and of several workers.

    There are collectors that yield the rows they store, and others that only store them.
    """
    floor = work.scratch / "floor"
    floor.mkdir()
    found: list[Contender] = [TwoCopies(work.case, floor)]
    for yields, word in ((True, ""), (False, ", yield_large=False")):
        path = work.scratch / f"rows-{yields}"
        options = {"ring": RING_BATCHES, "yield_large": yields}
        images = Images(work.case.lanes)
        found.append(named(f"tallyroll{word}", Tallyroll(work, None, path, images, **options)))
        for mode in MODES:
            found.append(
                Apart(partial(collecting, work, workers, mode, word, options), AHEAD[mode])
            )
    # Let the rings wrap around once before timing, so that all of their pages have been touched.
    for contender in found:
        for _ in range(RING_BATCHES):
            contender.advance()
            contender.tally()
    return found


def collecting(
    work: Work, workers: int, mode: str, word: str, options: dict[str, Any]
) -> Contender:
    """Return Tallyroll's workers, each with its share of the lanes."""
    path = work.scratch / f"rows-{mode}{word}"
    make = partial(Images, work.case.lanes // workers)
    started = workers_collecting(work, None, workers, mode, path, make, **options)
    return named(f"{name_of(workers, mode)}{word}", started)


def named(name: str, contender: Contender) -> Contender:
    """Rename the contender to a name without the ring, because all contenders here have one."""
    contender.name = name
    return contender
