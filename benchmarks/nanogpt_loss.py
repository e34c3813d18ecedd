"""Seconds to a validation loss beside nanoGPT, everything counted but the installation.

nanoGPT runs as it is, from a checkout that you name, with its own recipe for a CPU (4 layers, width
128, block 64, batch 12, 2000 steps), without and with compile. gptfast prepares the text and trains
`speedrun`. Each is a command of its own, from its start to its end, by turns. Losses are over all
of `val` in windows of 64, the same way for all.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/nanogpt_loss.py --nanogpt nanoGPT --rounds 1
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

BLOCK = 64
RECIPE = [
    "--device=cpu",
    "--eval_iters=20",
    "--log_interval=100",
    "--block_size=64",
    "--batch_size=12",
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=128",
    "--max_iters=2000",
    "--lr_decay_iters=2000",
    "--dropout=0.0",
]
"""As its README gives it for a CPU."""


def gptfast(*arguments: str, folder: Path) -> str:
    return run([sys.executable, "-m", "gptfast", *arguments], folder)


def run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def nanogpt(folder: Path, *, compiled: bool) -> None:
    run(
        [
            sys.executable,
            "train.py",
            "config/train_shakespeare_char.py",
            *RECIPE,
            f"--compile={compiled}",
        ],
        folder,
    )


def nanogpt_loss(folder: Path) -> float:
    """Of its best checkpoint over all of `val`."""
    import numpy as np
    import torch

    sys.path.insert(0, str(folder))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]  # of the checkout

    # Written by the run just measured; its settings are plain numbers and strings.
    saved = torch.load(folder / "out-shakespeare-char" / "ckpt.pt", weights_only=True)
    model = GPT(GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in saved["model"].items()})
    ids = np.fromfile(folder / "data" / "shakespeare_char" / "val.bin", dtype=np.uint16)
    val = torch.from_numpy(ids.astype(np.int64))
    total = 0.0
    with torch.no_grad():
        for at in range(0, len(val) - 1, BLOCK):
            window = val[at : at + BLOCK + 1]
            _, loss = model(window[None, :-1], window[None, 1:])
            total += loss.item() * (len(window) - 1)
    return total / (len(val) - 1)


def speedrun(folder: Path, profile: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    gptfast("prepare", "shakespeare", "--tokenizer", "chars", folder=folder)
    gptfast("train", "--profile", profile, "--run", "it", folder=folder)


def speedrun_loss(folder: Path) -> float:
    loss: float = json.loads(gptfast("eval", "it", "--json", folder=folder))["loss"]
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of nanoGPT")
    parser.add_argument("--profile", default="speedrun")
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()

    times: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        theirs, ours = Path(scratch, "nanoGPT"), Path(scratch, "gptfast")
        shutil.copytree(asked.nanogpt, theirs)
        gptfast("prepare", "shakespeare", "--tokenizer", "chars", "--out", "c.h5", folder=theirs)
        data = theirs / "data" / "shakespeare_char"
        for name in ("train.bin", "val.bin", "meta.pkl"):
            (data / name).unlink(missing_ok=True)
        gptfast(
            *("data", "export", "c.h5", "--format", "nanogpt", "--out", str(data)), folder=theirs
        )

        contenders: dict[str, tuple[Callable[[], None], Callable[[], float]]] = {
            "nanoGPT eager": (
                partial(nanogpt, theirs, compiled=False),
                partial(nanogpt_loss, theirs),
            ),
            "nanoGPT compile": (
                partial(nanogpt, theirs, compiled=True),
                partial(nanogpt_loss, theirs),
            ),
            f"gptfast {asked.profile}": (
                partial(speedrun, ours, asked.profile),
                partial(speedrun_loss, ours),
            ),
        }
        for _ in range(asked.rounds):
            for name, (train, score) in contenders.items():
                start = time.perf_counter()
                train()
                times.setdefault(name, []).append(time.perf_counter() - start)
                losses.setdefault(name, []).append(score())
                print(
                    f"{name}: {times[name][-1]:.1f} s, loss {losses[name][-1]:.4f}",
                    file=sys.stderr,
                )
    best = min(statistics.median(taken) for name, taken in times.items() if "nano" in name)
    for name, taken in times.items():
        seconds = statistics.median(taken)
        print(
            f"{name:20}{seconds:8.1f} s   loss {statistics.median(losses[name]):.4f}   "
            f"{best / seconds:5.2f} x the better nanoGPT"
        )


if __name__ == "__main__":
    main()
