"""The device "fakegpu": a simulated accelerator, which torch registers when it is imported.

`fake_gpu_kit.environment` gives a process the environment variables for that. The name of torch's
backend for other devices changes, so it is for processes that run nothing else.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import torch

NAME = "fakegpu"


def _loaded(path: str) -> Any:
    spec = spec_from_file_location(
        "fakegpu_engine", loader=ExtensionFileLoader("fakegpu_engine", path)
    )
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


engine = _loaded(os.environ["TALLYROLL_FAKE_GPU"])


def counts() -> dict[str, int]:
    """Return the number of kernels, copies and waits, and of bytes, since the last reset.

    Copies are ``h2d`` or ``d2h``, then ``_pageable`` or ``_pinned``, then ``_async`` for those with
    ``non_blocking=True``. ``d2h_items`` are values that `item()` and `bool()` read.
    """
    found: dict[str, int] = engine.counts()
    return found


def reset_counts() -> None:
    """Wait for the device, and count from 0 again."""
    torch.accelerator.synchronize()
    engine.reset_counts()


call_at_waits = engine.call_at_waits
"""Call a function with the reason of each wait of the host, until None replaces it."""

lose = engine.lose
"""With True, make every use of the device fail. With False, end that."""


def _device_module() -> ModuleType:
    module: Any = ModuleType(f"torch.{NAME}")
    generator = engine.default_generator()
    module.is_available = lambda: True
    module.is_initialized = engine.is_initialized
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.device = lambda device: nullcontext()
    module.set_device = lambda device: None
    module.get_device_name = lambda device=None: "simulated"
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module._is_in_bad_fork = engine.is_in_bad_fork
    module.manual_seed = module.manual_seed_all = lambda seed: generator.manual_seed(int(seed))
    module.get_rng_state = lambda device=NAME: generator.get_state()
    module.set_rng_state = lambda state, device=NAME: generator.set_state(state)
    module.default_generators = (generator,)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


def register() -> None:
    """Make torch know the device; torch calls this at the end of its import."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    sys.modules[f"torch.{NAME}"] = getattr(torch, NAME)
    torch.utils.generate_methods_for_privateuse1_backend()
