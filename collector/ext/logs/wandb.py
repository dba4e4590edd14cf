"""A log as a run of Weights & Biases; offline by their variable WANDB_MODE=offline.

Its library is used itself: TorchRL's `WandbLogger` adds packages and paths of this machine.
"""

import math
from typing import Any

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.errors import ArgumentError, MissingExtra
from tallyroll.collector.ext.logs.target import LogTarget, Newest, Row

_PATIENCE_SECONDS = 60.0
"""For a login that asks, and for a network that takes the last rows."""


class WandbLog(LogTarget):
    """Rows of a new run, or of the one that their variable WANDB_RUN_ID names.

    Neither the host nor a path, a file or a commit of this machine is sent.

    Args:
        project: the name of the project.

    Raises:
        ArgumentError: wandb refuses to begin, as without a login.
        MissingExtra: wandb is not installed.
    """

    def __init__(self, project: str) -> None:
        self.name = f"wandb:{project}"
        self._run: Any = None
        wandb: Any = needs("wandb", "wandb", "logs for Weights & Biases")
        if not hasattr(wandb, "init"):  # a folder of that name, which their runs are kept in
            raise MissingExtra(
                "logs for Weights & Biases need the package wandb, which is not installed: "
                "pip install 'tallyroll[wandb]'"
            )
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            host="",
            finish_timeout=_PATIENCE_SECONDS,
            login_timeout=_PATIENCE_SECONDS,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        try:
            self._run = wandb.init(project=project, resume="allow", settings=settings)
        except (wandb.errors.Error, OSError) as error:
            raise ArgumentError(
                f"log: {self.name} cannot begin: {error}; log in by `wandb login`, or set "
                "WANDB_MODE=offline"
            ) from error
        if self._run.resumed and self._run.step:
            self.newest = Newest(self._run.step - 1)

    def write(self, row: Row) -> None:
        """Log a row, but for numbers that are unknown; its step is the number of transitions."""
        known = {name: value for name, value in row.items() if not math.isnan(value)}
        self._run.log(known, step=row["frames"])

    def forget_after(self, frames: int) -> None:
        """Do nothing: a run of theirs takes no step back, and drops rows that it has."""

    def close(self) -> None:
        """Finish the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
