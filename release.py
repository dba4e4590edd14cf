#!/usr/bin/env python3
"""Cut a release: build, check, install and try an sdist and a wheel. Nothing is uploaded.

    ./release.py 0.1.0              all of it: a commit, a tag, and the files to upload in dist/
    ./release.py 0.1.0 --rehearse   everything except these three

The script needs git, a C compiler, the packages that pip installs, and a tree without changes. It
works in a copy of the last commit, so that a step that fails leaves the tree as it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VERSION_FILE = "src/tallyroll/__init__.py"
CHANGELOG = "CHANGELOG.md"
GLIBC = "manylinux_2_17"
"""The oldest C library that the wheel's extension supports. `auditwheel` enforces it."""
FRAMES = 2001

_VERSION_LINE = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
_HEADING = re.compile(r"^## \[(.+?)\](?: - \d{4}-\d\d-\d\d)?$", re.MULTILINE)
_OURS = re.compile(r"PYTHON|TALLYROLL_|VIRTUAL_ENV")
_NUMBERS = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")


class Refused(Exception):
    """Reports the expectation, the actual value, and a remedy."""


# --- pure functions -------------------------------------------------------------------------------


def numbers(version: str) -> tuple[int, int, int]:
    """Return the three numbers of a version."""
    found = _NUMBERS.fullmatch(version)
    if found is None:
        raise Refused(f"expected a version of three numbers as 0.1.0, got {version!r}")
    major, minor, patch = map(int, found.groups())
    return major, minor, patch


def released(changelog: str) -> list[str]:
    """Return the versions that have a section, newest first."""
    return [name for name in _HEADING.findall(changelog) if name != "Unreleased"]


def folded(changelog: str, version: str, date: str) -> str:
    """Return the changelog with all unreleased entries in a section for ``version``."""
    wanted = numbers(version)
    earlier = released(changelog)
    newest = max(map(numbers, earlier), default=(0, 0, 0))
    if wanted <= newest:
        raise Refused(f"expected a version after {'.'.join(map(str, newest))}, got {version}")
    headings = list(_HEADING.finditer(changelog))
    if not headings or headings[0][0] != "## [Unreleased]":
        raise Refused(f"expected `## [Unreleased]` as the first section of {CHANGELOG}; add it")
    end = headings[1].start() if len(headings) > 1 else len(changelog)
    notes = changelog[headings[0].end() : end].strip()
    if not re.search(r"^- ", notes, re.MULTILINE):
        raise Refused(f"expected lines below `## [Unreleased]` of {CHANGELOG}, got none; add them")
    kinds = re.findall(r"^### (.+)$", notes, re.MULTILINE)
    if not earlier and kinds != ["Added"]:
        raise Refused(
            f"expected `### Added` alone in a first release, got {', '.join(kinds) or 'none'}; "
            "say what the release does, not what it was before it"
        )
    head, tail = changelog[: headings[0].end()], changelog[end:]
    return f"{head}\n\n## [{version}] - {date}\n\n{notes}\n" + (f"\n{tail}" if tail else "")


def with_version(source: str, version: str) -> str:
    """Return ``source`` with another version in its single assignment of ``__version__``."""
    changed, count = _VERSION_LINE.subn(f'__version__ = "{version}"', source)
    if count != 1:
        raise Refused(f"expected one line `__version__ = …` in {VERSION_FILE}, got {count}")
    return changed


# --- steps ----------------------------------------------------------------------------------------


def run(*command: object, cwd: Path) -> str:
    """Run a command that must succeed, and return its output.

    Environment variables that affect Python or Tallyroll are removed, so that the release is tried
    unmodified.
    """
    words = [str(word) for word in command]
    env = {name: value for name, value in os.environ.items() if not _OURS.match(name)}
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        told = f"{done.stdout}{done.stderr}".strip()
        raise Refused(f"`{' '.join(words)}` ended with {done.returncode}:\n{told}")
    return done.stdout


def look(root: Path, version: str) -> None:
    """Refuse a tree with changes, a commit that is on no branch, and an existing tag."""
    numbers(version)
    changes = run("git", "status", "--porcelain", cwd=root).splitlines()
    if changes:
        named = ", ".join(line[3:] for line in changes[:5])
        raise Refused(
            f"expected a tree without changes, got {len(changes)} ({named}); "
            "commit them or take them away"
        )
    if not run("git", "branch", "--show-current", cwd=root).strip():
        raise Refused("expected a branch, got a detached commit; switch to the branch to release")
    if run("git", "tag", "--list", f"v{version}", cwd=root).strip():
        raise Refused(f"expected a new tag, got v{version}, which is there; choose another version")


