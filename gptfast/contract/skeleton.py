"""The package that `gptfast plugins new` writes: one plugin, its entry point and its test.

It installs and passes as it is, so that its author starts from something that works.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from string import Template

from gptfast import __version__
from gptfast.errors import GptfastError, Refused

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def skeleton(name: str) -> dict[str, str]:
    """The files of the package for plugin `name`: relative path -> text.

    Raises:
        Refused: the name is not kebab-case.
    """
    if not NAME.fullmatch(name):
        raise Refused(
            f"plugin name {name}: use small letters, digits and single dashes, as in my-plugin"
        )
    words = name.split("-")
    module = f"gptfast_{'_'.join(words)}"
    filled = {
        "name": name,
        "package": f"gptfast-{name}",
        "module": module,
        "class_name": "".join(word.capitalize() for word in words),
        "version": __version__,
    }
    return {
        path: Template(text).substitute(filled)
        for path, text in {
            "pyproject.toml": PYPROJECT,
            "README.md": README,
            f"{module}.py": MODULE,
            "test_contract.py": TEST,
        }.items()
    }


def first_commands(folder: str) -> list[str]:
    """What to type after `new`: installs the package that was written, and runs its test."""
    return [
        f"python -m pip install -e {shlex.quote(f'{folder}[test]')}",
        f"python -m pytest {shlex.quote(folder)}",
    ]


def write_skeleton(name: str, folder: Path) -> None:
    """Write the package into `folder`, which appears complete or not at all.

    Raises:
        Refused: the name is not kebab-case, or `folder` is there already.
        GptfastError: it cannot be written.
    """
    files = skeleton(name)
    if folder.exists():
        raise Refused(f"{folder}: is there already: choose another with --out")
    beside = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        for path, text in files.items():
            (beside / path).write_text(text, encoding="utf-8")
        beside.rename(folder)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise GptfastError(
            f"{folder}: cannot be written ({error.strerror}): choose another with --out"
        ) from error


PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$package"
version = "0.1.0"
description = "The gptfast plugin $name"
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["gptfast>=$version"]

[project.optional-dependencies]
test = ["pytest>=8"]

[project.entry-points."gptfast.plugins"]
$name = "$module:$class_name"

[tool.setuptools]
py-modules = ["$module"]
"""

README = """\
# $package

The plugin `$name` for gptfast. Say here what it does, when it helps and what it costs.

    pip install -e ".[test]"
    python -m pytest
    gptfast plugins check $name
    gptfast train --plugin $name
    gptfast bench --plugin $name
"""

MODULE = '''\
"""Evaluates after steps 1, 2, 4, 8 and so on, where the loss moves most.

Claim: exact. An evaluation changes nothing of the training; it costs its own time.
"""

from __future__ import annotations

from gptfast.plugin import Claim, Options, Plugin, Stage, Stepped, Want


def is_due(step: int, first: int) -> bool:
    """Whether `step` is `first` times a power of two."""
    share, rest = divmod(step, first)
    return rest == 0 and share & (share - 1) == 0


class ${class_name}Options(Options):
    first: int = 1
    """The first step after which to evaluate."""


class $class_name(Plugin):
    summary = "evaluates after steps 1, 2, 4, 8, ..."
    stage = Stage.REPORT
    claim = Claim.EXACT
    Options = ${class_name}Options

    def step(self, event: Stepped) -> Want:
        return Want.EVAL if is_due(event.step, self.options.first) else Want.NOTHING
'''

TEST = """\
from $module import is_due

from gptfast.contract.check import assert_keeps_contract


def test_keeps_the_contract() -> None:
    assert_keeps_contract("$name", {"first": 2})


def test_when_it_is_due() -> None:
    assert [step for step in range(1, 20) if is_due(step, 2)] == [2, 4, 8, 16]
"""
