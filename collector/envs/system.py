"""Interface for environment systems: a `System` takes arrays and returns arrays.

An author declares the properties of the system and writes ``reset`` and ``step``. `Stepper` drives
every system and does the rest: it decides which slots are transitions, stores final observations,
and handles masks, seeds of lanes and contexts. `SystemEnv` adds TorchRL's own protocol.
`collector.testing` contains the contract tests for systems.
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
"""A NumPy array, or an array with ``__dlpack__`` on the declared device. It may be read-only."""

Mask = NDArray[np.bool_]

AtEnd = Literal["final", "reset_slot", "first"]
Finals = Literal["returned", "extra", "some", "lost"]
AgentFinals = Literal["returned", "some"]


@dataclass(frozen=True, kw_only=True)
class Declares:
    """Declaration of a system. Specs describe one lane, without a leading dimension."""

    lanes: int
    observation: Mapping[Key, TensorSpec]
    """Specs of observations by key.

    A group of agents has its observations stacked, as in ``("walkers", "observation")``, and a
    mask of living agents, ``("walkers", "mask")``, bool ``[agent]``. Agents may join and return."""
    action: Mapping[Key, TensorSpec]
    reward: Mapping[Key, TensorSpec] = field(default_factory=lambda: {("reward",): Unbounded((1,))})
    at_end: AtEnd
    """Observation that a step returns for a lane whose episode ended.

    ``"final"``: its final observation; the lane then waits for ``reset``. ``"reset_slot"``: its
    final observation; the next step ignores the lane's action and resets the lane. ``"first"``:
    the first observation of the next episode."""
    finals: Finals = "returned"
    """Location of final observations with ``at_end="first"``.

    ``"extra"``: in ``Step.final``. ``"some"``: in ``Step.final``, for lanes that
    ``Step.final_valid`` marks. ``"lost"``: nowhere."""
    agent_finals: AgentFinals = "returned"
    """Next observations that steps return for agents in groups.

    ``"returned"``: for every agent. ``"some"``: a step may lack the next observation of an
    agent that acted in it. The step then contains zeros instead, and ``AgentFlags.next_valid`` is
    False."""
    truncation: bool = True
    """True if the system reports truncation; otherwise every end is a termination."""
    resets: Literal["mask", "all", "none"] = "mask"
    """Lanes that ``reset`` can restart: the lanes of a mask, only all of them, or none.

    With ``"none"``, ``reset`` returns the first observations and can be called once only."""
    seeds: Literal["reset", "shared", "make", "none"] = "reset"
    """The call that accepts one seed per lane: ``reset``, the making of the system, or none.

    ``"shared"``: all lanes draw from one generator, which ``reset`` seeds with the first lane's
    seed. Only a run with the same number of lanes and the same actions repeats such a run."""
    context: Mapping[str, TensorSpec] = field(default_factory=dict)
    """Parameters of the task that a reset accepts in addition to a seed, one value per lane."""
    reset_seeds: bool = False
    """True if each reset of a lane uses `System.next_seeds`, unless these are None."""
    options: bool = False
    """True if each reset of a lane uses `System.next_options`, unless these are None."""
    parts: bool = False
    """True if ``step`` accepts ``lanes`` and steps only those."""
    arrivals: int = 0
    """Lanes that each ``recv`` returns. If not 0, ``send`` and ``recv`` replace ``step``."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Number of agents in each group. The flags of the agents are in ``Step.agents``."""
    turns: bool = False
    """True if agents take turns: a mask marks the agent that acts next, not the living agents."""
    of_lanes: Mapping[Key, TensorSpec] = field(default_factory=dict)
    """Specs ``[lane, ...]``, by key, of observations and actions whose bounds differ by lane.

    The spec of one lane then has the same dtype and shape."""
    device: str = "cpu"
    """Device of the arrays. Actions are NumPy arrays on the CPU, and torch tensors elsewhere."""

    @property
    def resets_by_mask(self) -> bool:
        """True if a reset can restart some lanes while the others continue."""
        return self.resets == "mask"

    @property
    def has_reset_slots(self) -> bool:
        """True if the step after an end only resets the lane and is not a transition."""
        return self.at_end == "reset_slot"

    @property
    def marks_transitions(self) -> bool:
        """True if TorchRL's steps have to mark which of them are transitions.

        The marks are in ``("collector", "valid")``. They are needed if the system has reset slots
        and cannot reset lanes by mask, so TorchRL cannot avoid the reset slots.
        """
        return self.has_reset_slots and not self.resets_by_mask

    @property
    def loses_finals(self) -> bool:
        """True if the system loses final observations."""
        return self.finals == "lost"

    @property
    def can_step_part(self) -> bool:
        """True if the system can step some lanes while the others wait."""
        return self.parts or (self.lanes == 1 and not self.arrivals)


