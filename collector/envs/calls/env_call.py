"""A call of environments, or of an attribute of theirs: what is asked of lanes, and what came."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

Way = Literal["env_call", "env_get", "env_set"]


@dataclass(frozen=True)
class EnvCall:
    """A call of the environments of some lanes."""

    way: Way
    name: str
    """The name of a method, or of an attribute."""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``"env_call"``, the same for every lane."""
    values: Sequence[Any] = ()
    """Values of ``"env_set"``, one for each lane that is asked, in their order."""

    def of(self, places: Sequence[int]) -> Self:
        """Return the call of some of the lanes, given by their places among those asked."""
        return replace(self, values=[self.values[at] for at in places] if self.values else ())

    def __str__(self) -> str:
        return f"{self.way}({self.name!r})"


class NoAttribute(AttributeError):
    """The environment lacks the name: nothing was called."""


class NoMethod(TypeError):
    """The name is that of no method: nothing was called."""


class CallOutcome(NamedTuple):
    """The outcome of a call in one lane."""

    value: Any = None
    error: BaseException | None = None
    """The exception that it raised."""
    traceback: str = ""
    """The traceback of that."""

    @property
    def changed(self) -> bool:
        """True if the environment may be another than before."""
        return not isinstance(self.error, (NoAttribute, NoMethod))

    @classmethod
    def of(cls, call: Callable[[], Any]) -> Self:
        """Return the outcome of ``call``."""
        try:
            return cls(call())
        except Exception as error:  # noqa: BLE001  the collector raises it
            return cls(None, error, "".join(traceback.format_exception(error)))
