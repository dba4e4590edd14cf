"""Tests of the wheel and the sdist: their contents, and their coexistence with a user's modules."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mypy.api
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("collector", "storage")

# The public names are pinned, so that changing them is a decision, not an accident. Errors are
# public in addition.
PUBLIC: dict[str, set[str]] = {
    "tallyroll.collector": {
        "Actors",
        "Checks",
        "Columns",
        "Devices",
        "Episode",
        "EpisodeBatches",
        "Evaluation",
        "FixedWidth",
        "GymnasiumVectorEnv",
        "Info",
        "Layout",
        "Ledger",
        "Loaded",
        "LogWarning",
        "MultiprocessCollector",
        "OnePolicy",
        "Processes",
        "RayCollector",
        "Recorder",
        "ReplayReport",
        "Resets",
        "RunLog",
        "RunsReport",
        "Shard",
        "Supervision",
        "SyncCollector",
        "choice",
        "evaluate",
        "load_checkpoint",
        "recover_env",
        "replay",
        "report",
        "save_checkpoint",
        "split_trajectories",
        "uniform",
    },
    "tallyroll.storage": {
        "Card",
        "ColumnStatistics",
        "CopyReport",
        "Differences",
        "DifferentRow",
        "DeviceStorage",
        "DiskStorage",
        "EpochBatches",
        "ExportReport",
        "Finding",
        "Follow",
        "FrameStack",
        "FrameWindows",
        "H5Storage",
        "HindsightSampler",
        "ImportReport",
        "LeRobotOptions",
        "Loader",
        "MemmapStorage",
        "MixedSampler",
        "Normaliser",
        "Overlay",
        "PackReport",
        "PoolUsage",
        "PrioritizedSampler",
        "PullReport",
        "PushReport",
        "RateLimit",
        "RepairReport",
        "Report",
        "ReusedRows",
        "RowDataset",
        "RowReader",
        "RowSink",
        "S3Options",
        "Schema",
        "ShardedStorage",
        "Statistics",
        "StoredTrajectories",
        "Trajectories",
        "TrajectorySliceSampler",
        "Video",
        "ZarrStorage",
        "content_hash",
        "diff",
        "export_card",
        "frame_windows",
        "import_dataset",
        "n_step",
        "open_storage",
        "pull",
        "push",
        "repair",
        "verify",
        "verify_dataset",
    },
}


def run(*command: object, cwd: Path, **env: str) -> str:
    """Return the stdout of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


COMPILED = {f"tallyroll/{each}/_kernel.abi3.so" for each in ("storage/engine", "collector/native")}
"""The extensions, which the build includes where a compiler exists."""


