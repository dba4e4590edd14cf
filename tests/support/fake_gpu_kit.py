"""Build the device "fakegpu" (`fake_gpu/`), and run processes that have it.

``python tests/support/fake_gpu_kit.py`` builds it in advance.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

FOLDER = Path(__file__).with_name("fake_gpu")
SOURCE = FOLDER / "fakegpu.cpp"
FLAGS = ("-shared", "-fPIC", "-std=c++20", "-O0", "-w")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
SECONDS = 300


class CannotBuild(Exception):
    """Error: this machine has no C++ compiler, or the library cannot be saved."""


class BuildFailed(Exception):
    """Error: the compiler refused the source. The message has its output."""


def built() -> Path:
    """Return the path of the shared library, and build it if it is missing.

    The environment of this interpreter keeps it, for each version of torch and of the source.

    Raises:
        CannotBuild, BuildFailed: there is no library.
    """
    import torch

    key = repr((torch.__version__, sys.version, FLAGS)).encode() + SOURCE.read_bytes()
    cache = Path(sys.prefix) / "fake-gpu"
    library = cache / f"{hashlib.sha256(key).hexdigest()[:16]}.so"
    if library.exists():
        return library
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise CannotBuild(f"there is no {name}, which builds the simulated GPU")
    try:
        cache.mkdir(exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _build(compiler, library)
    except OSError as error:
        raise CannotBuild(f"the simulated GPU cannot be saved: {error}") from error
    return library


def _build(compiler: str, library: Path) -> None:
    import torch
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [
            *(compiler, *FLAGS, "-DTORCH_EXTENSION_NAME=fakegpu_engine"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            *(f"-I{path}" for path in cpp_extension.include_paths()),
            f"-I{sysconfig.get_paths()['include']}",
            *(str(SOURCE), "-o", str(made)),
            *(f"-L{path}" for path in cpp_extension.library_paths()),
            *(f"-l{name}" for name in LIBRARIES),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            raise BuildFailed(f"{compiler} cannot build {SOURCE.name}:\n{done.stderr[-3000:]}")
        made.replace(library)


def environment() -> dict[str, str]:
    """Return environment variables with which torch registers the device when it is imported."""
    paths = [str(FOLDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TALLYROLL_FAKE_GPU": str(built()),
    }


def variables() -> dict[str, str]:
    """Return the environment variables of such processes, or skip the test.

    Without a compiler it is skipped, but it fails in `.ci/run`. The newest torch may have changed
    interfaces that the simulated GPU uses.
    """
    import pytest

    try:
        found = environment()
    except CannotBuild as error:
        if os.environ.get("TALLYROLL_FAKE_GPU_REQUIRED"):
            raise
        pytest.skip(str(error))
    except BuildFailed as error:
        if os.environ.get("TALLYROLL_TEST_ENVIRONMENT") != "newest":
            raise
        pytest.skip(f"warning: {error}")
    return {name: each for name, each in found.items() if not name.startswith("PYTEST_")}


if __name__ == "__main__":
    try:
        built()
    except (CannotBuild, BuildFailed) as error:
        sys.exit(f"warning: {error}")
