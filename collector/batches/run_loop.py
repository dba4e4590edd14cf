"""The run loop of every collector: batches of exactly so many transitions, counted and stored."""

import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.envs.utils import set_exploration_type

from tallyroll.collector.batches.final_observations import FinalsWatch
from tallyroll.collector.batches.output import BatchOutput
from tallyroll.collector.batches.provenance import run_provenance, versions
from tallyroll.collector.batches.rows import Part, Rows, RowSource
from tallyroll.collector.batches.value_checks import Range, RangeChecks
from tallyroll.collector.batches.writer import BatchWriter, ClosedFirstWarning, StorageLike
from tallyroll.collector.counting.episode_budget import EpisodeBudget
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.ledger import Budget, Ledger
from tallyroll.collector.counting.numbering import LaneState, Numbers, lane_seed
from tallyroll.collector.errors import ArgumentError, LedgerError, SilentReset, StateError
from tallyroll.collector.options import Options, not_negative, or_none, positive
from tallyroll.collector.policies.policy import Policy, Weights
from tallyroll.collector.rollout.os_signals import deferred
from tallyroll.collector.rollout.rollout import Block, Source
from tallyroll.collector.slab.names import new_name, spelled_rename, split
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.errors import StorageClosed
from tallyroll.storage.rows.keys import POLICY_VERSION, RANDOM_VERSION, TERMINATED, Key

EPISODES_KEPT = 50_000
"""With a budget of frames, ``collector.episodes`` keeps at least that many of the last ones."""

_STATE = {"ledger", "seed", "next_id", "open", "policy", "env", "generators"}


