"""The accelerator that tests use: a GPU, or the simulated one in the processes that have it.

`test_on_the_fake_gpu.py` runs the tests marked ``gpu`` in such processes.
"""

from __future__ import annotations

import pytest
import torch

FOUND = torch.accelerator.current_accelerator(check_available=True)
ACCELERATOR = "gpu" if FOUND is None else FOUND.type
"""Type of the accelerator, such as "cuda"."""
SIMULATED = ACCELERATOR == "fakegpu"

_GPU = (pytest.mark.gpu, pytest.mark.skipif(FOUND is None, reason="there is no GPU"))
here_and_there = pytest.mark.parametrize(
    "device", ["cpu", pytest.param(ACCELERATOR, marks=_GPU, id="gpu")]
)
on_gpu = pytest.mark.parametrize("device", [pytest.param(ACCELERATOR, marks=_GPU, id="gpu")])
only_simulated = [
    pytest.mark.gpu,
    pytest.mark.skipif(not SIMULATED, reason="only the simulated GPU reports waits and copies"),
]
"""The `pytestmark` of a module."""
