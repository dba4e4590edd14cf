"""Make environments from a storage's manifest, without importing code that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from tallyroll.collector.envs import registry
from tallyroll.collector.envs.close import closing_on_error
from tallyroll.collector.envs.setup.make import NOT_JSON, CreateEnv, make_env
from tallyroll.collector.envs.setup.prepare import prepare_env
from tallyroll.collector.errors import ArgumentError, EnvironmentUnknown
from tallyroll.collector.ext.systems.pettingzoo import envs as pettingzoo
from tallyroll.collector.options import Options
from tallyroll.collector.options.draws import parsed as parsed_draw
from tallyroll.collector.options.objects import Checks, Columns
from tallyroll.collector.options.resets import Resets
from tallyroll.collector.slab.info import parsed as parsed_info
from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.files.copied_runs import is_collected
from tallyroll.storage.storages import open_storage

_INDIRECT = ("GymV21Environment", "GymV26Environment")
"""Gymnasium ids that import code named in their arguments."""
_BY_MODULE = "pettingzoo"
"""System whose environment names may be module paths if its registry lacks them."""


@dataclass(frozen=True)
class RecoveredEnv:
    """How the environment of a run was made and driven, according to the run's entry."""

    create: CreateEnv
    kwargs: dict[str, Any]
    lanes: tuple[int, ...]
    """Number of lanes of each worker; a run without workers has one number."""
    options: dict[str, Any]
    """Arguments of a collector."""
    resets: Resets
    """How the run drew its resets, as far as the manifest records it."""
    unknown_sampler: str = ""
    """Name of the function that drew the resets; empty if there was none."""


