"""Contract tests of the rows that a collector makes of a system."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.stepping.arrays import as_flags, as_tensor
from tallyroll.collector.envs.system import Step
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.ext.testing.hand import Hand, Values
from tallyroll.collector.ext.testing.system_case import SEED, SystemCase
from tallyroll.collector.sync import SyncCollector
from tallyroll.storage.rows.keys import (
    LANE,
    NEXT,
    NEXT_VALID,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    format_key,
)


class CollectedContract(SystemCase):
    """Tests that collected rows equal the results of another instance that is stepped by hand."""

    def env(self, seeds: Sequence[int] | None = None) -> SystemEnv:
        """Return the environment that a collector drives."""
        seeds = seeds or lane_seeds(SEED, self.lanes, 0)
        system = self.make(self.lanes, seeds)
        draw = self.draw if system.declares.context else None
        return SystemEnv(system, make=lambda seeds: self.make(self.lanes, seeds), draw=draw)

    def test_rows_are_what_was_stepped_by_hand(self) -> None:
        """Compare collected rows with an instance that has the same seeds and actions."""
        with SyncCollector(
            self.env, None, frames_per_batch=self.frames, total_frames=self.frames, seed=SEED
        ) as collector:
            (rows,) = list(collector)
        assert rows.numel() == self.frames, f"expected {self.frames} rows, got {rows.numel()}"
        if self.repeatable and self.make(self.lanes, None).declares.seeds != "none":
            self._compare(rows)

    def _compare(self, rows: TensorDictBase) -> None:
        hand = self.hand()
        d = hand.d
        columns = {key: rows.get(key).cpu().numpy() for key in rows.keys(True, True)}
        left = _in_order(columns, d.lanes)
        spare = self.actions(hand.system, 2 * self.frames, seed=3)
        compared = 0
        while all(left):
            action = next(spare)
            here = [None if hand.pending[lane] else left[lane].pop(0) for lane in range(d.lanes)]
            for lane, row in enumerate(here):
                for key, value in zip(d.action, action, strict=True):
                    if row is not None:
                        value[lane] = columns[_name(key)][row]
            seen = hand.seen
            out, after, _ = hand.step(action)
            for lane, row in enumerate(here):
                if row is not None:
                    self._compare_row(columns, row, lane, seen, out, after, hand)
                    compared += 1
        assert compared >= self.frames // 2, f"only {compared} rows could be compared"
        self.close(hand.system)

    def _compare_row(
        self,
        columns: Mapping[Any, NDArray[Any]],
        row: int,
        lane: int,
        seen: Values,
        out: Step,
        after: Values,
        hand: Hand,
    ) -> None:
        where = f"row {row}, lane {lane}"
        ended = bool(as_flags(out.terminated)[lane] | as_flags(out.truncated)[lane])
        lost = ended and hand.d.finals == "lost"
        if ended and out.final_valid is not None:
            lost = not as_flags(out.final_valid)[lane]
        for key, before, value in zip(hand.d.observation, seen, after, strict=True):
            got = columns[_name(key)][row]
            assert np.array_equal(got, before[lane]), (
                f"{where}: {format_key(key)} {got} {before[lane]}"
            )
            got = columns[_name((NEXT, *key))][row]
            assert lost or np.array_equal(got, value[lane]), f"{where}: next {format_key(key)}"
        for key, value in zip(hand.d.reward, out.reward, strict=True):
            got = columns[_name((NEXT, *key))][row].reshape(-1)
            wanted = as_tensor(value, torch.device("cpu")).numpy()[lane]
            assert np.array_equal(got, np.asarray(wanted, got.dtype).reshape(-1)), f"{where}: {key}"
        for key, flags in ((TERMINATED, out.terminated), (TRUNCATED, out.truncated)):
            assert bool(columns[key][row]) == as_flags(flags)[lane], f"{where}: {format_key(key)}"
        if NEXT_VALID in columns:
            assert bool(columns[NEXT_VALID][row]) != lost, f"{where}: {format_key(NEXT_VALID)}"


def _name(key: Key) -> Any:
    return key[0] if len(key) == 1 else key


def _in_order(columns: Mapping[Any, NDArray[Any]], lanes: int) -> list[list[int]]:
    """Return the rows of each lane in the order of their steps."""
    order = np.lexsort((columns[STEP], columns[TRAJ_IDS]))
    lane = columns[LANE][order]
    return [order[lane == each].tolist() for each in range(lanes)]
