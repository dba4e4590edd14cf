"""Import of libraries that only some storages need."""

from __future__ import annotations

import importlib
import os
from typing import Any

from tallyroll.storage.errors import MissingLibrary
from tallyroll.storage.files.safe_files import open_any


def needed(module: str, extra: str, by: str) -> Any:
    """Import and return an optional module.

    Args:
        module: the name of the module.
        extra: the extra of Tallyroll that installs the module.
        by: the beginning of the message, which names the feature, such as ``"a table needs"``.

    Raises:
        MissingLibrary: the module is not installed.
        TooManyFiles: the files of the module cannot be opened because too many files are open.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        os.close(open_any(os.devnull, os.O_RDONLY))  # raises if no more files may be open
        name = module.partition(".")[0].replace("_", "-")
        raise MissingLibrary(
            f'{by} {name}, which is not installed ({error}): pip install "tallyroll[{extra}]"'
        ) from error
