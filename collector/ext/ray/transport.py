"""Transport that starts workers in Ray actors, detects their death and replaces them."""

import os
import socket
import threading
import weakref
from collections.abc import Sequence
from contextlib import closing, suppress
from math import ceil
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.far.far_place import FarPlace
from tallyroll.collector.ext.ray.actor import ActorLanes
from tallyroll.collector.ext.ray.heartbeat import Heart
from tallyroll.collector.ext.ray.links import RayLink
from tallyroll.collector.ext.ray.ready_links import ReadyLinks
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.worker_options import Actors
from tallyroll.storage.package.versions import versions

_ANSWER_SECONDS = 10.0
"""Timeout for an answer from the address of a cluster."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of a gRPC client (RFC 9113, 3.4). A server answers with its settings."""
_SETTINGS = 4
_IN_REPLIES = "max_direct_call_object_size"
_MOST_IN_REPLIES = 512 * 1024
"""Largest answer in bytes that travels in Ray's own reply instead of the object store.

On loopback, the object store is slower below some 700 KB and faster above.
"""


def connect(address: str | None, cpus: int) -> bool:
    """Connect to a cluster; return True if the caller must end the connection.

    Args:
        address: ``"local"``, ``"auto"`` or ``HOST:PORT``. None uses the existing connection of this
            process, or starts a local cluster.
        cpus: number of CPUs of a local cluster.

    Raises:
        ArgumentError: no cluster answers at the address, or the cluster has other versions.
    """
    if ray.is_initialized():
        if address is None:
            return False
        raise ArgumentError(
            "address: expected None, because this process is already connected to Ray, got "
            f"{address!r}. Omit the argument, or call ray.shutdown() first."
        )
    if address in (None, "local"):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        replies = {_IN_REPLIES: _MOST_IN_REPLIES}
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
            _system_config=None if f"RAY_{_IN_REPLIES}" in os.environ else replies,
        )
        return True
    assert address is not None
    if address != "auto":
        _require_answer(address)
    try:
        ray.init(address=address, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, RayError) as error:
        said = " ".join(str(error).split())
        raise ArgumentError(
            f"address: expected a Ray cluster at {address!r}, got {type(error).__name__}: {said}. "
            'Start a cluster with `ray start --head`, or use address="local".'
        ) from error
    return True


