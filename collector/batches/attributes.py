"""Attributes of every collector."""

from tallyroll.collector.batches.state.restarting import Restarting
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.options import Options
from tallyroll.collector.options.objects import LayoutName
from tallyroll.collector.options.sharding import ShardOfRun
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.several.policies import SeveralPolicies


class Attributes:
    """A run as its attributes say it; a collector sets what they read."""

    _options: Options
    _ticks: int | None
    """Simulator ticks of a transition, as the environment reports them; None: unknown."""
    _ledger: Ledger
    _restarting: Restarting
    _episodes: EpisodeLog
    _lanes: int
    _own_lanes: range
    _policy: Policy | None
    _frames_per_batch: int
    _last_rows: range | None = None

    @property
    def restarting(self) -> Restarting:
        """The state of the run, as `save_checkpoint` and `load_checkpoint` use it."""
        return self._restarting

    @property
    def policy_versions(self) -> dict[int | str, int]:
        """Number of updates of each of several policies by its id; empty where there is one."""
        policy = self._policy
        return policy.versions if isinstance(policy, SeveralPolicies) else {}

    @property
    def ledger(self) -> Ledger:
        """The balanced count of the run: a snapshot, which does not change later.

        Any thread may take one. During a call it has the counts of the last commit.
        """
        return self._ledger.snapshot()

    @property
    def episodes(self) -> EpisodeLog:
        """Finished episodes, the newest last."""
        return self._episodes

    @property
    def lanes(self) -> int:
        """Lanes, over all workers; of a shard its own ones."""
        return self._lanes

    @property
    def shard(self) -> ShardOfRun | None:
        """The part of a run that this collector makes; None: it makes all of it."""
        return self._options.part

    @property
    def frames_per_batch(self) -> int:
        """Transitions a batch."""
        return self._frames_per_batch

    @property
    def frame_skip(self) -> int | str | None:
        """Simulator ticks a transition, or the info key that counts them; None: unknown."""
        given = self._options.columns.frame_skip
        return self._ticks if given is None else given

    @property
    def layout(self) -> LayoutName:
        """The layout of batches, by its name."""
        return self._options.layout.name

    @property
    def last_rows(self) -> range | None:
        """Numbers, over all rows ever stored, of those of the last :meth:`collect`.

        None before it, where only a replay buffer over another storage knows, and with
        ``sharded=True``, where a row's number changes while shards grow.
        """
        return None if self._options.in_shards else self._last_rows

    def _publish(self) -> None:
        """Hand the policy's weights to workers, which act by copies; here there are none."""
