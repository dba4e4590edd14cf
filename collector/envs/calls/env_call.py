"""Records of a call to the environments of lanes, and of its outcome in each lane."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self

Way = Literal["env_call", "env_get", "env_set"]


@dataclass(frozen=True)
class EnvCall:
    """A method call, or an attribute read or write, in the environments of some lanes."""

    way: Way
    name: str
    """Name of a method or of an attribute."""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``"env_call"``. Every lane gets the same ones."""
    values: Sequence[Any] = ()
    """Values of ``"env_set"``, one for each called lane, in the order of the lanes."""

    def of(self, places: Sequence[int]) -> Self:
        """Return the call for some of the lanes, given by their indices among the called lanes."""
        return replace(self, values=[self.values[at] for at in places] if self.values else ())

    def __str__(self) -> str:
        return f"{self.way}({self.name!r})"


class NoAttribute(AttributeError):
    """The environment has no attribute of that name, so nothing was called."""


class NoMethod(TypeError):
    """The attribute is not a method, so nothing was called."""


class CallOutcome(NamedTuple):
    """The outcome of a call in one lane."""

    value: Any = None
    error: BaseException | None = None
    """The exception that the call raised, if any."""
    traceback: str = ""
    """The traceback of :attr:`error`."""

    @property
    def changed(self) -> bool:
        """True if the call may have changed the environment."""
        return not isinstance(self.error, (NoAttribute, NoMethod))

    @classmethod
    def of(cls, call: Callable[[], Any]) -> Self:
        """Run ``call`` and return its outcome."""
        try:
            return cls(call())
        except Exception as error:  # noqa: BLE001  the collector raises it
            return cls(None, error, "".join(traceback.format_exception(error)))
