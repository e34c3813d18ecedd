"""The README's commands are run as they stand, on a smaller model and for a few steps."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from gptfast.cli import COMMANDS, main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"^gptfast (.+?)(?:\s{2,}#.*)?$", re.M)
SMALLER = {
    "train": "--set model.n_layer=1 --set model.n_embd=16 --set train.steps=3 "
    "--set train.eval_interval=0 --set train.sample_tokens=5",
    "generate": "--max-new-tokens 5",
}


def readme_commands() -> list[list[str]]:
    """Arguments of each gptfast command in the README's blocks, in their order."""
    blocks = re.findall(r"^```\n(.*?)^```", README, re.S | re.M)
    return [shlex.split(line) for block in blocks for line in COMMAND.findall(block)]


def test_the_way_from_text_to_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mybook.txt").write_text("It was a dark and stormy night. " * 200, encoding="utf-8")
    ran = []
    for arguments in readme_commands():
        name = arguments[0]
        if name in ("bench", "tune"):  # minutes; their own tests run them
            continue
        code = main([*arguments, *shlex.split(SMALLER.get(name, ""))])
        assert code == 0, (arguments, capsys.readouterr().err)
        ran.append(name)
    assert ran == ["prepare", "train", "eval", "generate"]
    metrics = Path("runs/quick/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in metrics if '"step",' in line] == [1, 2, 3]


def test_every_command_that_the_readme_names_exists() -> None:
    named = re.findall(r"gptfast ([a-z]+)", README)
    assert set(named) <= {*COMMANDS}
    assert {"prepare", "train", "eval", "generate", "bench", "plugins", "config"} <= set(named)
