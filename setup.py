"""Finds the packages, and puts the shipped profiles, which live at the top of the project, into
the wheel."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildWithProfiles(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copyfile("gptfast.toml", Path(self.build_lib, "gptfast", "gptfast.toml"))


setup(
    # `plugins/` is imported under another name, which only a list can say.
    packages=[*find_packages(include=["gptfast", "gptfast.*"]), "gptfast_plugins"],
    cmdclass={"build_py": BuildWithProfiles},
)
