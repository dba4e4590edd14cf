"""Iterate over a Tallyroll collector as over a TorchRL collector, here or in a thread."""

import atexit
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from tallyroll.collector.base import Collector
from tallyroll.collector.batches.batch_iterator import BatchIterator
from tallyroll.collector.batches.layouts.torchrl_layout import TorchrlLayout
from tallyroll.collector.batches.layouts.trajectories import padded, split_trajectories
from tallyroll.collector.batches.state.run_seeds import Environments
from tallyroll.collector.batches.stored.buffer_items import extend_buffer, require_items
from tallyroll.collector.batches.stored.sinks import accepts_rows
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.ext.torchrl.arguments import Wishes
from tallyroll.collector.interrupts import defer_signals
from tallyroll.collector.user_code import user_code
from tallyroll.storage.rows.keys import CUT, MASK, NEXT, POLICY_VERSION, as_key, is_done


class WholeTrajectories:
    """Buffer of complete trajectories, and of the rows of incomplete ones."""

    def __init__(self) -> None:
        self._open: dict[int, list[TensorDictBase]] = {}
        self._whole: list[TensorDictBase] = []

    def __len__(self) -> int:
        return len(self._whole)

    def add(self, rows: TensorDictBase, *, ends_all: bool) -> None:
        """Add the rows of a batch.

        If ``ends_all``, drop the trajectories that the batch leaves open.
        """
        pieces = split_trajectories(rows, out="offsets")
        lengths = np.diff(pieces.offsets.numpy()).tolist()
        for key, piece in zip(pieces.traj_ids.tolist(), pieces.rows.split(lengths), strict=True):
            self._open.setdefault(key, []).append(own_ends(piece))
            if not bool(piece.get(CUT)[-1]):
                self._whole.append(torch.cat(self._open.pop(key)))
        if ends_all:
            self._open.clear()

    def forget(self) -> None:
        """Drop all rows, because every lane begins a new trajectory."""
        self._open.clear()
        self._whole.clear()

    def first(self, count: int) -> Sequence[TensorDictBase]:
        """Return the first ``count`` complete trajectories."""
        return self._whole[:count]

    def drop(self, count: int) -> None:
        """Drop the first ``count`` complete trajectories."""
        del self._whole[:count]


def own_ends(rows: TensorDictBase) -> TensorDictBase:
    """Return ``rows`` with the done flags of the environment.

    They are False where only the batch ended.
    """
    cut = rows.get(CUT)
    if not bool(cut.any()):
        return rows
    rows = rows.copy()
    for key, leaf in list(rows.items(True, True)):
        if is_done(as_key(key), leaf.dtype):
            rows.set(key, leaf & ~cut.view(-1, *[1] * (leaf.ndim - 1)))
    rows.set(CUT, torch.zeros_like(cut))
    return rows


def laid_out(trajectories: Sequence[TensorDictBase], form: str | None) -> TensorDictBase:
    """Lay out trajectories as ``[trajectory, time]`` with a mask; ``"cat"`` concatenates them."""
    rows = torch.cat(list(trajectories))
    if form == "cat":
        return rows
    return padded(rows, np.array([len(each) for each in trajectories]))


def stores_rows(buffer: ReplayBuffer | None) -> bool:
    """Return True if ``buffer`` has a Tallyroll storage, which accepts rows of any batch."""
    return buffer is not None and accepts_rows(buffer.storage)


def with_policy_version(batch: TensorDictBase) -> TensorDictBase:
    """Add each row's policy version to ``batch`` at the keys of TorchRL's ``PolicyVersion``."""
    version = batch.get(POLICY_VERSION)
    batch.set("policy_version", version)
    batch.set((NEXT, "policy_version"), version.clone())
    return batch


def compact(batch: TensorDictBase) -> TensorDictBase:
    """Return ``batch`` without values under ``"next"`` that are also at the root."""
    at_root = {as_key(key) for key in batch.keys(True, True)}
    again = [
        key
        for key, leaf in batch.items(True, True)
        if key[0] == NEXT
        and as_key(key[1:]) in at_root
        and key[-1] not in ("done", "terminated", "truncated", "reward")
        and not is_done(as_key(key), leaf.dtype)
    ]
    return batch.exclude(*again)


def joined_workers(batch: TensorDictBase, cat: int) -> TensorDictBase:
    """Join ``[worker, *batch size, time]`` along a dimension of the workers' batches."""
    own = batch.ndim - 1
    at = cat + own if cat < 0 else cat
    if not 0 <= at < own:
        raise StateError(
            f"cat_results: expected a dimension of a worker's batches {list(batch.shape[1:])}, got "
            f"{cat}"
        )
    if own == 1:
        return flat(batch)
    pieces = batch.unbind(0)
    joined: TensorDictBase = torch.cat(list(pieces), at)
    joined.refine_names(..., "time")
    return joined


