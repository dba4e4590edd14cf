"""The call that stores rows counts the masks of their agents as the slow path does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchrl.data import Binary, Categorical, Unbounded

from tallyroll.collector import SyncCollector
from tallyroll.collector.batches.fast_collect import FastPath
from tallyroll.collector.envs import AgentFlags, Declares, Step, System
from tallyroll.collector.native.kernel import compiled
from tallyroll.storage import MemmapStorage, fast_paths, open_storage, verify

LANES, AGENTS, CHOICES = 3, 3, 4
KEYS = [("team", name) for name in ("observation", "mask", "action_mask")]


class Turns(System):
    """System whose agents act in turn, sometimes two of three; others have no legal action.

    Every observation and mask is a function of lane, episode and step.
    """

    def __init__(self, at_end: Any) -> None:
        of_agents = Unbounded((AGENTS, 1)), Binary(AGENTS, dtype=torch.bool)
        legal = Binary(shape=(AGENTS, CHOICES), dtype=torch.bool)
        self.declares = Declares(
            lanes=LANES,
            observation=dict(zip(KEYS, (*of_agents, legal), strict=True)),
            action={("team", "action"): Categorical(CHOICES, shape=(AGENTS,))},
            reward={("team", "reward"): Unbounded((AGENTS, 1))},
            at_end=at_end,
            groups={"team": AGENTS},
            turns=True,
        )
        self.episode, self.at = np.zeros((2, LANES), np.int64)
        self.over = np.zeros(LANES, np.bool_)

    def reset(self, lanes: Any, seeds: Any, **options: Any) -> list[NDArray[Any]]:
        """Begin the next episodes of lanes."""
        lanes = np.ones(LANES, np.bool_) if lanes is None else lanes
        self.episode[lanes] += 1
        self.at[lanes], self.over[lanes] = 0, False
        return self._seen()

    def step(self, action: Any, lanes: Any = None) -> Step:
        """Step every lane.

        An episode of lane 1 has five steps, and those of the others have two or three.
        """
        ended, resets = self.over.copy(), self.declares.has_reset_slots
        if resets and ended.any():
            self.reset(ended, None)
        elif ended.any():
            raise AssertionError("it was not reset")
        self.at[~ended] += 1
        self.over = ~ended & (self.at == [2, 5, 3])
        over, none = self.over.copy(), np.zeros(LANES, np.bool_)
        alive = np.zeros((LANES, AGENTS), np.bool_)
        paid = self._mask() * self.at[:, None] * 0.5
        flags = {"team": AgentFlags(alive | over[:, None], alive)}
        return Step(self._seen(), [paid], over, none, agents=flags)

    def _mask(self) -> NDArray[np.bool_]:
        turn = self.at[:, None] + np.arange(LANES)[:, None] + self.episode[:, None]
        mine = turn % AGENTS == np.arange(AGENTS)
        return np.asarray(mine | ((turn % 4 == 0) & (np.arange(AGENTS) == 0)))

    def _seen(self) -> list[NDArray[Any]]:
        mask = self._mask()
        legal = np.repeat(mask[..., None], CHOICES, -1)
        legal[..., 0] = False
        seen = np.stack([self.episode * 10 + self.at] * AGENTS, 1)[..., None]
        return [seen.astype(np.float32), mask, legal]


def collected(path: Path, at_end: Any, wants: list[int], **options: Any) -> tuple[Any, Any, int]:
    """Return the stored rows, the ledger, and the number of calls on the fast path."""
    at_once: list[bool] = []
    original = FastPath.store

    def store(self: FastPath, *given: Any) -> bool:
        at_once.append(original(self, *given))
        return at_once[-1]

    kwargs: dict[str, Any] = {"frames_per_batch": LANES, "total_frames": -1, "seed": 2, **options}
    with (
        patch.object(FastPath, "store", store),
        MemmapStorage(path) as storage,
        SyncCollector(Turns(at_end), None, storage=storage, **kwargs) as collector,
    ):
        stored = 0
        for want in wants:
            assert collector.collect(want) == want
            stored += want
            collector.ledger.check()
            living = int(storage[:]["team", "mask"].sum())
            assert (collector.ledger.stored, collector.ledger.agent_transitions) == (stored, living)
        ledger = collector.ledger.as_dict()
    assert not verify(path).findings
    with open_storage(path) as storage:
        return storage[:], ledger, sum(at_once)


@pytest.mark.parametrize("at_end", ["final", "reset_slot"])
@pytest.mark.parametrize("wants", [[LANES] * 40, [2, 4, 3, 7, 1, 5] * 7], ids=["whole", "parts"])
def test_the_call_that_stores_rows_counts_their_agents(
    at_end: str, wants: list[int], tmp_path: Path
) -> None:
    rows, ledger, at_once = collected(tmp_path / "fast", at_end, wants)
    with fast_paths.switched_off("fast-collect"):
        other, slow, never = collected(tmp_path / "slow", at_end, wants)
    assert never == 0
    assert at_once > len(wants) // 2 or compiled() is None
    assert ledger == slow
    assert (rows == other).all()
    assert 0 < ledger["agent_transitions"] < AGENTS * ledger["stored"]
    legal = rows["team", "action_mask"].gather(-1, rows["team", "action"][..., None])[..., 0]
    assert legal[rows["team", "mask"]].all(), "an agent that acts keeps to its mask"
