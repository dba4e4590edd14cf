"""Options of an export to LeRobot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Video = Literal["av1", "h264", "h264-lossless", "ffv1"]
"""Video codecs. The last two are lossless."""

_MOST_FPS, _MOST_CRF, _LONGEST_TASK = 1000, 51, 4096


@dataclass(frozen=True)
class LeRobotOptions:
    """Options of an export to LeRobot: ``storage.export(path, "lerobot", options=...)``."""

    video: Video | None = None
    """The codec that stores images as videos. None stores images as PNG, bit for bit."""
    fps: int = 30
    """Steps per second. LeRobot finds frames by their time."""
    crf: int = 30
    """The quality of ``"av1"`` and ``"h264"``, from 0, the best, to 51, the worst."""
    task: str = ""
    """The task description of all episodes, one sentence."""

    def __post_init__(self) -> None:
        if self.video is not None and self.video not in get_args(Video):
            names = ", ".join(map(repr, get_args(Video)))
            raise ValueError(f"video: expected one of {names} or None, got {self.video!r:.80}.")
        for name, least, most in (("fps", 1, _MOST_FPS), ("crf", 0, _MOST_CRF)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(
                    f"{name}: expected a whole number from {least} to {most}, got {value!r}."
                )
        if not isinstance(self.task, str) or len(self.task) > _LONGEST_TASK:
            raise ValueError(
                f"task: expected a text of at most {_LONGEST_TASK} characters, got "
                f"{self.task!r:.80}."
            )
