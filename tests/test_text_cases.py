"""Texts at the edge of what can be trained on, from `prepare` to the end of `train`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_helpers import INPUTS, TEXT

from gptfast.cli import main

Output = pytest.CaptureFixture[str]


def trained(text: str, *options: str) -> int:
    """The exit code of `train` on a text that was prepared with some options."""
    assert main(["prepare", str(TEXT / text), "--out=x.h5", *options]) == 0
    config = INPUTS / "profiles" / "tiny.toml"
    changes = [f"data.path={Path('x.h5').absolute()}", "train.eval_interval=2", "train.steps=5"]
    changes = [word for change in changes for word in ("--set", change)]
    return main(["train", f"--config={config}", "--run=r", "--device=cpu", "--plain", *changes])


@pytest.mark.parametrize(
    ("text", "n_tokens"), [("one_token.txt", 1), ("tok63_gpt2.txt", 63), ("tok64_gpt2.txt", 64)]
)
def test_a_text_shorter_than_a_window_is_refused_before_the_first_step(
    text: str, n_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """TXT-01, TXT-02."""
    monkeypatch.chdir(tmp_path)
    assert trained(text, "--val-fraction=0") == 2
    assert f"{n_tokens} < 65" in capsys.readouterr().err
    assert not Path("runs/r").exists()


def test_without_validation_it_trains_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """TXT-02: on the one window of 65 tokens. TXT-04: evaluation is off and the end is kept."""
    monkeypatch.chdir(tmp_path)
    assert trained("tok65_gpt2.txt", "--val-fraction=0") == 0
    assert "x.h5 has no validation split: evaluation is off\n" in capsys.readouterr().err
    lines = Path("runs/r/metrics.jsonl").read_text().splitlines()
    kinds = [(record["kind"], record["step"]) for record in map(json.loads, lines)]
    assert kinds == [("step", step) for step in range(1, 6)]
    assert Path("runs/r/checkpoints/step-000005/model.safetensors").exists()
