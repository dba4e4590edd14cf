"""Options of a ``tallyroll collect`` command, and the storage that it writes to."""

import argparse
import contextlib
import importlib
import inspect
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import cloudpickle

from tallyroll.collector.batches.stored.resume import opened_or_created
from tallyroll.collector.cli.output import CommandError, pasteable
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.report.stored_runs import part as part
from tallyroll.collector.options import MOST_LANES
from tallyroll.collector.options.sharding import Shard, ShardOfRun, shard_of_run
from tallyroll.collector.policies.sb3_models import as_policy
from tallyroll.collector.policies.several.entries import are_several
from tallyroll.storage import CorruptStorage, StorageExists, StorageMissing
from tallyroll.storage.ext.sharded.sharded_storage import ShardedStorage
from tallyroll.storage.files.manifest import SHARD
from tallyroll.storage.package.near_names import did_you_mean
from tallyroll.storage.storages import DiskStorage, H5Storage, is_sharded, storage_class
from tallyroll.storage.stores.row_store import Once


@dataclass(frozen=True)
class Plan:
    """Options of a run. None means that the command line leaves the option out."""

    env: str | None = None
    frames: int | None = None
    episodes: int | None = None
    budget_unit: str | None = None
    num_envs: int | None = None
    seed: int | None = None
    shard: str | None = None
    policy: str | None = None
    frames_per_batch: int | None = None
    env_kwargs: dict[str, Any] | None = None
    max_frames_per_traj: int | None = None
    validate: str | None = None
    frame_skip: int | str | None = None
    reward_dtype: str | None = None
    info_keys: list[str] | None = None
    finals: str | None = None
    rename: list[str] | None = None
    exclude: list[str] | None = None
    reset: list[str] | None = None
    reset_seeds: bool | None = None
    workers: int | None = None
    mode: str | None = None
    transport: str | None = None
    address: str | None = None
    sharded: bool | None = None
    policy_placement: str | None = None
    respawns: int | None = None
    step_timeout: int | float | None = None
    durability: str | None = None
    max_size: int | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Plan":
        """Return the plan of a command line."""
        return cls(**{each.name: getattr(args, each.name) for each in fields(cls)})

    @classmethod
    def of_run(cls, run: Mapping[str, Any]) -> "Plan":
        """Return the plan of a run in a manifest, made by a command or by Python code.

        Raises:
            CorruptStorage: the manifest has values that no plan can have.
        """
        call, environment = part(run, "call"), part(run, "environment")
        command = part(run, "command") or {
            **call,
            "env": environment.get("id"),
            "env_kwargs": environment.get("kwargs") or None,
            "frames": call.get("total_frames"),
            "episodes": call.get("total_episodes"),
            "workers": call.get("num_workers"),
            "policy": None,  # the call names the class of the policy, but not its module
            **_resets_of(part(call, "resets")),
            **_shard_of(part(run, SHARD)),
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
        """Return this plan, with missing options from ``other``.

        A budget in this plan replaces both kinds of budget in ``other``.
        """
        if self.frames is not None or self.episodes is not None:
            other = replace(other, frames=None, episodes=None)
        return replace(other, **self.as_dict())

    @property
    def by_ray(self) -> bool:
        """True if workers are actors of a Ray cluster."""
        return self.transport == "ray"

    @property
    def lanes(self) -> int:
        """Number of lanes of the run; by default one, or one per worker."""
        return self.num_envs or max(1, self.workers or 0)

    @property
    def own(self) -> ShardOfRun | None:
        """The shard to collect; None for the whole run.

        Raises:
            ArgumentError: the run has no such shard.
        """
        if self.shard is None:
            return None
        given = {"num_envs": self.lanes, "total_frames": self.frames, "seed": self.seed}
        given |= {"total_episodes": self.episodes, "init_random_frames": 0}
        return shard_of_run(Shard.parsed(self.shard), given, by_agent=self.by_agent)

    @property
    def own_lanes(self) -> int:
        """Number of lanes of this process: those of the shard, or all."""
        return self.lanes if self.own is None else len(self.own.lanes)

    @property
    def own_frames(self) -> int | None:
        """Number of frames that this process collects; None with an episode budget."""
        own = self.own
        return self.frames if own is None else own.among_first(own.asked)

    def as_dict(self) -> dict[str, Any]:
        """Return the given options as JSON values."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def by_agent(self) -> bool:
        """True if the frames are agent transitions."""
        return self.budget_unit == "agent_transitions"

    def command(self, out: str, *options: str) -> str:
        """Return the command line of this plan, to paste into a shell."""
        words = ["tallyroll", "collect"]
        for name, value in self.as_dict().items():
            if name == "env":
                words.append(value)
            elif name in ("rename", "exclude", "reset"):
                words += [word for each in value for word in (f"--{name}", each)]
            elif value is True:
                words.append("--" + name.replace("_", "-"))
            else:
                words += ["--" + name.replace("_", "-"), _word(value)]
        return pasteable(shlex.join([*words, "--out", out, *options]))


def _shard_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command options for the shard of a run.

    They include the frames of the whole run, because the call only has the frames of the shard.
    """
    if not said:
        return {}
    return {"shard": f"{said.get('index')}/{said.get('of')}", "frames": said.get("asked")}


def _resets_of(resets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command options for the resets of a call, except for a sampler function."""
    sampler = part(resets, "sampler")
    found: dict[str, Any] = {"reset": [f"{name}={text}" for name, text in sampler.items()]}
    return {name: value for name, value in found.items() if value} | (
        {"reset_seeds": True} if resets.get("seeds") is True else {}
    )


_MAY_BE_0 = ("seed", "workers", "respawns")
_KINDS = {
    name: tuple(get_origin(each) or each for each in get_args(hint))
    for name, hint in get_type_hints(Plan).items()
}


def _may_be(name: str, value: Any) -> bool:
    if not isinstance(value, _KINDS[name]) or isinstance(value, bool):
        return value is True and bool in _KINDS[name]
    if isinstance(value, float):
        return 0 < value < math.inf
    if isinstance(value, str):
        # Text with control characters would reappear in error messages.
        return value.isprintable() and (name != "shard" or _names_shard(value))
    if isinstance(value, list):
        return all(isinstance(each, str) for each in value)
    most = MOST_LANES + 1 if name == "num_envs" else 2**63
    return not isinstance(value, int) or (0 if name in _MAY_BE_0 else 1) <= value < most


def _names_shard(text: str) -> bool:
    try:
        Shard.parsed(text)
    except ArgumentError:
        return False
    return True


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(value) if isinstance(value, list) else str(value)


def open_output(args: argparse.Namespace) -> DiskStorage:
    """Open the storage that the command line names, without writing to it.

    Raises:
        CommandError: the storage exists although neither --append nor --resume was given, or it
            does not exist although --append was given, or its format or suffix does not fit.
        StorageError: the storage cannot be opened or created.
    """
    if args.resume:
        return _open_resumed(args)
    try:
        return _open(args, "append" if args.append else "create")
    except StorageExists as error:
        raise CommandError(
            f"{args.out} holds a storage already. Use --append to add a new run after its rows, "
            "--resume to continue its last run, or give another --out."
        ) from error
    except StorageMissing as error:
        raise CommandError(
            f"--append: {args.out} does not exist. Leave --append out to create it."
        ) from error


def _open_resumed(args: argparse.Namespace) -> DiskStorage:
    storage = opened_or_created(lambda mode: _open(args, mode))
    if storage.mode == "create":
        return storage
    last = (storage.manifest["runs"] or [{}])[-1]
    if args.durability is None and part(last, "command").get("durability") == "power":
        storage.close()
        args.durability = "power"
        return _open(args, "append")
    return storage


def _open(args: argparse.Namespace, mode: Literal["create", "append"]) -> DiskStorage:
    if args.append and is_sharded(args.out):
        raise CommandError(
            f"--append: {args.out} is a sharded storage, which has one run. Use --resume to "
            "continue it, or give another --out."
        )
    once = {"yes": True, "no": False}.get(args.once)
    layout: Once = "auto" if once is None or mode == "append" else once
    if args.sharded or (args.resume and is_sharded(args.out)):
        return _with_layout(args, ShardedStorage(args.out, mode=mode, once=layout), once)
    try:
        kind = storage_class(args.out, args.format)
    except ValueError as error:
        raise CommandError(f"--format: {error}") from error
    if once and kind is H5Storage:
        raise CommandError(
            f"--once: expected a MemmapStorage or ZarrStorage, got {kind.__name__} at {args.out}. "
            "Leave --once out, or give another --out."
        )
    try:
        storage = kind(
            args.out,
            mode=mode,
            max_size=args.max_size,
            once=layout,
            durability=args.durability or "process",
            accept_copy=args.accept_copy,
        )
    except ValueError as error:
        raise CommandError(f"--max-size: {error}") from error
    return _with_layout(args, storage, once)


def _with_layout(args: argparse.Namespace, storage: DiskStorage, once: bool | None) -> DiskStorage:
    """Return ``storage``. Close it and raise `CommandError` if its layout is not ``once``."""
    if once is not None and storage.stores_once is not once:
        storage.close()
        stored = "whole observations" if once else "frames once"
        raise CommandError(
            f"--once {args.once}: {args.out} stores {stored}, and a storage keeps its layout. "
            "Leave --once out, or give another --out."
        )
    return storage


def load_policy(spec: str | None) -> Any:
    """Load the policy, or several policies, from ``module:attr`` or ``file.py:attr``.

    A class, or a function that needs no arguments, is called once to make the policy.

    Raises:
        CommandError: the policy does not exist, or importing or making it failed.
    """
    if spec is None:
        return None
    name, _, path = spec.rpartition(":")
    if not name or not path:
        raise CommandError(f"--policy: expected module:attr or file.py:attr, got {spec!r}")
    from_file = name.endswith(".py")
    module = _loaded(name, spec) if from_file else import_named(name, f"--policy {spec}")
    try:
        policy = attrgetter(path)(module)
    except AttributeError as error:
        near = did_you_mean(path, [each for each in vars(module) if not each.startswith("_")])
        raise CommandError(f"--policy {spec}: {error}{near}") from error
    if _is_factory(policy):
        with _named(f"--policy {spec}: calling {path}"):
            policy = policy()
    if are_several(policy):
        return policy  # the collector checks each policy
    policy = as_policy(policy)
    if not callable(policy):
        raise CommandError(
            f"--policy {spec}: expected a policy (a callable from TensorDict to TensorDict), "
            f"a class or a function that makes one, got {type(policy).__name__}"
        )
    return policy


def import_named(name: str, wanted: str) -> Any:
    """Import a module, also from the current directory.

    ``wanted`` names the use of the module in error messages.

    Raises:
        CommandError: the import failed.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _named(f"{wanted}: importing {name}"):
        return importlib.import_module(name)


def _loaded(name: str, spec: str) -> ModuleType:
    """Load a module from a file. Like a script, it can import modules beside it.

    The module is named after its file, and is pickled by value for workers.

    Raises:
        CommandError: the file does not exist, or running it failed.
    """
    path = os.path.abspath(os.path.expanduser(name))
    if not os.path.isfile(path):
        raise CommandError(f"--policy {spec}: expected a Python file, but {path} is not a file")
    if (folder := os.path.dirname(path)) not in sys.path:
        sys.path.append(folder)  # last: a random.py in it must not hide the standard one
    called = f"policy_file_{os.path.basename(path).removesuffix('.py')}"
    found = spec_from_file_location(called, path)
    assert found is not None
    assert found.loader is not None
    module = sys.modules[called] = module_from_spec(found)
    with _named(f"--policy {spec}: running {name}"):
        found.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Convert an exception within the context to a CommandError that names the action."""
    try:
        yield
    except Exception as error:
        raise CommandError(
            f"{what} failed: {type(error).__name__}: {error} (--traceback shows where)"
        ) from error


def _is_factory(value: Any) -> bool:
    try:
        inspect.signature(value).bind()
    except (TypeError, ValueError):
        return inspect.isclass(value)
    return inspect.isclass(value) or inspect.isroutine(value)
