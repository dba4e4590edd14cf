"""The trajectories of a storage, with methods that select some of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from tallyroll.storage.ext.notebook.figures import trajectories_figure
from tallyroll.storage.ext.notebook.film import Video, film
from tallyroll.storage.ext.notebook.tables import trajectories_as_html
from tallyroll.storage.ext.views.expression import Expression
from tallyroll.storage.ext.views.flag_file import flags_of_storage
from tallyroll.storage.ext.views.trajectory_columns import TrajectoryColumns
from tallyroll.storage.ext.views.view_reader import ViewReader, view_of
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.trajectories.mapping import Trajectories

if TYPE_CHECKING:
    from matplotlib.figure import Figure

View = TypeVar("View")
"""The class of the views."""


class StoredTrajectories(Trajectories, Generic[View]):
    """The trajectories of a storage, as `Trajectories`, with methods that create views.

    Args:
        reader: the reader of the rows.
        owner: the storage.
        over: a factory that creates a view from a reader.
    """

    def __init__(
        self, reader: RowReader, owner: object, over: Callable[[ViewReader], View]
    ) -> None:
        super().__init__(reader, owner)
        self._rows_reader, self._over = reader, over

    def _repr_html_(self) -> str:
        return trajectories_as_html(self)

    def plot(self, where: str | None = None, *, window: int = 100) -> Figure:
        """Draw returns and lengths over transitions, and the counts of ends, with Matplotlib.

        The returns and lengths of whole episodes are drawn at the transitions that ended them.

        Args:
            where: an expression as for `where`; None: all trajectories.
            window: the number of last episodes in the mean that is drawn as a line.

        Returns:
            A ``matplotlib.figure.Figure``, which notebooks show and ``savefig(path)`` writes.

        Raises:
            MissingLibrary: Matplotlib is not installed.
            InvalidExpression, ColumnsMissing: as for `where`.
        """
        table = self.table if where is None else self.matching(where)
        return trajectories_figure(table, self._rows_reader.span.start, window)

    def video(self, id: int, column: str | Key | None = None, *, rate: int = 30) -> Video:
        """Return a video of the images in the rows of a trajectory.

        For a stack of frames, the last one is shown. Notebooks show the video, and
        ``.save("episode.mp4")`` writes it.

        Args:
            id: the id of the trajectory.
            column: the column of the images, uint8; None: the first such column.
            rate: frames per second.

        Raises:
            UnknownTrajectory: no row of the trajectory is stored.
            ColumnsMissing: the rows have no such column of images.
            MissingLibrary: PyAV is not installed.
        """
        rows = self.rows_of(id)
        return read_consistently(
            self._rows_reader, lambda: film(self._rows_reader, rows, column, rate)
        )

    def where(self, expression: str, *, flags: str | os.PathLike[str] | None = None) -> View:
        """Return the rows of the trajectories that satisfy an expression, as a read-only storage.

        The view contains the rows that exist now. It does not grow when open trajectories continue
        or new ones start. No row is copied. Rows are numbered 0, 1, 2 ... in the order that they
        have in the storage, and runs keep their numbers. A trajectory that is still open ends with
        a cut in the view. The view supports reading, sampling and pickling like the storage itself,
        as long as the storage is open.

        Names in an expression: ``id``, ``run`` (numbered as in `tallyroll inspect`), ``lane``,
        ``length`` (in rows), ``return`` (the sum of rewards; ``return[i]`` if a row has several
        rewards), ``end`` ("terminated", "truncated", "cut" or "open"), ``whole``, ``first_row``,
        ``last_row``, ``first_step``, ``reset_seed`` (-1 if unknown), ``policy_version`` (at the
        last row; ``version_first`` at the first row), ``policy_id``, ``context.NAME``, and with
        ``flags`` also ``flag``, the text of a trajectory's flag ("" if it has none). See
        `Expression` for the operations.

        Args:
            expression: such as ``"return > 5 and end == 'terminated' and run in (1, 2)"``.
            flags: a file of flags that `tallyroll view --flags` wrote for this storage; None: there
                are no flags.

        Raises:
            InvalidExpression: the text is not a condition on trajectories. The message shows the
                position.
            ColumnsMissing: the rows have no trajectory ids.
            ValueError: the file has no flags of this storage, or other contents.
            OSError: the file cannot be read.

        Examples:
            >>> from tallyroll.collector import SyncCollector
            >>> from tallyroll.storage import MemmapStorage
            >>> storage = MemmapStorage()
            >>> with SyncCollector(
            ...     "CartPole-v1",
            ...     frames_per_batch=12,
            ...     total_frames=12,
            ...     max_frames_per_traj=5,
            ...     storage=storage,
            ... ) as collector:
            ...     stored = collector.collect(12)
            >>> whole = storage.trajectories.where("length == 5 and end != 'open'")
            >>> print(len(whole), whole.trajectories.ids, whole.get(slice(None)).batch_size)
            10 [0 1] torch.Size([10])
            >>> storage.close()
        """
        condition = Expression(expression)
        found = self.parts(lambda table: {"": self._holds(condition, table, flags)})
        return self._over(found[""])

    def parts(
        self, masks: Callable[[np.ndarray], Mapping[str, np.ndarray]]
    ) -> dict[str, ViewReader]:
        """Return a reader for each of several selections of trajectories.

        Args:
            masks: a function that takes `table` and returns the mask of each part, bool
                [trajectories].
        """

        def made() -> dict[str, ViewReader]:
            table = self.table
            return {
                name: view_of(self._rows_reader, table, each) for name, each in masks(table).items()
            }

        return read_consistently(self._rows_reader, made)

    def matching(
        self, expression: str, *, flags: str | os.PathLike[str] | None = None
    ) -> np.ndarray:
        """Return the lines of `table` that satisfy an expression of `where`.

        Raises:
            InvalidExpression, ColumnsMissing, ValueError, OSError: as for `where`.
        """
        condition, table = Expression(expression), self.table
        found: np.ndarray = table[self._holds(condition, table, flags)]
        return found

    def _holds(
        self, condition: Expression, table: np.ndarray, path: str | os.PathLike[str] | None
    ) -> np.ndarray:
        reader = self._rows_reader
        flags = None if path is None else flags_of_storage(path, str(reader.id or reader.path))
        columns = TrajectoryColumns(reader, table, flags)
        return condition.select(columns, len(table))
