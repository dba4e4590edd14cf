"""Text from a storage, made safe for a terminal. Pure.

A manifest, a file name or a column's name may hold anything: codes that a terminal obeys, marks
that turn the direction of reading, line ends that make one line look like two.
"""

__all__ = ["encodable", "pasteable", "visible"]

_NOT_SHOWN = (
    "(the command is not shown: a name in it holds control characters; put it together yourself, "
    "from names that you know)"
)


def visible(text: str, *, lines: bool = False) -> str:
    r"""``text`` with all that is not printable escaped as in Python: ``\x1b``, ``\u202e``.

    Line ends and tabs too, unless they are to stay (``lines``).
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


def pasteable(command: str) -> str:
    """A command that does in a shell what it shows, or a sentence that says why there is none."""
    return command if visible(command) == command else _NOT_SHOWN


def encodable(text: str, encoding: str | None) -> str:
    """``text`` with what a stream of that encoding does not have escaped."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
