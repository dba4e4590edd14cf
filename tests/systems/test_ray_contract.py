"""Run the contract of transports, which the wheel includes for any engine, over Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
from loopback_kit import inside, nothing_left_behind, own_ray, run_inside

from tallyroll.collector import Actors, RayCollector
from tallyroll.collector.ext.ray.transport import RayTransport
from tallyroll.collector.testing.transports import TransportContract
from tallyroll.collector.workers.transport import Transport

__all__ = ["nothing_left_behind"]

ADDRESS = "TALLYROLL_RAY_ADDRESS"


@pytest.mark.timeout(1600)
def test_in_a_network_namespace() -> None:
    run_inside(__file__)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with own_ray():
        if ray.is_initialized():  # for a killed process, which connects by itself
            os.environ[ADDRESS] = ray.get_runtime_context().gcs_address
        yield
        os.environ.pop(ADDRESS, None)


def _actors() -> Actors:
    return Actors(address=None if ray.is_initialized() else os.environ[ADDRESS], spares=0)


@inside
class TestRay(TransportContract):
    start_seconds = 300
    notice_seconds = 30

    def transport(self, jobs: Sequence[bytes]) -> Transport[Any]:
        return RayTransport(jobs, _actors())

    def collector(self, create: Any, policy: Any = None, **options: Any) -> Any:
        return RayCollector(create, policy, actors=_actors(), **options)
