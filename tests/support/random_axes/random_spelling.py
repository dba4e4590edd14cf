"""Options of a random run as keywords, as objects, or as a mix: the run must be the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tallyroll.collector import Checks, Columns, Devices, Layout
from tallyroll.collector.options.objects import keywords_of


def spelled(options: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the ``options`` of the collector, in the form that ``number`` selects."""
    given = dict(options)
    if number % 3 == 0:
        return given
    for name, kind in (("columns", Columns), ("checks", Checks), ("devices", Devices)):
        keywords = keywords_of(kind)
        into = [keyword for keyword in keywords if keyword in given]
        into = into[:1] if number % 3 == 1 else into
        if into:
            given[name] = kind(**{keywords[each].name: given.pop(each) for each in into})
    if "layout" in given:
        given["layout"] = Layout(given["layout"])
    return given