def copy_to(tree: Path) -> None:
    """Copy the project without build products."""
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so")
    shutil.copytree(ROOT, tree, ignore=skip, symlinks=True, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it, of a copy of the tree. Return their folder."""
    tree = tmp_path_factory.mktemp("tree")
    copy_to(tree)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=tree)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("tallyroll-*.whl")
    return found


def is_of_reports(path: Path) -> bool:
    """Return whether a file belongs to the report page, or is the licence of such a file."""
    return path.suffix in (".css", ".html", ".js") or path.name == "LICENSE"


def source_files() -> set[str]:
    """Return the path in the wheel of every file that it must hold."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    own = {f"tallyroll/{name}" for name in ("__init__.py", "__main__.py", "py.typed")}
    return own | {
        f"tallyroll/{path.relative_to(ROOT)}"
        for path in files
        if path.suffix in (".py", ".pyi") or path.name == "py.typed" or is_of_reports(path)
    }


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    code = {name for name in names if ".dist-info/" not in name}
    assert code - COMPILED == source_files()
    assert code & COMPILED == (set() if shutil.which("cc") is None else COMPILED)
    licences = {name.partition("licenses/")[2] for name in names if "licenses/" in name}
    assert licences == {"LICENSE", "collector/ext/report/uplot/LICENSE"}


@pytest.mark.slow
def test_without_a_compiler_the_sdist_installs_and_collects(dist: Path, tmp_path: Path) -> None:
    site, (sdist,) = tmp_path / "site", dist.glob("tallyroll-*.tar.gz")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    env = {"CC": str(tmp_path / "no compiler"), "PYTHONPATH": ""}
    run(*pip, "--no-build-isolation", "--target", site, sdist, cwd=tmp_path, **env)
    assert not any((site / each).exists() for each in COMPILED)
    env["PYTHONPATH"] = str(site)
    told = run(
        sys.executable,
        "-c",
        "import tallyroll.collector.native.kernel as k; from tallyroll.collector import *\n"
        "with SyncCollector('CartPole-v1', frames_per_batch=4, total_frames=9, storage='s') as c:\n"
        "    print(k.compiled(), k.__file__, c.collect(4), c.collect(99))",
        cwd=tmp_path,
        **env,
    )
    assert told.split() == ["None", str(site / "tallyroll/collector/native/kernel.py"), "4", "5"]
    told = run(site / "bin/tallyroll", "info", cwd=tmp_path, **env)
    assert "extension       not built, for there was no C compiler" in told.splitlines()


@pytest.mark.slow
def test_an_editable_installation_has_the_extension_the_links_and_the_entry_points(
    tmp_path: Path,
) -> None:
    tree, venv = tmp_path / "tree", tmp_path / "venv"
    copy_to(tree)
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    (site,) = (venv / "lib").glob("python3*/site-packages")
    # The environment links to our installed packages, except this one's metadata.
    here = Path(pytest.__file__).parents[1]
    for each in here.iterdir():
        if not each.name.startswith(("tallyroll", "__editable__")):
            (site / each.name).symlink_to(each)
    env = {"PYTHONPATH": ""}
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", "-e", tree, cwd=tmp_path, **env)
    code = "import tallyroll.collector as c, tallyroll.storage.engine.kernel as k\n"
    code += "print(c.__file__, k.compiled() is not None)"
    where, compiled = run(venv / "bin/python", "-c", code, cwd=tmp_path, **env).split()
    assert where == str(tree / "src/tallyroll/collector/__init__.py")
    assert Path(where).resolve() == tree / "collector/__init__.py"
    assert compiled == str(shutil.which("cc") is not None)
    assert "brax" in run(venv / "bin/tallyroll", "envs", cwd=tmp_path, **env)
    (tree / "collector/added.py").write_text("VALUE = 'seen at once'\n")
    code = "import tallyroll.collector.added as a; print(a.VALUE)"
    assert run(venv / "bin/python", "-c", code, cwd=tmp_path, **env) == "seen at once\n"


def test_the_sdist_holds_what_the_gate_needs(dist: Path) -> None:
    (sdist,) = dist.glob("tallyroll-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {each.name.partition("/")[2]: each for each in archive.getmembers()}
    assert {"check.sh", "constraints.txt", "CHANGELOG.md", "LICENSE", "README.md"} <= {*names}
    assert "release.py" in names
    assert {"docs/conf.py", "docs/start.md", "docs/drawings/kill.svg"} <= {*names}
    assert {"tests/conftest.py", "tests/support/oracles.py", "collector/py.typed"} <= {*names}
    for folder in FOLDERS:
        assert names[f"src/tallyroll/{folder}"].linkname == f"../../{folder}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_tools_that_follow_folders_find_each_file_under_its_import_name(folder: str) -> None:
    link = ROOT / "src/tallyroll" / folder
    assert (os.readlink(link), link.resolve()) == (f"../../{folder}", ROOT / folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_is_imported_twice_under_two_names(folder: str) -> None:
    command = [sys.executable, "-c", f"import {folder}.errors"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    wanted = f"expected the name tallyroll.{folder}, got {folder}; import tallyroll.{folder}"
    assert done.stderr.splitlines()[-1] == f"ImportError: {wanted}"


def test_the_command_of_an_interpreter() -> None:
    told = run(sys.executable, "-m", "tallyroll", "--version", cwd=ROOT)
    assert told.startswith(f"tallyroll {version('tallyroll')} (python ")


def test_the_version_is_known_without_an_import_of_either_package() -> None:
    code = "import sys, tallyroll; print(tallyroll.__version__, 'tallyroll.storage' in sys.modules)"
    assert run(sys.executable, "-c", code, cwd=ROOT).split() == [version("tallyroll"), "False"]


def test_the_wheel_lives_beside_a_users_storage_and_collector(wheel: Path, tmp_path: Path) -> None:
    site, user = tmp_path / "site", tmp_path / "user"
    user.mkdir()
    for name in FOLDERS:
        (user / f"{name}.py").write_text("WHOSE = 'the user'\n")
    (user / "main.py").write_text(
        "import collector, storage, tallyroll.collector, tallyroll.storage\n"
        "print(collector.WHOSE, storage.WHOSE, sep='\\n')\n"
        "print(tallyroll.collector.__file__, tallyroll.storage.__file__, sep='\\n')\n"
    )
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", site, wheel, cwd=tmp_path)
    lines = run(sys.executable, "main.py", cwd=user, PYTHONPATH=str(site)).split("\n")
    assert lines[:2] == ["the user"] * 2
    assert lines[2:4] == [str(site / "tallyroll" / name / "__init__.py") for name in FOLDERS]


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_pinned(package: str) -> None:
    module, errors = import_module(package), import_module(f"{package}.errors")
    assert {*module.__all__} - {*errors.__all__} == PUBLIC[package]
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{package}.{name} has no docstring"
    assert {*module.__all__} <= {*dir(module)}


@pytest.mark.parametrize("package", PUBLIC)
def test_every_error_is_exported_beside_what_raises_it(package: str) -> None:
    module, errors = import_module(package), import_module(f"{package}.errors")
    classes = {name: each for name, each in vars(errors).items() if isinstance(each, type)}
    own = {name for name, each in classes.items() if each.__module__ == errors.__name__}
    assert own == {*errors.__all__} <= {*module.__all__}
    assert all(getattr(module, name) is classes[name] for name in own)


OPTIONS = [
    'SyncCollector("A", frames_per_batch=1, frame_skip=4, validate="raise", rename=None)',
    'SyncCollector("A", frames_per_batch=1, layout=Layout("torchrl", split_trajs=True))',
    'Columns(info_keys=["lives"], rename={"a": "b"}), Devices(policy="cuda", env=None)',
    'SyncCollector("A", frames_per_batch=1, validate="nose")  # type: ignore[arg-type]',
    'SyncCollector("A", frames_per_batch=1, max_respawns=1)  # type: ignore[call-arg]',
    'MultiprocessCollector("A", frames_per_batch=1, max_respawns="1")  # type: ignore[arg-type]',
    'Checks(finals="gone")  # type: ignore[arg-type]',
]


@pytest.mark.slow
def test_type_checkers_see_the_public_names(tmp_path: Path) -> None:
    names = [(package, name) for package in PUBLIC for name in import_module(package).__all__]
    lines = [f"from {package} import {name}\nreveal_type({name})" for package, name in names]
    lines += OPTIONS  # in strict mode an unneeded ignore is an error
    (tmp_path / "use.py").write_text("\n".join(lines))
    options = ["--strict", "--follow-imports=silent", f"--cache-dir={os.devnull}"]
    found, errors, status = mypy.api.run([*options, str(tmp_path / "use.py")])
    assert (status, errors) == (0, ""), found
    assert found.count("Revealed type is") == len(names)
    assert 'Revealed type is "Any"' not in found


def imported_modules(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_storage_never_imports_collector() -> None:
    for path in (ROOT / "storage").rglob("*.py"):
        assert not any(n.startswith("tallyroll.collector") for n in imported_modules(path)), path


def test_the_command_says_what_it_does() -> None:
    tallyroll = Path(sys.executable).parent / "tallyroll"
    assert "collect" in run(tallyroll, "--help", cwd=ROOT)


@pytest.mark.parametrize("name", ["tallyroll.collector", "tallyroll.storage"])
def test_each_public_name_is_what_it_says(name: str) -> None:
    module = import_module(name)
    got: dict[str, Any] = {}
    exec(f"from {name} import *", got)
    assert {*got} - {"__builtins__"} == {*module.__all__}
    assert all(callable(getattr(module, each)) for each in module.__all__)
