"""Evaluation takes the episodes that start first, and leaves everything else as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from tallyroll.collector import SyncCollector, evaluate
from tallyroll.collector.errors import ArgumentError

from collect_kit import ByObservation
from oracles import length_of, make_oracle_vec

# Lane 0's episodes are short, lane 2's are long: taking those that end first would take lane 0's.
LENGTHS = [[1], [4], [30]]


def first_started(episodes: int) -> list[tuple[int, int]]:
    """(lane, length) of the episodes that start first, by slot and lane, without reset slots."""
    clock, started, found = [0, 0, 0], [0, 0, 0], []
    while len(found) < episodes:
        lane = min(range(3), key=lambda each: (clock[each], each))
        length = length_of(LENGTHS, lane, started[lane])
        found.append((lane, length))
        clock[lane] += length
        started[lane] += 1
    return found


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("episodes", [1, 2, 3, 4, 17, 40])
def test_the_episodes_are_those_that_start_first(mode: AutoresetMode, episodes: int) -> None:
    found = evaluate(
        ByObservation(), lambda: make_oracle_vec(3, LENGTHS, mode=mode), episodes=episodes
    )
    assert sorted((e.lane, e.length) for e in found.episodes) == sorted(first_started(episodes))
    assert found.ledger.episodes_complete == episodes == len(found.returns)
    assert found.ledger.stored == found.lengths.sum()
    assert found.ledger.episodes_cut == 0


def test_an_evaluation_has_a_budget_of_its_own() -> None:
    with SyncCollector("CartPole-v1", frames_per_batch=50, total_frames=150, seed=3) as alone:
        wanted = torch.cat([batch["observation"] for batch in alone])
    got = []
    with SyncCollector("CartPole-v1", frames_per_batch=50, total_frames=150, seed=3) as collector:
        for batch in collector:
            got.append(batch["observation"])
            before = collector.ledger.counts()
            evaluate(None, "CartPole-v1", episodes=3, num_envs=2, seed=len(got))
            assert collector.ledger.counts() == before
    assert torch.equal(torch.cat(got), wanted)


def test_global_generators_are_as_before() -> None:
    def drawing(td):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return td.set("action", torch.randint(2, td.batch_size))

    torch.manual_seed(5)
    saved, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = evaluate(drawing, "CartPole-v1", episodes=4, num_envs=2, seed=0)
    again = evaluate(drawing, "CartPole-v1", episodes=4, num_envs=2, seed=0)
    assert torch.equal(torch.get_rng_state(), saved)
    assert np.array_equal(np.random.get_state()[1], numpys)
    assert first.returns.tolist() == again.returns.tolist()
    assert first.mean_return == first.returns.mean()


@pytest.mark.parametrize("episodes", [0, -1, 2.5])
def test_how_many_is_a_whole_number(episodes: int) -> None:
    with pytest.raises(ArgumentError, match="total_episodes: expected an integer"):
        evaluate(None, "CartPole-v1", episodes=episodes)
