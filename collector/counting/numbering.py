"""Numbering: trajectory ids, steps, returns and lengths of episodes, and all seeds of a run. Pure.

`number_slot` and `number` sum the rewards of an episode; ``number`` in ``native/_number.c`` repeats
them. `RunLoop.discard` adds the rewards of discarded transitions. If a row has several rewards,
`RowSource._rewards` and `SlabTable._reward` add them up first.

The first id of a run is `StoredRun.next_id` (with shards, rounded up by `first_id` in `shards.py`);
`RunLoop._begin_run` passes it to `LaneState.begin_at`. Rows that no collector made get ids from
`with_new_ids` (``storage/stores/input_rows.py``, ``ids="renumber"``) and `TrajectoryNumbering`
(``storage/ext/exchange/numbering.py``, imports). Unions and merges add offsets
(`UnionReader.ids_moved_by`), and `repair` gives new ids to parts of trajectories (`_renumbered` in
``storage/ext/repair/ours.py``).
"""

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.transitions import Mask
from tallyroll.storage.trajectories.lane_stretches import LaneOrder

Int64 = NDArray[np.int64]

SEED_MASK = 0x7FFF_FFFF
RESETS_DRAWN = 64
"""Number of reset seeds of a lane that are drawn together."""


def lane_seed(seed: int, lane: int, incarnation: int) -> int:
    """Return the seed of one lane's environment for one start of the lane.

    The seed does not depend on other lanes, or on how lanes are spread over processes.
    ``incarnation`` counts the starts of the lane, so a restart never repeats data. Source:
    ``numpy.random.SeedSequence`` with ``spawn_key``.
    """
    return next(_seeds(seed, lane, incarnation))


def lane_seeds(seed: int, lanes: int, incarnation: int) -> list[int]:
    """Return distinct seeds of lanes 0 to ``lanes - 1`` for one start.

    Each seed is the lane's :func:`lane_seed`. If a lower lane already has this seed, the lane gets
    the next word of its own sequence that no lower lane has. So a seed does not depend on higher
    lanes.
    """
    taken: dict[int, None] = {}
    for lane in range(lanes):
        free = (word for word in _seeds(seed, lane, incarnation) if word not in taken)
        taken[next(free)] = None
    return list(taken)


def _seeds(seed: int, lane: int, incarnation: int) -> Iterator[int]:
    """Yield the words of the lane's sequence, cut to 31 bits, which every environment accepts."""
    sequence = np.random.SeedSequence(seed, spawn_key=(lane, incarnation))
    for words in itertools.count(1):
        yield int(sequence.generate_state(words, np.uint32)[-1]) & SEED_MASK


