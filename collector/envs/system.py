"""The door for environment systems: a `System` takes arrays and gives arrays.

An author declares what the system is and writes ``reset`` and ``step``. Everything else is done by
the one class that drives all of them, `Stepper`: which slots are transitions, where final
observations go, masks, seeds of lanes, contexts; `SystemEnv` is TorchRL's own protocol over it.
`collector.testing` has the contract that a system is held to.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data import TensorSpec, Unbounded

from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall
from tallyroll.collector.envs.calls.objects import objects_of
from tallyroll.collector.envs.frame_skips import ticks_by_reaching, ticks_of_objects
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.info import Info
from tallyroll.collector.slab.names import NamedColumn
from tallyroll.storage.rows.keys import Key

Array: TypeAlias = Any
"""A NumPy array, or one with ``__dlpack__`` on the declared device; it may be read-only."""

Mask = NDArray[np.bool_]

AtEnd = Literal["final", "reset_slot", "first"]
Finals = Literal["returned", "extra", "some", "lost"]
AgentFinals = Literal["returned", "some"]


@dataclass(frozen=True, kw_only=True)
class Declares:
    """The declaration of a system; specs are those of one lane, without a leading dimension."""

    lanes: int
    observation: Mapping[Key, TensorSpec]
    """Specs of observations by key.

    A group of agents has its observations stacked, ``("walkers", "observation")``, and a mask of
    the living, ``("walkers", "mask")``, bool ``[agent]``. Agents may join and come back."""
    action: Mapping[Key, TensorSpec]
    reward: Mapping[Key, TensorSpec] = field(default_factory=lambda: {("reward",): Unbounded((1,))})
    at_end: AtEnd
    """The observation that a step returns in a lane whose episode ended.

    ``"final"``: its final observation, and the lane waits for ``reset``; ``"reset_slot"``: its
    final observation, and the next step ignores the lane's action and resets it; ``"first"``: the
    first observation of the next episode."""
    finals: Finals = "returned"
    """The place of final observations with ``at_end="first"``.

    ``"extra"``: in ``Step.final``; ``"some"``: there too, if ``Step.final_valid`` says so;
    ``"lost"``: nowhere."""
    agent_finals: AgentFinals = "returned"
    """The last observations of agents in groups.

    ``"some"``: a step may lack the next observation of an agent that acted in it, as
    ``AgentFlags.next_valid`` says, and has zeros in its place."""
    truncation: bool = True
    """True if the system separates truncation from termination; else all ends are terminations."""
    resets: Literal["mask", "all", "none"] = "mask"
    """Lanes that ``reset`` can restart: those of a mask, all of them only, or none.

    With ``"none"`` it returns the first observations, and works once."""
    seeds: Literal["reset", "shared", "make", "none"] = "reset"
    """The call that takes one seed a lane: ``reset``, the making of the system, or none.

    ``"shared"``: all lanes draw from one generator, which ``reset`` seeds with that of the first;
    a run is repeated by as many lanes and the same actions only."""
    context: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Parameters of the task that a reset takes beside a seed, one value a lane."""
    reset_seeds: bool = False
    """True if each reset of a lane takes `System.next_seeds`, where these are not None."""
    options: bool = False
    """True if each reset of a lane takes `System.next_options`, where these are not None."""
    parts: bool = False
    """True if ``step`` takes ``lanes`` and steps those alone."""
    arrivals: int = 0
    """Lanes that ``recv`` returns; ``send`` and it replace ``step``. 0: there is ``step``."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Groups of agents and their numbers of agents; their flags are in ``Step.agents``."""
    turns: bool = False
    """True if agents take turns: a mask marks the agent that acts next, not those alive."""
    of_lanes: Mapping[Key, TensorSpec] = field(default_factory=dict)
    """Specs ``[lane, ...]`` of observations and actions, by key, whose bounds differ by lane.

    Those of one lane have the dtype and the shape then."""
    device: str = "cpu"
    """The device of arrays; on the CPU actions are NumPy arrays, elsewhere torch tensors."""

    @property
    def resets_by_mask(self) -> bool:
        """True if some lanes can be reset while the others go on."""
        return self.resets == "mask"

    @property
    def has_reset_slots(self) -> bool:
        """True if the step of a lane after an end only resets it, and is no transition."""
        return self.at_end == "reset_slot"

    @property
    def marks_transitions(self) -> bool:
        """True if TorchRL's steps mark transitions, for reset slots cannot be avoided there.

        They do that in ``("collector", "valid")``.
        """
        return self.has_reset_slots and not self.resets_by_mask

    @property
    def loses_finals(self) -> bool:
        """True if final observations are lost."""
        return self.finals == "lost"

    @property
    def can_step_part(self) -> bool:
        """True if some lanes can be stepped while others wait."""
        return self.parts or (self.lanes == 1 and not self.arrivals)


class AgentFlags(NamedTuple):
    """Ends of the agents of a group in a step, each bool ``[lane, agent]``."""

    terminated: Array
    truncated: Array
    next_valid: Array | None = None
    """With ``agent_finals="some"``: False where an agent acted and the next observation is lost."""


