"""Scripts without the main guard: told when workers would run them again, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import tallyroll.collector
from tallyroll.collector.workers.main_guard import guards, in_bootstrap, require_guard

GUARD = 'if __name__ == "__main__":\n'

# `ask` prints what is told at a line, and what then happens there: it starts a process, which
# says whether it came to that line again. It imports nothing heavy.
ASK = """
import multiprocessing, os, sys, types

package = types.ModuleType("tallyroll.collector")
package.__path__ = {path!r}
sys.modules["tallyroll.collector"] = package

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.workers.main_guard import in_bootstrap, require_guard

AGAIN = os.path.join(os.path.dirname(__file__), "again")

def nothing():
    assert not in_bootstrap()

def ask():
    if in_bootstrap():
        open(AGAIN, "w").close()
        return
    try:
        require_guard(sys._getframe(1))
    except ArgumentError as error:
        print(error)
        print("told", end=" ")
    child = multiprocessing.get_context("spawn").Process(target=nothing)
    child.start()
    child.join()
    print("failed" if child.exitcode else "again" if os.path.exists(AGAIN) else "once")
"""


def asked(folder: Path, *command: str, script: str = "", stdin: str = "", **env: str) -> list[str]:
    """What a script, written to ``script.py``, prints when Python runs ``command``."""
    (folder / "asking.py").write_text(ASK.format(path=list(tallyroll.collector.__path__)))
    (folder / "script.py").write_text("from asking import ask\n" + textwrap.dedent(script))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path} | env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


UNGUARDED = {
    "a bare call": "ask()",
    "through a function": """
        def main():
            ask()

        main()
        """,
    "in blocks": """
        import contextlib
        try:
            for _ in range(1):
                with contextlib.nullcontext():
                    ask()
        finally:
            pass
        """,
    "under another condition": """
        parallel = True
        if parallel:
            ask()
        """,
    "beside a guard": """
        if __name__ == "__main__":
            print("hello")
        ask()
        """,
    "with a string that Python warns of": r"""
        import warnings
        warnings.simplefilter("error")
        pattern = "\d"
        ask()
        """,
}
GUARDED = {
    "plain": """
        if __name__ == "__main__":
            ask()
        """,
    "through a function": """
        def main():
            ask()

        if "__main__" == __name__:
            main()
        """,
    "in blocks": """
        try:
            if __name__ == "__main__" and not None:
                with open(__file__):
                    ask()
        finally:
            pass
        """,
    "else": """
        if __name__ != "__main__":
            pass
        else:
            ask()
        """,
    "on one line": """
        if __name__ == "__main__": ask()
        """,
    "as an expression": """
        __name__ == "__main__" and ask()
        """,
    "a function that may know": """
        def in_main():
            return __name__ == "__main__"

        if in_main():
            ask()
        """,
    "a name that knows": """
        MAIN = __name__ == "__main__"
        if MAIN:
            ask()
        """,
    "multiprocessing's own answer": """
        import multiprocessing
        if multiprocessing.current_process().name == "MainProcess":
            ask()
        """,
    "looked up": """
        {"__main__": ask}.get(__name__, list)()
        """,
    "match": """
        match __name__:
            case "__main__":
                ask()
        """,
}


@pytest.mark.parametrize("script", UNGUARDED.values(), ids=UNGUARDED)
def test_a_script_without_a_guard_is_told(tmp_path: Path, script: str) -> None:
    *_, last = asked(tmp_path, "script.py", script=script)
    assert last == "told again"


def test_what_is_told(tmp_path: Path) -> None:
    *told, _ = asked(tmp_path, "script.py", script="\n\nask()")
    assert "\n".join(told) == (
        'wanted worker processes to be started under `if __name__ == "__main__":`, because each '
        "imports the main module again, got them started by line 4 of "
        f"{tmp_path / 'script.py'}, which each would run again; write\n\n"
        '    if __name__ == "__main__":\n'
        "        with MultiprocessCollector(...) as collector:\n"
        "            ..."
    )


@pytest.mark.parametrize("script", GUARDED.values(), ids=GUARDED)
def test_a_script_with_a_guard_is_not_told(tmp_path: Path, script: str) -> None:
    assert asked(tmp_path, "script.py", script=script) == ["once"]


def test_a_module_run_by_name_is_told(tmp_path: Path) -> None:
    assert asked(tmp_path, "-m", "script", script="ask()")[-1] == "told again"
    (tmp_path / "again").unlink()
    assert asked(tmp_path, "-m", "script", script=GUARD + "    ask()") == ["once"]


def test_a_script_started_from_elsewhere_is_told(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    script = "import os; os.chdir('/')\nask()"
    for name in ("script.py", "./below/../script.py", str(tmp_path / "script.py")):
        assert asked(tmp_path, name, script=script)[-1] == "told again"


def test_modules_that_a_script_imports_are_not_what_is_asked(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text("from asking import ask\nask()\n")
    assert asked(tmp_path, "script.py", script=GUARD + "    import library") == ["once"]
    assert asked(tmp_path, "script.py", script="import library")[-1] == "told again"


def test_what_no_worker_runs_again_is_not_told(tmp_path: Path) -> None:
    """Packages, folders and archives, ``-c``: no file of theirs is imported again."""
    for package in (tmp_path / "package", tmp_path / "folder"):
        package.mkdir()
        (package / "__main__.py").write_text("from asking import ask\nask()\n")
    (tmp_path / "package" / "__init__.py").touch()
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "from asking import ask\nask()\n")
    code = "from asking import ask; ask()"
    for command in (["-m", "package"], ["folder"], ["app.pyz"], ["-c", code]):
        assert asked(tmp_path, *command) == ["once"], command


def test_a_program_from_stdin_is_told(tmp_path: Path) -> None:
    """Workers would look for a file "<stdin>"."""
    told, status = asked(tmp_path, "-", stdin="from asking import ask; ask()")
    assert "read from stdin; save it in a file" in told
    assert status == "told failed"


@pytest.mark.parametrize("tool", ["cProfile", "trace", "runpy", "pdb", "timeit"])
def test_a_script_under_a_tool_is_not_told_in_doubt(tmp_path: Path, tool: str) -> None:
    options = {
        "trace": ["--count", "--coverdir", "counts"],
        "pdb": ["-c", "continue", "-c", "quit"],
        "timeit": ["-n1", "-r1", "import script"],
    }.get(tool, [])
    target = {"runpy": ["script"], "timeit": []}.get(tool, ["script.py"])
    lines = asked(tmp_path, "-m", tool, *options, *target, script="ask()")
    assert not any("told" in line for line in lines)
    # In pdb, multiprocessing itself cannot start a process.
    assert tool == "pdb" or any(line.endswith(("once", "again")) for line in lines)


def test_threads_are_not_told(tmp_path: Path) -> None:
    script = """
        import threading
        def work():
            ask()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        """
    assert asked(tmp_path, "script.py", script=script) == ["again"]


def test_other_code_in_the_main_module_is_not_told(tmp_path: Path) -> None:
    assert asked(tmp_path, "script.py", script='exec("ask()")')[-1] == "told again"
    (tmp_path / "again").unlink()
    lines = asked(tmp_path, "-i", "script.py", script="", stdin="ask()\n")
    assert lines == ["once"]


def test_a_script_that_was_edited_since_is_not_told(tmp_path: Path) -> None:
    script = """
        import asking
        if not asking.in_bootstrap():
            text = open(__file__).read()
            open(__file__, "w").write("import os, sys\\n" + text)
        number = 1
        ask()
        """
    assert asked(tmp_path, "script.py", script=script) == ["again"]


def test_a_script_that_is_gone_is_not_told(tmp_path: Path) -> None:
    script = """
        import os, sys, asking
        os.rename(__file__, "elsewhere.py")
        try:
            asking.require_guard(sys._getframe())
            print("not told")
        finally:
            os.rename("elsewhere.py", __file__)
        """
    assert asked(tmp_path, "script.py", script=script) == ["not told"]


def test_pytest_is_not_told() -> None:
    require_guard(sys._getframe())
    require_guard(None)
    assert not in_bootstrap()


@pytest.mark.parametrize("prefix", ["", "try:\n  pass\nfinally:\n", "with a, b:\n", "if x:\n"])
def test_the_line_decides(prefix: str) -> None:
    pad = "  " if prefix else ""
    body = [
        f"{pad}first()",
        f'{pad}if __name__ == "__main__":',
        f"{pad}  second()",
        f"{pad}  if True:",
        f"{pad}    third(",
        "4)",
        f"{pad}fifth()",
    ]
    source = prefix + "\n".join(body)
    first = 1 + prefix.count("\n")
    told = [not guards(source, first + index) for index in range(len(body))]
    assert told == [True, False, False, False, False, False, True]


@pytest.mark.parametrize(
    ("condition", "guarded"),
    [
        ('__name__ == "__main__"', True),
        ('"__main__" == __name__', True),
        ('x and (y or __name__ == "__main__")', True),
        ("in_main()", True),
        ("tool.IN_MAIN", True),
        ("tool.enabled", False),
        ("knows", True),
        ("len(x) > 1", False),
        ("x", False),
        ("True", False),
    ],
)
def test_conditions(condition: str, guarded: bool) -> None:
    source = f"knows = __name__ == '__main__'\nif {condition}:\n    main()\n"
    assert guards(source, 3) is guarded


@pytest.mark.parametrize(
    ("source", "guarded"),
    [
        ("with (__name__ and main()):\n    pass", True),
        ("with (main() if __name__ else x):\n    pass", True),
        ("with main():\n    __name__", False),
        ("while __name__:\n    main()", True),
        ("for x in main(__name__):\n    pass", False),
        ("main(__name__)", True),
        ("knows.x = __name__\nif knows:\n    main()", False),
    ],
)
def test_what_stands_around_a_line(source: str, guarded: bool) -> None:
    line = 1 + source[: source.index("main(")].count("\n")
    assert guards(source, line) is guarded


def test_no_python_has_no_guard() -> None:
    with pytest.raises(SyntaxError):
        guards("if", 1)