def prepare(root: Path, tree: Path, version: str, date: str) -> None:
    """Copy the last commit, and commit the version and the changelog in the copy."""
    changelog = folded((root / CHANGELOG).read_text(encoding="utf-8"), version, date)
    source = with_version((root / VERSION_FILE).read_text(encoding="utf-8"), version)
    run("git", "clone", "--quiet", "--no-hardlinks", root, tree, cwd=root)
    (tree / CHANGELOG).write_text(changelog, encoding="utf-8")
    (tree / VERSION_FILE).write_text(source, encoding="utf-8")
    for name in ("user.name", "user.email"):
        run("git", "config", name, run("git", "config", name, cwd=root).strip(), cwd=tree)
    run("git", "commit", "--quiet", "--all", "--message", f"Release {version}", cwd=tree)


def environment(folder: Path, constraints: Path, *wanted: object) -> Path:
    """Create a virtual environment with packages. Return the folder of its commands."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    pip = (folder / "bin/python", "-m", "pip", "install", "--quiet", "-c", constraints)
    run(*pip, *wanted, cwd=folder.parent)
    return folder / "bin"


def build(tools: Path, tree: Path, work: Path) -> list[Path]:
    """Build an sdist, and from it a wheel for old C libraries. Check and return both."""
    built, out = work / "built", work / "dist"
    python = tools / "python"
    run(python, "-m", "build", "--no-isolation", "--outdir", built, tree, cwd=work)
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    if "-cp311-abi3-linux_" not in wheel.name:
        raise Refused(f"expected a wheel cp311-abi3-linux, got {wheel.name}; is there a compiler?")
    place = f"{GLIBC}_{platform.machine()}"
    path = f"PATH={tools}:/usr/bin:/bin"  # auditwheel searches for patchelf in PATH
    audit = ("env", path, python, "-m", "auditwheel")
    run(*audit, "repair", "--plat", place, "--wheel-dir", out, wheel, cwd=work)
    shutil.copy(sdist, out)
    (repaired,) = out.glob("*.whl")
    told = run(*audit, "show", repaired, cwd=work)
    if place not in told:
        raise Refused(f"expected a wheel for {place}, got this:\n{told}")
    files = [out / sdist.name, repaired]
    run(python, "-m", "twine", "check", "--strict", *files, cwd=work)
    return files


def attempt(commands: Path, work: Path, version: str) -> None:
    """Collect with the installed wheel, count the rows and verify them."""
    said = run(commands / "tallyroll", "--version", cwd=work)
    if version not in said:
        raise Refused(f"expected {version} of tallyroll --version, got {said.strip()}")
    facts = json.loads(run(commands / "tallyroll", "info", "--json", cwd=work))
    if facts["extension"]["loads"] is not True:
        raise Refused(f"expected an extension that loads, got {facts['extension']}")
    collect = ("collect", "CartPole-v1", "--frames", FRAMES, "--num-envs", 8, "--seed", 0)
    run(commands / "tallyroll", *collect, "--out", "rows", cwd=work)
    rows = json.loads(run(commands / "tallyroll", "inspect", "--json", "rows", cwd=work))["rows"]
    if rows != FRAMES:
        raise Refused(f"expected {FRAMES} rows, got {rows}")
    run(commands / "tallyroll", "verify", "rows", cwd=work)


def release(root: Path, version: str, rehearse: bool, work: Path) -> None:
    """Run all steps in ``work``, and then, unless this is a rehearsal, in the tree."""
    look(root, version)
    tree, constraints = work / "tree", root / "constraints.txt"
    prepare(root, tree, version, datetime.now(UTC).date().isoformat())
    print("building", flush=True)
    needed = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = needed["optional-dependencies"]["release"]
    tools = environment(work / "tools", constraints, *extra)
    files = build(tools, tree, work)
    print("installing and trying", flush=True)
    commands = environment(work / "fresh", constraints, files[-1])
    attempt(commands, work, version)
    print("\n".join(f"{file.name}: {file.stat().st_size:,} bytes" for file in files))
    if rehearse:
        print(f"{version} can be released; nothing was changed")
        return
    run("git", "pull", "--quiet", "--ff-only", tree, "HEAD", cwd=root)
    run("git", "tag", "--annotate", f"v{version}", "--message", f"Release {version}", cwd=root)
    shutil.rmtree(root / "dist", ignore_errors=True)
    (root / "dist").mkdir()
    for file in files:
        shutil.copy(file, root / "dist")
    print(f"{version} is committed, tagged v{version} and lies in dist/; nothing was uploaded.")
    print(f"To publish it: git push origin HEAD v{version} && python -m twine upload dist/*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="three numbers, as 0.1.0")
    parser.add_argument(
        "--rehearse", action="store_true", help="build, check and try, and change nothing"
    )
    args = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="tallyroll-release-") as work:
            release(ROOT, args.version, args.rehearse, Path(work))
    except Refused as refusal:
        print(f"release.py: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
