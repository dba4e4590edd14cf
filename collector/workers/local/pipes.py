"""Messages and memory over a pipe, between a parent and a worker on one machine."""

import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.local.memory import Arena, Measure, require
from tallyroll.collector.workers.local.placement import Blocks
from tallyroll.collector.workers.share import Share


class PipeChannel:
    """A pipe with messages; memory follows the question :class:`~messages.Bind`.

    Args:
        connection: one end of the pipe.
        memory: is sent with that question, by a parent.
    """

    def __init__(self, connection: Connection, memory: "SharedPlace | None" = None) -> None:
        self.connection, self._memory = connection, memory

    def send(self, message: object) -> None:
        """Send a message. Torch would move tensors to named shared memory: it is not asked to."""
        self.connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        if isinstance(message, m.Bind) and self._memory is not None:
            arena = self._memory.arena
            self.connection.send(arena.nbytes)
            send_handle(self.connection, arena.fd, 0)  # the receiver's number is for Windows alone

    def receive(self) -> Any:
        """The next message; waits for it."""
        return pickle.loads(self.connection.recv_bytes())

    def place(self, share: Share, plan: SlabPlan, module: object) -> Blocks:
        """The memory that follows the question, laid out as the parent's is."""
        nbytes = self.connection.recv()
        return Blocks(Arena.attach(recv_handle(self.connection), nbytes), share, plan, module)


class SharedPlace:
    """Memory that the parent makes once, for all of its workers."""

    arena: Arena

    def make(self, share: Share, plan: SlabPlan, module: object) -> Blocks:
        """The memory, laid out; all of it, or else ArgumentError is raised."""
        measure = Measure()
        Blocks(measure, share, plan, module)
        slabs = "a slab"
        if share.segments:
            slabs = f"{share.segments} slabs for each of {len(share.lanes)} workers"
        require(
            measure.end,
            f"{slabs} of {share.slots} slots of {share.total} lanes and the policy's weights",
        )
        self.arena = Arena.create(measure.end)
        return Blocks(self.arena, share, plan, module)