def recovered(
    entry: Mapping[str, Any],
    create_env_fn: CreateEnv | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    resets: Resets | None = None,
) -> RecoveredEnv:
    """Read how to make and drive the environment of a run. Arguments override the entry.

    Raises:
        EnvironmentUnknown: the entry names no environment that may be made, and ``create_env_fn``
            is None; or a `Recorder` stored the run.
        CorruptStorage: the entry is damaged.
    """
    environment = _part(entry, "environment")
    call = _part(entry, "call")
    if "recorded" in call:
        raise EnvironmentUnknown(
            "expected a run of a collector, got one that a Recorder stored. Its loop chose seeds "
            "and resets that are not in the storage"
        )
    create, kwargs = create_env_fn, dict(env_kwargs or {})
    if create is None:
        create = _safe_id(environment, _part(entry, "made").get("environment"))
    if isinstance(create, str) and create == environment.get("id"):
        _require_arguments(environment, kwargs)
        kwargs = {**_in_step(create, _part(environment, "kwargs")), **kwargs}
    lanes, workers = entry.get("lanes"), call.get("num_workers", 1)
    if type(lanes) is not int or type(workers) is not int or not 0 < workers <= lanes:
        raise CorruptStorage(
            f"manifest: expected at least one lane for each worker, got lanes={lanes!r} and "
            f"num_workers={workers!r}. Run `tallyroll verify` to find other damage."
        )
    shares = [lanes // workers + (part < lanes % workers) for part in range(workers)]
    given, unknown = _resets(call) if resets is None else (resets, "")
    try:
        options = {
            "max_frames_per_traj": call.get("max_frames_per_traj"),
            "columns": Columns(
                info_keys=[parsed_info(each) for each in call.get("info_keys", [])],
                rename=dict(each.split("=", 1) for each in call.get("rename", [])),
                frame_skip=call.get("frame_skip", 1),
                reward_dtype=call.get("reward_dtype"),
            ),
            "checks": Checks(
                finals=call.get("finals", "check"), reset_slots=call.get("reset_slots", "mask")
            ),
        }
    except (ArgumentError, AttributeError, TypeError, ValueError) as error:
        raise CorruptStorage(
            f"manifest: the entry of the run has invalid arguments: {error}"
        ) from error
    return RecoveredEnv(create, kwargs, tuple(shares), options, given, unknown)


def _require_arguments(environment: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise `EnvironmentUnknown` for an argument that the entry names but does not contain."""
    names = environment.get(NOT_JSON)
    lacking = [name for name in names if name not in given] if isinstance(names, list) else []
    if lacking:
        raise EnvironmentUnknown(
            f"the manifest does not contain the arguments {', '.join(map(str, lacking))} of the "
            "run's environment. Pass them in env_kwargs=, or pass create_env_fn=."
        )


def _part(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = entry.get(name)
    return found if isinstance(found, dict) else {}


def _safe_id(environment: Mapping[str, Any], classes: object) -> str:
    """Return the id with which the environment was made, if it is safe to use.

    An id is safe if making it imports no module that the storage names. ``classes`` are the names
    of the environment's classes or factories in the run's entry, for the message.

    Raises:
        EnvironmentUnknown: there is no id, or it names a module.
    """
    name = environment.get("id")
    way_out = "pass create_env_fn= (on the command line --env ID or --env-factory module:function)"
    if not isinstance(name, str) or not name or "kwargs" not in environment:
        kind = environment.get("type")
        of = f" ({kind})" if isinstance(kind, str) else ""
        names = classes if isinstance(classes, list) else []
        if len(names) == 1 and isinstance(names[0], str):
            module, _, made = names[0].rpartition(":")
            of = f" ({kind} of {made})"
            module = "module" if module == "__main__" else module  # a script has another name here
            way_out = (
                f"pass create_env_fn={made} (on the command line --env-factory {module}:{made}) if "
                "the run got it as it is, or else a function that makes the same environment"
            )
        raise EnvironmentUnknown(
            f"the run's environment{of} came from a factory or was an instance: the storage does "
            "not record its arguments, and Tallyroll never imports code that a storage names. To "
            f"make the environment, {way_out}"
        )
    system, colon, rest = name.partition(":")
    if not colon:
        if system.startswith(_INDIRECT):
            raise EnvironmentUnknown(
                f"the run's environment {name!r} imports modules that its arguments name, and "
                "Tallyroll never imports modules named by a storage. To make the environment, "
                f"{way_out}"
            )
        return name
    modules = ":" in rest or (system == _BY_MODULE and pettingzoo.registered(rest) is None)
    if system not in registry.names() or modules:
        raise EnvironmentUnknown(
            f"the run's environment {name!r} names a module, and Tallyroll never imports modules "
            f"named by a storage. If you trust the module, {way_out}"
        )
    return name


def _in_step(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that step all lanes together, which does not change any lane's results."""
    if name.startswith("envpool:") and "batch_size" in kwargs:
        return {**kwargs, "batch_size": 0}
    return kwargs


def _resets(call: Mapping[str, Any]) -> tuple[Resets, str]:
    """Return how the resets were drawn, and the name of a sampler function."""
    said = _part(call, "resets")
    seeds, sampler = said.get("seeds") is True, said.get("sampler")
    if isinstance(sampler, str):
        return Resets(seeds=seeds), sampler
    if not isinstance(sampler, dict) or not sampler:
        return Resets(seeds=seeds), ""
    try:
        draws = {name: parsed_draw(text) for name, text in sampler.items()}
        return Resets(sampler=draws, seeds=seeds), ""
    except (ArgumentError, AttributeError, TypeError) as error:
        raise CorruptStorage(
            f"manifest: the entry of the run has invalid draws of resets: {error}"
        ) from error


def options_for(found: RecoveredEnv, num_envs: int | None, resets: Resets | None = None) -> Options:
    """Return collector options with which the environment of ``found`` can be made again."""
    return Options.of(
        {
            "frames_per_batch": 1,
            "total_frames": 1,
            "total_episodes": None,
            "num_envs": num_envs,
            "seed": None,
            "device": None,
            "env_kwargs": found.kwargs or None,
            "layout": "rows",
            "surplus": "carry",
            "init_random_frames": 0,
            "exploration_type": ExplorationType.RANDOM,
            "reset_at_each_iter": False,
            "postproc": None,
            "devices": None,
            "resets": resets,
            "shard": None,
            "progress": False,
            "storage": None,
            "replay_buffer": None,
            "more": {},
            **found.options,
        }
    )


def made(found: RecoveredEnv, lanes: int, resets: Resets | None = None) -> EnvBase:
    """Make the environment with ``lanes`` lanes, or with the number that its factory chooses.

    Raises:
        ArgumentError: the environment cannot be made.
        EnvironmentRefused: the environment cannot be driven with these options.
    """
    num_envs = lanes if isinstance(found.create, str) else None
    env = _made(found, num_envs, resets)
    if num_envs is None and lanes != 1 and env.batch_size.numel() == 1 and _is_factory(found):
        env.close(raise_if_closed=False)
        env = _made(found, lanes, resets)
    return env


def _is_factory(found: RecoveredEnv) -> bool:
    return callable(found.create) and not isinstance(found.create, EnvBase)


def _made(found: RecoveredEnv, num_envs: int | None, resets: Resets | None) -> EnvBase:
    options = options_for(found, num_envs, resets)
    made = make_env(found.create, options)
    with closing_on_error(made.env if made.owned else None):
        return prepare_env(made.env, None, options)


def recover_env(
    path: str | PathLike[str],
    run: int = -1,
    *,
    num_envs: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
) -> EnvBase:
    """Make the environment of a stored run again from its provenance.

    The environment is set up as a collector would set it up. Only ids that are registered with
    Gymnasium or with an environment system can be recovered. The function never imports or calls
    code that a storage names. Factories and ids of the form ``"module:Env-v0"`` cannot be
    recovered; make these environments yourself.

    Args:
        path: path of the storage.
        run: index of the entry in the manifest's ``runs``.
        num_envs: number of lanes. None selects the number of the run.
        env_kwargs: keyword arguments in addition to those of the run, such as ``render_mode``.

    Raises:
        EnvironmentUnknown: the provenance does not define the environment, or names a module.
        ArgumentError: the run does not exist, or the id is not registered here.
        StorageError: the storage cannot be opened.

    Examples:
        >>> from tallyroll.collector import SyncCollector, recover_env
        >>> from tallyroll.storage import MemmapStorage
        >>> storage = MemmapStorage()
        >>> with SyncCollector(
        ...     "CartPole-v1", num_envs=2, frames_per_batch=20, total_frames=20, storage=storage
        ... ) as collector:
        ...     rows = next(iter(collector))
        >>> env = recover_env(storage.path)
        >>> env.reset()["observation"].shape
        torch.Size([2, 4])
        >>> env.close()
        >>> storage.close()
    """
    with open_storage(Path(path), accept_copy=True) as storage:
        entry = entry_of(storage.runs, run, str(path))
    found = recovered(entry, None, env_kwargs)
    return made(found, sum(found.lanes) if num_envs is None else num_envs)


def entry_of(runs: Sequence[Mapping[str, Any]], run: int, path: str) -> Mapping[str, Any]:
    """Return an entry of a manifest by index.

    Raises:
        ArgumentError: the index is out of range, or the entry is not a collector's run.
    """
    try:
        entry = runs[run]
    except (IndexError, TypeError):
        raise ArgumentError(
            f"run: expected the index of one of the {len(runs)} runs in {path}, got {run!r}"
        ) from None
    if not is_collected(entry):
        raise ArgumentError(f"run: expected a run that a collector made, got entry {run} of {path}")
    return entry
