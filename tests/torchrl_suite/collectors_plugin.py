"""TorchRL's own collector tests, with our collectors in the place of its own.

The test modules come from a checkout of TorchRL, of the version that is installed; before they are
imported its collectors' names in ``torchrl.collectors`` are ours. By hand, a quarter of an hour on
quiet cores (on busy ones tests that start many processes of TorchRL's own need a long timeout)::

    cd CHECKOUT && PYTHONPATH=TALLYROLL/tests/torchrl_suite \
        pytest -p collectors_plugin -p no:cacheprovider test/test_collectors.py
"""

from __future__ import annotations

import functools
import sys
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest
from suite import Suite

NAMES = (
    *("Collector", "AsyncCollector", "MultiCollector", "MultiSyncCollector"),
    "MultiAsyncCollector",
)
WHERE = ("torchrl.collectors", "torchrl.collectors._multi_base")
"""The modules that tests take these names from."""


def _noting(kind: Any, made: list[str]) -> None:
    """Note whenever one of ``kind`` is made."""
    plain = kind.__init__

    @functools.wraps(plain)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(kind.__name__)
        if kind.__name__ == "MultiCollector":  # starts in a tenth of the time
            kwargs.setdefault("mp_start_method", "forkserver")
        plain(self, *args, **kwargs)

    kind.__init__ = noted


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the run."""
    parser.getgroup("tallyroll").addoption("--torchrl-log", help="a file for what failed, and how")


def pytest_configure(config: pytest.Config) -> None:
    """Put ours in their place, before a test module is imported."""
    # All that stands on TorchRL's own collectors is imported before.
    import torchrl.collectors.distributed
    import torchrl.trainers  # noqa: F401

    import tallyroll.collector.torchrl as ours

    set_forkserver_preload(["torch", "torchrl.envs", "tallyroll.collector.workers.worker"])
    made: list[str] = []
    for kind in (ours.Collector, ours.MultiCollector):
        _noting(kind, made)
    for module in WHERE:
        for name in NAMES:
            if hasattr(sys.modules[module], name):
                setattr(sys.modules[module], name, getattr(ours, name))
    listed = Path(__file__).parent / "collectors.toml"
    suite = Suite(listed, made, "our collectors", config.getoption("--torchrl-log"))
    config.pluginmanager.register(suite, "tallyroll-collectors")