def reset_seeds(seed: int, lane: int, incarnation: int, block: int) -> Iterator[int]:
    """Return the seeds of `RESETS_DRAWN` resets of a lane in one start.

    The seed of the lane's k-th trajectory is in the block ``k // RESETS_DRAWN``.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(lane, incarnation, block))
    words = sequence.generate_state(RESETS_DRAWN, np.uint32) & np.uint32(SEED_MASK)
    return iter(array("q", words.tolist()))


def driver_seed(seed: int, incarnation: int, worker: int | None = None) -> np.random.SeedSequence:
    """Return the seed sequence of a process's own generators (random actions, torch).

    ``worker`` is the number of a worker, or None for the collecting process.
    """
    key = (0xFFFF_FFFF, incarnation) if worker is None else (0xFFFF_FFFF, incarnation, worker)
    return np.random.SeedSequence(seed, spawn_key=key)


def policy_seed(
    seed: int, incarnation: int, policy: int, worker: int | None = None
) -> np.random.SeedSequence:
    """Return the seed sequence of one of several policies, independent of the other policies.

    ``worker`` is the number of a worker with its own generator; None if all workers draw the same
    numbers.
    """
    key = (0xFFFF_FFFE, incarnation, policy, *(() if worker is None else (worker,)))
    return np.random.SeedSequence(seed, spawn_key=key)


@dataclass
class LaneState:
    """The state of each lane between two blocks of rows. All arrays are ``[lane]``.

    Lane ``l``'s ``k``-th trajectory has the id ``base + k * lanes + l``.
    """

    lanes: int
    """Number of lanes of the run, and the distance between the ids of a lane's trajectories."""
    traj_id: Int64
    """Id of the trajectory to which the lane's next row belongs."""
    step: Int64
    """Step of the lane's next row within that trajectory; 0 if the trajectory has no row yet."""
    returns: NDArray[np.float64]
    """Sum of the rewards of the current episode so far, including discarded transitions."""
    first_version: Int64
    """Policy version of the episode's first row; meaningless if ``length`` is 0."""
    length: Int64
    """Number of transitions of the current episode so far, including discarded ones."""
    first_id: int = 0
    """The lowest id that a trajectory may have."""

    @classmethod
    def fresh(cls, lanes: int, base: int = 0) -> "LaneState":
        """Return the state of ``lanes`` lanes before their first row."""
        zeros = np.zeros(lanes, np.int64)
        ids = base + np.arange(lanes)
        return cls(lanes, ids, zeros, np.zeros(lanes), zeros.copy(), zeros.copy(), base)

    def part(self, first: int, lanes: int) -> "LaneState":
        """Return views of the state of ``lanes`` adjacent lanes from ``first`` on."""
        if lanes == len(self.step):
            return self
        own = slice(first, first + lanes)
        return LaneState(
            self.lanes,
            self.traj_id[own],
            self.step[own],
            self.returns[own],
            self.first_version[own],
            self.length[own],
            self.first_id,
        )

    def begin_at(self, base: int) -> None:
        """Before any row, raise the ids of trajectories so that they begin at ``base`` or above."""
        missing = max(0, base - self.first_id)
        self.traj_id += missing
        self.first_id += missing

    @property
    def open(self) -> NDArray[np.bool_]:
        """Mask of lanes: True if a lane is within a trajectory that has rows."""
        return self.step > 0

    def cut(self, lanes: NDArray[np.bool_]) -> int:
        """Leave the open trajectories of ``lanes`` unfinished; return their number."""
        cut = lanes & self.open
        self.traj_id[cut] += self.lanes
        self.step[cut] = 0
        return int(cut.sum())

    def interrupt(self, lanes: NDArray[np.bool_]) -> int:
        """Leave the trajectories of ``lanes`` unfinished, with or without rows.

        A lane skips an id if it lost the first transitions of a trajectory, or was reset before
        them. Consecutive ids mean that the lane continued from one trajectory to the next.

        Returns:
            The number of trajectories with rows that were left unfinished.
        """
        cut = int((lanes & self.open).sum())
        self.traj_id[lanes] += self.lanes
        self.step[lanes] = 0
        return cut

    def skip_to(self, other: "LaneState", lanes: NDArray[np.bool_]) -> None:
        """Begin trajectories in ``lanes``, with ids after all those that ``other`` has used.

        None of these lanes may be in the middle of a trajectory. Some ids remain without rows.
        """
        before = lanes & (self.traj_id < other.traj_id + (other.step > 0))
        self.traj_id[before] = (other.traj_id + self.lanes * (other.step > 0))[before]

    def restart(self, lanes: NDArray[np.bool_]) -> None:
        """Begin new episodes in ``lanes``, whose environments are reset."""
        self.returns[lanes] = 0.0
        self.length[lanes] = 0

    @property
    def next_id(self) -> int:
        """An id larger than any id that has been used."""
        return int((self.traj_id - np.arange(self.lanes)).max()) + self.lanes


class EndedEpisodes(NamedTuple):
    """Episodes that ended, one entry each."""

    at: NDArray[np.intp]
    """Indices of the last rows of the episodes."""
    returns: NDArray[np.float64]
    lengths: Int64
    first_versions: Int64


@dataclass(frozen=True)
class Numbers:
    """Trajectory ids and steps ``[row]`` of a block, and the episodes that began or ended in it."""

    traj_ids: Int64
    step: Int64
    begun: NDArray[np.intp]
    """First rows of episodes."""
    ended: EndedEpisodes


