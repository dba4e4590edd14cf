"""Contract tests for a transport of workers. Subclass `TransportContract` and run pytest.

    class TestMyTransport(TransportContract):
        def transport(self, jobs):
            return MyTransport(jobs)

The tests ask a worker by hand, and collect with several workers. They check that the rows equal the
rows of one process, and that exactly the requested number of rows arrives whichever worker dies.
They also check that weights are consistent and that nothing is left over. To make pytest show
differing values, call ``pytest.register_assert_rewrite("tallyroll.collector.testing")`` in a
``conftest.py`` before the import.
"""

from tallyroll.collector.ext.testing.transports.transport_contract import TransportContract

__all__ = ["TransportContract"]
