"""The built wheel in a clean environment: prepare, two training steps, plugins by entry point.

Run by `make wheel-check` (not by pytest, since it makes an environment and installs into it).
Everything happens in a temporary folder, so nothing of the checkout can be imported by chance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).parent.parent
N_MODULES = sum(1 for folder in ("gptfast", "plugins") for _ in (PROJECT / folder).rglob("*.py"))
IMPORT_ALL = """
import importlib, pkgutil, gptfast, gptfast_plugins
names = [p.__name__ for p in (gptfast, gptfast_plugins)]
for package in (gptfast, gptfast_plugins):
    names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""
"""Imports every module that the wheel holds, and prints their number."""


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        constraints = ["-c", str(PROJECT / "constraints.txt")]
        pip = [sys.executable, "-m", "pip", "--quiet"]
        run([*pip, "wheel", "--no-deps", "-w", str(folder), str(PROJECT)], folder)
        (wheel,) = folder.glob("gptfast-*.whl")
        run([sys.executable, "-m", "venv", str(folder / "venv")], folder)
        scripts = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        run(
            [str(scripts / "python"), "-m", "pip", "--quiet", "install", *constraints, str(wheel)],
            folder,
        )
        gptfast = str(scripts / "gptfast")

        python = str(scripts / "python")
        n_modules = int(run([python, "-c", IMPORT_ALL], folder))
        assert n_modules == N_MODULES, (n_modules, N_MODULES)

        text = folder / "text.txt"
        text.write_text("To be, or not to be, that is the question.\n" * 200, encoding="utf-8")
        run([gptfast, "prepare", str(text), "--tokenizer", "gpt2", "--out", "text.h5"], folder)
        profile = ["--profile", "fast", "--set", "data.path=text.h5", "--set", "train.steps=2"]
        listed = json.loads(run([gptfast, "plugins", "list", "--json"], folder))
        broken = [plugin for plugin in listed if plugin["broken"]]
        assert len(listed) >= 16, listed
        assert not broken, broken
        small = ["--set", "train.sample_tokens=0", "--set", "train.eval_interval=0"]
        finished = json.loads(
            run([gptfast, "train", *profile, *small, "--without", "compile", "--json"], folder)
        )
        assert finished["steps"] == 2, finished
        meta = json.loads(
            (folder / "runs/fast/checkpoints/step-000002/meta.json").read_text(encoding="utf-8")
        )
        assert meta["plugins"]["flash"]["package"] == "gptfast", meta["plugins"]
    print("wheel: prepared, trained two steps, plugins found through their entry points")


def run(command: list[str], folder: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}exit {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