class Step(NamedTuple):
    """The result of a step; arrays ``[lane, ...]``, in the order of the declaration.

    The system may return the same arrays each time: they are copied before its next call.
    """

    obs: Sequence[Array]
    reward: Sequence[Array]
    """``[lane, *shape]``, without the last axis if that has the length 1."""
    terminated: Array
    """bool ``[lane]``, the lane's episode ended."""
    truncated: Array
    """bool ``[lane]``, its episode was cut short."""
    final: Sequence[Array] | None = None
    """Final observations in the form of ``obs``; only the rows of lanes that ended are read."""
    final_valid: Array | None = None
    """bool ``[lane]``, with ``finals="some"``: the final observation is in ``final``."""
    lanes: Array | None = None
    """int ``[arrival]``, from ``recv``: the lane of each row."""
    skipped: Array | None = None
    """bool ``[lane]``: the system says that it ignored the action; compared with ``at_end``."""
    agents: Mapping[str, AgentFlags] = {}
    """Flags of each group."""


Into: TypeAlias = Callable[[NDArray[Any], NDArray[Any], bytes], Step | None]
"""Steps all lanes with an action ``[lane, ...]``, and writes the results to a slot.

That is given by its observation ``[lane, ...]`` and its table for `StepKernel.put_step`. None is
returned if that is all; the step, if the caller has to write it, or to complete the slot.
"""


Reached: TypeAlias = Callable[[EnvCall, Sequence[int]], Iterable[CallOutcome]]
"""Calls a method of each of some lanes' environments, or reads or sets an attribute, in order.

It is called between steps. An exception of an environment is an outcome, and the other lanes are
called all the same: `reaching.objects.reach_objects` does that to a list of environments.
"""


