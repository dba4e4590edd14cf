"""Assignment of rows to trajectories: ids, episodes, and the index of both."""

from tallyroll.storage.package.moved_paths import moved_names

__getattr__ = moved_names(__name__, "tallyroll.storage.trajectories.mapping", "Trajectories")