class AgentFlags(NamedTuple):
    """Ends of the agents of one group in a step. Each array is bool ``[lane, agent]``."""

    terminated: Array
    truncated: Array
    next_valid: Array | None = None
    """With ``agent_finals="some"``: False if an agent acted and its next observation is lost."""


class Step(NamedTuple):
    """Result of a step: arrays ``[lane, ...]``, in the order of the declaration.

    The system may return the same arrays each time, because the caller copies them before its next
    call.
    """

    obs: Sequence[Array]
    reward: Sequence[Array]
    """``[lane, *shape]``, without the last axis if that axis has length 1."""
    terminated: Array
    """bool ``[lane]``: the lane's episode terminated."""
    truncated: Array
    """bool ``[lane]``: the lane's episode was truncated."""
    final: Sequence[Array] | None = None
    """Final observations in the form of ``obs``. Only rows of lanes that ended are read."""
    final_valid: Array | None = None
    """bool ``[lane]``, with ``finals="some"``: ``final`` contains the final observation."""
    lanes: Array | None = None
    """int ``[arrival]``, from ``recv``: lane number of each row."""
    skipped: Array | None = None
    """bool ``[lane]``: the system ignored the action. The stepper validates this."""
    agents: Mapping[str, AgentFlags] = {}
    """Flags of each group of agents."""


Into: TypeAlias = Callable[[NDArray[Any], NDArray[Any], bytes], Step | None]
"""Function that steps all lanes with an action ``[lane, ...]`` and writes the results to a slot.

The second and third arguments describe the slot: its observation ``[lane, ...]``, and its table for
`StepKernel.put_step`. The function returns None if the slot is complete. It returns the step if the
caller has to write or complete the slot.
"""


Reached: TypeAlias = Callable[[EnvCall, Sequence[int]], Iterable[CallOutcome]]
"""Function that makes an `EnvCall` to the environment of each given lane, in order.

The call happens between steps. An exception of an environment becomes an outcome, and the remaining
lanes are still called. `calls.objects.reach_objects` implements this for a list of environments.
"""