class System(ABC):
    """An environment system: many lanes that are stepped in one call.

    The entry point of a system in the group ``tallyroll.envs`` names such a class. Its name before
    the first colon of ``create_env_fn`` calls :meth:`make`, and an environment of the system's own
    kind is recognised by :meth:`adopt`.

    Examples:
        >>> import numpy as np
        >>> from torchrl.data import Categorical, Unbounded
        >>> from tallyroll.collector import SyncCollector
        >>> from tallyroll.collector.envs import Declares, Step, System
        >>> class Count(System):
        ...     "Counts to three in each lane."
        ...
        ...     def __init__(self, lanes):
        ...         self.declares = Declares(
        ...             lanes=lanes,
        ...             observation={("count",): Unbounded((1,))},  # of one lane
        ...             action={("action",): Categorical(2)},
        ...             at_end="final",  # lanes wait for a reset
        ...         )
        ...         self.count = np.zeros((lanes, 1), np.float32)
        ...
        ...     def reset(self, lanes, seeds, **options):
        ...         self.count[... if lanes is None else lanes] = 0
        ...         return [self.count]
        ...
        ...     def step(self, action, lanes=None):
        ...         self.count += 1
        ...         over = self.count[:, 0] == 3
        ...         return Step([self.count], [np.ones(len(over))], over, np.zeros_like(over))
        >>> with SyncCollector(
        ...     lambda: Count(2), frames_per_batch=10, total_frames=10, layout="lanes"
        ... ) as collector:
        ...     for batch in collector:
        ...         print(batch["count"][..., 0].int())
        tensor([[0, 1, 2, 0, 1],
                [0, 1, 2, 0, 1]], dtype=torch.int32)
    """

    package: ClassVar[str] = ""
    """The package that it needs, by the name that is imported; empty: none."""
    extra: ClassVar[str] = ""
    """The extra of tallyroll that installs the package; empty: there is none."""
    conflicts: ClassVar[str] = ""
    """A sentence about packages that it cannot be installed beside, and the way out."""
    about: ClassVar[str] = ""
    """A few words on ends of episodes and on seeds, for ``tallyroll envs``."""

    declares: Declares
    next_context: dict[str, NDArray[Any]]
    """Values ``[lane, ...]`` of the next resets, by the names of ``Declares.context``.

    The system reads a lane's at its next reset, after which the driver draws others. Copy values
    to keep them."""
    next_seeds: NDArray[np.int64] | None = None
    """Seeds ``[lane]`` of the next resets, read then as contexts are; None: they have none."""
    next_options: Sequence[Mapping[str, Any]] | None = None
    """``options`` of each lane's next reset, read then as contexts are; None: it has none."""
    stepped_by: Decision = Decision("system")
    """The way its lanes are stepped; for `RunPlan.steps`."""
    forgets_resets: bool = False
    """True if a lane that ended and was reset may reset itself again in the next step."""
    why_no_resets: str = "the system declares neither reset_seeds nor options"
    """The reason that resets take no seeds or options, for messages."""
    reached: Reached | None = None
    """A way to the Python object of each lane's environment; None: there are no such objects."""
    why_not_reached: str = "its lanes have no Python objects of their own"
    """The reason that there are none, for messages."""
    names_contexts: ClassVar[bool] = False
    """True if :meth:`make` takes ``context``, the names of contexts to declare."""
    kept_options: frozenset[str] = frozenset()
    """Names of options that the system needs for itself."""
    reward_dtype: torch.dtype | None = None
    """The dtype of columns of rewards, by a collector's option; None: as declared."""
    first_lane: int = 0
    """The number of the first lane in a run, for messages."""
    wants_masks: bool = False
    """True if random actions will be drawn, which keep to :attr:`legal`."""
    legal: Mapping[Key, NDArray[np.bool_]] = MappingProxyType({})
    """Masks of legal actions ``[lane, ...]`` by action, as of the last step or reset of each lane.

    Of masks that are not among the observations, such as those in infos. A reset of all lanes says
    which actions have one."""

    @abstractmethod
    def reset(
        self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any
    ) -> Sequence[Array]:
        """Start the next episode of ``lanes`` (None: of all), and return first observations.

        Args:
            lanes: bool ``[lane]``; only their rows are read from the result. With None,
                steps under way are dropped: ``recv`` returns none of them.
            seeds: one a lane, with ``lanes=None`` only; None: keep the present generators.
            options: further arguments of TorchRL's ``env.reset``; none in a collector.
        """

    def step(self, action: Sequence[Array], lanes: Mask | None = None) -> Step:
        """Step all lanes, or with ``parts`` those of ``lanes``; ``action`` holds ``[lane, ...]``.

        The system may keep the arrays of ``action``.
        """
        raise NotImplementedError

    @property
    def into(self) -> Into | None:
        """A way of stepping all lanes straight into a slot of one observation, if there is one."""
        return None

    def send(self, action: Sequence[Array], lanes: NDArray[np.int32]) -> None:
        """Begin a step of ``lanes``; ``action`` holds a row for each of them."""
        raise NotImplementedError

    def recv(self) -> Step:
        """Wait until ``arrivals`` lanes have completed their steps; ``Step.lanes`` says which."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027  a system may have nothing to close
        """Close the environments and processes that the system started."""

    def describe(self) -> dict[str, Any]:
        """Return provenance for a storage's manifest: JSON values."""
        return {"id": None, "type": type(self).__name__}

    @property
    def columns(self) -> Sequence[NamedColumn]:
        """The names of observations, in their order; some may be declared by the first reset."""
        return [NamedColumn(key, key) for key in self.declares.observation]

    @property
    def ticks(self) -> int | None:
        """Simulator ticks of a transition; None: it is not known.

        The default is the number that the environments of :attr:`reached` report, or 1.
        """
        if self.reached is None:
            return 1
        objects = objects_of(self.reached)
        if objects is not None:
            return ticks_of_objects(objects)
        return ticks_by_reaching(self.reached, self.declares.lanes)

    def keep_infos(self, infos: Sequence[Info]) -> bool:
        """Make entries of infos observations from the first reset on; False: it has no infos.

        :attr:`columns` has them from now on, ``declares`` from the first reset on at the latest.
        """
        return False

    def require_finals(self) -> None:  # noqa: B027
        """Raise `EnvironmentRefused` if final observations are not as declared."""

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make the environment of ``SYSTEM:name``."""
        raise ArgumentError(f"{cls.__name__} makes no environments by name; pass one that is made")

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Return a system over ``made``, if that is an environment of its kind; else None."""
        return None


def _choices(kind: Any) -> str:
    return ", ".join(map(repr, get_args(kind)))


def require_consistent(declares: Declares, keys: Iterable[Key] = ()) -> None:
    """Raise if a system's declaration cannot be true.

    Raises:
        ArgumentError: two of its fields contradict each other; the message names them.
    """
    d = declares
    wrong = {
        f"lanes: expected at least 1, got {d.lanes}": d.lanes < 1,
        "expected at least one observation, one action and one reward": not (
            d.observation and d.action and d.reward
        ),
        f"at_end: expected one of {_choices(AtEnd)}, got {d.at_end!r}": (
            d.at_end not in get_args(AtEnd)
        ),
        f"finals: expected one of {_choices(Finals)}, got {d.finals!r}": (
            d.finals not in get_args(Finals)
        ),
        'at_end="first": say where the final observation is, by finals="extra" (in Step.final), '
        '"some" (there in some lanes) or "lost"': d.at_end == "first" and d.finals == "returned",
        f'finals="{d.finals}": only with at_end="first", got at_end="{d.at_end}"': (
            d.finals != "returned" and d.at_end != "first"
        ),
        'at_end="final" needs resets="mask", for a lane that ended waits for its reset': (
            d.at_end == "final" and d.resets != "mask"
        ),
        f"arrivals: expected at most {d.lanes} lanes a call, got {d.arrivals}": (
            not 0 <= d.arrivals <= d.lanes
        ),
        f"agent_finals: expected one of {_choices(AgentFinals)}, got {d.agent_finals!r}": (
            d.agent_finals not in get_args(AgentFinals)
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
