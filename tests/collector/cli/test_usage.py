"""Mistyped commands, options and values; output of ``--help``; completion in shells."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tallyroll.collector.cli import main
from tallyroll.collector.cli.parser import COMMON, SHELLS, make_parser
from tallyroll.storage.package.near_names import did_you_mean

COMMANDS = ["collect", "completion", "envs", "info", "inspect", "plan", "prove", "verify", "view"]


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of stderr of a refused command, which must print nothing else."""
    with pytest.raises(SystemExit) as end:
        main(shlex.split(words))
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    return said.err.splitlines()


MISTYPED = {
    "colect": "unrecognized command colect; did you mean collect?",
    "nothing-like-it": "unrecognized command nothing-like-it",
    "--verson": "unrecognized option --verson; did you mean --version?",
    "--frames 5 collect": "unrecognized option --frames",
    "collect X --num_envs 3": "unrecognized option --num_envs; did you mean --num-envs?",
    "collect X --worker=3": "unrecognized option --worker; did you mean --workers?",
    "collect X --frame 3": "unrecognized option --frame; did you mean --frame-skip, --frames or "
    "--frames-per-batch?",
    "collect X -frames 3": "unrecognized option -frames; did you mean --frames or "
    "--frames-per-batch?",
    "collect X -z": "unrecognized option -z",
    "collect X 500 --out data": "unrecognized argument 500",
    "collect X --out": "argument --out: expected one argument",
    "collect X --out --frames 3": "argument --out: expected one argument",
    "collect X --out a --frames 3 --mode asinc": "argument --mode: expected sync or async, got "
    "'asinc'; did you mean async?",
    "collect X --out a --frames 3 --format h": "argument --format: expected memmap, hdf5 or zarr, "
    "got 'h'; did you mean hdf5?",
    "completion": "the following arguments are required: SHELL",
    "completion ksh": "argument SHELL: expected bash, zsh, fish or tcsh, got 'ksh'; did you mean "
    "zsh?",
    "completion bsh": "argument SHELL: expected bash, zsh, fish or tcsh, got 'bsh'; did you mean "
    "bash?",
    "completion bash --instal": "unrecognized option --instal; did you mean --install?",
    "completion bash zsh": "unrecognized argument zsh",
    "envs --jason": "unrecognized option --jason; did you mean --json?",
    "info --out x": "unrecognized option --out",
    "info torch": "unrecognized argument torch",
    "inspect a --row 5": "unrecognized option --row; did you mean --rows?",
    "verify a --skip nans": "tasks, spaces, videos, statistics, got 'nans'; did you mean nan?",
    "verify --skip -- a": "argument --skip: expected one argument",
}


@pytest.mark.parametrize("words", MISTYPED, ids=str)
def test_a_mistake_is_one_line_below_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str], words: str
) -> None:
    *usage, line = refused(words, capsys)
    command = next((each for each in words.split() if each in COMMANDS), "")
    called = f"tallyroll {command}" if words.startswith(command) else "tallyroll"
    assert usage[0].startswith(f"usage: {called} ".replace("  ", " "))
    assert len(usage) <= 2
    assert all(len(each) <= 80 for each in usage)
    assert line.startswith(f"{called.strip()}: error: ")
    assert line.endswith(MISTYPED[words])


def test_all_values_that_begin_so_are_meant() -> None:
    assert did_you_mean("b", ["bash", "bsd", "zsh"]) == "; did you mean bash or bsd?"
    assert did_you_mean("zhs", ["bash", "bsd", "zsh"]) == "; did you mean zsh?"
    assert did_you_mean("", ["bash"]) == did_you_mean("--", ["--json"]) == ""


