"""Several policies in random runs, by lane or for a group of agents, some with openings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tallyroll.collector import OnePolicy

if TYPE_CHECKING:  # random_rows imports configurations, which import this module
    from random_rows import Rows, Verdict


@dataclass(frozen=True)
class SeveralKind:
    """The assignment of policies to lanes or to a group. None in its place means one policy."""

    of_lane: tuple[int, ...]
    """The policy of each lane. A group's policy acts in all lanes."""
    random: tuple[bool, ...]
    """``[policy]``: whether it draws random actions."""
    openings: tuple[int, ...]
    """``[policy]``: number of transitions with random actions at the start of a run."""
    spelling: int = 0
    """Number that selects how lanes are named."""
    group: str = ""

    @property
    def draws(self) -> bool:
        """True if a policy acts at random, always or at first."""
        return any(self.random) or any(self.openings)

    def policies(self, make: Callable[[], Any]) -> Any:
        """Return the argument for a collector. ``make`` makes a policy."""
        given = [
            None if random else OnePolicy(make(), init_random_frames=opening)
            for random, opening in zip(self.random, self.openings, strict=True)
        ]
        if self.group:
            return {self.group: given[0]}
        return [(self._lanes(at), policy) for at, policy in enumerate(given)]

    def _lanes(self, policy: int) -> Any:
        mine = [lane for lane, at in enumerate(self.of_lane) if at == policy]
        gap = mine[1] - mine[0] if len(mine) > 1 else 1
        even = mine == list(range(mine[0], mine[-1] + 1, gap))
        if self.spelling % 4 == 0 and policy == max(self.of_lane):
            return "rest"
        if self.spelling % 4 == 1 and even:
            stop = mine[-1] + 1
            return slice(mine[0], None if stop == len(self.of_lane) else stop, gap)
        if self.spelling % 4 == 2 and even:
            return range(mine[0], mine[-1] + 1, gap)
        return mine[0] if self.spelling % 2 and len(mine) == 1 else np.array(mine[::-1])


def check_several(kind: SeveralKind, runs: Sequence[Rows], verdict: Verdict) -> None:
    """Check which rows are random, in one run or in a run and its continuations."""
    found = np.zeros(len(kind.random), np.int64)
    made = np.zeros_like(found)
    went: dict[int, bool] = {}
    for rows in runs:
        if not len(rows):
            continue
        lane, version = rows["collector", "lane"], rows["collector", "policy_version"]
        policy = np.array(kind.of_lane)[lane]
        if kind.group:
            own = rows["collector", "policy_versions", kind.group]
            verdict(bool((own == version).all()), "the group that acts alone has other versions")
        else:
            right = rows["collector", "policy_id"] == policy
            verdict.rows(right, rows, "the policy of another lane")
        for at in range(len(kind.random)):
            mine = policy == at
            found[at] += np.count_nonzero(version[mine] == -1)
            made[at] += np.count_nonzero(mine)
        for each in np.unique(lane).tolist():
            acted = version[lane == each] != -1
            late = went.get(each, False) and not acted.all()
            verdict(not late and (np.diff(acted.astype(int)) >= 0).all(), f"{each}: random again")
            went[each] = went.get(each, False) or bool(acted.any())
    wanted = np.where(kind.random, made, np.minimum(kind.openings, made))
    verdict(np.array_equal(found, wanted), f"random rows by policy: {found}, not {wanted}")
