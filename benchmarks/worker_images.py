"""Images from an environment to a ring on disk: Tallyroll's collectors, and bare copies."""

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
    """So many lanes and frames a worker."""
    return Case("images", lanes=workers * lanes, native=False, frames=workers * frames)


class TwoCopies(Contender):
    """Each image is copied into a slab, and a slab's rows into memory maps of a ring of files.

    In the slab an observation and the one that was next a step before are the same memory, in
    files they are two columns: an image is written once there and twice here. The other columns,
    which are small, are always the same.
    """

    name = "copies, one process (floor)"

    def __init__(self, case: Case, scratch: Path) -> None:
        """Make slab and files."""
        self.case = case
        self.images = images(case.lanes)
        self.slab = np.ones((case.block + 1, case.lanes, *IMAGE), np.uint8)
        rows = self.rows()
        self.store = Floor(Spec(rows, rows, RING_BATCHES * case.frames, scratch))
        self.store.fill()
        self.given = self.store.given(rows)

    def rows(self) -> Rows:
        """The rows of a batch; their observations are views of the slab."""
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
        """Return one batch."""
        return Tally(self.case.frames, self.case.block)

    def close(self) -> None:
        """Let go of files."""
        self.store.close()


def contenders(work: Work, workers: int) -> list[Contender]:
    """Return the copies, and one process and several that yield what they store, or store only."""
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
    # The rings have gone round once before anything is timed: pages are not new any more.
    for contender in found:
        for _ in range(RING_BATCHES):
            contender.advance()
            contender.tally()
    return found


def collecting(
    work: Work, workers: int, mode: str, word: str, options: dict[str, Any]
) -> Contender:
    """Tallyroll's workers, each with its share of the lanes."""
    path = work.scratch / f"rows-{mode}{word}"
    make = partial(Images, work.case.lanes // workers)
    started = workers_collecting(work, None, workers, mode, path, make, **options)
    return named(f"{name_of(workers, mode)}{word}", started)


def named(name: str, contender: Contender) -> Contender:
    """The contender under another name: that they write into a ring is true of all here."""
    contender.name = name
    return contender
