"""The connection of this process to a Ray cluster: one of its own, or one that is there."""

import os
import socket
from contextlib import closing

import ray
from ray.exceptions import RayError

from tallyroll.collector.errors import ArgumentError

_ANSWER_SECONDS = 10.0
"""How long a cluster's address may take to answer."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The beginning of every client of gRPC (RFC 9113, 3.4), whose server answers with its settings."""
_SETTINGS = 4
_IN_REPLIES = "max_direct_call_object_size"
_MOST_IN_REPLIES = 512 * 1024
"""Bytes of an answer that comes with Ray's own reply, and not by the object store: on loopback the
store costs more time than that below some 700 KB, and less above."""


def connect(address: str | None, cpus: int) -> bool:
    """Connect to a cluster; returns whether the connection is the caller's to end.

    Args:
        address: ``"local"``, ``"auto"`` or ``HOST:PORT``; None: the one that this process has
            already, or else a cluster of its own.
        cpus: that a cluster of its own has to offer.

    Raises:
        ArgumentError: no cluster answers there, or it has other versions.
    """
    if ray.is_initialized():
        if address is None:
            return False
        raise ArgumentError(
            f"address: expected None where this process is connected to Ray already, got "
            f"{address!r}; leave it out, or call ray.shutdown() before"
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
            f"address: expected a Ray cluster at {address!r}, got {type(error).__name__}: {said}; "
            'start one with `ray start --head`, or use address="local"'
        ) from error
    return True


def _require_answer(address: str) -> None:
    """Raise unless a server of gRPC answers there: Ray itself waits for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ArgumentError(f'address: expected "local", "auto" or HOST:PORT, got {address!r}')
    try:
        with closing(socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS)) as at:
            at.sendall(_HELLO)
            answer = at.recv(4)
        if answer[3:] != bytes([_SETTINGS]):
            raise OSError("something that is no Ray cluster")
    except (OSError, OverflowError) as error:
        raise ArgumentError(
            f"address: expected a Ray cluster that answers at {address!r} within "
            f"{_ANSWER_SECONDS:g} seconds, got {error}; start one with `ray start --head`, or "
            'use address="local"'
        ) from error
