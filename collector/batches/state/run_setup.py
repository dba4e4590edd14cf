"""Set up a run, new or resumed: its ledger, its seeds and its entry in the manifest."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tallyroll.collector.batches.state.host_info import hashes_of, made_by
from tallyroll.collector.batches.state.provenance import (
    call_of,
    common_id,
    recorded_spaces,
    run_provenance,
)
from tallyroll.collector.batches.state.run_seeds import Environments, RunSeeds
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.batches.stored.resume import differ, newest_version, opening_rows
from tallyroll.collector.batches.stored.writer import BatchWriter
from tallyroll.collector.counting.episode_budget import EpisodeBudget
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.envs.setup.make import CLASSES
from tallyroll.collector.envs.setup.packages import VERSIONS
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.options import Options
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.rollout.driver import Driver
from tallyroll.collector.rollout.rollout import Rollout
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.storage.files.manifest import SHARD
from tallyroll.storage.package.versions import versions
from tallyroll.storage.rows.keys import RANDOM_VERSION


class RunSetup:
    """Sets up the ledger of a run, the version of its policy, and the seeds of its lanes.

    Args:
        options: the options of the run.
        policy: chooses actions; None if all actions are random.
        writer: writes to the storage, which may have a run to resume.
        lanes: the number of lanes of this collector; a shard's run has more.
        envs: the environments of these lanes.

    Raises:
        StateError: the resumed run has another seed, or another number of lanes.
    """

    def __init__(
        self,
        options: Options,
        policy: Policy | None,
        writer: BatchWriter,
        lanes: int,
        envs: Environments,
    ) -> None:
        self._options, self._writer = options, writer
        self._lanes = options.run_lanes(lanes)
        self.policy, self.envs = policy, envs
        resumed = writer.stored_run.resumed(self._lanes, options.seed)
        self.ledger = resumed or Ledger(seed=options.seed)
        if options.seed not in (None, self.ledger.seed):
            raise StateError(
                f"the run to be continued has the seed {self.ledger.seed}, got {options.seed}. "
                "Leave seed out."
            )
        self.ledger.versions.update(versions())
        if policy is not None:
            # A resumed run may continue with weights other than those it ended with.
            last = writer.stored_run.last
            policy.begin_at(1 + (RANDOM_VERSION if last is None else newest_version(*last)))
            if isinstance(policy, SeveralPolicies):
                _require_one_opening(options, policy)
                if last is not None and policy.openings.under_way:
                    stored = opening_rows(*last, policy, self.ledger)
                    policy.openings.continue_after(stored)
        self.seeds = RunSeeds(self.ledger, envs, policy, options.part)
        self.seeds.seed(self.ledger.seed)

    @property
    def draws(self) -> bool:
        """True if a policy acts and some actions are random; the ledger counts them."""
        policy = self.policy
        return policy is not None and (self._options.init_random_frames > 0 or policy.draws)

    @property
    def random_frames(self) -> int:
        """Number of coming transitions with random actions; 0 if no policy acts."""
        if self.policy is None:
            return 0
        return max(0, self._options.init_random_frames - self.ledger.random)

    def rollout(self, driver: Driver, plan: SlabPlan) -> Rollout:
        """Make the `Rollout` of ``driver``."""
        gate, episodes = None, self._options.total_episodes
        if episodes is not None:
            gate = EpisodeBudget(episodes, self._lanes)
            gate.restart(self.ledger.episodes_complete)
        return Rollout(
            driver,
            self.policy,
            extra=plan.extra,
            surplus=self._options.surplus,
            random_frames=self.random_frames,
            gate=gate,
            run_lanes=None if self._options.part is None else self._lanes,
        )

    def state(
        self, environment: Mapping[str, Any], spaces: Mapping[str, Any], more: Mapping[str, Any]
    ) -> RunState:
        """Return the initial state of the run.

        The provenance contains the ``environment``, the ``spaces`` of its columns, and ``more``
        arguments of the collector.
        """
        self.ledger.versions.update(environment.get(VERSIONS, {}))
        self._classes = environment.get(CLASSES, [])
        left_out = VERSIONS, CLASSES
        self._environment = {name: v for name, v in environment.items() if name not in left_out}
        buffer = self._writer.replay_buffer
        self._spaces = recorded_spaces(spaces, self._options, buffer)
        self._call = call_of(self._options, self.policy, more)
        lanes = LaneState.fresh(self._lanes, self._writer.stored_run.next_id())
        return RunState(self._options, self._writer, self.ledger, lanes, self.provenance(lanes))

    @property
    def other_classes(self) -> str:
        """A warning if the resumed run had an environment of other classes, otherwise ""."""
        last = self._writer.stored_run.last_run
        if last is None or not differ(last.classes, self._classes):
            return ""
        before, now = (", ".join(each) for each in (last.classes, self._classes))
        return (
            f"the run to be continued was made by an environment of {before}, but this environment "
            f"is of {now}. Its rows are added to the same run. If the environments differ, append "
            "a new run instead"
        )

    def provenance(self, lanes: LaneState) -> dict[str, Any]:
        """Return the run's entry in the manifest, with its current seeds, ids and weights."""
        made = None if self._writer.storage is None else made_by(self.policy, self._classes)
        run = run_provenance(
            self._environment,
            self.ledger,
            self.seeds.of_lanes,
            lanes=self._lanes,
            first_id=lanes.first_id,
            call=self._call,
            policy_version=RANDOM_VERSION if self.policy is None else self.policy.version,
            made=made,
        )
        run |= self._spaces
        if (part := self._options.part) is not None:
            last = self._writer.stored_run.last_run
            weights = None if last is None else last.weights
            hashes = {**self._hashes, "weights": weights or self._hashes["weights"]}
            run[SHARD] = part.described(common_id(run, part, hashes), hashes["weights"])
        return run

    @cached_property
    def _hashes(self) -> Mapping[str, str | None]:
        """The hashes of the policy's code and of the weights that it had at set-up."""
        nothing = {"code": None, "weights": None}
        return nothing if self.policy is None else hashes_of(self.policy.source)


def _require_one_opening(options: Options, policy: SeveralPolicies) -> None:
    if options.init_random_frames and policy.draws:
        raise ArgumentError(
            "init_random_frames: expected 0, because one of the policies has init_random_frames of "
            f"its own or acts at random, got {options.init_random_frames}. Set the number for each "
            "policy: OnePolicy(policy, init_random_frames=…)."
        )
