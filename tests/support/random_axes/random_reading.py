"""Compare slices, trajectories and n-step returns of a storage with a model for single rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import SliceSampler, TensorDictReplayBuffer

from tallyroll.storage import StorageError, TrajectorySliceSampler, n_step, open_storage
from tallyroll.storage.errors import NoSlices

Key = tuple[str, ...]


class Model:
    """Rows by trajectory, in plain Python."""

    def __init__(self, rows: TensorDictBase) -> None:
        self.rows = rows
        self.ids = rows["collector", "traj_ids"].tolist()
        self.steps = rows["collector", "step"].tolist()
        self.at = {pair: row for row, pair in enumerate(zip(self.ids, self.steps, strict=True))}
        flags = rows["next", "terminated"] | rows["next", "truncated"]
        self.ended = flags.reshape(len(rows)).tolist()

    def following(self, row: int) -> int | None:
        """Return the row of the next step, or None if it does not exist."""
        if self.ended[row]:
            return None
        return self.at.get((self.ids[row], self.steps[row] + 1))

    def chain(self, row: int, n: int) -> list[int]:
        """Return up to ``n`` successive rows, starting with ``row``."""
        found = [row]
        while len(found) < n and (following := self.following(found[-1])) is not None:
            found.append(following)
        return found

    def parts(self, key: Key, chain: list[int]) -> list[tuple[tuple[int, ...], list[int]]]:
        """Return the parts of a row's values in a column, and the rows of ``chain`` for each.

        An agent's values use rows until the agent ends by itself.
        """
        if key[:2] != ("next", "agents"):
            return [((), chain)]
        group = self.rows["next", "agents"]
        ended = (group["terminated"] | group["truncated"])[..., 0]
        found = []
        for agent in range(ended.shape[1]):
            ends = [place for place, row in enumerate(chain) if bool(ended[row, agent])]
            found.append(((agent,), chain[: ends[0] + 1] if ends else chain))
        return found

    def starts(self, length: int) -> int:
        """Return the number of slices of that length."""
        return sum(len(self.chain(row, length)) == length for row in range(len(self.ids)))


def wrong_in_reading(source: Path, stored: TensorDictBase, number: int) -> list[str]:
    """Return the faults in reads of ``source``, whose rows in their order are ``stored``."""
    if not len(stored):
        return []
    rng, model, found = np.random.default_rng([19, number]), Model(stored), []
    with open_storage(source) as storage:
        order = storage.index_of(np.array(storage.span, np.int64))
        found += _n_steps(storage, model, order, rng)
        found += _trajectories(storage, model, rng)
        found += _slices(storage, model, rng)
        if not storage.ring:
            found += _samplers(storage, model, rng)
    return found


def _n_steps(storage: Any, model: Model, order: Any, rng: np.random.Generator) -> list[str]:
    n, gamma = int(rng.integers(1, 6)), float(rng.choice([1.0, 0.9, 0.5]))
    some = rng.integers(len(model.ids), size=12)
    try:
        found = n_step(storage, order[some], n=n, gamma=gamma)
    except StorageError as error:
        return [f"n_step: {error}"]
    wrong = []
    for place, row in enumerate(some.tolist()):
        chain = model.chain(row, n)
        if int(found["steps_to_next_obs"][place]) != len(chain):
            return [f"n_step: {found['steps_to_next_obs'][place]} steps, not {len(chain)}"]
        for key, leaf in model.rows.items(True, True):
            own = key if isinstance(key, tuple) else (key,)
            for at, used in model.parts(own, chain):
                mine = found[own][place][at]
                if not _is_n_step(mine, leaf[used][:, *at] if at else leaf[used], own, gamma):
                    wrong.append(f"n_step: another {own}")
    return sorted(set(wrong))


def _is_n_step(mine: torch.Tensor, values: torch.Tensor, key: Key, gamma: float) -> bool:
    """Return whether ``mine`` is the n-step result of the ``values`` of the used rows."""
    if key[0] == "next" and key[-1] == "reward":
        weights = gamma ** torch.arange(len(values), dtype=torch.float64)
        total = (values.double() * weights.reshape(-1, *[1] * (values.ndim - 1))).sum(0)
        return torch.allclose(mine.double(), total, rtol=1e-6)
    last = key[0] == "next" or key == ("collector", "next_valid")
    return _same(mine, values[-1 if last else 0])


def _trajectories(storage: Any, model: Model, rng: np.random.Generator) -> list[str]:
    wrong = []
    if sorted(storage.trajectories.ids.tolist()) != sorted(set(model.ids)):
        return [f"trajectories: ids {storage.trajectories.ids.tolist()[:9]}"]
    for id in rng.choice(sorted(set(model.ids)), 3).tolist():
        rows = [row for row, each in enumerate(model.ids) if each == id]
        rows.sort(key=model.steps.__getitem__)
        mine = storage.trajectories[id]
        if len(mine) != len(rows):
            return [f"trajectory {id}: {len(mine)} rows, not {len(rows)}"]
        wrong += [
            f"trajectory {id}: another {key}"
            for key, leaf in model.rows.items(True, True)
            if not _same(mine[key], leaf[rows])
        ]
    return wrong


def _slices(storage: Any, model: Model, rng: np.random.Generator) -> list[str]:
    length = int(rng.integers(1, 6))
    try:
        drawn = storage.trajectories.sample_slices(5, length)
    except NoSlices:
        return [f"no slices of {length}"] if model.starts(length) else []
    return _wrong_slices("sample_slices", drawn, model)


def _samplers(storage: Any, model: Model, rng: np.random.Generator) -> list[str]:
    length = int(rng.integers(1, 6))
    if not model.starts(length):
        return []
    own = TensorDictReplayBuffer(
        storage=storage, sampler=TrajectorySliceSampler(length), batch_size=4 * length
    )
    wrong = _wrong_slices("TrajectorySliceSampler", own.sample().reshape(4, length), model)
    theirs = SliceSampler(slice_len=length, traj_key=("collector", "traj_ids"))
    buffer = TensorDictReplayBuffer(storage=storage, sampler=theirs, batch_size=4 * length)
    try:
        drawn = buffer.sample().reshape(4, length)
    except RuntimeError:  # rows in batch order may have no slice of this length
        return wrong
    return wrong + _wrong_slices("SliceSampler", drawn, model, marks=False)


def _wrong_slices(
    what: str, drawn: TensorDictBase, model: Model, *, marks: bool = True
) -> list[str]:
    """Check that each slice is a chain of the model, and that its last row is done."""
    for each in drawn.unbind(0):
        first = int(each["collector", "traj_ids"][0]), int(each["collector", "step"][0])
        if first not in model.at:
            return [f"{what}: no row has the id and step {first}"]
        chain = model.chain(model.at[first], len(each))
        if len(chain) != len(each):
            return [f"{what}: a slice of {len(each)} rows where {len(chain)} follow one another"]
        for key, leaf in model.rows.items(True, True):
            wanted = leaf[chain]
            name = key if isinstance(key, str) else key[-1]
            if name == "done" or (name == "truncated" and not marks):
                wanted, mine = wanted[:-1], each[key][:-1]
            elif name == "is_init":
                wanted, mine = wanted[1:], each[key][1:]
            else:
                mine = each[key]
            if not _same(mine, wanted):
                return [f"{what}: another {key}"]
        if marks and not bool(each["next", "done"][-1].all()):
            return [f"{what}: the last row is not done"]
    return []


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    mine, wanted = one.contiguous().numpy(), other.contiguous().numpy()
    return mine.dtype == wanted.dtype and mine.tobytes() == wanted.tobytes()
