"""Comparison of the values that a system returned with those that it declares."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.envs.arrays import as_flags
from tallyroll.collector.envs.declared_env import DeclaredEnv
from tallyroll.collector.envs.system import Array, Mask, Step
from tallyroll.collector.errors import TransitionError, ValueRefused
from tallyroll.storage.rows.keys import spell


class CheckedEnv(DeclaredEnv):
    """An environment that finds what is wrong with a step, and makes the error."""

    def _array(self, index: int, value: Array, count: int | None = None) -> NDArray[Any]:
        """Return an observation as a NumPy array.

        ``count``: its rows, if it does not have one for each lane.

        Raises:
            TransitionError: it is not as its spec declares.
        """
        wanted = self._expected[index]
        if count is not None and count != wanted[0][0]:
            wanted = (count, *wanted[0][1:]), wanted[1]
        if isinstance(value, torch.Tensor):
            value = value.detach().numpy()
        elif not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
            value = np.from_dlpack(value)
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if not isinstance(value, np.ndarray) or (shape, dtype) != wanted:
            raise TransitionError(
                f"{spell(self.observation_keys[index])}: the space declares {wanted[1]} "
                f"{list(wanted[0])}, the environment returned {dtype} {list(shape or ())} "
                f"({type(value).__name__}); correct the environment's space, or cast in a wrapper"
            )
        return value

    def _unfit(self, out: Step, error: Exception, lanes: Array | None = None) -> TransitionError:
        """Return the error for rewards or flags; ``lanes``: the row's lanes if not all came."""
        if not isinstance(error, ValueRefused):
            return self._wrong_shapes(out)
        if error.lane is not None:
            row = error.lane if lanes is None else int(lanes[error.lane])
            error.lane = self.first_lane + row
        return error

    def _wrong_shapes(self, out: Step) -> TransitionError:
        got: dict[str, Any] = {
            "reward": [list(np.shape(each)) for each in out.reward],
            "terminated": list(np.shape(out.terminated)),
            "truncated": list(np.shape(out.truncated)),
        }
        if len(out.reward) == 1:
            got["reward"] = got["reward"][0]
        return TransitionError(
            f"expected reward, terminated and truncated of shape {list(self.batch_size)}, one "
            f"number a lane, got the shapes {got}; reduce a vector of rewards in a wrapper"
        )

    def _lost_finals(self, ended: Mask) -> TransitionError:
        return TransitionError(
            f"{self.kind} declares that final observations come beside the first ones, and "
            "gave none at the end of an episode of lane "
            f"{self.first_lane + int(np.argmax(ended))}, so they are lost; let a wrapper hand "
            "them out, or use a mode that does not reset within the step"
        )

    def _require_skipped(
        self, skipped: Array | None, pending: Mask, lanes: Array | None = None
    ) -> None:
        """Raise if the system ignored other actions than it declares."""
        if skipped is None:
            return
        wrong = as_flags(skipped) != pending
        if wrong.any():
            row = int(np.argmax(wrong))
            lane = self.first_lane + (row if lanes is None else int(lanes[row]))
            did, when = "ignored", "that followed no"
            if pending[row]:
                did, when = "executed", "after an"
            raise TransitionError(
                f'lane {lane}: {self.kind} declares at_end="{self._declares.at_end}", and it {did} '
                f"the action of a step {when} end of an episode"
            )

    def wrong_arrivals(self, lanes: NDArray[np.int32]) -> TransitionError:
        """Return the error for lanes that were not under way, or too many or too few."""
        return TransitionError(
            f"{self.kind}: expected {self.arrivals} different lanes that were sent, got "
            f"{lanes.tolist()!r:.200}"
        )
