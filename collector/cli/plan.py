"""The options of a ``tallyroll collect`` command, and the storage that it writes to."""

import argparse
import importlib
import inspect
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from typing import Any, Literal

from tallyroll.collector.batches.resume import last_run_of
from tallyroll.collector.cli.errors import CommandError
from tallyroll.collector.cli.escaped_text import pasteable
from tallyroll.collector.errors import CollectorError
from tallyroll.collector.policies.policy import PolicyFn
from tallyroll.storage import CorruptStorage, Schema, StorageExists, StorageMissing
from tallyroll.storage.engine.engine import Durability
from tallyroll.storage.errors import NotAStorage
from tallyroll.storage.storages import DiskStorage, storage_class


@dataclass(frozen=True)
class Plan:
    """The options of a run. None: left out on the command line."""

    env: str | None = None
    frames: int | None = None
    episodes: int | None = None
    num_envs: int | None = None
    seed: int | None = None
    policy: str | None = None
    frames_per_batch: int | None = None
    env_kwargs: dict[str, Any] | None = None
    max_frames_per_traj: int | None = None
    validate: str | None = None
    frame_skip: int | str | None = None
    info_keys: list[str] | None = None
    finals: Literal["check", "lost", "kept"] | None = None
    rename: list[str] | None = None
    workers: int | None = None
    mode: str | None = None
    respawns: int | None = None
    step_timeout: float | None = None
    durability: Durability | None = None
    max_size: int | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Plan":
        """The plan that a command line gives."""
        return cls(**{each.name: getattr(args, each.name) for each in fields(cls)})

    @classmethod
    def of_run(cls, run: Mapping[str, Any]) -> "Plan":
        """The plan of a run in a manifest, made by a command or by a call.

        Raises:
            CorruptStorage: its values are none that a plan could have.
        """
        command = run.get("command")
        if not isinstance(command, dict):
            call, environment = (
                value if isinstance(value := run.get(name), dict) else {}
                for name in ("call", "environment")
            )
            command = {
                "env": environment.get("id"),
                "env_kwargs": environment.get("kwargs") or None,
                "frames": call.get("total_frames"),
                "episodes": call.get("total_episodes"),
                "frames_per_batch": call.get("frames_per_batch"),
                "frame_skip": call.get("frame_skip"),
                "finals": call.get("finals"),
                "info_keys": call.get("info_keys"),
                "rename": call.get("rename"),
                "workers": call.get("num_workers"),
                "mode": call.get("mode"),
            }
        command = {"num_envs": run.get("lanes"), **command}
        names = {each.name for each in fields(cls)}
        plan = cls(**{name: value for name, value in command.items() if name in names})
        if wrong := [name for name, value in plan.as_dict().items() if not _may_be(name, value)]:
            raise CorruptStorage(
                f"the manifest's last run is damaged: {wrong[0]} is {command[wrong[0]]!r}. Restore "
                "it, or begin a new run with --append."
            )
        return plan

    def or_else(self, other: "Plan") -> "Plan":
        """This plan, with what it leaves out taken from ``other``; one kind of budget."""
        if self.frames is not None or self.episodes is not None:
            other = replace(other, frames=None, episodes=None)
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Plan(**{name: theirs if mine is None else mine for name, mine, theirs in pairs})

    @property
    def lanes(self) -> int:
        """In all: one, or one a worker, where the command line leaves it out."""
        return self.num_envs or max(1, self.workers or 0)

    def as_dict(self) -> dict[str, Any]:
        """The options that were given, as JSON values."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def command(self, out: str, *options: str, leave_out: tuple[str, ...] = ()) -> str:
        """The command line of this plan, to be pasted into a shell."""
        words = ["tallyroll", "collect"]
        for name, value in self.as_dict().items():
            if name in leave_out:
                continue
            if name == "env":
                words.append(value)
            elif name == "rename":
                words += [word for each in value for word in ("--rename", each)]
            else:
                words += ["--" + name.replace("_", "-"), _word(value)]
        return pasteable(shlex.join([*words, "--out", out, *options]))


_MOST_LANES = 2**20
_MAY_BE_0 = ("seed", "workers", "respawns")
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "env": str,
    "policy": str,
    "validate": str,
    "durability": str,
    "mode": str,
    "finals": str,
    "step_timeout": (int, float),
    "env_kwargs": dict,
    "info_keys": list,
    "rename": list,
    "frame_skip": (int, str),
}


def _may_be(name: str, value: Any) -> bool:
    if not isinstance(value, _KINDS.get(name, int)) or isinstance(value, bool):
        return False
    if isinstance(value, float):
        return 0 < value < math.inf
    if isinstance(value, str):
        return value.isprintable()  # else it would come back in errors of those who get it
    if isinstance(value, list):
        return all(isinstance(each, str) for each in value)
    most = _MOST_LANES if name == "num_envs" else 2**63
    return not isinstance(value, int) or (0 if name in _MAY_BE_0 else 1) <= value < most


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(value) if isinstance(value, list) else str(value)


class CommandStorage(DiskStorage):
    """A storage whose manifest also says which command wrote a run; to be mixed into one."""

    plan = Plan()
    begun = False
    """The run stands in the manifest."""

    def initialise(self, schema: Schema, provenance: Mapping[str, Any] | None = None) -> None:
        """As `DiskStorage`, with the plan as the run's ``"command"``."""
        super().initialise(schema, {**(provenance or {}), "command": self.plan.as_dict()})
        self.begun = True