def _require_answer(address: str) -> None:
    """Raise unless a gRPC server answers at the address. Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ArgumentError(f'address: expected "local", "auto" or HOST:PORT, got {address!r}')
    try:
        with closing(socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS)) as at:
            at.sendall(_HELLO)
            answer = at.recv(4)
        if answer[3:] != bytes([_SETTINGS]):
            raise OSError("a server that is not a Ray cluster")
    except (OSError, OverflowError) as error:
        raise ArgumentError(
            f"address: expected a Ray cluster that answers at {address!r} within "
            f"{_ANSWER_SECONDS:g} seconds, got {error}. Start a cluster with `ray start --head`, "
            'or use address="local".'
        ) from error


_OPTIONS = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "enable_task_events": False}
"""Default actor options, which the caller may override. Task events would record each lease."""


class RayTransport:
    """Transport that starts actors in the cluster to which this process is connected.

    Args:
        jobs: one pickled job per worker.
        actors: the address of the cluster, and options of the actors.
    """

    kills = True

    def __init__(self, jobs: Sequence[bytes], actors: Actors) -> None:
        own = actors.actor_options or {}
        cpus = ceil((len(jobs) + actors.spares) * own.get("num_cpus", 1))
        self._connected = connect(actors.address, max(1, cpus))
        self._jobs = [ray.put(job) for job in jobs]
        self._here = {name: each.partition("+")[0] for name, each in versions().items()}
        self._options = {**_OPTIONS, **own}
        self._spare_count = actors.spares
        self._spares: list[tuple[Any, Any]] = []
        """Spare actors, and references to their locations."""
        self._frozen: set[str] = set()
        """Nodes that receive no more actors."""
        self.links: dict[int, RayLink] = {}
        self._due = ReadyLinks[RayLink]()
        self._weights: tuple[int, Any] = (-1, None)
        self._made_place: FarPlace | None = None
        self._in_lease = False
        """True if new weights take effect within a lease, not only from the next question on."""
        links = self.links
        self._heart = Heart(actors.heartbeat, lambda: [links[index] for index in sorted(links)])
        threading.Thread(target=self._heart.run, name="tallyroll-ray", daemon=True).start()
        self._stop = weakref.finalize(self, _stop, self._heart, self._spares)

    def start(self, index: int) -> RayLink:
        """Start an actor with the job of a worker, or give the job to a spare actor."""
        before = self.links.get(index)
        if before is not None and before.lost and before.facts is not None:
            self._frozen.add(before.facts.node)
        started, place, newest = self._started, self._place, lambda: self._weights
        self.links[index] = RayLink(index, started, place, newest, self._due)
        return self.links[index]

    def _started(self, index: int, spare: bool) -> tuple[Any, Any, Any]:
        found = self._spare() if spare else None
        if found is None:
            actor = self._actor()
            found = actor, actor.facts.remote()
        if self._made_place is not None:
            self._fill_up()
        actor, facts = found
        return actor, facts, actor.make.remote(self._jobs[index], self._here)

    def _actor(self) -> Any:
        options = dict(self._options)
        if self._frozen:
            alive = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
            if fit := [node for node in alive if node not in self._frozen]:
                node = fit[len(self._spares) % len(fit)]
                options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
        return ActorLanes.options(**options).remote()  # type: ignore[attr-defined]

    def _spare(self) -> tuple[Any, Any] | None:
        """Return a spare actor, preferably one that is ready; never wait for one."""
        unready = []
        while self._spares:
            actor, facts = self._spares.pop(0)
            if not ray.wait([facts], timeout=0)[0]:
                unready.append((actor, facts))
                continue
            try:
                if ray.get(facts).node not in self._frozen:
                    self._spares[:0] = unready
                    return actor, facts
            except RayError:
                pass
            _kill(actor)
        self._spares[:] = unready
        return self._spares.pop(0) if self._spares else None

    def _fill_up(self) -> None:
        while len(self._spares) < self._spare_count:
            actor = self._actor()
            self._spares.append((actor, actor.facts.remote()))

    def ready(self, links: Sequence[RayLink], seconds: float) -> set[RayLink]:
        """Return the links with available answers.

        The set of links is cached by the identity of the list.
        """
        self._update_boards()
        return {link for link in self._due.ready(links, seconds) if not link.starts_again()}

    def _update_boards(self) -> None:
        place, answers = self._made_place, self._heart.answers
        while answers:
            link, words = answers.popitem()
            if place is not None and self.links.get(link.index) is link:
                place.tell(link.index, words)

    def _place(self) -> FarPlace:
        assert self._made_place is not None
        return self._made_place

    def place(self, share: Share, plan: SlabPlan, module: object) -> FarPlace:
        """Allocate the memory of this process. Each actor allocates its own memory."""
        self._in_lease = share.segments > 0
        self._made_place = FarPlace(share, plan, module, self._heart.order, self._publish)
        self._fill_up()
        return self._made_place

    def _publish(self, version: int, tensors: list[Any]) -> None:
        self._weights = version, ray.put(tensors)
        if self._in_lease:
            for link in self.links.values():
                link.send_weights()

    @property
    def nodes(self) -> list[str]:
        """Host of each worker."""
        facts = [self.links[index].facts for index in sorted(self.links)]
        return [each.host for each in facts if each is not None]

    def close(self) -> None:
        """Kill the spare actors, and end the connection if this object made it. Idempotent."""
        self._stop()
        connected, self._connected = self._connected, False
        if connected:
            ray.shutdown()


def _stop(heart: Heart, spares: list[tuple[Any, Any]]) -> None:
    heart.stop()
    while spares:
        _kill(spares.pop()[0])


def _kill(actor: Any) -> None:
    with suppress(Exception):  # Ray may have shut down before this process
        ray.kill(actor, no_restart=True)
