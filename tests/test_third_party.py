"""A stranger's package: built into a wheel, installed in a clean environment, trained with."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gptfast.contract.tiny import write_tiny_store
from gptfast.plugin import Plugin

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "stranger"
version = "{version}"

[project.entry-points."gptfast.plugins"]
every-hook = "stranger:EveryHook"

[tool.setuptools]
py-modules = ["stranger"]
"""

MODULE = '''
"""Does nothing that changes the loss and writes down each hook that is called."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

from gptfast.plugin import Claim, Options, Plugin, Stage, Support, Want, decay_groups


class EveryHookOptions(Options):
    record: str
    """File to write to."""


class Plain:
    def __init__(self, say):
        self.say = say

    def backward(self, loss):
        self.say("stepper.backward")
        loss.backward()

    def unscale(self, optimizer):
        self.say("stepper.unscale")

    def step(self, optimizer):
        self.say("stepper.step")
        optimizer.step()
        return True

    def skip(self, optimizer):
        self.say("stepper.skip")


class Around:
    """Another source around the one it is given."""

    def __init__(self, source, say):
        self.source, self.say = source, say

    @property
    def windows(self):
        return self.source.windows

    @property
    def step(self):
        return self.source.step

    def next(self):
        self.say("source.next")
        return self.source.next()

    def seek(self, step):
        self.say(f"source.seek {step}")
        self.source.seek(step)

    def close(self):
        self.say("source.close")
        self.source.close()


class EveryHook(Plugin):
    summary = "writes down each hook"
    stage = Stage.OUTER
    claim = Claim.EXACT
    Options = EveryHookOptions

    def __init__(self, options):
        super().__init__(options)
        self.failed = False

    def say(self, hook):
        with Path(self.options.record).open("a") as file:
            file.write(json.dumps(hook) + "\\n")

    def supports(self, machine):
        self.say("supports")
        return Support.yes("everywhere")

    def configure(self, profile):
        self.say("configure")
        return profile

    def setup(self, context):
        self.say("setup")
        context.undo(lambda: self.say("undo"))
        context.note("the stranger says hello")

    def wrap_model(self, model):
        self.say("wrap_model")
        return model

    def build_optimizer(self, model, profile):
        import torch

        self.say("build_optimizer")
        return torch.optim.AdamW(
            decay_groups(model.named_parameters(), profile.train.weight_decay),
            lr=profile.train.learning_rate,
            betas=(profile.train.beta1, profile.train.beta2),
            foreach=False,
        )

    def build_stepper(self):
        self.say("build_stepper")
        return Plain(self.say)

    def wrap_source(self, source):
        self.say("wrap_source")
        return Around(source, self.say)

    def ready(self, parts):
        self.say("ready")

    @contextmanager
    def micro_scope(self, last):
        self.say("micro_scope")
        yield
        if not self.failed:
            self.failed = True
            raise RuntimeError("out of memory")

    @contextmanager
    def forward_scope(self):
        self.say("forward_scope")
        yield

    def recover(self, error, profile):
        self.say("recover")
        return profile

    def pays(self, steps, payback):
        self.say("pays")

    def agree(self, stop):
        self.say("agree")
        return None

    def before_step(self, event):
        self.say("before_step")
        return Want.NOTHING

    def step(self, event):
        self.say(f"step {event.step}")
        return Want.NOTHING

    @contextmanager
    def eval_scope(self):
        self.say("eval_scope")
        yield

    def evaluated(self, event):
        self.say("evaluated")
        return Want.NOTHING

    def metrics(self):
        self.say("metrics")
        return {"hooks": 1}

    def teardown(self):
        self.say("teardown")

    def state(self):
        self.say("state")
        return {"failed": self.failed}

    def load_state(self, state):
        self.say("load_state")
        self.failed = state["failed"]
'''


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, in which the dependencies of this one are seen too."""

    python: Path
    folder: Path

    def run(self, *args: str) -> CompletedProcess[str]:
        variables = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            [str(self.python), *args],
            cwd=self.folder,
            env={**variables, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def gptfast(self, *args: str) -> CompletedProcess[str]:
        return self.run("-m", "gptfast", *args)

    def install(self, package: Path) -> None:
        """Build a wheel of `package` and install it; nothing is fetched."""
        wheels = package.parent / f"{package.name}-wheels"
        offline = ["--no-index", "--no-deps", "--disable-pip-version-check", "-q"]
        pip = [sys.executable, "-m", "pip"]
        build = [*pip, "wheel", *offline, "--no-build-isolation", "-w", str(wheels), str(package)]
        subprocess.run(build, check=True, capture_output=True, timeout=120)
        (wheel,) = wheels.glob("*.whl")
        into = [*pip, "--python", str(self.python), "install", *offline, "--force-reinstall"]
        subprocess.run([*into, str(wheel)], check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("clean")
    made = [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")]
    subprocess.run(made, check=True, timeout=120)
    python = folder / "venv" / "bin" / "python"
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # As a folder of packages, so that a package installed for editing is seen as well.
    ours = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    Path(site, "dependencies.pth").write_text(ours)
    work = folder / "work"
    work.mkdir()
    write_tiny_store(work / "tiny.h5")
    inputs = Path(__file__).parent / "inputs" / "profiles"
    (work / "gptfast.toml").write_text(
        (inputs / "tiny.toml").read_text() + '\n[data]\npath = "tiny.h5"\n'
    )
    return Environment(python, work)


@pytest.fixture(scope="module")
def stranger(environment: Environment) -> Callable[..., None]:
    """`stranger(version, module)`: install that version of the foreign package."""

    def install(version: str, module: str) -> None:
        package = environment.folder.parent / f"stranger-{version}"
        package.mkdir()
        (package / "pyproject.toml").write_text(PYPROJECT.format(version=version))
        (package / "stranger.py").write_text(module)
        environment.install(package)

    return install


TRAIN = ("train", "--run", "one", "--device", "cpu", "--set", "train.steps=4")


def test_a_foreign_plugin_trains_and_a_broken_one_disturbs_nobody(
    environment: Environment, stranger: Callable[..., None]
) -> None:
    gptfast, record = environment.gptfast, environment.folder / "record.jsonl"
    small = ("--set", "model.block_size=16", "--set", "train.eval_interval=2")
    stranger("1.0", MODULE)

    listed = {row["name"]: row for row in json.loads(gptfast("plugins", "list", "--json").stdout)}
    assert listed["every-hook"]["package"] == "stranger 1.0"
    assert listed["every-hook"]["summary"] == "writes down each hook"
    shown = json.loads(gptfast("plugins", "show", "every-hook", "--json").stdout)
    assert shown["options"] == [
        {"name": "record", "type": "string", "default": "required", "help": "File to write to."}
    ]

    on = ("--set", f"plugins.every-hook.record={record}")
    first = gptfast(*TRAIN, *small, *on, "--stop-at", "2")
    assert first.returncode == 0, first.stderr
    assert "the stranger says hello" in first.stdout + first.stderr
    resumed = gptfast("train", "--run", "one", "--device", "cpu", "--resume")
    assert resumed.returncode == 0, resumed.stderr

    hooks = {name for name, hook in vars(Plugin).items() if callable(hook) and name[0] != "_"}
    hooks -= {"Options"}
    assert set(shown["hooks"]) == hooks
    called = [json.loads(line) for line in record.read_text().splitlines()]
    assert hooks - {call.partition(" ")[0] for call in called} == set()
    assert [call for call in called if call.startswith("step ")] == [
        "step 1",
        "step 2",
        "step 3",
        "step 4",
    ]
    assert called.count("teardown") == called.count("undo") == 2
    assert called.count("recover") == 1
    assert called.count("load_state") == 1
    assert "source.seek 3" in called
    meta = environment.folder / "runs" / "one" / "checkpoints" / "step-000004" / "meta.json"
    assert json.loads(meta.read_text())["plugins"] == {
        "every-hook": {"package": "stranger", "version": "1.0"}
    }

    record.unlink()
    checked = gptfast("plugins", "check", "every-hook", *on)
    assert checked.returncode == 0, checked.stdout + checked.stderr

    stranger("2.0", "import a_module_that_is_not_there\n")
    for args in (
        ["--help"],
        ["plugins"],
        ["plugins", "order"],
        ["config", "show"],
        [*TRAIN, "--run", "two", *small],
    ):
        done = gptfast(*args)
        assert done.returncode == 0, (args, done.stderr)
        assert sum("warning" in line for line in done.stderr.splitlines()) <= 1
    assert "broken" in gptfast("plugins").stdout

    asked = gptfast(*TRAIN, "--run", "three", *small, *on)
    assert asked.returncode == 2
    assert "ModuleNotFoundError: No module named 'a_module_that_is_not_there'" in asked.stderr
    assert "stranger 2.0" in asked.stderr
    assert asked.stderr.count("\n") == 1
    assert not (environment.folder / "runs" / "three").exists()


def test_the_package_that_new_writes_installs_and_passes(environment: Environment) -> None:
    made = environment.gptfast("plugins", "new", "early-look")
    assert made.returncode == 0, made.stderr
    package = environment.folder / "gptfast-early-look"
    install, test = made.stdout.splitlines()[1:]
    assert install == "    python -m pip install -e 'gptfast-early-look[test]'"
    assert 'test = ["pytest>=8"]' in (package / "pyproject.toml").read_text()
    again = environment.gptfast("plugins", "new", "early-look")
    assert again.returncode == 2
    assert "is there already" in again.stderr
    taken = environment.gptfast("plugins", "new", "amp")
    assert (taken.returncode, (environment.folder / "gptfast-amp").exists()) == (2, False)

    # As printed, but from what is here already: neither a build nor pytest is fetched.
    offline = ["--no-index", "--no-build-isolation", "--disable-pip-version-check", "-q"]
    pip, *arguments = shlex.split(install)[2:]
    assert pip == "pip"
    ours = [sys.executable, "-m", "pip", "--python", str(environment.python), *arguments, *offline]
    subprocess.run(ours, cwd=environment.folder, check=True, capture_output=True, timeout=120)
    listed = json.loads(environment.gptfast("plugins", "list", "--json").stdout)
    assert next(row for row in listed if row["name"] == "early-look")["broken"] is None
    python, *arguments = shlex.split(test)
    assert python == "python"
    tested = environment.run(*arguments)
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout
