"""Let an sdist hold `collector` and `storage` once, and the links to them, as a checkout does."""

import os
from typing import Any

from setuptools import setup
from setuptools.command.sdist import sdist


class WithLinks(sdist):
    """Copies each file from where it is, and makes the links of `src/tallyroll` again."""

    def make_release_tree(self, base_dir: str, files: Any) -> None:
        """Make the tree that is packed."""
        super().make_release_tree(base_dir, [os.path.relpath(os.path.realpath(f)) for f in files])
        for name in ("collector", "storage"):
            link = os.path.join("src", "tallyroll", name)
            os.symlink(os.readlink(link), os.path.join(base_dir, link))


setup(cmdclass={"sdist": WithLinks})