def number_slot(
    state: LaneState,
    taken: Mask | None,
    ended: Mask,
    reward: NDArray[Any],
    version: Int64,
    traj_ids: Int64,
    step: Int64,
) -> tuple[Mask | None, EndedEpisodes | None]:
    """Number the rows of one slot, and move ``state`` past them. All arrays are ``[lane]``.

    Args:
        state: the trajectory and step of each lane; updated in place.
        taken: marks of the lanes whose slot is a row; None means all lanes.
        ended: marks of the lanes that terminated or truncated.
        reward: one number per lane.
        version: the policy version of each lane.
        traj_ids, step: output arrays. The entries of lanes without a row have no meaning.

    Returns:
        The mask of lanes that began an episode, and the episodes that ended, whose ``at`` holds
        their lanes. Each is None if there are none.
    """
    next_step, length = state.step, state.length
    traj_ids[:] = state.traj_id
    step[:] = next_step
    begins: Mask = length == 0
    if taken is not None:
        begins &= taken
    begun = begins if np.count_nonzero(begins) else None
    if begun is not None:
        np.copyto(state.first_version, version, where=begins)
    rows = 1 if taken is None else taken
    next_step += rows
    length += rows
    if taken is not None:
        ended = ended & taken
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards of both signs
        np.add(state.returns, reward, out=state.returns, where=True if taken is None else taken)
    if not np.count_nonzero(ended):
        return begun, None
    at = ended.nonzero()[0]
    over = EndedEpisodes(at, state.returns[at], state.length[at], state.first_version[at])
    state.traj_id[at] += state.lanes
    state.step[at] = 0
    state.returns[at] = 0.0
    state.length[at] = 0
    return begun, over


def number(
    state: LaneState,
    lane: NDArray[np.int32],
    ended: NDArray[np.bool_],
    reward: NDArray[np.float64],
    version: Int64,
) -> Numbers:
    """Number a block of rows, which are ordered by lane, and move ``state`` past it.

    Args:
        state: the trajectory and step of each lane before the block; updated in place.
        lane: the lane of each row ``[row]``, ascending.
        ended: marks ``[row]`` of rows that terminated or truncated.
        reward: the reward of each row ``[row]``.
        version: the policy version of each row ``[row]``.
    """
    rows = len(lane)
    if not rows:
        none = np.zeros(0, np.int64)
        return Numbers(none, none, none, EndedEpisodes(none, np.zeros(0), none, none))
    # A part of a trajectory begins at a lane's first row, and after each row that ended an episode.
    begins = np.empty(rows, np.bool_)
    begins[1:] = ended[:-1]
    row = np.arange(rows)
    parts = LaneOrder.of(row, lane).stretches(begins)
    # From here on, arrays have one entry per part: the rows of one trajectory in this block.
    begin, size, own = parts.at, parts.length, parts.lane
    # Parts are counted within their lane; part 0 continues the trajectory of earlier blocks.
    ordinal = np.arange(len(begin)) - np.repeat(parts.first, parts.last - parts.first + 1)
    carries_on = ordinal == 0
    closes = ended[parts.until]
    # Sums over a part; the first part of a lane adds the sums of earlier blocks.
    ids = state.traj_id[own] + ordinal * state.lanes
    offset = np.where(carries_on, state.step[own], 0)
    with np.errstate(invalid="ignore", over="ignore"):  # infinite rewards of both signs
        returns = np.add.reduceat(reward, begin) + np.where(carries_on, state.returns[own], 0.0)
    before = np.where(carries_on, state.length[own], 0)
    lengths = size + before
    first_version = np.where(before > 0, state.first_version[own], version[begin])
    numbers = Numbers(
        np.repeat(ids, size),
        row + np.repeat(offset - begin, size),
        begin[before == 0],
        EndedEpisodes(parts.until[closes], returns[closes], lengths[closes], first_version[closes]),
    )
    # The next block continues the last part of each lane, unless that part ended.
    parts.keep(ids + closes * state.lanes, state.traj_id)
    parts.keep(np.where(closes, 0, offset + size), state.step)
    parts.keep(np.where(closes, 0.0, returns), state.returns)
    parts.keep(np.where(closes, 0, lengths), state.length)
    parts.keep(first_version, state.first_version)
    return numbers
