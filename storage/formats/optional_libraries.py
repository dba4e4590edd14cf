"""Libraries that only some storages need, imported where they are used."""

from __future__ import annotations

import importlib
import os
from typing import Any

from tallyroll.storage.errors import MissingLibrary
from tallyroll.storage.files.safe_files import open_any


def needed(module: str, extra: str, by: str) -> Any:
    """Return a module that only some users need.

    Args:
        module: its name.
        extra: the extra that installs it.
        by: what needs it, as ``"a table needs"``.

    Raises:
        MissingLibrary: it is not installed.
        TooManyFiles: none of its files may be opened.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        os.close(open_any(os.devnull, os.O_RDONLY))  # unless no more files may be open
        name = module.partition(".")[0].replace("_", "-")
        raise MissingLibrary(
            f"{by} {name}, which is not installed ({error}): pip install 'tallyroll[{extra}]'"
        ) from error
