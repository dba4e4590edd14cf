"""Collect exactly N true transitions of reinforcement learning, and keep them on disk.

:mod:`tallyroll.collector` steps environments, :mod:`tallyroll.storage` keeps the rows.
"""

__version__ = "0.1.0"
