"""Suggestions for misspelled names in error messages."""

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a message suffix that suggests completions of a name, or else the most similar name.

    The suffix is "" if there is neither.
    """
    names = sorted(known)
    begun = [each for each in names if name.strip("-") and each.startswith(name)]
    near = begun or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {in_words(near)}?" if near else ""


def in_words(names: Sequence[str]) -> str:
    """Join names to a phrase, such as "bash, zsh or tcsh"."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
