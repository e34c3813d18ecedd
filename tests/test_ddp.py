"""Several processes train as one: the same losses, plain checkpoints, one end for all."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.distributed.run import get_args_parser

from gptfast.cli import main
from gptfast.contract.tiny import write_tiny_store
from gptfast.device.place import Place
from gptfast.errors import Refused

ROOT = Path(__file__).parent.parent
PROFILE = """
[model]
n_layer = 2
n_head = 2
n_embd = 32
block_size = 16
[data]
path = "tiny.h5"
[train]
steps = 12
batch_size = 8
learning_rate = 1e-2
log_interval = 1
eval_interval = 0
sample_tokens = 0
[plugins]
ddp = true
"""

Tally = Callable[..., None]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `alone`, of one process."""
    folder = tmp_path_factory.mktemp("begun")
    write_tiny_store(folder / "tiny.h5", train_tokens=2001)
    (folder / "gptfast.toml").write_text(PROFILE, encoding="utf-8")
    run_alone(folder, "--run", "alone")
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    """A copy of `begun`."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    return tmp_path


def start(folder: Path, *options: str, **place: object) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        **{name.upper(): str(value) for name, value in place.items()},
    }
    return subprocess.Popen(
        [sys.executable, "-m", "gptfast", "train", *options],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def together(folder: Path, *options: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes, as torchrun would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as ends:
        processes = []
        for rank in (0, 1):
            place = {"rank": rank, "local_rank": rank, "world_size": 2, "master_port": port}
            processes.append(start(folder, *options, **place))
            ends.callback(processes[-1].kill)
        yield processes


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return out, err


def run_together(folder: Path, *options: str) -> None:
    with together(folder, *options) as (first, second):
        finish(first)
        assert finish(second) == ("", "")


def run_alone(folder: Path, *options: str) -> None:
    finish(start(folder, "--without", "ddp", *options))


def metrics(folder: Path, run: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if "grad_norm" in record]


def assert_same_training(folder: Path, run: str, other: str) -> None:
    ours, theirs = metrics(folder, run), metrics(folder, other)
    assert [r["step"] for r in ours] == [r["step"] for r in theirs] == list(range(1, 13))
    for key in ("loss", "grad_norm"):
        values = [record[key] for record in theirs]
        assert [record[key] for record in ours] == pytest.approx(values, rel=1e-5)


def test_two_processes_train_as_one(folder: Path) -> None:
    """With micro-batches; without, see the next."""
    run_together(folder, "--run", "two", "--set", "train.micro_batch=2")
    assert_same_training(folder, "two", "alone")
    weights = [
        load_file(folder / "runs" / run / "checkpoints" / "step-000012" / "model.safetensors")
        for run in ("alone", "two")
    ]
    assert weights[0].keys() == weights[1].keys()


def test_a_run_of_two_goes_on_alone_and_back_again(folder: Path, tally: Tally) -> None:
    """RES-04: nothing in a checkpoint tells how many processes made it."""
    run_together(folder, "--run", "moved", "--stop-at", "4")
    run_alone(folder, "--run", "moved", "--resume", "--stop-at", "8")
    run_together(folder, "--run", "moved", "--resume", "--plugin", "ddp")
    assert_same_training(folder, "moved", "alone")
    tally("resumes compared", 2)


@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_one_stops_both_after_the_same_step(
    folder: Path, told: int, tally: Tally
) -> None:
    """CLI-08, with two processes."""
    with together(folder, "--run", "cut", "--set", "train.steps=1000000") as processes:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            if line.split()[:2] == ["step", "8/1000000"]:
                break
        processes[told].send_signal(signal.SIGTERM)
        results = [
            finish(process, 143 if rank == told else 0) for rank, process in enumerate(processes)
        ]
    saved = sorted(path.name for path in (folder / "runs" / "cut" / "checkpoints").glob("step-*"))
    assert len(saved) == 1
    step = int(saved[0].removeprefix("step-"))
    assert f"after step {step}," in results[told][1]
    assert metrics(folder, "cut")[-1]["step"] == step
    tally("faults injected")


@pytest.mark.parametrize(
    ("place", "options", "said"),
    [
        ({"world_size": 2}, ["--without", "ddp"], "2 processes and no plugin that joins them"),
        (
            {"world_size": 3},
            [],
            "train.batch_size = 8 cannot be shared out among 3 processes: use 6 or 9",
        ),
        ({"world_size": 2}, ["--set", 'train.micro_batch="auto"'], "give a number"),
        ({"world_size": 1}, [], "torchrun --nproc-per-node 2"),
        ({"rank": 2, "world_size": 2}, [], "RANK = 2 is not below WORLD_SIZE = 2"),
        ({"world_size": "two"}, [], "WORLD_SIZE = 'two' is no number"),
    ],
)
def test_what_cannot_be_joined_is_refused_in_one_line(
    tmp_path: Path,
    place: dict[str, Any],
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_tiny_store(tmp_path / "tiny.h5", train_tokens=2001)
    (tmp_path / "gptfast.toml").write_text(PROFILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, value in place.items():
        monkeypatch.setenv(name.upper(), str(value))
    assert main(["train", *options]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", [["--run", "a"], ["--resume", "--run", "a"], ["--stop-at", "3"]])
def test_torchrun_leaves_our_options_to_us(option: list[str]) -> None:
    """The command of the README, whatever is added to it."""
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    command = re.search(r"`torchrun (.*?)`", readme)
    assert command is not None
    asked = get_args_parser().parse_args([*command[1].split(), *option])
    assert (asked.nproc_per_node, asked.module, asked.training_script) == ("2", True, "gptfast")
    ours = ["train", "--profile", "gpt2-124m", "--plugin", "ddp"]
    assert asked.training_script_args == [*ours, *option]


def test_a_place_is_what_torchrun_says() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert Place.from_environment(environment) == Place(rank=5, world=8, local_rank=1)
    assert Place.from_environment({}) == Place()
    with pytest.raises(Refused, match="LOCAL_RANK"):
        Place.from_environment({**environment, "LOCAL_RANK": "-1"})