def flat(batch: TensorDictBase) -> TensorDictBase:
    """Return the rows lane by lane, without padding."""
    mask = batch.get(MASK, None)
    rows = batch.reshape(-1) if mask is None else batch[mask].exclude(MASK)
    rows.names = ["time"]
    return rows


def joined(pieces: Sequence[TensorDictBase]) -> TensorDictBase:
    """Concatenate steps of all lanes.

    Raises:
        StateError: one of the steps has only some of the lanes.
    """
    if any(piece.get(MASK, None) is not None for piece in pieces):
        raise StateError(
            "interruptor: expected steps of all lanes, got a step of some lanes. Make "
            "frames_per_batch and total_frames multiples of the lanes, and use an environment "
            "without reset slots."
        )
    batch: TensorDictBase = torch.cat(list(pieces), -1)
    batch.refine_names(..., "time")
    return batch


def extend(buffer: ReplayBuffer, batch: TensorDictBase) -> None:
    """Add ``batch``, which has trajectory ids, to a replay buffer.

    Raises:
        ItemsDiffer: an interruptor made the batch shorter than the buffer's items.
    """
    require_items(buffer.storage, batch)
    with user_code("the replay buffer"):
        extend_buffer(buffer, [batch])


PATIENCE_SECONDS = 60.0
"""Time in seconds that the current step may take after a request to end the thread."""
_AT_EXIT_SECONDS = 5.0

_running: "weakref.WeakSet[Background]" = weakref.WeakSet()


class _Request:
    """An action that one thread asks another thread to perform."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self.is_done = False
        self.error: BaseException | None = None

    def do(self) -> None:
        """Perform the action; keep its exception for the requesting thread."""
        try:
            self._action()
        except BaseException as error:  # noqa: BLE001  raised by `perform`
            self.error = error
        self.is_done = True


class Background:
    """A thread that collects batch after batch.

    Args:
        batches: function that makes the next batch. The thread ends when it raises StopIteration.
        stop: function that ends a batch early.
    """

    def __init__(self, batches: Callable[[], Any], stop: Callable[[], None]) -> None:
        self._batches, self._stop = batches, stop
        self._turn = threading.Condition()
        self._told = self._in_batch = False
        self._holders = 0
        self._requests: list[_Request] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tallyroll-collector", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the thread collects."""
        return self._thread.is_alive()

    @property
    def is_here(self) -> bool:
        """True if the calling thread is this thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        try:
            while self._begins():
                try:
                    self._batches()
                finally:
                    with self._turn:
                        self._in_batch = False
                        self._turn.notify_all()
        except StopIteration:
            return
        except BaseException as error:  # noqa: BLE001  raised by `raise_error`
            self.error = error
        finally:
            _running.discard(self)

    def _begins(self) -> bool:
        """Wait while a caller holds the next batch; return False if the thread must end."""
        with self._turn:
            self._turn.wait_for(lambda: self._told or not self._holders)
            self._do_requests()
            self._in_batch = not self._told
            return self._in_batch

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Prevent new batches within this context, and wait for the current one to end.

        The thread itself does not wait.
        """
        with self._turn:
            self._holders += 1
            self._turn.wait_for(lambda: self.is_here or not self._in_batch)
        try:
            yield
        finally:
            with self._turn:
                self._holders -= 1
                self._turn.notify_all()

    def perform(self, action: Callable[[], None]) -> None:
        """Perform ``action`` while nothing is collected: between two steps, or two batches.

        Raises:
            BaseException: the exception of ``action``.
        """
        if self.is_here:
            action()
            return
        request = _Request(action)
        with self._turn:
            self._requests.append(request)
            self._turn.wait_for(lambda: request.is_done or not self._in_batch)
            if not request.is_done:
                self._requests.remove(request)
                request.do()
        if request.error is not None:
            raise request.error

    def serve(self) -> None:
        """Perform the requested actions in the thread, between two steps."""
        if self._requests:
            with self._turn:
                self._do_requests()

    def _do_requests(self) -> None:
        for request in self._requests:
            request.do()
        self._requests.clear()
        self._turn.notify_all()

    def raise_error(self) -> None:
        """Raise the thread's exception, if there is one, and clear it."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def tell(self) -> None:
        """Ask the thread to end after the current step."""
        with self._turn:
            self._told = True
            self._turn.notify_all()
        if self.alive:
            self._stop()

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the thread to end."""
        self._thread.join(seconds)

    def end(self, timeout: float | None) -> None:
        """Ask the thread to end, and wait until it has.

        Raises:
            StateError: the thread has not ended within ``timeout`` seconds.
        """
        self.tell()
        if self.is_here:
            return
        seconds = PATIENCE_SECONDS if timeout is None else timeout
        self.wait(seconds)
        if self.alive:
            raise StateError(
                f"the thread that collects has not ended within {seconds:g} s, because a step of "
                "the environment or the policy takes longer. Shut down again with a larger "
                "timeout=."
            )


