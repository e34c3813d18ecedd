"""What gptfast 0.1.0 wrote is still read: a run, its data file, a bench, a tuned profile."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gptfast.cli import main

INPUTS = Path(__file__).parent / "inputs" / "version-0.1"
MOVED = "data.path=data/text-chars.h5"
"""The run was made in a folder that is not here."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(INPUTS, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resumed = ["train", "--profile", "tiny", "--run", "old", "--resume", "--set", MOVED]
    assert main([*resumed, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    logged = (folder / "runs/old/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record["step"] for line in logged if (record := json.loads(line))["kind"] == "eval"]
    assert steps == [3, 6]


def test_a_run_is_scored_and_writes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "old", "--data", "data/text-chars.h5", "--json"]) == 0
    logged = (folder / "runs/old/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (loss,) = [record["loss"] for line in logged if (record := json.loads(line))["kind"] == "eval"]
    scored = json.loads(capsys.readouterr().out)
    assert scored["loss"] == pytest.approx(loss, abs=0.05)  # a step later than was logged
    assert main(["generate", "old", "--prompt", "The ", "--max-new-tokens", "8"]) == 0


def test_a_data_file_is_whole(folder: Path) -> None:
    assert main(["data", "verify", "data/text-chars.h5"]) == 0


def test_a_bench_is_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", "bench.json", "bench.json"]) == 0
    assert "fused-adamw" in capsys.readouterr().out


def test_a_tuned_profile_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--config", "tuned.toml", "--profile", "tuned"]) == 0
    assert "spike-guard" in capsys.readouterr().out
