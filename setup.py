"""Puts the lessons and the examples into the wheel, as minidist/shipped; all else is in pyproject.toml.

An editable installation reads them in the repository.
"""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithLessons(build_py):
    """The package, and what `minidist lesson copy` and `minidist example copy` write."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if self.editable_mode:
            return
        # The module alone: importing its package needs NumPy, which a build has not.
        spec = spec_from_file_location("handout", ROOT / "minidist/course/lesson/handout.py")
        handout = module_from_spec(spec)
        spec.loader.exec_module(handout)
        for folder in handout.FOLDERS:
            for path in handout.handed_out(ROOT, folder):
                target = Path(self.build_lib) / "minidist/shipped" / path.relative_to(ROOT)
                self.mkpath(str(target.parent))
                target.write_bytes(handout.handout(path))


setup(cmdclass={"build_py": BuildWithLessons})