@dataclass(frozen=True)
class OutputPath:
    """The path that a command writes to: ``--out`` and its options."""

    path: str
    format: str | None = None
    """A key of `FORMATS`; None takes it from what is there, or from the suffix."""
    durability: Durability | None = None
    max_size: int | None = None
    """Slots of a new ring."""
    accept_copy: bool = False
    """Open a copy that was made while a writer had the storage open."""

    def open(self, mode: Literal["create", "append"]) -> CommandStorage:
        """Open the storage; nothing is written yet.

        Raises:
            CommandError: what is there, or the suffix, is of another format.
            StorageError: it cannot be opened or created.
        """
        try:
            kind = storage_class(self.path, self.format)
        except ValueError as error:
            raise CommandError(f"--format: {error}") from error
        made = type("CommandStorage", (CommandStorage, kind), {})
        options = {} if self.max_size is None else {"max_size": self.max_size}
        try:
            storage: CommandStorage = made(
                self.path,
                mode=mode,
                durability=self.durability or "process",
                accept_copy=self.accept_copy,
                **options,
            )
        except ValueError as error:
            raise CommandError(f"--max-size: {error}") from error
        return storage


class Target:
    """The storage of a command, open for writing.

    Args:
        storage: the storage.
        run: the run that is continued, as the manifest has it; None begins one.
    """

    def __init__(self, storage: CommandStorage, run: dict[str, Any] | None = None) -> None:
        self.storage, self.run = storage, run
        self.head = storage.head
        """Rows that were there when it was opened."""
        self.first_row = self.head
        """The run's first row."""
        if run is not None:
            self.first_row = last_run_of([run], storage.path, self.head).first_row


def open_target(place: OutputPath, *, append: bool, resume: bool) -> Target:
    """Open ``place`` as the command line says; nothing is written yet.

    Raises:
        CommandError: a storage is there and nothing said what to do with it, or the reverse.
        StorageError: it cannot be opened or created.
    """
    if resume:
        return _open_resumed(place)
    try:
        return Target(place.open("append" if append else "create"))
    except StorageExists as error:
        raise CommandError(
            f"{place.path} holds a storage already: --append adds a new run behind its rows, "
            "--resume continues its last run; or give another --out"
        ) from error
    except StorageMissing as error:
        raise CommandError(
            f"--append: {place.path} does not exist; leave --append out to create it"
        ) from error


def _open_resumed(place: OutputPath) -> Target:
    try:
        storage = place.open("append")
    except StorageMissing:
        return Target(place.open("create"))
    except NotAStorage:
        # A process that was killed before the manifest stood leaves what "create" accepts.
        try:
            return Target(place.open("create"))
        except StorageExists:
            pass  # it holds a manifest, of another program: the first message says it best
        raise
    runs = storage.manifest["runs"]
    if runs and "first_row_of_run" in runs[-1]:
        if place.durability is None and _wanted_power(runs[-1]):
            storage.close()
            storage = replace(place, durability="power").open("append")
        try:
            return Target(storage, runs[-1])
        except CollectorError:
            storage.close()
            raise
    storage.close()
    raise CommandError(f"--resume: {place.path} holds no run of a collector; use --append")


def _wanted_power(run: Mapping[str, Any]) -> bool:
    command = run.get("command")
    return isinstance(command, dict) and command.get("durability") == "power"


def load_policy(spec: str | None) -> PolicyFn | None:
    """The policy that ``module:attr`` names.

    A class, or a function that needs no arguments, is called once to make it.

    Raises:
        CommandError: there is no such thing, or importing or making it failed.
    """
    if spec is None:
        return None
    name, _, path = spec.partition(":")
    if not name or not path:
        raise CommandError(f"--policy: expected module:attr, got {spec!r}")
    found = _guarded(f"--policy {spec}: importing {name}", lambda: _import(name))
    try:
        policy = attrgetter(path)(found)
    except AttributeError as error:
        raise CommandError(f"--policy {spec}: {error}") from error
    if _is_factory(policy):
        policy = _guarded(f"--policy {spec}: calling {path}", policy)
    if not callable(policy):
        raise CommandError(
            f"--policy {spec}: expected a policy (a callable from TensorDict to TensorDict), "
            f"a class or a function that makes one, got {type(policy).__name__}"
        )
    made: PolicyFn = policy
    return made


def import_registry(env: str) -> None:
    """Import the module of ``module:Id-v0``, which registers the environment.

    Raises:
        CommandError: that failed.
    """
    name, colon, _ = env.partition(":")
    if colon:
        _guarded(f"{env}: importing {name}", lambda: _import(name))


def _import(name: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _guarded(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise CommandError(
            f"{what} failed: {type(error).__name__}: {error} (--traceback shows where)"
        ) from error


def _is_factory(value: Any) -> bool:
    if inspect.isclass(value):
        return True
    if not inspect.isroutine(value):
        return False
    try:
        inspect.signature(value).bind()
    except (TypeError, ValueError):
        return False
    return True