@atexit.register
def _end_all() -> None:
    # torch's threads do not survive the teardown of modules at interpreter exit.
    left = [*_running]
    for each in left:
        each.tell()
    for each in left:
        each.wait(_AT_EXIT_SECONDS)


class BatchIteration(Collector):
    """A collector that yields batches, or adds them to a replay buffer, as in TorchRL."""

    _wishes: Wishes
    _background: Background | None = None
    _iterator: Iterator[Any] | None = None
    _many: ClassVar[bool] = False
    """True if the collector has workers."""
    _batches_made = 0
    _close_env: bool | None = None
    """True closes the environment. None closes it only if the collector made it."""

    def _begin_run(self, lanes: int, envs: Environments) -> None:
        self._fill_rectangles(lanes)
        super()._begin_run(lanes, envs)

    def _fill_rectangles(self, lanes: int) -> None:
        """Enlarge batches so that all ``lanes`` have the same number of steps, as TorchRL does."""
        options = self._options
        if options.layout.name == "torchrl":
            frames = -(-options.frames_per_batch // lanes) * lanes
            self._options = replace(options, frames_per_batch=frames)
            self._frames_per_batch = frames
            self._writer.require_room(self._options.largest_batch)

    def _drive(self, *parts: Any, torchrl: TorchrlLayout | None = None, **more: Any) -> None:
        if torchrl is not None and self._adds_steps and self._wishes.replay_buffer is not None:
            torchrl.require_rectangles()  # a step of only some lanes would be padded with zeros
        super()._drive(*parts, torchrl=torchrl, **more)

    def _take_over(self, wishes: Wishes) -> None:
        """Set the attributes from TorchRL's arguments, at the end of construction."""
        frames = self._options.frames_per_batch
        if frames != wishes.frames_per_batch:
            warnings.warn(
                f"frames_per_batch={wishes.frames_per_batch} is not a multiple of the lanes: "
                f"batches have {frames} transitions, as in TorchRL. total_frames stays exact",
                stacklevel=5,
            )
        self._hooked = self._in_pieces or self._options.postproc is not None
        self._whole = WholeTrajectories()
        self._pieces: list[TensorDictBase] = []
        """Pieces of a batch that an interruptor may end early."""
        self._outputs: list[Any] = []
        """Outputs to yield next. They were made from :attr:`_ready`."""
        self.requested_frames_per_batch = wishes.frames_per_batch
        self.total_frames = wishes.total_frames
        self.reset_at_each_iter = self._options.reset_at_each_iter
        self.replay_buffer, self.postproc = wishes.replay_buffer, wishes.postproc
        self.pre_collect_hook = wishes.pre_collect_hook
        self.post_collect_hook = wishes.post_collect_hook
        self.interruptor = wishes.interruptor
        self.trajs_per_batch, self.trajs_per_write = wishes.trajs_per_batch, wishes.trajs_per_write
        self.replay_write_mode = None
        if wishes.replay_buffer is not None:
            self.replay_write_mode = "trajectory" if wishes.whole_trajectories else "rollout"
        self.traj_format = wishes.traj_format or "padded"
        self.compact_obs, self.extend_buffer = wishes.compact_obs, wishes.extend_buffer
        self.policy_version_tracker = wishes.track_policy_version or None

    # --- iteration --------------------------------------------------------------------------------

    @property
    def _in_pieces(self) -> bool:
        """True if this class assembles batches and writes them to the buffer itself."""
        wishes = self._wishes
        return wishes.interruptor is not None or wishes.whole_trajectories

    @property
    def _adds_steps(self) -> bool:
        """True if steps are added to the buffer one by one.

        Each item then has the environment's batch size.
        """
        wishes = self._wishes
        return not (wishes.extend_buffer or self._many or stores_rows(wishes.replay_buffer))

    def _of_the_run(self) -> dict[str, Any]:
        """Return the postproc and the replay buffer that the run uses."""
        wishes = self._wishes
        changed = wishes.postproc, wishes.post_collect_hook, wishes.cat_results
        changes = changed not in ((None, None, None), (None, None, "stack"))
        changes = changes or wishes.compact_obs or bool(wishes.track_policy_version)
        given = not (self._in_pieces or self._adds_steps)
        return {
            "postproc": self._process if given and changes else None,
            "replay_buffer": wishes.replay_buffer if given else None,
        }

    def _process(self, batch: TensorDictBase) -> Any:
        """Apply the layout options, the caller's postproc and the hook to ``batch``."""
        wishes = self._wishes
        if isinstance(wishes.cat_results, int) and not self._options.layout.split_trajs:
            batch = joined_workers(batch, wishes.cat_results)
        if wishes.track_policy_version:
            batch = with_policy_version(batch)
        if wishes.compact_obs:
            batch = compact(batch)
        if self.postproc is not None:
            with user_code("postproc"):
                batch = self.postproc(batch)
        self._call_post_hook(batch)
        return batch

    def _call_post_hook(self, batch: Any) -> None:
        if self.post_collect_hook is not None:
            with user_code("post_collect_hook"):
                self.post_collect_hook(batch)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the budget is met, or None for each batch in the replay buffer."""
        if not self._wishes.whole_trajectories:
            return self.iterator()
        return BatchIterator(self._outputs, self._make_trajectories)

    def iterator(self) -> Iterator[Any]:
        """Iterate over batches of frames, even if the collector yields trajectories."""
        return BatchIterator(self._outputs, self._make_output)

    def next(self) -> Any:
        """Return the next batch, or None at the end or if the batch went to the replay buffer."""
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            return self._iterator.__next__()  # a signal handler may raise after a call of `next`
        except StopIteration:
            return None

    def rollout(self) -> Any:
        """Return the next batch, counted and stored as in iteration; None at the end."""
        if not self._continues():
            return None
        with user_code("rollout"):
            _, batch = self._next_batch(yields=True)
        self._done_with_it()
        return batch

    def _continues(self) -> bool:
        """Return True if the run has more batches; raise if an exception ended it."""
        if self._ready or self._pieces or not self._run.over:
            return True
        self._run.refuse_ended()
        return False

    def _make_output(self) -> bool:
        """Make the next output ready; return False if the run is over."""
        if not self._continues():
            return False
        made, batch = self._next_batch()
        if made:
            self._done_with_it(self._outputs, batch)
        return True

    def _done_with_it(self, outputs: list[Any] | None = None, *made: Any) -> None:
        """Add the outputs ``made`` from the ready batch to ``outputs``, and drop the batch.

        Signals are deferred meanwhile, so that no batch is lost or repeated.
        """
        with defer_signals():
            if outputs is not None:
                outputs.extend(made)
            self._ready.clear()
            if outputs is not self._pieces:
                self._pieces.clear()

    def _next_batch(self, *, yields: bool = False) -> tuple[bool, Any]:
        """Return whether there was another batch, and the output to yield.

        With ``yields`` the output is the batch itself, even if it went to a buffer.
        """
        if not (self._ready or self._pieces):
            if self._wishes.update_at_each_batch:
                self.update_policy_weights_()
            if self.pre_collect_hook is not None:
                with user_code("pre_collect_hook"):
                    self.pre_collect_hook()
        before, batch = self._ledger.stored, None
        if self.replay_buffer is not None and not (self.extend_buffer or self._many):
            self._step_by_step(self.replay_buffer)
        elif self.interruptor is not None:
            batch = self._until_interrupted(self.interruptor)
        elif self.replay_buffer is None or yields or self._in_pieces:
            batch = self._raw()
            if batch is not None and not self._hooked:
                self._call_post_hook(batch)
        else:
            self.collect(self._options.frames_per_batch)
        made = batch is not None or self._ledger.stored > before
        self._batches_made += made
        return made, batch if self.replay_buffer is None or yields else None

    def _raw(self, size: int | None = None) -> Any:
        """Return the next batch of the run, which stays ready; None at the end."""
        if not self._ready:
            if self._watched is not None:
                self._watch(self._watched, size or self._frames_per_batch)
            self._guard.ready_batch(size)
        return self._ready[0] if self._ready else None

    def _step_by_step(self, buffer: ReplayBuffer) -> None:
        """Add the steps of a batch to the buffer one by one."""
        left = self._options.frames_per_batch
        while left > 0 and (self._ready or not self._run.over):
            if not self._adds_steps:
                self.collect(min(self.lanes, left))
            elif (step := self._raw(min(self.lanes, left))) is not None:
                with defer_signals(), user_code("the replay buffer"):
                    buffer.add(self._process(step).squeeze(-1))
                    self._ready.clear()
            left -= self.lanes

    def _until_interrupted(self, interruptor: Any) -> Any:
        left = self._options.frames_per_batch - self.lanes * len(self._pieces)
        while left > 0 and (self._ready or not self._run.over):
            piece = self._raw(min(self.lanes, left))
            if piece is not None:
                self._done_with_it(self._pieces, piece)
            left -= self.lanes
            with user_code("interruptor"):
                if interruptor.collection_stopped():
                    break
        if not self._pieces:
            return None
        if self._wishes.whole_trajectories:  # trajectories go to the buffer once they are complete
            return joined(self._pieces)
        with defer_signals():
            batch = self._process(joined(self._pieces))
            if self.replay_buffer is not None:
                extend(self.replay_buffer, batch)
                self._pieces.clear()
        return batch

    def _make_trajectories(self) -> bool:
        """Make an output of complete trajectories; collect a batch first if there are too few."""
        if self.replay_buffer is None:
            assert self.trajs_per_batch is not None
            if len(self._whole) >= self.trajs_per_batch:
                taken = self._whole.first(self.trajs_per_batch)
                batch = self._process(laid_out(taken, self.traj_format))
                with defer_signals():
                    self._outputs.append(batch)
                    self._whole.drop(len(taken))
                return True
        if self.replay_buffer is None or not len(self._whole):
            if not self._continues():
                return False
            self._complete()
        if self.replay_buffer is not None:
            self._extend_whole(self.replay_buffer)
            self._outputs.append(None)
        return True

    def _complete(self) -> None:
        """Collect a batch and add it to the open trajectories."""
        made, batch = self._next_batch(yields=True)
        if made:
            with defer_signals():
                self._whole.add(flat(batch), ends_all=self.reset_at_each_iter)
                self._done_with_it()

    def _extend_whole(self, buffer: ReplayBuffer) -> None:
        while len(self._whole):
            taken = self._whole.first(self.trajs_per_write or len(self._whole))
            with defer_signals():
                extend(buffer, self._process(laid_out(taken, "cat")))
                self._whole.drop(len(taken))

    def __len__(self) -> int:
        """Return the total number of batches of a run with limited frames."""
        if not math.isfinite(self.total_frames):
            raise TypeError("a collector without total_frames has no length")
        return math.ceil(self.total_frames / self._options.frames_per_batch)

    # --- in a thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer in a thread, until the budget is met or until shutdown.

        All threads of a process share TorchRL's exploration type. To let another policy act, as in
        an evaluation, use ``with collector.pause():``.

        Raises:
            ArgumentError: there is neither a replay buffer nor a storage.
        """
        if not self._writer.stores and self.replay_buffer is None:
            raise ArgumentError(
                "start() collects into a replay buffer. Give the collector a replay_buffer=."
            )
        self._raise_of_thread()
        if self.is_running():
            return
        batches = iter(self)  # raises StopIteration only at the end of the run
        self._background = Background(lambda: next(batches), self.stop)
        if self._policy is not None:
            self._policy.serve_between_steps(self._background.serve)

    def is_running(self) -> bool:
        """Return True while the thread of :meth:`start` collects."""
        return self._background is not None and self._background.alive

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Prevent new batches within this context, and wait for the current one to end.

        Raises:
            StateError: no thread is collecting.
        """
        if self._background is None or not self.is_running():
            raise StateError("pause: no thread is collecting. Call start() first.")
        with self._background.hold():
            yield

    def _raise_of_thread(self) -> None:
        if self._background is not None:
            self._background.raise_error()

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Shut down as :meth:`shutdown` does; raise the exception of :meth:`start`'s thread."""
        self.shutdown(timeout=timeout, close_env=close_env)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the run after the current step, and close the environment. Idempotent.

        Args:
            timeout: time in seconds that the current step may take if a thread collects. None means
                60.
            close_env: False leaves the environment open, even if the collector made it.
            raise_on_error: False suppresses exceptions.

        Raises:
            StateError: the thread has not ended in time, and nothing is closed.
            BaseException: the exception of :meth:`start`'s thread, if it raised one.
        """
        try:
            if self._background is not None:
                self._background.end(timeout)
            if hasattr(self, "_whole"):
                self._close_env = close_env
            super().shutdown()
            self._raise_of_thread()
        except Exception:
            if raise_on_error:
                raise

    @property
    def closed(self) -> bool:
        """True if the run is over: its budget is met, or it was shut down."""
        return not hasattr(self, "_loop") or self._run.over
