"""What is there and may not be read is told as that: never as missing, never as damaged."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gptfast.cli import main
from gptfast.config import load
from gptfast.contract.tiny import write_tiny_store
from gptfast.data.prepare import sources
from gptfast.data.store import Store
from gptfast.errors import Refused
from gptfast.run.folder import Run, find_checkpoint, find_run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="modes are POSIX")

NOBODY = 65_534


@contextmanager
def rights(path: Path, mode: int = 0) -> Iterator[None]:
    """As a user to whom `path` is closed; root, who reads everything, becomes another one."""
    root = os.geteuid() == 0
    before = path.stat().st_mode
    path.chmod(mode)
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        path.chmod(before)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One that every user may enter; pytest's are open to their owner alone."""
    with tempfile.TemporaryDirectory() as name:
        at = Path(name).resolve()
        at.chmod(0o755)
        monkeypatch.chdir(at)
        yield at


@pytest.fixture
def run(folder: Path, inputs: Path) -> Run:
    write_tiny_store(folder / "tiny.h5")
    shutil.copy(inputs / "profiles" / "tiny.toml", folder / "gptfast.toml")
    given = ("--set", "data.path=tiny.h5", "--set", "model.block_size=16", "--stop-at", "2")
    assert main(["train", "--device", "cpu", "--run", "one", *given]) == 0
    return Run(folder / "runs" / "one")


def test_a_run_that_may_not_be_looked_into(run: Run) -> None:
    for find in (find_run, find_checkpoint):
        with rights(run.folder), pytest.raises(Refused, match="Permission denied"):
            find("one", parent=run.folder.parent)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer.pt", "meta.json"])
def test_a_checkpoint_that_may_not_be_read_is_not_damaged(run: Run, name: str) -> None:
    file = run.latest().folder / name
    with rights(file), pytest.raises(Refused, match="Permission denied") as refused:
        run.newest_intact()
    assert "none of its" not in str(refused.value)


def test_data_and_profile_that_may_not_be_read(run: Run, folder: Path) -> None:
    with rights(folder / "tiny.h5"), pytest.raises(Refused) as refused:
        Store.open(folder / "tiny.h5")
    assert "cannot be read (Permission denied): " in str(refused.value)
    with rights(folder / "gptfast.toml"), pytest.raises(Refused, match="Permission denied"):
        load(folder=folder)
    with rights(folder), pytest.raises(Refused, match="Permission denied"):
        load(folder=folder)


def test_a_glob_in_a_folder_that_may_not_be_listed(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir()
    (closed / "a.txt").write_text("text")
    for mode in (0, 0o111):
        with rights(closed, mode), pytest.raises(Refused, match="Permission denied"):
            list(sources._files(f"{closed}/*.txt", None, known=()))
    with pytest.raises(Refused, match="no file matches"):
        list(sources._files(f"{closed}/*.md", None, known=()))
