"""Log target that writes a run of Weights & Biases.

Set WANDB_MODE=offline to work offline.

The module uses the wandb library directly. TorchRL's `WandbLogger` adds packages and local paths.
"""

from typing import Any

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.errors import ArgumentError, MissingExtra
from tallyroll.collector.ext.logs.target import LogTarget, Newest, Row, known_numbers

_PATIENCE_SECONDS = 60.0
"""Timeout for an interactive login, and for the upload of the last rows."""


class WandbLog(LogTarget):
    """Rows of a new run, or of the run that the environment variable WANDB_RUN_ID names.

    The log does not send the host name, or any path, file or commit of this machine.

    Args:
        project: name of the project.

    Raises:
        ArgumentError: wandb cannot start a run, for example without a login.
        MissingExtra: wandb is not installed.
    """

    def __init__(self, project: str) -> None:
        self.name = f"wandb:{project}"
        self._run: Any = None
        wandb: Any = needs("wandb", "wandb", "logs for Weights & Biases")
        if not hasattr(wandb, "init"):  # a local folder "wandb" with run files shadows the package
            raise MissingExtra(
                "logs for Weights & Biases need the package wandb, which is not installed: "
                'pip install "tallyroll[wandb]"'
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
                f"log: {self.name} cannot start a run: {error}. Log in with `wandb login`, or set "
                "WANDB_MODE=offline."
            ) from error
        if self._run.resumed and self._run.step:
            self.newest = Newest(self._run.step - 1)

    def write(self, row: Row) -> None:
        """Log a row without its unknown numbers. Its number of transitions is the step."""
        self._run.log(known_numbers(row), step=row["frames"])

    def forget_after(self, frames: int) -> None:
        """Do nothing: wandb cannot go back to an earlier step, and drops rows that it has."""

    def close(self) -> None:
        """Finish the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
