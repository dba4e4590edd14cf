"""The door for environment systems: a `System` takes arrays and gives arrays.

An author declares what the system is and writes ``reset`` and ``step``. Everything else is done by
the one class that drives all of them, `SystemEnv`: which slots are transitions, where final
observations go, masks, seeds of lanes, contexts, TorchRL's own protocol. `testing.py` beside this
module has the contract that a system is held to.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torchrl.data import TensorSpec, Unbounded

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.info import Info
from tallyroll.collector.slab.names import Named
from tallyroll.storage.rows.keys import Key

Array: TypeAlias = Any
"""A NumPy array, or what exports ``__dlpack__`` on the declared device; it may be read-only."""

Mask = NDArray[np.bool_]

AtEnd = Literal["final", "reset_slot", "first"]
Finals = Literal["returned", "extra", "some", "lost"]


@dataclass(frozen=True, kw_only=True)
class Declares:
    """What a system is; specs are those of one lane, without a leading dimension."""

    lanes: int
    observation: Mapping[Key, TensorSpec]
    """A group of agents has its observations stacked, ``("walkers", "observation")``, and a mask
    of the living, ``("walkers", "mask")``, bool ``[agent]``. Agents may join and come back."""
    action: Mapping[Key, TensorSpec]
    reward: Mapping[Key, TensorSpec] = field(default_factory=lambda: {("reward",): Unbounded((1,))})
    at_end: AtEnd
    """What a step returns in a lane whose episode ended: ``"final"``, its final observation, and
    the lane waits for ``reset``; ``"reset_slot"``, its final observation, and the next step ignores
    the lane's action and resets it; ``"first"``, the first observation of the next episode."""
    finals: Finals = "returned"
    """With ``at_end="first"``: ``"extra"``, in ``Step.final``; ``"some"``, there too, as far as
    ``Step.final_valid`` says so; ``"lost"``, nowhere."""
    truncation: bool = True
    """Truncation is told from termination; otherwise every end counts as terminated."""
    resets: Literal["mask", "all", "none"] = "mask"
    """``reset`` restarts the lanes of a mask, all of them only, or is a look at the first
    observations that works once."""
    seeds: Literal["reset", "shared", "make", "none"] = "reset"
    """Where one seed a lane is taken: by ``reset``, when the system is made, or nowhere.
    ``"shared"``: all lanes draw from one generator, which ``reset`` seeds with that of the first;
    a run is repeated by as many lanes and the same actions only."""
    context: Mapping[str, TensorSpec] = field(default_factory=dict)
    """What a reset takes beside a seed: parameters of the task, one value a lane."""
    parts: bool = False
    """``step`` takes ``lanes`` and steps those alone."""
    arrivals: int = 0
    """Not 0: ``send`` and ``recv`` take the place of ``step``, and so many lanes come a call."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Groups of agents, and how many each has; their flags are in ``Step.agents``."""
    turns: bool = False
    """Agents take turns: masks say who acts next, and not who lives."""
    device: str = "cpu"
    """Where arrays are; on the CPU actions are NumPy arrays, elsewhere torch tensors."""


class AgentFlags(NamedTuple):
    """Ends of the agents of a group in a step, each bool ``[lane, agent]``."""

    terminated: Array
    truncated: Array


class Step(NamedTuple):
    """The result of a step; arrays ``[lane, ...]``, in the order of what was declared.

    They may be the same arrays each time: they are copied before the system is called again.
    """

    obs: Sequence[Array]
    reward: Sequence[Array]
    """``[lane, *shape]``, without the last axis where that has the length 1."""
    terminated: Array
    """bool ``[lane]``, the lane's episode ended."""
    truncated: Array
    """bool ``[lane]``, its episode was cut short."""
    final: Sequence[Array] | None = None
    """As ``obs``; only the rows of lanes that ended are read."""
    final_valid: Array | None = None
    """bool ``[lane]``, with ``finals="some"``: the final observation is in ``final``."""
    lanes: Array | None = None
    """int ``[arrival]``, from ``recv``: the lanes that these rows are of."""
    skipped: Array | None = None
    """bool ``[lane]``: the system says that it ignored the action; compared with ``at_end``."""
    agents: Mapping[str, AgentFlags] = {}
    """Of each group."""


