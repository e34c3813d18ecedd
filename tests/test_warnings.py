"""AMP-01: no command fills the log with what torch calls old."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptfast.contract.tiny import write_tiny_store

STRICT = [sys.executable, "-W", "error::FutureWarning", "-W", "error::DeprecationWarning"]
PROFILE = """
[model]
n_layer = 1
n_head = 2
n_embd = 16
block_size = 16
[data]
path = "tiny.h5"
[train]
steps = 3
batch_size = 4
sample_tokens = 4
[plugins]
accumulate = { steps = 2 }
activation-checkpointing = true
amp = { dtype = "bf16" }
chunked-loss = true
compile = true
ema = true
eval-cadence = true
flash = true
fused-adamw = true
loader = true
prefetch = true
vocab-pad = true
"""

WITH_MUON = ("--without", "compile", "--without", "fused-adamw", "--plugin", "muon")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run in it, for each worker its own."""
    folder = tmp_path_factory.mktemp("warnings")
    write_tiny_store(folder / "tiny.h5")
    (folder / "gptfast.toml").write_text(PROFILE, encoding="utf-8")
    bare, _, _ = PROFILE.partition("[plugins]")
    (folder / "flash.toml").write_text(f"{bare}[plugins]\nflash = true\n", encoding="utf-8")
    said(folder, "train", "--run", "one", "--without", "compile")
    return folder


def said(folder: Path, *command: str) -> str:
    """What a command says on standard error, run with every warning of age an error."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [*STRICT, "-m", "gptfast", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--run", "all"],
        ["train", "--run", "muon", *WITH_MUON],
        ["eval", "one"],
        ["generate", "one", "--max-new-tokens", "4"],
        ["bench", "--config", "flash.toml", "--steps", "1", "--rounds", "2"],
    ],
    ids=lambda command: "-".join(command[:2]),
)
def test_nothing_old_is_used(folder: Path, command: list[str]) -> None:
    assert "Warning" not in said(folder, *command)
