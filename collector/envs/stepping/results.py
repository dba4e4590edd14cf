"""Validation of the values that a system returns, against its declaration."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.envs.stepping.arrays import as_flags, as_tensor
from tallyroll.collector.envs.system import Array, Mask, Step, System
from tallyroll.collector.errors import TransitionError, ValueRefused
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import Key, format_key


def kind_of(system: System) -> str:
    """Return the name of the system for messages."""
    return str(system.describe()["type"])


class Results:
    """Validator for the results of a system, which also builds the errors.

    Args:
        system: the system.
        names: names of the observation columns, in order.
    """

    def __init__(self, system: System, names: Sequence[Key]) -> None:
        self._system, self._names = system, names
        d = system.declares
        self._specs = [((d.lanes, *spec.shape), spec.dtype) for spec in d.observation.values()]
        kinds = {dtype for _, dtype in self._specs}
        self.are_arrays = d.device == "cpu" and torch.bfloat16 not in kinds
        """True if NumPy can hold all observations: they are on the CPU, and none is bfloat16."""
        self._expected = [(shape, NUMPY[kind]) for shape, kind in self._specs if self.are_arrays]

    def array(self, index: int, value: Array, count: int | None = None) -> NDArray[Any]:
        """Validate an observation and return it as a NumPy array.

        ``count`` is the number of rows of ``value``, if it does not have one row per lane.

        Raises:
            TransitionError: the shape or the dtype differs from the spec.
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
                f"{format_key(self._names[index])}: the space declares {wanted[1]} "
                f"{list(wanted[0])}, the environment returned {dtype} {list(shape or ())} "
                f"({type(value).__name__}); correct the environment's space, or cast in a wrapper"
            )
        return value

    def tensors(self, values: Sequence[Array]) -> list[torch.Tensor]:
        """Return copies of observations as tensors on the declared device.

        Raises:
            TransitionError: a shape or a dtype differs from the spec.
        """
        if self.are_arrays:
            return [torch.from_numpy(np.array(self.array(*each))) for each in enumerate(values)]
        device = torch.device(self._system.declares.device)
        found = [as_tensor(value, device) for value in values]
        for name, value, (shape, dtype) in zip(self._names, found, self._specs, strict=True):
            if (value.shape, value.dtype) != (shape, dtype):
                raise TransitionError(
                    f"{format_key(name)}: the space declares {dtype} {list(shape)}, the "
                    f"environment returned {value.dtype} {list(value.shape)}"
                )
        return found

    def unfit(self, out: Step, error: Exception) -> TransitionError:
        """Return the error for rewards or flags that do not fit their columns."""
        if not isinstance(error, ValueRefused):
            return self._wrong_shapes(out)
        if error.lane is not None:
            error.locate(lane=self.number(error.lane, out.lanes))
        return error

    def number(self, row: int, lanes: Array | None) -> int:
        """Return the number in the run of the lane to which a row belongs."""
        return self._system.first_lane + (row if lanes is None else int(lanes[row]))

    def _wrong_shapes(self, out: Step) -> TransitionError:
        got: dict[str, Any] = {
            "reward": [list(np.shape(each)) for each in out.reward],
            "terminated": list(np.shape(out.terminated)),
            "truncated": list(np.shape(out.truncated)),
        }
        if len(out.reward) == 1:
            got["reward"] = got["reward"][0]
        return TransitionError(
            f"expected reward, terminated and truncated of shape [{self._system.declares.lanes}], "
            f"one number per lane, got the shapes {got}; reduce a vector of rewards in a wrapper"
        )

    def require_final_observations(self, out: Step, ended: Mask) -> None:
        """Raise if lanes ended and the step lacks the final observations that are declared."""
        if out.final is None and self._system.declares.finals == "extra" and ended.any():
            raise TransitionError(
                f'{kind_of(self._system)} declares finals="extra", but returned no final '
                "observation at the end of an episode of lane "
                f"{self.number(int(np.argmax(ended)), None)}, so the observation is lost. Return "
                "final observations from a wrapper, or use a mode that does not reset within the "
                "step."
            )

    def require_skipped(
        self, skipped: Array | None, pending: Mask, lanes: Array | None = None
    ) -> None:
        """Raise if the reported ``skipped`` lanes differ from the ``pending`` lanes."""
        if skipped is None:
            return
        wrong = as_flags(skipped) != pending
        if wrong.any():
            row = int(np.argmax(wrong))
            did, when = "ignored", "that did not follow the"
            if pending[row]:
                did, when = "executed", "after the"
            raise TransitionError(
                f"lane {self.number(row, lanes)}: {kind_of(self._system)} declares "
                f'at_end="{self._system.declares.at_end}", but it {did} '
                f"the action of a step {when} end of an episode"
            )

    def wrong_arrivals(self, lanes: NDArray[np.int32]) -> TransitionError:
        """Return the error for too few or too many arrivals, or for lanes that were not sent."""
        return TransitionError(
            f"{kind_of(self._system)}: expected {self._system.declares.arrivals} different lanes "
            f"among those that were sent, got {lanes.tolist()!r:.200}"
        )