class System(ABC):
    """An environment system: many lanes that are stepped in one call.

    The entry point of a system in the group ``tallyroll.envs`` names such a class. Its name before
    the first colon of ``create_env_fn`` calls :meth:`make`, and an environment of the system's own
    kind is recognised by :meth:`adopt`.
    """

    package: ClassVar[str] = ""
    """What has to be installed for it, by the name that is imported; empty: nothing has to."""
    extra: ClassVar[str] = ""
    """The extra of tallyroll that brings the package, where there is one."""
    conflicts: ClassVar[str] = ""
    """What it cannot be installed beside, and what to do about it: a sentence."""
    about: ClassVar[str] = ""
    """How its episodes end and where seeds are taken, in a few words, for ``tallyroll envs``."""

    declares: Declares
    next_context: dict[str, NDArray[Any]]
    """``[lane, ...]``, by the names of ``Declares.context``: read at each lane's next reset, and
    drawn anew after it by the driver. Copy what is kept."""
    stepped_by: Decision = Decision("system")
    """How its lanes are stepped, where a run can choose; for `RunPlan.steps`."""
    lent: Decision = Decision("copied", "the system returns arrays of its own")
    """Where it writes its observations; for `RunPlan.observations`."""
    lends: bool = False
    """:meth:`lend` has an effect."""
    waits: bool = False
    """:meth:`step` calls :attr:`while_waiting` where it could only wait for what computes it."""
    while_waiting: Callable[[], None] | None = None
    """What the driver has to do meanwhile; it touches nothing of the system's. None: nothing.

    It is set for steps that fill a slab, and only where there may be something to do."""
    forgets_resets: bool = False
    """A lane that ended, and was reset since, may reset itself once more in the next step."""
    first_lane: int = 0
    """The number of the first lane in a run, for messages."""

    @abstractmethod
    def reset(
        self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any
    ) -> Sequence[Array]:
        """Start the next episode of ``lanes`` (None: of all), and return first observations.

        Args:
            lanes: bool ``[lane]``; only their rows of what is returned are read. With None, steps
                that are under way are dropped: ``recv`` returns none of them.
            seeds: one a lane, with ``lanes=None`` only; None: go on with the generators there are.
            options: what a caller of TorchRL's ``env.reset`` added; none in a collector.
        """

    def step(self, action: Sequence[Array], lanes: Mask | None = None) -> Step:
        """Step all lanes, or with ``parts`` those of ``lanes``; ``action`` holds ``[lane, ...]``.

        The arrays of ``action`` are the system's to keep.
        """
        raise NotImplementedError

    def send(self, action: Sequence[Array], lanes: NDArray[np.int32]) -> None:
        """Begin a step of ``lanes``; ``action`` holds a row for each of them."""
        raise NotImplementedError

    def recv(self) -> Step:
        """Wait until ``arrivals`` lanes have completed their steps; ``Step.lanes`` says which."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027  a system may have nothing to close
        """End what the system started."""

    def describe(self) -> dict[str, Any]:
        """Provenance for a storage's manifest: JSON values."""
        return {"id": None, "type": type(self).__name__}

    @property
    def columns(self) -> Sequence[Named]:
        """The names of observations, in their order; some may be declared by the first reset."""
        return [Named(key, key) for key in self.declares.observation]

    def lend(self, rows: Sequence[NDArray[Any]] | None) -> None:  # noqa: B027
        """Write the next observations to ``rows`` ``[lane, ...]``, which spares a copy; or no more.

        What is returned then are these arrays themselves.
        """

    def keep_infos(self, infos: Sequence[Info]) -> bool:
        """Let entries of infos be observations from the first reset on; False: it has no infos.

        :attr:`columns` has them from now on, ``declares`` from the first reset on at the latest.
        """
        return False

    def require_finals(self) -> None:  # noqa: B027
        """Raise `EnvironmentRefused` where final observations are not what they are declared."""

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """The environment of ``SYSTEM:name``."""
        raise ArgumentError(f"{cls.__name__} makes no environments by name; pass one that is made")

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """A system over ``made``, an environment of its kind; None: ``made`` is none."""
        return None


def require_consistent(declares: Declares, keys: Iterable[Key] = ()) -> None:
    """Raise where what a system declares cannot be true.

    Raises:
        ArgumentError: says which two of it contradict.
    """
    d = declares
    wrong = {
        f"lanes: expected at least 1, got {d.lanes}": d.lanes < 1,
        "expected at least one observation, one action and one reward": not (
            d.observation and d.action and d.reward
        ),
        f'finals="{d.finals}": only with at_end="first", got at_end="{d.at_end}"': (
            (d.finals != "returned") == (d.at_end != "first")
        ),
        'at_end="final" needs resets="mask", for a lane that ended waits for its reset': (
            d.at_end == "final" and d.resets != "mask"
        ),
        f"arrivals: expected at most {d.lanes} lanes a call, got {d.arrivals}": (
            not 0 <= d.arrivals <= d.lanes
        ),
        "arrivals and parts: send takes the lanes to step": bool(d.arrivals and d.parts),
        **{
            f'group {name}: expected a mask of the living, ("{name}", "mask"), bool [{size}]': (
                (name, "mask") not in d.observation
                or tuple(d.observation[name, "mask"].shape) != (size,)
            )
            for name, size in d.groups.items()
        },
    }
    if found := [text for text, is_wrong in wrong.items() if is_wrong]:
        raise ArgumentError(f"the system declares what cannot be: {'; '.join(found)}")
