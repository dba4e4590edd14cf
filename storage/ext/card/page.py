"""The Markdown page of a card, with the front matter that a hub reads. Pure.

Much of the page comes from untrusted text. Each value is therefore shortened and escaped, so that
it cannot leave its table cell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tallyroll.storage.files.manifest import environment_of, policy_of
from tallyroll.storage.rows.pages import counted
from tallyroll.storage.rows.spaces import spelled

UNKNOWN: Final = "unknown"
"""The Hugging Face Hub's word for an unknown licence."""
_SIZES: Final = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
_LONGEST: Final = 200
_MOST_LINES: Final = 256
_MOST_TAGS: Final = 8
_TAG: Final = re.compile(r"[\w./:-]{1,96}")
_MOST: Final = 2**64
_NUMBERS: Final = ("mean", "std", "min", "max")


@dataclass(frozen=True)
class Card:
    """The content of a dataset's card. ``str(card)`` is the page, in Markdown."""

    name: str
    kind: str
    """``memmap``, ``hdf5``, ``zarr``, the name of another reader, or the kind of an export."""
    rows: int
    columns: Sequence[Mapping[str, Any]]
    """The ``name``, ``dtype`` and ``shape`` of each column, and its ``space`` as JSON, if known."""
    trajectories: int | None = None
    """The number of trajectories, or None if the rows do not record trajectories."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """The number of trajectories for each kind of end, such as ``terminated``."""
    runs: Sequence[Mapping[str, Any]] = ()
    """The manifest entries of the runs that made the rows, oldest first."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """The saved statistics of columns, by column name."""
    hashes: Mapping[str, str] = field(default_factory=dict)
    """``content``: the `content_hash` of a storage; ``files``: the SHA-256 of an export's files."""
    licence: str = UNKNOWN
    """The licence in the hub's spelling, such as ``"apache-2.0"``."""
    loading: str = ""
    """Lines of Python that open the dataset."""
    data_files: str = ""
    """The glob pattern of the files that the hub shows as a table."""
    runs_omitted: int = 0
    """The number of earlier runs that made rows, but that the metadata omit for lack of room."""

    def __str__(self) -> str:
        return "\n".join([*_front(self), "", *_body(self), ""])


def _front(card: Card) -> list[str]:
    """Return the YAML front matter. Strings are quoted as in JSON, which is valid YAML."""
    lines = ["---", f"license: {_quoted(card.licence)}", f"pretty_name: {_quoted(card.name)}"]
    lines += ["task_categories:", "- reinforcement-learning", "size_categories:"]
    lines += [f"- {size_category(card.rows)}", "tags:", "- tallyroll"]
    found = dict.fromkeys(filter(_TAG.fullmatch, map(_environment, card.runs)))
    lines += [f"- {_quoted(each)}" for each in [*found][:_MOST_TAGS]]
    if card.data_files:
        lines += ["configs:", "- config_name: default", "  data_files:", "  - split: train"]
        lines += [f"    path: {_quoted(card.data_files)}"]
    return [*lines, "---"]


def _body(card: Card) -> list[str]:
    lines = [f"# {_text(card.name)}", ""]
    of = "" if card.trajectories is None else f" of {counted(card.trajectories, 'trajectory')}"
    lines += [f"{counted(card.rows, 'row')}{of}, a transition each ({card.kind})."]
    if ends := [f"{count:,} {_text(end)}" for end, count in card.ends.items() if count]:
        lines += [f"How these ended: {', '.join(ends)}."]
    if card.loading:
        lines += ["", "## How to load it", "", "```python", *card.loading.splitlines(), "```"]
    lines += ["", "## Columns", "", *_columns(card)]
    lines += ["", "## How it was made", "", *_made(card)]
    known = card.licence != UNKNOWN
    said = f"`{_text(card.licence)}`" if known else "Unknown: no licence was given for this card."
    lines += ["", "## Licence", "", said]
    if card.hashes:
        lines += ["", "## Hash", ""]
        lines += [f"- SHA-256 of the {_text(n)}: `{_text(h)}`" for n, h in card.hashes.items()]
    return lines


