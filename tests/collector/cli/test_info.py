"""``tallyroll info`` with working, missing and broken packages."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
import tensordict
import torch
import torchrl
import zarr

import tallyroll
from tallyroll.collector.cli import info, main, probe
from tallyroll.collector.envs import registry
from tallyroll.collector.native import kernel

from registered_kit import install

FINE = "__version__ = '3.4'"


def package(folder: Path, name: str, code: str) -> None:
    """Create a package whose import runs `code`."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)


# --- effects of imports ---------------------------------------------------------------------------

BROKEN = {
    "raise ImportError('libfoo.so:\\n  no such file')": "ImportError: libfoo.so: no such file",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "1 / 0": "ZeroDivisionError: division by zero",
    "(": "SyntaxError: '(' was never closed (__init__.py, line 1)",
    "raise KeyboardInterrupt": "KeyboardInterrupt:",
    "import os; os._exit(3)": "the process that tried it ended (exit status 3)",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": (
        "the process that tried it ended (signal 11)"
    ),
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_package_that_is_broken_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package(tmp_path, "breaks", code)
    package(tmp_path, "works", FINE)
    questions = ["package works", "package breaks", "package gone", "unknown question"]
    assert probe.answers(questions) == {
        "package works": {"version": "3.4"},
        "package breaks": {"error": BROKEN[code]},
        "package gone": {"version": ""},
        "unknown question": {"error": "KeyError: 'unknown'"},
    }


def test_what_a_package_prints_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "import os; print('{}'); os.write(1, b'one\\n'); os.write(2, b'two\\n')\n"
    package(tmp_path, "prints", code + FINE)
    assert probe.answers(["package prints"]) == {"package prints": {"version": "3.4"}}
    assert capfd.readouterr() == ("", "")


def test_a_package_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(probe, "SECONDS", 6.0)  # the other package must start within that time
    mark = tmp_path / "pid"
    package(
        tmp_path,
        "hangs",
        f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)",
    )
    package(tmp_path, "works", FINE)
    assert probe.answers(["package hangs", "package works"]) == {
        "package hangs": {"error": "no answer within 6 seconds"},
        "package works": {"version": "3.4"},
    }
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_a_long_error_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package(tmp_path, "breaks", "raise ImportError(100_000 * 'x')")
    error = probe.answers(["package breaks"])["package breaks"]["error"]
    assert 250 < len(error) < 350


# --- the whole command ----------------------------------------------------------------------------


def test_all_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run lists versions as packages report them, and systems by the packages they need."""
    package(tmp_path, "needed", "raise ImportError('built for another ABI')")
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, monkeypatch, toy="toy_systems:Toy", wrong="toy_systems:ReadOnly")
    (tmp_path / "my_systems.py").write_text(
        "from toy_systems import Toy\n"
        "class Absent(Toy):\n    package, extra = 'no_such_package', 'envpool'\n"
        "class Broken(Toy):\n    package = 'needed'\n"
    )
    lines = "absent = my_systems:Absent\nbroken = my_systems:Broken\n"
    points = tmp_path / "toys-1.0.dist-info/entry_points.txt"
    points.write_text(points.read_text() + lines)
    monkeypatch.setenv("TALLYROLL_PLAN", "-once,-network")
    assert main(["info", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    facts: dict[str, Any] = json.loads(said.out)
    assert facts["tallyroll"] == tallyroll.__version__
    modules = (torch, tensordict, torchrl, np, gymnasium, h5py, zarr)
    assert {name: each["version"] for name, each in facts["packages"].items()} == {
        each.__name__: each.__version__ for each in modules
    }
    assert not any(each["error"] for each in facts["packages"].values())
    built = kernel.is_built()
    assert facts["extension"] == {"built": built, "loads": built, "error": ""}
    assert facts["ways"] == {"off": ["network", "once"], "error": ""}
    assert facts["devices"]["cuda"] == [
        torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())
    ]
    assert facts["limits"]["open_files"]["soft"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    systems = facts["systems"]
    assert list(systems) == registry.names()
    assert systems["toy"]["installed"]
    assert systems["toy"]["error"] == ""
    assert (
        "expected the entry point toy_systems:ReadOnly to name a System"
        in (systems["wrong"]["error"])
    )
    assert systems["absent"] == {
        "installed": False,
        "version": "",
        "install": 'pip install "tallyroll[envpool]"',
        "error": "",
    }
    assert systems["broken"]["installed"]
    assert systems["broken"]["error"] == "ImportError: built for another ABI"


def test_without_torch_all_else_is_said(tmp_path: Path) -> None:
    """An extension does not load, a setting is wrong and rich is broken as well."""
    home = tmp_path / "home" / "ada"
    package(home / "site", "torch", f"raise ImportError('{home}/lib/libtorch.so: not there')")
    package(home / "site", "rich", "raise ImportError('broken')")
    package(home / "site", "h5py", "import os; os._exit(1)")
    path = os.pathsep.join(filter(None, [str(home / "site"), os.environ.get("PYTHONPATH", "")]))
    more = {"PYTHONPATH": path, "HOME": str(home), "TALLYROLL_PLAN": "-nonsense", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "tallyroll.collector.cli", "info"],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | more,
        cwd=home,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    broken = "not usable: ImportError: ~/lib/libtorch.so: not there"
    assert lines["torch"].split(maxsplit=1)[1] == f"{metadata.version('torch')}, {broken}"
    assert "libtorch.so" in lines["tensordict"]
    assert "libtorch.so" in lines["cuda"]
    assert "the process that tried it ended (exit status 1)" in lines["h5py"]
    assert lines["numpy"].split()[1] == np.__version__
    assert "expected the fast paths to switch off" in lines["switched"]
    assert str(home) not in done.stdout
    assert "open files" in done.stdout


@pytest.mark.parametrize("module", ["torch", "rich", "numpy"])
def test_the_command_itself_imports_nothing_that_may_be_broken(module: str) -> None:
    code = f"import sys; from tallyroll.collector.cli import info; print({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"


# --- parts of the command -------------------------------------------------------------------------


def test_systems_are_those_of_the_registry() -> None:
    assert info.SYSTEMS == registry.GROUP


def test_an_extension_of_other_sources_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the package is complete, except that one extension file has the wrong content."""
    ours = Path(tallyroll.__file__).parent
    copy = tmp_path / "site" / "tallyroll"
    copy.mkdir(parents=True)
    (copy / "__init__.py").write_text((ours / "__init__.py").read_text())
    parts = ("storage", "engine"), ("storage/engine", "_kernel")
    for folder, without in (*parts, ("collector", "native"), ("collector/native", "_kernel")):
        (copy / folder).mkdir()
        for each in (ours / folder).iterdir():
            if not each.name.startswith(without):
                (copy / folder / each.name).symlink_to(each)
    monkeypatch.syspath_prepend(str(copy.parent))

    def answer() -> Any:
        return probe.answers(["extension"])["extension"]

    assert answer() == {"built": False, "loads": False, "error": ""}
    for folder in ("storage/engine", "collector/native"):
        (copy / folder / "_kernel.abi3.so").write_bytes(b"no ELF")
    assert (answer()["built"], answer()["loads"]) == (True, False)
    assert "_kernel.abi3.so" in answer()["error"]