class System(ABC):
    """Environment system: many lanes that one call steps.

    Register a subclass as an entry point in the group ``tallyroll.envs``. The name of the entry
    point, before the first colon of ``create_env_fn``, selects the class, whose :meth:`make` makes
    the environment. :meth:`adopt` recognizes an environment of the system's own kind.

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
    """Import name of the package that the system needs; empty if it needs none.

    The tables ``_COMPUTES`` and ``_NAMED`` in ``envs/setup/packages.py`` list packages whose
    versions a run records.
    """
    extra: ClassVar[str] = ""
    """The extra of tallyroll that installs the package; empty if there is none."""
    conflicts: ClassVar[str] = ""
    """One sentence about packages that conflict with the package, and the workaround."""
    about: ClassVar[str] = ""
    """Short description of ends of episodes and of seeds, for ``tallyroll envs``."""

    declares: Declares
    # Systems of other authors get these inputs as attributes. Therefore the classes of `stepping`
    # assign `next_context`, `next_seeds`, `next_options`, `reward_dtype`, `first_lane` and
    # `wants_masks`.

    next_context: dict[str, NDArray[Any]]
    """Values ``[lane, ...]`` for the next resets, by the names of ``Declares.context``.

    The system reads a lane's values at the lane's next reset. The driver then draws new ones, so
    copy values to keep them."""
    next_seeds: NDArray[np.int64] | None = None
    """Seeds ``[lane]`` of the next resets, read like contexts; None if resets take no seeds."""
    next_options: Sequence[Mapping[str, Any]] | None = None
    """``options`` of each lane's next reset, read like contexts; None if resets take none."""
    stepped_by: Decision = Decision("system")
    """How the lanes are stepped, for `RunPlan.steps`."""
    forgets_resets: bool = False
    """True if a lane that ended and was reset may reset itself again in the next step."""
    why_no_resets: str = "the system declares neither reset_seeds nor options"
    """Reason, for messages, that resets accept no seeds or options."""
    reached: Reached | None = None
    """Access to the Python object of each lane's environment; None if there are no such objects."""
    why_not_reached: str = "its lanes have no Python objects of their own"
    """Reason, for messages, that :attr:`reached` is None."""
    names_contexts: ClassVar[bool] = False
    """True if :meth:`make` accepts ``context``, the names of contexts to declare."""
    kept_options: frozenset[str] = frozenset()
    """Names of options that are reserved for the system."""
    reward_dtype: torch.dtype | None = None
    """Dtype of reward columns, from a collector's option; None for the declared dtype."""
    first_lane: int = 0
    """Number of the first lane in the run, for messages."""
    wants_masks: bool = False
    """True if the collector draws random actions, which have to respect :attr:`legal`."""
    legal: Mapping[Key, NDArray[np.bool_]] = MappingProxyType({})
    """Masks of legal actions ``[lane, ...]``, by action, as of the last step or reset of each lane.

    Contains only masks that are not among the observations, such as masks in infos. A reset of all
    lanes decides which actions have a mask."""

    @abstractmethod
    def reset(
        self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any
    ) -> Sequence[Array]:
        """Start the next episode of ``lanes`` and return the first observations.

        Args:
            lanes: bool ``[lane]``. Only the rows of these lanes are read from the result. None
                resets all lanes and drops steps in progress: ``recv`` returns none of them.
            seeds: the seeds, one per lane, only with ``lanes=None``. None keeps the present
                generators.
            options: further arguments of TorchRL's ``env.reset``. A collector passes none.
        """

    def step(self, action: Sequence[Array], lanes: Mask | None = None) -> Step:
        """Step all lanes, or only ``lanes`` if the system declares ``parts``.

        ``action`` contains arrays ``[lane, ...]``. The system may keep them.
        """
        raise NotImplementedError

    @property
    def into(self) -> Into | None:
        """Function that steps all lanes into a slot with one observation; None by default."""
        return None

    def send(self, action: Sequence[Array], lanes: NDArray[np.int32]) -> None:
        """Begin a step of ``lanes``. ``action`` contains one row for each of them."""
        raise NotImplementedError

    def recv(self) -> Step:
        """Wait until ``arrivals`` lanes have completed their steps; see ``Step.lanes``."""
        raise NotImplementedError

    def keep_on(self, device: torch.device) -> bool:
        """Keep later arrays on ``device``, and declare it, if the system computes them there.

        Return True if it does. A collector calls this method with the device of its environment
        before the first reset. By default, arrays stay on the declared device, and the result is
        False.
        """
        return False

    def close(self) -> None:  # noqa: B027  a system may have nothing to close
        """Close the environments and processes that the system started."""

    def describe(self) -> dict[str, Any]:
        """Return provenance for a storage's manifest, as JSON values."""
        return {"id": None, "type": type(self).__name__}

    @property
    def columns(self) -> Sequence[NamedColumn]:
        """Names of the observations, in order. The first reset may add some."""
        return [NamedColumn(key, key) for key in self.declares.observation]

    @property
    def ticks(self) -> int | None:
        """Simulator ticks per transition; None if unknown.

        The default is the number that the environments of :attr:`reached` report, or 1 if there are
        no such environments.
        """
        if self.reached is None:
            return 1
        objects = objects_of(self.reached)
        if objects is not None:
            return ticks_of_objects(objects)
        return ticks_by_reaching(self.reached, self.declares.lanes)

    def keep_infos(self, infos: Sequence[Info]) -> bool:
        """Add entries of infos to the observations, from the first reset on.

        :attr:`columns` contains them from now on, and ``declares`` from the first reset on at the
        latest. Return False if the system has no infos.
        """
        return False

    def require_finals(self) -> None:  # noqa: B027
        """Raise `EnvironmentRefused` if final observations contradict the declaration."""

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make the environment ``SYSTEM:name`` with ``lanes`` lanes."""
        raise ArgumentError(
            f"{cls.__name__} cannot make environments by name. Pass an environment."
        )

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Return a system over ``made`` if that is an environment of this kind; otherwise None."""
        return None


def _choices(kind: Any) -> str:
    return ", ".join(map(repr, get_args(kind)))


def require_consistent(declares: Declares) -> None:
    """Validate the declaration of a system.

    Raises:
        ArgumentError: fields are invalid or contradict each other. The message names them.
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
        'at_end="first": expected finals="extra" (final observations in Step.final), "some" (in '
        'Step.final for some lanes) or "lost"': d.at_end == "first" and d.finals == "returned",
        f'finals="{d.finals}": expected at_end="first", got at_end="{d.at_end}"': (
            d.finals != "returned" and d.at_end != "first"
        ),
        'at_end="final" needs resets="mask", because a lane that ended waits for its reset': (
            d.at_end == "final" and d.resets != "mask"
        ),
        f"arrivals: expected at most {d.lanes} lanes per call, got {d.arrivals}": (
            not 0 <= d.arrivals <= d.lanes
        ),
        f"agent_finals: expected one of {_choices(AgentFinals)}, got {d.agent_finals!r}": (
            d.agent_finals not in get_args(AgentFinals)
        ),
        "arrivals and parts: expected one of them, because send accepts the lanes to step": bool(
            d.arrivals and d.parts
        ),
        **{
            f'group {name}: expected a mask of living agents, ("{name}", "mask"), bool [{size}]': (
                (name, "mask") not in d.observation
                or tuple(d.observation[name, "mask"].shape) != (size,)
            )
            for name, size in d.groups.items()
        },
    }
    if found := [text for text, is_wrong in wrong.items() if is_wrong]:
        raise ArgumentError(f"the declaration of the system is not valid: {'; '.join(found)}")