def _columns(card: Card) -> Iterable[str]:
    shown = {name: each for name, each in card.statistics.items() if isinstance(each, dict)}
    more = _NUMBERS if shown else ()
    spaces = [spelled(each["space"]) if each.get("space") else "" for each in card.columns]
    named = ("space",) if any(spaces) else ()
    cells = []
    for each, space in zip(card.columns[:_MOST_LINES], spaces, strict=False):
        said = shown.get(str(each.get("said", each["name"])), {})
        numbers = [_numbers(said.get(name)) for name in more]
        words = [_text(space)] if named else []
        shape = str(each["shape"])
        cells.append([f"`{_text(each['name'])}`", each["dtype"], shape, *words, *numbers])
    return _table(("column", "dtype", "shape", *named, *more), cells, len(card.columns))


def _made(card: Card) -> Iterable[str]:
    if not card.runs:
        yield "No run is known that made these rows."
        return
    cells = []
    for number, run in enumerate(card.runs[-_MOST_LINES:]):
        call, versions = _part(run, "call"), _part(run, "versions")
        policy = _part(run, "made").get("policy")
        hashed = policy.get("weights") if isinstance(policy, dict) else None
        acted = policy_of(run).rpartition("/")[2]
        kwargs = _part(run, "environment").get("kwargs")
        values = [
            max(0, len(card.runs) - _MOST_LINES) + number,
            _environment(run),
            json.dumps(kwargs) if kwargs else "",
            run.get("seed", ""),
            run.get("lanes", ""),
            f"{acted} ({hashed})" if isinstance(hashed, str) else acted,
            call.get("total_frames") or call.get("total_episodes") or "",
            ", ".join(f"{name} {version}" for name, version in versions.items()),
        ]
        cells.append([_text(str(value)) for value in values])
    heads = ("run", "environment", "arguments", "seed", "lanes", "policy", "asked for", "versions")
    yield from _table(heads, cells, len(card.runs))
    if card.runs_omitted:
        yield f"\nThe metadata omit {counted(card.runs_omitted, 'earlier run')}."


def _environment(run: Mapping[str, Any]) -> str:
    return environment_of(run)[:_LONGEST]


def size_category(rows: int) -> str:
    """Return the Hugging Face Hub's size category for a number of rows."""
    if rows >= 10 ** (len(_SIZES) + 2):
        return f"n>{_SIZES[-1]}"
    at = max(0, len(str(rows)) - 3)
    return f"n<{_SIZES[0]}" if at == 0 else f"{_SIZES[at - 1]}<n<{_SIZES[at]}"


def _part(run: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = run.get(name)
    return found if isinstance(found, dict) else {}


def _table(heads: Sequence[str], cells: Sequence[Sequence[str]], every: int) -> Iterable[str]:
    yield _line(heads)
    yield _line(["---"] * len(heads))
    yield from map(_line, cells)
    if every > len(cells):
        yield f"\n{every - len(cells):,} more are not shown."


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _numbers(values: Any) -> str:
    """Format numbers briefly. A list shows its first four numbers."""
    if isinstance(values, list):
        found = [_numbers(each) for each in values[:4]]
        return f"[{', '.join(found)}{', ...' if len(values) > 4 else ''}]"
    if isinstance(values, bool | float) or (isinstance(values, int) and abs(values) < _MOST):
        return f"{values:.4g}"
    return "" if values is None else _text(str(values))


def _text(value: str) -> str:
    """Return text as one short line in which Markdown and HTML are escaped."""
    shown = "".join(each if each.isprintable() else " " for each in value[: _LONGEST + 1])
    plain = re.sub(r"\s+", " ", shown).strip()
    plain = plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]}..."
    return re.sub(r"[\\`|<>\[\]!*#]", lambda found: f"&#{ord(found[0])};", plain)


def _quoted(text: str) -> str:
    return json.dumps(text[:_LONGEST])