class Collector(ABC):
    """An iterable of batches that is a context manager.

    It takes blocks of transitions from a source, numbers, checks, counts and delivers them. A
    subclass makes the source, in three steps: :meth:`__init__` opens what is stored to,
    :meth:`_begin_run` gives the run its seed and its numbers once the lanes are known, and
    :meth:`_drive` takes over the source.
    """

    ledger: Ledger
    """The balanced count of the run."""
    episodes: EpisodeLog
    """Finished episodes."""
    lanes: int
    _policy: Policy | None
    _rollout: Source

    def __init__(
        self,
        options: Options,
        *,
        replay_buffer: ReplayBuffer | None,
        storage: StorageLike | None,
        resume: bool,
    ) -> None:
        self._over = True  # until everything stands
        self._in_hand = 0
        """Transitions that were taken from the source and are in no batch yet."""
        self._options = options
        self.frames_per_batch = options.frames_per_batch
        self.frame_skip, self.layout = options.frame_skip, options.layout
        self._budget = Budget(options.total_frames)
        self._writer = BatchWriter(
            storage, replay_buffer, resume, options.total_frames, options.largest_batch
        )
        if not options.yield_large and not self._writer.stores_alone:
            self._writer.close()
            raise ArgumentError(
                "yield_large=False wants a storage (storage=), which alone gets large columns; a "
                "replay buffer gets what is yielded"
            )
        self._lane_seeds: list[int] = []

    def _begin_run(self, lanes: int) -> int | None:
        """A ledger, a gate and numbers for ``lanes`` lanes; returns the seed, None to draw one."""
        self.lanes = lanes
        seed = self._options.seed
        resumed = self._writer.resumed()
        if resumed is not None and seed is not None and seed != resumed.seed:
            raise StateError(
                f"the run to be continued has the seed {resumed.seed}, got {seed}; leave it out"
            )
        self.ledger = Ledger(versions=versions())
        if resumed is not None:
            seed = resumed.seed
            self.ledger.load({**resumed.counts, "incarnation": resumed.incarnation})
        self._gate = None
        if self._options.total_episodes is not None:
            self._gate = EpisodeBudget(self._options.total_episodes, lanes)
            self._gate.restart(self.ledger.episodes_complete)
        self._rng = np.random.default_rng()
        self._state = LaneState.fresh(lanes, self._writer.next_id())
        return seed

    @property
    def _random_frames(self) -> int:
        """Transitions that are still to have random actions, where a policy has others."""
        if self._policy is None:
            return 0
        return max(0, self._options.init_random_frames - self.ledger.random)

    def _drive(
        self,
        rollout: Source,
        source: RowSource,
        ranges: Sequence[Range],
        description: Mapping[str, Any],
        policy: object,
        **call: Any,
    ) -> None:
        """Take blocks from ``rollout`` from here on. ``call`` is kept as provenance."""
        options = self._options
        self._rollout, self._source = rollout, source
        self._ticks = _ticks(options, source)
        self._checks = RangeChecks(ranges, options.validate)
        self.episodes = EpisodeLog(None if options.total_episodes is not None else EPISODES_KEPT)
        watched = options.finals == "check" and not source.lost_finals
        self._finals = FinalsWatch(self.lanes, source.observed if watched else ())
        self._description = description
        named: dict[str, Any] = {}
        if options.info_keys:
            named["info_keys"] = [str(info) for info in options.info_keys]
        if options.rename:
            named["rename"] = [f"{old}={new}" for old, new in spelled_rename(options.rename)]
        self._call = {
            "frames_per_batch": self.frames_per_batch,
            "total_frames": options.total_frames,
            "total_episodes": options.total_episodes,
            "policy": None if policy is None else type(policy).__qualname__,
            "surplus": options.surplus,
            "frame_skip": self.frame_skip,
            "finals": options.finals,
            **named,
            **call,
        }
        if source.unobserved:
            self._call["unobserved"] = [list(key) for key in source.unobserved]
        self._output = BatchOutput(
            self._writer,
            source,
            self.lanes,
            self.ledger,
            lambda: rollout.held,
            self._provenance(),
            layout=options.layout,
            postproc=options.postproc,
            device=options.storing_device,
            yield_large=options.yield_large,
            frame_skip=self._ticks,
            count_random=policy is not None,
        )
        self._over = False

    def _provenance(self) -> dict[str, Any]:
        return run_provenance(
            self._description, self.ledger, self._lane_seeds, lanes=self.lanes, call=self._call
        )

    # --- iteration --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches until the budget is met or :meth:`stop` was called."""
        while not self._over:
            batch = self._collect()
            if batch is not None:
                yield batch

    def __len__(self) -> int:
        """Number of batches that a run of limited frames has in all."""
        if self._budget.total is None:
            raise TypeError("a collector without total_frames has no length")
        return ceil(self._budget.total / self.frames_per_batch)

    def __enter__(self) -> Self:
        """The collector; leaving the block shuts it down."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut down. What goes wrong with that is a note of an ``error`` that is there already."""
        try:
            self.shutdown()
        except Exception as again:
            if error is None:
                raise
            add_end_note(error, again)

    def _collect(self) -> TensorDictBase | None:
        """The next batch; None where the run ended without one. Sets ``_over`` at its end."""
        with self._undivided():
            return self._batch()

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """Do all that is inside, or end the run and store nothing of it."""
        with deferred():
            try:
                yield
            except BaseException as error:
                if not self._over:
                    self._finish_after(error)
                raise

    def _batch(self) -> TensorDictBase | None:
        self._writer.require_open()
        size = self._budget.batch(self.ledger.stored, self.frames_per_batch)
        rollout = self._rollout
        parts: list[Part] = []
        have = 0
        if self._options.reset_at_each_iter and self._output.batches:
            # What was carried belongs to the trajectories that the reset cuts: it comes first.
            have += self._take(min(size, rollout.held), size, parts)
            if not rollout.held:
                self.ledger.episodes_cut += self._restart_lanes()
        with torch.no_grad(), set_exploration_type(self._options.exploration_type):
            while have < size and not rollout.dry:
                have += self._take(size - have, size - have, parts)
        batch = self._deliver(parts) if have else None
        if self._options.surplus == "discard":
            self._discard()
        if self._budget.remaining(self.ledger.stored) == 0 or rollout.dry:
            self._finish()
            self._finals.warn_at_end(self._committed)
        return batch

    def _take(self, want: int, missing: int, parts: list[Part]) -> int:
        """Add at most ``want`` rows of the ``missing`` ones to ``parts``; returns how many."""
        block = self._fill(want, parts)
        part = self._numbered(block)
        self._copied(part, len(block), len(block) < missing)
        if part is not None:
            parts.append(part)
        return len(block)

    def _deliver(self, parts: list[Part]) -> TensorDictBase:
        before = self.ledger.stored
        try:
            self._finals.require_true(self._committed)
            batch = self._output.deliver(parts, int(self._state.open.sum()))
        except BaseException as error:
            self._in_hand -= self.ledger.stored - before  # of a large batch some may be committed
            self._finish_after(error)
            raise
        self._in_hand = 0
        self._rollout.delivered()
        return batch

    def _committed(self) -> str:
        """Which rows of this run are stored, and how many ends are in them, as a sentence."""
        return f"{self._writer.committed}, with {self.ledger.episodes_complete:,} ends of episodes"

    def _fill(self, want: int, parts: list[Part]) -> Block:
        """Take a block, and check it; on an error, what is complete is stored first."""
        try:
            block = self._rollout.fill(want)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            refused = self._rollout.refused()
            culprit = refused and self._checks.bad_action(*refused, self._state)
            blamed = culprit if isinstance(error, Exception) else None
            self._rescue(parts, blamed or error)
            if blamed is not None:
                raise blamed from error
            raise
        bad = self._checks.first_violation(block.slab, block.used, self._state)
        if bad is not None:
            self._rescue(parts, bad.error)
            raise bad.error
        return block

    def _numbered(self, block: Block) -> Part | None:
        if not len(block):
            return None
        part, numbers = self._source.rows(block, self._state)
        self._finals.look(part)
        self._log(part.rows, numbers, block)
        return part

    def _copied(self, part: Part | None, count: int, more: bool) -> None:
        """Keep rows of ``part``, of ``count`` rows, in the slab if they can stay there.

        Cuts come behind it.
        """
        kept = part is not None and bool(part.large) and self._rollout.keeps(more)
        if part is not None and not kept:
            part.settle()
        self._rollout.copied(kept)
        self._in_hand += count
        cuts = self._rollout.take_cuts()
        if cuts is not None:
            self.ledger.episodes_cut += self._state.cut(cuts)
            self._state.restart(cuts)
            self._finals.forget(cuts)

    def _log(self, rows: Rows, numbers: Numbers, block: Block) -> None:
        if isinstance(self._ticks, tuple):
            before = rows[self._ticks].reshape(-1)
            self.ledger.reset_ticks += int(before[torch.from_numpy(numbers.start_row)].sum())
        at = numbers.end_row
        if len(at):
            version = rows[POLICY_VERSION].numpy()
            self.episodes.extend(
                numbers.traj_ids[at],
                block.lane[at],
                numbers.returns,
                numbers.lengths,
                rows[TERMINATED].reshape(-1).cpu().numpy()[at],
                (numbers.first_versions, version[at]),
            )

    # --- ends, cuts and errors ------------------------------------------------------------------

    def _restart_lanes(self) -> int:
        everywhere = np.ones(self.lanes, np.bool_)
        cut = self._state.cut(everywhere)
        self._state.restart(everywhere)
        self._rollout.restart_lanes()
        return cut

    def _discard(self) -> None:
        """Throw the surplus away; the trajectories that lose a row there are cut."""
        if not self._rollout.held:
            return
        reward, ended = self._rollout.last_slot(self._source.rewards)
        lanes = self._rollout.discard_held()
        self.ledger.balance(self._rollout.held)
        self.ledger.episodes_cut += self._state.cut(lanes)
        self._state.returns[lanes] += reward[lanes]
        self._state.length[lanes] += 1
        self._state.restart(lanes & ended)
        self._finals.forget(lanes)

    def _rescue(self, parts: list[Part], error: BaseException) -> None:
        """After ``error``: ``parts``, and what is complete and sound behind them, are stored.

        Where they are not true, the ledger does not balance, or the storage was closed, nothing
        is, and that is a note: ``error`` is raised.
        """
        with deferred():
            try:
                self._store_rest(parts)
            except (LedgerError, SilentReset, StorageClosed) as again:
                error.add_note(f"tallyroll: complete transitions were not stored: {again}")

    def _store_rest(self, parts: list[Part]) -> None:
        if not self._writer.stores:  # nobody would get them
            self._finish()
            return
        parts = list(parts)
        remaining = self._budget.remaining(self.ledger.stored)
        most = sys.maxsize if remaining is None else remaining - sum(map(len, parts))
        for block in self._rollout.salvage(self._sound, most):
            part = self._numbered(block)
            self._copied(part, len(block), True)
            if part is not None:
                parts.append(part)
        if parts:
            self._deliver(parts)
        self._finish()

    def _sound(self, slab: Slab, used: int) -> int:
        """Number of slots, of the first ``used``, whose values are as declared."""
        bad = self._checks.first_violation(slab, used, self._state)
        return used if bad is None else bad.slot

    def _finish(self) -> None:
        """The run is over: nothing is carried any more, open trajectories are cut."""
        self._over = True
        ledger = self.ledger
        before = ledger.discarded
        self._rollout.stop()
        self._rollout.discard_held()
        ledger.discarded += self._in_hand
        self._in_hand = 0
        ledger.episodes_cut += self._state.cut(np.ones(self.lanes, np.bool_))
        ledger.balance(self._rollout.held)
        self._writer.finish(ledger, ledger.discarded - before)

    def _finish_after(self, error: BaseException) -> None:
        """End the run because of ``error``, which is raised: what else goes wrong is its note."""
        try:
            self._finish()
        except Exception as again:  # noqa: BLE001  see above
            add_end_note(error, again)

    def stop(self) -> None:
        """End the run after the step under way; what is complete makes a last, shorter batch.

        Safe to call from a signal handler or another thread.
        """
        self._rollout.stop()

    def shutdown(self) -> None:
        """End the run, close what was made here: the environment, the storage. Idempotent.

        Of a storage of yours that is closed already, what could not be written is a warning.
        """
        with deferred():
            try:
                if hasattr(self, "_rollout") and not self._over:
                    self._finish()
            except StorageClosed as error:
                warnings.warn(str(error), ClosedFirstWarning, stacklevel=2)
            finally:
                try:
                    self._close_source()
                finally:
                    self._writer.close()

    @abstractmethod
    def _close_source(self) -> None:
        """Close what was made here to collect from. Idempotent."""

    # --- the policy, and how it does --------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Number of updates of the policy's weights; -1 if actions are random."""
        return RANDOM_VERSION if self._policy is None else self._policy.version

    def update_policy_weights_(self, weights: Weights = None) -> None:
        """Use new weights for every action chosen from here on, and count the version up.

        Args:
            weights: a TensorDict of parameters, a state dict or a module; None takes those that
                the policy given at construction has now.
        """
        if self._policy is None:
            raise ArgumentError("this collector draws random actions: it has no weights to update")
        self._policy.update_weights(weights)

    def metrics(self, window: int = 100) -> dict[str, float]:
        """A flat dict for any logger: the counts, and means over the last ``window`` episodes."""
        positive("window", window)
        recent = self.episodes[-window:]
        return {
            "frames": self.ledger.stored,
            "ticks": self.ledger.ticks,
            "reset_slots": self.ledger.reset_slots,
            "discarded": self.ledger.discarded,
            "episodes": self.ledger.episodes_complete,
            "policy_version": self.policy_version,
            "return_mean": _mean([episode.total_return for episode in recent]),
            "length_mean": _mean([float(episode.length) for episode in recent]),
        }

    # --- seeds and state --------------------------------------------------------------------------

    @abstractmethod
    def _seed_everything(self, seed: int | None) -> None:
        """Seed every generator and every lane for the ledger's incarnation; None draws a seed."""

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed everything and start new trajectories; returns a seed for another collector.

        Transitions that wait for the next batch are discarded.
        """
        checked = or_none(not_negative)("seed", seed)
        with self._undivided():
            self._discard()
            self.ledger.episodes_cut += self._restart_lanes()
            self._seed_everything(checked)
        return seed if static_seed else lane_seed(seed, self.lanes, 0)

    @abstractmethod
    def _env_state(self) -> Any:
        """The environment's part of :meth:`state_dict`."""

    @abstractmethod
    def _load_env_state(self, state: Any) -> None:
        """Take over what :meth:`_env_state` gave."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a later collector needs to go on: budget, ids, seeds, policy, generators.

        Environments cannot be saved: after loading, every lane starts a new trajectory, from a
        seed that was not used before. Transitions that wait for the next batch are discarded.
        """
        return {
            "ledger": self.ledger.counts(),
            "seed": self.ledger.seed,
            "next_id": self._state.next_id,
            "open": int(self._state.open.sum()),
            "policy": None if self._policy is None else self._policy.state_dict(),
            "env": self._env_state(),
            "generators": {
                "torch": torch.get_rng_state(),
                "actions": self._rng.bit_generator.state,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned; call it before iterating.

        Raises:
            StateError: this collector has collected already, or the state has other parts.
        """
        if self.ledger.slots:
            raise StateError("load_state_dict: this collector has collected already")
        missing = sorted(_STATE - set(state))
        if missing:
            raise StateError(
                "load_state_dict: expected what state_dict() returned, got a mapping without "
                f"{missing}"
            )
        if (state["policy"] is None) != (self._policy is None):
            saved = "without" if state["policy"] is None else "with"
            raise StateError(
                f"load_state_dict: the state was saved {saved} a policy, this collector is the "
                "other way round"
            )
        ledger = self.ledger
        ledger.load(state["ledger"])
        ledger.incarnation += 1
        ledger.discarded += ledger.carried
        ledger.carried = 0
        ledger.episodes_cut += state["open"]
        ledger.check()
        self._state = LaneState.fresh(
            self.lanes, max(int(state["next_id"]), self._writer.next_id())
        )
        self._seed_everything(int(state["seed"]))
        self._load_env_state(state["env"])
        if self._policy is not None:
            self._policy.load_state_dict(state["policy"])
        torch.set_rng_state(state["generators"]["torch"])
        self._rng.bit_generator.state = state["generators"]["actions"]
        self._rollout.random_frames = self._random_frames
        self._rollout.restart_lanes()
        self._output.goes_on_from(self._provenance(), self._state.base)
        self._over = self._budget.remaining(ledger.stored) == 0


def _ticks(options: Options, source: RowSource) -> int | Key:
    """Ticks a transition, or the column that counts them.

    Raises:
        ArgumentError: there is no such column.
    """
    if isinstance(options.frame_skip, int):
        return options.frame_skip
    key = new_name(split(options.frame_skip), options.rename, source.layout)
    if key not in source.layout:
        raise ArgumentError(
            f"frame_skip: expected a number, or the info key that counts ticks, got "
            f"{options.frame_skip!r}; there is no such column"
        )
    return key


def add_end_note(error: BaseException, again: Exception) -> None:
    """Note of ``error``, which is raised, what else went wrong at the end of the run."""
    error.add_note(f"tallyroll: and at the end of the run: {type(again).__name__}: {again}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