def test_negative_numbers_are_values(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused("collect X --out a --frames 3 --seed -1", capsys)[-1]
    assert "argument --seed: expected a whole number of at least 0, got '-1'" in line


# --- help -----------------------------------------------------------------------------------------


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_of(command, capsys).splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert "examples:" in lines or any(line.startswith("examples (") for line in lines)
    assert len(list(itertools.takewhile(bool, lines))) <= 2  # the usage


def listed(text: str) -> list[str]:
    """Return the commands that a help text of the program lists."""
    return re.findall(r"^    ([a-z]+)(?:$| +[a-z])", text.partition("  COMMAND")[2], re.MULTILINE)


def test_the_first_help_lists_common_commands_and_all_lists_every_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = make_parser()
    assert parser._subparsers is not None
    every = {*parser._subparsers._group_actions[0].choices}
    first = listed(help_of("", capsys).partition("examples:")[0])
    assert first == [*COMMON]
    assert len(first) <= 12
    parser.format_help()
    parser.set_defaults(all_commands=True)
    assert {*listed(parser.format_help().partition("examples:")[0])} == every
    for words in ("--all", "--help --all"):
        assert {*listed(help_of(words, capsys).partition("examples:")[0])} == every
    assert "--all" in help_of("", capsys)
    for command in every:
        assert f"usage: tallyroll {command} " in help_of(command, capsys)
    assert refused("--all", capsys)[-1].endswith("are required: COMMAND")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_option_is_described_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = re.findall(r"^  (?:-h, )?(--[a-z-]+)", help_of(command, capsys), re.MULTILINE)
    assert sorted(options) == sorted({*options})
    assert {"--help", "--traceback"} <= {*options}


def test_every_example_is_a_command_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    examples = []
    for command in ("", *COMMANDS):
        text = help_of(command, capsys).replace("\\\n", " ")
        for line in re.findall(r"^ +(tallyroll [a-z].*)$", text, re.MULTILINE):
            # A shell variable stands for a number.
            words = shlex.split(re.sub(r"\$\w+", "0", line), comments=True)
            ends = [at for at, word in enumerate(words) if word in ("|", ">", "&&")]
            examples.append(words[1 : min([*ends, len(words)])])
    assert len(examples) > 20
    assert {words[0] for words in examples} == {*COMMANDS}
    for words in examples:
        assert make_parser().parse_args(words).command == words[0]


# --- completion -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    """Return the script of each shell as the command prints it."""
    command = [sys.executable, "-m", "tallyroll.collector.cli", "completion"]
    return {
        shell: subprocess.run(
            [*command, shell], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for shell in SHELLS
    }


def completed(script: str, folder: Path, *words: str) -> set[str]:
    """Return the words that bash offers for the last word."""
    (folder / "script").write_text(script)
    line = " ".join(map(shlex.quote, words))
    code = (
        f"source ./script; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        'complete -p tallyroll >&2; _shtab_tallyroll; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    bash = ["bash", "--norc", "-c", code]
    done = subprocess.run(bash, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    assert "complete -o" in done.stderr
    return {*done.stdout.split()}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_can_read_its_script(scripts: dict[str, str], tmp_path: Path, shell: str) -> None:
    (tmp_path / "script").write_text(scripts[shell])
    assert "tallyroll" in scripts[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=60)


def test_bash_completes(scripts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()

    def offered(*words: str) -> set[str]:
        return completed(scripts["bash"], tmp_path, "tallyroll", *words)

    parser = make_parser()
    assert parser._subparsers is not None
    assert offered("") >= {*parser._subparsers._group_actions[0].choices}
    assert offered("co") == {"collect", "completion", "copy"}
    assert offered("collect", "--fr") == {"--frames", "--frames-per-batch", "--frame-skip"}
    assert offered("collect", "X", "--format", "") >= {"memmap", "hdf5", "zarr"}
    assert offered("collect", "--durability", "po") == {"power"}
    assert offered("collect", "--out", "pl") == {"place"}
    assert offered("inspect", "pl") == {"place"}
    assert offered("verify", "--s") == {"--skip"}
    assert offered("completion", "z") == {"zsh"}


PLACES = {
    "bash": "data/bash-completion/completions/tallyroll",
    "fish": "config/fish/completions/tallyroll.fish",
    "zsh": ".zfunc/_tallyroll",
    "tcsh": ".tallyroll.tcsh",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_installed(
    shell: str, scripts: dict[str, str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = home / PLACES[shell]
    for _ in range(2):  # again after an update
        assert main(["completion", shell, "--install"]) == 0
        said = capsys.readouterr().out
        assert place.read_text() == scripts[shell]
        assert said.startswith(f"wrote {place}\n")
        assert [each.name for each in place.parent.iterdir() if "tallyroll-" in each.name] == []
    if shell in ("zsh", "tcsh"):
        assert f"Add this line to ~/.{shell}rc" in said
        (home / f".{shell}rc").write_text(said.splitlines()[-1].strip() + "\n")
        main(["completion", shell, "--install"])
        said = capsys.readouterr().out
    assert said.endswith("in new shells.\n")
    for other in (b"complete -F mine tallyroll", b"\xff\xfe"):
        place.write_bytes(other)
        assert main(["completion", shell, "--install"]) == 1
        assert "exists and is not a completion script of Tallyroll" in capsys.readouterr().err
        assert place.read_bytes() == other


def test_bash_finds_an_installed_script(home: Path) -> None:
    loader = Path("/usr/share/bash-completion/bash_completion")
    if not loader.is_file():
        pytest.skip("bash-completion is not installed")
    assert main(["completion", "bash", "--install"]) == 0
    load = "_comp_load tallyroll || __load_completion tallyroll; complete -p tallyroll"
    code = f"source {loader}; {load}"
    done = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert "_shtab_tallyroll" in done.stdout


def test_a_place_that_cannot_be_written(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / ".zfunc").write_text("a file")
    assert main(["completion", "zsh", "--install"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--install: {home / '.zfunc/_tallyroll'} cannot be written: " in line
    (home / "data").write_text("a file")
    assert main(["completion", "bash", "--install"]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("BASH_COMPLETION_USER_DIR", raising=False)
    return tmp_path


def test_completion_imports_no_large_library() -> None:
    code = (
        "import sys\n"
        "from tallyroll.collector.cli import main\n"
        "status = main(['completion', 'bash'])\n"
        "print(status, *{'torch', 'numpy', 'gymnasium', 'rich'} & {*sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0"


def test_without_shtab_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("tallyroll: error: completion needs a package that cannot be imported (")
    assert line.endswith('pip install "tallyroll[completion]"')
    assert said.out == ""
