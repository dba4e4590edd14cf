"""Start-up of commands: the first line on a terminal, and Ctrl-C at any time, in real processes."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tallyroll.collector.cli import main

STOPPED = "tallyroll: stopped by Ctrl-C during start-up; nothing was changed\n"
ENDLESS = ("collect", "CartPole-v1", "--frames", "2e7", "--quiet", "--out")
# Print "up" once Ctrl-C is handled, and begin to import only then.
SCRIPT = """
import signal, sys
install = signal.signal
def told(*handler):
    signal.signal = install
    before = install(*handler)
    print("up", flush=True)
    return before
signal.signal = told
from tallyroll.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("seconds", [0, 0.05, 0.2, 0.5, 1, 2, 4])
def test_ctrl_c_at_any_time_is_one_line(seconds: float, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, *ENDLESS, tmp_path / "rows"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
    if err == STOPPED:
        assert out == ""
        assert not (tmp_path / "rows").exists()
    else:  # the command had been imported
        assert "tallyroll: stopped by SIGINT; " in err
        assert seconds


def test_ctrl_c_in_an_import_that_catches_it(tmp_path: Path) -> None:
    """A library that catches every exception of an import does not keep the process alive."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    import time; time.sleep(60)\n"
        "except BaseException:\n"
        "    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tallyroll", "verify", "rows"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", STOPPED)


def test_a_parent_that_ignores_ctrl_c(tmp_path: Path) -> None:
    """Commands in the background of a script ignore Ctrl-C, also while they start."""
    done = subprocess.run(
        [sys.executable, "-c", "import os, signal, sys\n"
         "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
         "from tallyroll.__main__ import main\n"
         "os.kill(os.getpid(), signal.SIGINT)\n"
         "status = main()\n"
         "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
         "sys.exit(status)", "completion", "bash"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_ctrl_c_works_as_before_once_a_command_runs() -> None:
    code = (
        "import signal, sys\n"
        "from tallyroll.collector.cli import completion\n"
        "def run(args):\n"
        "    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "    print('ran')\n"
        "    return 5\n"
        "completion.run = run\n"
        "from tallyroll.__main__ import main\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, "-c", code, "completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (5, "ran\n", "")


def on_terminal(*words: str, term: str = "xterm", stop_at: str = "", **env: str) -> tuple[int, str]:
    """Run a command with stderr on a terminal, and return its status and the text there.

    Send Ctrl-C once the text ``stop_at`` is there, and again at each later text.
    """
    controller, terminal = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "tallyroll", *words],
            stdout=subprocess.DEVNULL,
            stderr=terminal,
            env={**os.environ, "TERM": term, **env},
        )
        os.close(terminal)
        text = b""
        try:
            while more := os.read(controller, 4096):
                text += more
                if stop_at and stop_at in text.decode():
                    process.send_signal(signal.SIGINT)
        except OSError:  # the process has closed the terminal
            pass
        return process.wait(120), text.decode()
    finally:
        os.close(controller)


def test_the_first_line_on_a_terminal(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    line, erased = "tallyroll: starting, which takes a few seconds", "\r\x1b[K"
    status, shown = on_terminal("verify", gone)
    assert status == 2
    assert shown.startswith(f"{line}{erased}")
    assert f"tallyroll: error: {gone} does not exist" in shown
    # Commands whose first import of torch exits, because it takes seconds.
    (tmp_path / "torch.py").write_text("raise SystemExit(7)\n")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    assert on_terminal("inspect", gone, term="dumb", PYTHONPATH=path) == (7, f"{line}\r\n")
    assert on_terminal("verify", gone, "--quiet", PYTHONPATH=path) == (7, "")
    for words in (("envs", "nothing"), ("verify", "--help")):
        assert line not in on_terminal(*words)[1]


def test_ctrl_c_erases_the_first_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)\n")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    line = "tallyroll: starting, which takes a few seconds"
    status, shown = on_terminal("verify", "rows", stop_at=line, PYTHONPATH=path)
    assert (status, shown) == (130, f"{line}\r\x1b[K{STOPPED}".replace("\n", "\r\n"))


def test_no_line_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "gone")]) == 2
    assert capsys.readouterr().err.startswith("tallyroll: error: ")