FOLDERS = {
    "{home}/x.so: not there": "~/x.so: not there",
    "{home}: not there": "~: not there",
    "{home}body/x": "{home}body/x",
    "/home/eve/lib/x.so and /Users/bob": "~/lib/x.so and ~",
    "/usr/lib/x.so": "/usr/lib/x.so",
    "no folder": "no folder",
}


@pytest.mark.parametrize("text", FOLDERS)
def test_no_folder_of_a_user_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "ada"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "ada" / "venv"))
    home = str(tmp_path / "ada")
    found = info._without_folders({"a": [text.format(home=home), 3]})
    assert found == {"a": [FOLDERS[text].format(home=home), 3]}
    assert info._without_folders(f"{home}/venv/lib/x.so") == "PREFIX/lib/x.so"


def test_a_home_that_is_the_root_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    text = "no room on / for /opt/lib/x.so"
    assert info._without_folders(text) == text


def facts(**more: Any) -> dict[str, Any]:
    return {
        "tallyroll": "0.1.0",
        "python": "CPython 3.11.7",
        "platform": "Linux",
        "packages": {"h5py": {"version": "", "install": 'pip install "x"', "error": ""}},
        "extension": {"built": False, "loads": False, "error": ""},
        "ways": {"off": [], "error": ""},
        "systems": {},
        "devices": {"cpus": 8, "usable_cpus": 2, "cuda": [], "mps": False, "error": ""},
        "limits": {"shared_memory": None, "open_files": {"soft": 1024, "hard": None}},
    } | more


def test_the_table() -> None:
    assert info.as_text(facts()).splitlines() == [
        "tallyroll       0.1.0",
        "python          CPython 3.11.7",
        "platform        Linux",
        "extension       not built, for there was no C compiler",
        "switched off    nothing",
        "",
        "packages",
        '  h5py          not installed: pip install "x"',
        "",
        "environment systems",
        "  none registered; install tallyroll with pip",
        "",
        "machine",
        "  cpus          8, 2 for this process",
        "  cuda          none that torch sees",
        "  /dev/shm      not there",
        "  open files    1,024, at most no limit",
    ]
    none = {"installed": True, "version": "", "install": "", "error": ""}
    more = facts(
        systems={"mine": none, "brax": none | {"version": "brax 1", "error": "\x1b[8mNo"}},
        devices=facts()["devices"] | {"cuda": ["H100", "H100"], "mps": True, "xpu": ["Arc"]},
        extension={"built": True, "loads": False, "error": "no ELF"},
        ways={"off": ["once"], "error": ""},
    )
    text = info.as_text(more)
    assert "\n  mine          needs no package\n" in text
    assert "\n  brax          brax 1, not usable: \\x1b[8mNo\n" in text
    assert "\n  cuda          H100, H100\n  mps           yes\n  xpu           Arc\n" in text
    assert "\nextension       does not load: no ELF\nswitched off    once\n" in text
