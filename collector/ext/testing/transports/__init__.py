"""The contract of a transport of workers, as tests: subclass `TransportContract` and run pytest.

    class TestMyTransport(TransportContract):
        def transport(self, jobs):
            return MyTransport(jobs)

It asks a worker by hand, and collects by many: the rows of one process, exactly as many as asked
whatever dies, weights that are whole, and nothing left. Before it is imported,
``pytest.register_assert_rewrite("tallyroll.collector.testing")`` in a ``conftest.py`` makes pytest
say what differs.
"""

from tallyroll.collector.ext.testing.transports.transport_contract import TransportContract

__all__ = ["TransportContract"]
