"""The host, time and code that made a run, for the run's entry in a manifest."""

import inspect
import os
import socket
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tallyroll.collector.envs.setup.make import bare, name_of
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.several.policies import SeveralPolicies

_GIT = ("git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch")
_GIT_SECONDS = 0.8
_MOST_NBYTES = 2**28
"""The most bytes of weights that are hashed. Hashing them takes a fraction of a second."""
_LIBRARIES = {"builtins", "functools", "stable_baselines3", "tallyroll", "tensordict", "torch"}
_LIBRARIES |= {"torchrl"}
"""Packages whose code is not hashed as code of the policy."""


def made_by(policy: Policy | None, classes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the time, the host, the commit of the working folder, and a description of the policy.

    The description is the policy's name, and hashes of its code and its weights.
    ``classes`` are the class names of the environment, left out if there are none. A value that
    cannot be found is None, instead of an error. No value is a path.
    """
    found: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "git": git_of_folder(),
        "policy": None if policy is None else _described(policy.source),
    }
    if classes:
        found["environment"] = list(classes)
    if isinstance(policy, SeveralPolicies):
        found["policies"] = [
            {"id": part.id, **_described(part.policy.source)}
            for part in policy.parts
            if part.policy is not None
        ]
    return found


def git_of_folder() -> dict[str, Any] | None:
    """Return the commit of the working folder, and whether tracked files differ from it.

    Return None if there is no git or no repository, or if git takes longer than 0.8 seconds.
    """
    try:
        found = subprocess.run(
            [*_GIT, "--untracked-files=no", "--ignore-submodules=all"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = found.stdout.decode(errors="replace").splitlines()
    name = "# branch.oid "
    commit = next((each.removeprefix(name) for each in lines if each.startswith(name)), "")
    if not commit or not all(each in "0123456789abcdef" for each in commit):
        return None
    return {"commit": commit, "changed": any(each[:1] != "#" for each in lines)}


def _described(policy: Any) -> dict[str, str | None]:
    """Return a policy's name, ``"module:qualname"`` of its function or class, and its hashes."""
    named = bare(policy)
    named = named if inspect.isroutine(named) else type(named)
    return {"name": name_of(named), **hashes_of(policy)}


def hashes_of(policy: Any) -> dict[str, str | None]:
    """Return the SHA-256 of a policy's code files, and of its weights.

    The code files define its classes and functions.

    For one file, it is the hash of that file. For several files, it is the hash of their sorted and
    joined hashes. Files of libraries are left out.
    """
    return {"code": _code_of(policy), "weights": _weights_of(policy)}


def _code_of(policy: Any) -> str | None:
    files: dict[str, bytes] = {}
    for each in _parts_of(policy):
        if (getattr(each, "__module__", None) or "").partition(".")[0] not in _LIBRARIES:
            try:
                path = inspect.getfile(each)
                files[path] = Path(path).read_bytes()
            except (OSError, TypeError):  # code of a notebook, or of a compiled module
                continue
    hashes = sorted(sha256(content).hexdigest() for content in files.values())
    if len(hashes) > 1:
        return sha256("".join(hashes).encode()).hexdigest()
    return hashes[0] if hashes else None


def _parts_of(policy: Any) -> Iterator[Any]:
    """Yield the classes and the functions of a policy."""
    owners: Iterable[Any] = policy.modules() if isinstance(policy, nn.Module) else [policy]
    for owner in owners:
        for each in (owner, *getattr(owner, "__dict__", {}).values()):
            while isinstance(each, partial):
                each = each.func
            if inspect.isfunction(each) or inspect.ismethod(each):
                yield each
        yield type(owner)


def _weights_of(policy: Any) -> str | None:
    if not isinstance(policy, nn.Module):
        return None
    try:
        state = sorted(policy.state_dict().items())
        tensors = [(name, each) for name, each in state if isinstance(each, torch.Tensor)]
        if not tensors or sum(each.nbytes for _, each in tensors) > _MOST_NBYTES:
            return None
        found = sha256()
        for name, each in tensors:
            found.update(f"{name} {each.dtype} {tuple(each.shape)}".encode())
            octets = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found.update(octets.numpy().tobytes())
        return found.hexdigest()
    except (RuntimeError, TypeError, ValueError):  # for example, parameters that have no shape yet
        return None
