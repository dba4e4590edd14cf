"""Tests of the release script: it folds the changelog into a version's section, or refuses."""

from __future__ import annotations

import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
HEAD = "# Changelog\n\nAll changes.\n\n"
NEW = "### Added\n\n- A thing,\n  of two lines.\n"


def loaded() -> ModuleType:
    spec = spec_from_file_location("release", ROOT / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = loaded()


def test_what_was_unreleased_is_the_section_of_the_version() -> None:
    first = release.folded(f"{HEAD}## [Unreleased]\n\n{NEW}", "0.1.0", "2026-11-26")
    assert first == f"{HEAD}## [Unreleased]\n\n## [0.1.0] - 2026-11-26\n\n{NEW}"
    more = first.replace("## [Unreleased]\n", "## [Unreleased]\n\n### Fixed\n\n- It fell.\n", 1)
    second = release.folded(more, "0.1.1", "2026-12-01")
    assert second == (
        f"{HEAD}## [Unreleased]\n\n## [0.1.1] - 2026-12-01\n\n### Fixed\n\n- It fell.\n\n"
        f"## [0.1.0] - 2026-11-26\n\n{NEW}"
    )
    assert release.released(second) == ["0.1.1", "0.1.0"]


REFUSED = {
    "nothing is new": ("## [Unreleased]\n\n## [0.1.0] - 2026-11-26\n\n- A\n", "0.2.0", "got none"),
    "nothing at all": ("## [Unreleased]\n", "0.1.0", "got none; add them"),
    "no section": (f"{NEW}", "0.1.0", "as the first section"),
    "a section before it": (f"## [0.0.1]\n\n## [Unreleased]\n\n{NEW}", "0.1.0", "as the first"),
    "what was before": (
        f"## [Unreleased]\n\n{NEW}\n### Changed\n\n- Less.\n",
        "0.1.0",
        "expected `### Added` alone in a first release, got Added, Changed",
    ),
    "the same again": (
        f"## [Unreleased]\n\n{NEW}\n## [0.1.0]\n",
        "0.1.0",
        "after 0.1.0, got 0.1.0",
    ),
    "an older one": (
        f"## [Unreleased]\n\n{NEW}\n## [0.10.0]\n",
        "0.9.0",
        "after 0.10.0, got 0.9.0",
    ),
    "two numbers": (f"## [Unreleased]\n\n{NEW}", "0.1", "three numbers as 0.1.0, got '0.1'"),
    "a letter": (f"## [Unreleased]\n\n{NEW}", "v0.1.0", "three numbers"),
    "a line end": (f"## [Unreleased]\n\n{NEW}", "0.1.0\n", "three numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_changelog_that_cannot_be_folded_is_refused(case: str) -> None:
    changelog, version, why = REFUSED[case]
    with pytest.raises(release.Refused) as refusal:
        release.folded(HEAD + changelog, version, "2026-11-26")
    assert why in str(refusal.value)


def test_the_version_has_one_place() -> None:
    source = (ROOT / release.VERSION_FILE).read_text(encoding="utf-8")
    changed = release.with_version(source, "12.0.3")
    assert '\n__version__ = "12.0.3"\n' in changed
    assert changed.count("12.0.3") == 1
    with pytest.raises(release.Refused, match="got 0"):
        release.with_version("version = 1\n", "0.1.0")
    with pytest.raises(release.Refused, match="got 2"):
        release.with_version(source + source, "0.1.0")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a clean repository whose changelog and version can be released."""
    (tmp_path / "src/tallyroll").mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("/dist/\n")
    (tmp_path / "pyproject.toml").write_text("[project.optional-dependencies]\nrelease = []\n")
    (tmp_path / release.VERSION_FILE).write_text('__version__ = "0.0.0"\n')
    (tmp_path / release.CHANGELOG).write_text(f"{HEAD}## [Unreleased]\n\n{NEW}")
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    git(tmp_path, "config", "user.name", "A")
    git(tmp_path, "config", "user.email", "a@example.org")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "Begin")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_tree_with_changes_and_a_tag_that_is_there_are_refused(repository: Path) -> None:
    release.look(repository, "0.1.0")
    (repository / "left.py").write_text("")
    with pytest.raises(
        release.Refused, match=r"expected a tree without changes, got 1 \(left.py\)"
    ):
        release.look(repository, "0.1.0")
    (repository / "left.py").unlink()
    git(repository, "tag", "v0.1.0")
    with pytest.raises(release.Refused, match=r"got v0\.1\.0, which is there"):
        release.look(repository, "0.1.0")
    git(repository, "checkout", "--quiet", "--detach")
    with pytest.raises(release.Refused, match="expected a branch"):
        release.look(repository, "0.2.0")


def test_the_release_is_prepared_in_a_copy(repository: Path) -> None:
    tree = repository.with_name(f"{repository.name}-tree")
    release.prepare(repository, tree, "0.1.0", "2026-11-26")
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "log", "--format=%s").split("\n")[0] == "Begin"
    assert git(tree, "log", "--format=%s").splitlines() == ["Release 0.1.0", "Begin"]
    assert git(tree, "show", "--stat", "--format=").count(" | ") == 2
    assert '"0.1.0"' in (tree / release.VERSION_FILE).read_text()


@pytest.mark.parametrize("rehearse", [True, False])
def test_it_is_committed_and_tagged_only_after_it_was_tried(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    rehearse: bool,
) -> None:
    tried = []
    work = tmp_path_factory.mktemp("work")
    built = work / "tallyroll-0.1.0.whl"
    built.write_text("wheel")
    before = git(repository, "rev-parse", "HEAD")

    def attempt(*given: object) -> None:
        assert git(repository, "rev-parse", "HEAD") == before
        assert git(repository, "tag") == ""
        tried.append(given[-1])

    monkeypatch.setattr(release, "environment", lambda folder, *_: folder)
    monkeypatch.setattr(release, "build", lambda *_: [built])
    monkeypatch.setattr(release, "attempt", attempt)
    release.release(repository, "0.1.0", rehearse, work)
    assert tried == ["0.1.0"]
    assert git(repository, "status", "--porcelain") == ""
    assert (git(repository, "rev-parse", "HEAD") == before) == rehearse
    if not rehearse:
        assert git(repository, "log", "-1", "--format=%s", "v0.1.0").strip() == "Release 0.1.0"
        assert (repository / "dist/tallyroll-0.1.0.whl").read_text() == "wheel"


def test_a_command_that_fails_says_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(release.Refused, match=r"`git no-such` ended with 1:\n.*not a git command"):
        release.run("git", "no-such", cwd=tmp_path)


def test_a_refusal_is_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["one"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("release.py: expected ")
