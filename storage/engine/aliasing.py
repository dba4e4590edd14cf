"""Views of a ring that were handed out: rows that lie in them are about to be overwritten."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class LentViews:
    """Maps of a ring that others may hold views of; false while there are none."""

    def __init__(self) -> None:
        self._maps: list[Sequence[np.ndarray]] = []
        self._begin = self._end = np.empty(0, np.uintp)

    def __bool__(self) -> bool:
        return bool(self._maps)

    def add(self, arrays: Sequence[np.ndarray]) -> None:
        """Views of ``arrays``, C-contiguous, are handed out. They are kept, so that nothing else
        comes to lie where they are.
        """
        if any(arrays is each for each in self._maps):
            return
        self._maps.append(arrays)
        maps = [array for each in self._maps for array in each]
        self._begin = np.array([array.ctypes.data for array in maps], np.uintp)
        self._end = self._begin + np.array([array.nbytes for array in maps], np.uintp)

    def hold(self, addresses: Sequence[int]) -> np.ndarray:
        """Whether each of ``addresses`` lies in one of the maps."""
        at = np.array(addresses, np.uintp)[:, None]
        within: np.ndarray = np.any((at >= self._begin) & (at < self._end), axis=1)
        return within

    def copied(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """The same, with copies of those that lie in one of the maps."""
        # Rows that are still to be gathered come from elsewhere.
        addresses = [a.ctypes.data if isinstance(a, np.ndarray) else 0 for a in arrays]
        held = self.hold(addresses)
        return [a.copy() if own else a for a, own in zip(arrays, held, strict=True)]
