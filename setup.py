"""Let an sdist hold `collector` and `storage` once, and the links to them, as a checkout does.

With TALLYROLL_DEBUG=1 the extensions are built to be tested: see CONTRIBUTING.
"""

import os
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

_SANITIZERS = "-fsanitize=address,undefined"
_DEBUG = ["-O1", "-g", "-fno-omit-frame-pointer", "-DTALLYROLL_DEBUG", _SANITIZERS]


class Checked(build_ext):
    """Builds extensions that check what they read and write, where that is asked for."""

    def build_extension(self, ext: Extension) -> None:
        """Build one."""
        if os.environ.get("TALLYROLL_DEBUG", "0") != "0":
            ext.extra_compile_args += _DEBUG
            ext.extra_link_args += [_SANITIZERS]
            ext.optional = False
        super().build_extension(ext)


class WithLinks(sdist):
    """Copies each file from where it is, and makes the links of `src/tallyroll` again."""

    def make_release_tree(self, base_dir: str, files: Any) -> None:
        """Make the tree that is packed."""
        super().make_release_tree(base_dir, [os.path.relpath(os.path.realpath(f)) for f in files])
        for name in ("collector", "storage"):
            link = os.path.join("src", "tallyroll", name)
            os.symlink(os.readlink(link), os.path.join(base_dir, link))


setup(cmdclass={"build_ext": Checked, "sdist": WithLinks})
