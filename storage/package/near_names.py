"""Names that may have been meant, where there is none of a name."""

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that there is not: what it abbreviates, or the nearest."""
    names = sorted(known)
    begun = [each for each in names if name.strip("-") and each.startswith(name)]
    near = begun or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {in_words(near)}?" if near else ""


def in_words(names: Sequence[str]) -> str:
    """The names as words: bash, zsh or tcsh."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
