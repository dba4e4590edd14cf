"""Vectors in SAME_STEP mode that omit the final observation of one of the ended lanes."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from tallyroll.collector import SyncCollector
from tallyroll.collector.errors import TransitionError

LENGTHS = np.array([3, 3, 5])


class Leaves(VectorEnv[Any, Any, Any]):
    """Vector of three lanes that observe their step; ``how`` names what lane 1 omits at its end."""

    num_envs = 3

    def __init__(self, how: str, space: str) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        box = spaces.Box(0, 9, (1,), np.float64)
        self.single_observation_space: Any = box
        if space == "dict":
            self.single_observation_space = spaces.Dict({"a": box, "b": spaces.Discrete(10)})
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, 3)
        self.action_space = batch_space(self.single_action_space, 3)
        self.how, self.space, self.at = how, space, np.zeros(3)

    def seen(self, lane: Any = slice(None)) -> Any:
        at = self.at[:, None].copy()[lane]
        return at if self.space == "box" else {"a": at, "b": self.at.astype(np.int64)[lane]}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.at[:] = 0
        return self.seen(), {}

    def step(self, actions: Any) -> Any:
        self.at += 1
        over = self.at >= LENGTHS
        if not over.any():
            return self.seen(), np.ones(3), over, np.zeros(3, bool), {}
        there, finals = over.copy(), np.full(3, None, object)
        for lane in np.flatnonzero(over):
            finals[lane] = self.seen(lane)
        given: Any = finals
        if self.how == "none" and over[1]:
            finals[1] = None
        elif self.how == "a part" and over[1]:
            finals[1] = {"a": finals[1]["a"]} if self.space == "dict" else np.zeros(2)
        elif self.how in ("marked", "arrays"):
            given, there[1] = self.seen(), over[1] and self.how == "arrays"
        elif self.how == "a part of arrays":
            given = {"a": self.seen()["a"]} if self.space == "dict" else np.zeros((3, 2))
        self.at[over] = 0
        infos = {} if self.how == "nothing" else {"final_obs": given, "_final_obs": there}
        return self.seen(), np.ones(3), over, np.zeros(3, bool), infos


@pytest.mark.parametrize("space", ["box", "dict"])
@pytest.mark.parametrize(
    ("how", "lane"),
    [
        *(("each", None), ("arrays", None), ("none", 1), ("marked", 1), ("a part", 1)),
        *(("a part of arrays", 0), ("nothing", 0)),
    ],
)
def test_lanes_without_a_final_observation(how: str, lane: int | None, space: str) -> None:
    with SyncCollector(
        lambda: Leaves(how, space), frames_per_batch=30, total_frames=30
    ) as collector:
        if lane is not None:
            match = rf"lane {lane}, step 2 of its" if how != "nothing" else "of lane 0, so the"
            with pytest.raises(TransitionError, match=match):
                list(collector)
            return
        rows = torch.cat(list(collector))
    name = "a" if space == "dict" else "observation"
    assert torch.equal(rows["next", name], rows[name] + 1)
