"""Ray actor that runs a worker."""

import os
import pickle
import platform
from typing import Any, NamedTuple

import ray
from numpy.typing import NDArray

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.far.far_worker import Answer, FarWorker
from tallyroll.collector.workers.worker import exception_report
from tallyroll.storage.package.versions import versions


class Facts(NamedTuple):
    """Process and node of an actor."""

    node: str
    """Ray's id of the node."""
    host: str
    pid: int


@ray.remote(
    max_restarts=0,
    max_task_retries=0,
    enable_task_events=False,  # Ray's server would keep 4 KB for each of 100,000 calls
    concurrency_groups={"questions": 1, "orders": 1},
)
class ActorLanes:
    """A worker that receives orders while it answers a question."""

    def __init__(self) -> None:
        self._worker = FarWorker()

    @ray.method(concurrency_group="orders")
    def facts(self) -> Facts:
        """Return the node, host and process of the actor."""
        context = ray.get_runtime_context()
        return Facts(context.get_node_id(), platform.node(), os.getpid())

    @ray.method(concurrency_group="orders")
    def words(self) -> list[int]:
        """Return the progress of the worker, as a heartbeat."""
        return self._worker.words

    @ray.method(concurrency_group="orders")
    def halt(self, number: int, word: int) -> None:
        """Set the HALT word, which makes the worker stop or continue."""
        self._worker.halt(number, word)

    @ray.method(concurrency_group="orders")
    def weights(self, version: int, arrays: list[NDArray[Any]]) -> None:
        """Store weights for the worker."""
        self._worker.take_weights(version, arrays)

    @ray.method(concurrency_group="questions")
    def make(self, job: bytes, here: dict[str, str]) -> Answer:
        """Start the worker if this node has the parent's package versions."""
        try:
            _require_same(here)
        except ArgumentError as error:
            return Answer(exception_report(error, ""))
        return self._worker.start(job)

    @ray.method(concurrency_group="questions")
    def ask(self, content: bytes, weights: list[NDArray[Any]] | None = None) -> Answer:
        """Answer a question; ``content`` is the question with its :class:`Given`, pickled."""
        question, given = pickle.loads(content)
        if weights is not None:
            self._worker.take_weights(given.weights, weights)
        return self._worker.ask(question, given)


def _require_same(here: dict[str, str]) -> None:
    """Raise unless this node has the parent's package versions."""
    own = {name: version.partition("+")[0] for name, version in versions().items()}
    differing = [
        f"{name} {own.get(name, 'missing')} (the driver has {here.get(name, 'none')})"
        for name in sorted({*here, *own})
        if here.get(name) != own.get(name)
    ]
    if differing:
        raise ArgumentError(
            f"expected the driver's package versions on every node, got {', '.join(differing)} on "
            f"node {platform.node()}. Install the same versions on that node."
        )
