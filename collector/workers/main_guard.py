"""Scripts that lack ``if __name__ == "__main__":``, told before a process is started.

A process that is not forked imports the main module again, to find there what it is sent. What
stands in it without that guard runs again too: each worker would start workers of its own.
Source: "Safe importing of main module" in the documentation of ``multiprocessing``.
"""

import ast
import builtins
import sys
import tokenize
import warnings
from collections.abc import Iterator
from multiprocessing import process
from pathlib import Path
from types import CodeType, FrameType, ModuleType

from tallyroll.collector.errors import ArgumentError

WORDS = {"__name__", "current_process"}
"""Names by which code asks which process it runs in."""

_UNREADABLE = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)


def in_bootstrap() -> bool:
    """Whether this is a started process that is still importing its main module."""
    return bool(getattr(process.current_process(), "_inheriting", False))


def require_guard(frame: FrameType | None) -> None:
    """Raise if the main module, imported again, would certainly come to where ``frame`` is.

    In doubt it does not: a notebook, a test runner, a thread, a debugger, a line under an
    unusual condition.

    Args:
        frame: of the caller.

    Raises:
        ArgumentError: the line of the main module is not guarded, or came from stdin.
    """
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) == "<stdin>":
        raise ArgumentError(
            "wanted a program that worker processes can import, got one that was read from stdin; "
            "save it in a file, and run that"
        )
    if main is None or not runs_again(main):
        return
    found = _frame_of(main, frame)
    if found is None:
        return
    with warnings.catch_warnings(action="ignore"):  # about the script, told when it started
        source = _source_of(main, found.f_code)
        if source is None or guards(source, found.f_lineno):
            return
    raise ArgumentError(
        'wanted worker processes to be started under `if __name__ == "__main__":`, because each '
        f"imports the main module again, got them started by line {found.f_lineno} of "
        f"{main.__file__}, which each would run again; write\n\n"
        '    if __name__ == "__main__":\n'
        "        with MultiprocessCollector(...) as collector:\n"
        "            ..."
    )


def runs_again(main: ModuleType) -> bool:
    """Whether ``multiprocessing`` imports ``main`` in a process that it starts.

    Source: ``get_preparation_data`` and ``prepare`` in ``multiprocessing/spawn.py``.
    """
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return str(name).rpartition(".")[2] != "__main__"
    path = getattr(main, "__file__", None)
    if path is None or getattr(sys, "frozen", False):
        return False
    return Path(path).stem != "ipython"


def guards(source: str, line: int) -> bool:
    """Whether what stands around a line may keep it from running when a module is imported.

    That is a condition that asks for ``__name__`` or for the process, calls something that might,
    or has a name that speaks of ``main`` or was assigned such an answer.

    Args:
        source: of the module.
        line: counted from 1.

    Raises:
        SyntaxError, ValueError: ``source`` is no Python.
    """
    tree = ast.parse(source)
    answers = _answers(tree)
    return any(
        _asks(node) or (is_condition and _may_know(node, answers))
        for node, is_condition in _around(tree, line)
    )


def _around(tree: ast.AST, line: int) -> Iterator[tuple[ast.AST, bool]]:
    """Conditions and simple statements around a line, and which of both it is."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt | ast.expr):
            continue
        if not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.Match(subject=test):
                yield test, True
            case ast.IfExp() | ast.BoolOp():
                yield node, False
            case ast.stmt() if not hasattr(node, "body"):
                yield node, False  # it may look up by name what it runs


def _asks(tree: ast.AST) -> bool:
    """Whether it asks which module or which process it is in."""
    nodes = ast.walk(tree)
    return any(
        getattr(node, "id", None) in WORDS or getattr(node, "attr", None) in WORDS for node in nodes
    )


def _may_know(condition: ast.AST, answers: set[str]) -> bool:
    """Whether a condition may know the answer from elsewhere."""
    for node in ast.walk(condition):
        match node:
            case ast.Call(func=ast.Name(id=name)) if not hasattr(builtins, name):
                return True
            case ast.Call(func=ast.Attribute()):
                return True
            case ast.Name(id=name) | ast.Attribute(attr=name):
                if name in answers or "main" in name.lower():
                    return True
    return False


def _answers(tree: ast.AST) -> set[str]:
    """Names that are assigned what depends on the module or the process."""
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _asks(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _frame_of(main: ModuleType, frame: FrameType | None) -> FrameType | None:
    """The outermost frame that runs the main module itself; None in a thread, for example."""
    found = None
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is main.__dict__:
            found = frame
        frame = frame.f_back
    return found


def _source_of(main: ModuleType, code: CodeType) -> str | None:
    """The text of the main module's file, if that is what ``code`` was made from."""
    try:
        path = main.__file__ or ""
        with tokenize.open(path) as file:
            source = file.read()
        again = compile(source, path, "exec", dont_inherit=True)
    except _UNREADABLE:
        return None
    # Lines tell another file, and one that was edited since.
    return source if list(again.co_lines()) == list(code.co_lines()) else None
