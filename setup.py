"""Build sdists that contain `collector` and `storage` once, with links to them, as in a checkout.

TALLYROLL_DEBUG=1 builds the extensions for testing: see CONTRIBUTING.
"""

import os
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

_SANITIZERS = "-fsanitize=address,undefined"
_DEBUG = ["-O1", "-g", "-fno-omit-frame-pointer", "-DTALLYROLL_DEBUG", _SANITIZERS]


class Checked(build_ext):
    """Builds extensions that check their reads and writes, if TALLYROLL_DEBUG asks for it."""

    def build_extension(self, ext: Extension) -> None:
        """Build one extension."""
        if os.environ.get("TALLYROLL_DEBUG", "0") != "0":
            ext.extra_compile_args += _DEBUG
            ext.extra_link_args += [_SANITIZERS]
            ext.optional = False
        super().build_extension(ext)


class WithLinks(sdist):
    """Copies each file once, from its real location, and recreates the links of `src/tallyroll`."""

    def make_release_tree(self, base_dir: str, files: Any) -> None:
        """Create the tree of the sdist."""
        super().make_release_tree(base_dir, [os.path.relpath(os.path.realpath(f)) for f in files])
        for name in ("collector", "storage"):
            link = os.path.join("src", "tallyroll", name)
            os.symlink(os.readlink(link), os.path.join(base_dir, link))


setup(cmdclass={"build_ext": Checked, "sdist": WithLinks})
