"""Seconds for the loss over the whole of `val`, beside nanoGPT's forward passes over it.

The same shape of model (4 layers, 4 heads, width 128, block 64) and the same windows in the same
batches; what `gptfast eval` calls, reading included, against nanoGPT's model with targets, whose
batches are cut as its `get_batch` does. Both compute GELU exactly. Each contender is a process of
its own and runs alone; rounds go A B, B A.

    git clone https://github.com/karpathy/nanoGPT
    gptfast prepare shakespeare --tokenizer chars
    python benchmarks/eval_speed.py --nanogpt nanoGPT --rounds 9
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from gptfast.bench.result.record import Protocol
from gptfast.bench.result.statistics import paired_ratio

BLOCK, BATCH = 64, 12
Pass = Callable[[], float]
"""Scores all of `val`; returns the mean loss."""


def nanogpt(checkout: Path, data: Path) -> Pass:
    import numpy as np
    import torch

    from gptfast.data.store import Store

    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]  # of the checkout

    store = Store.open(data)
    tokens = store.tokens("val")
    torch.manual_seed(1337)
    shape = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": BLOCK, "bias": True}
    model = GPT(GPTConfig(**shape, vocab_size=store.vocab_size, dropout=0.0)).eval()

    @torch.no_grad()
    def whole() -> float:
        total, starts = 0.0, range(0, len(tokens) - 1, BLOCK)
        for first in range(0, len(starts), BATCH):
            # The last window is cut short where the tokens end, and goes alone.
            full = [s for s in starts[first : first + BATCH] if s + BLOCK < len(tokens)]
            rest = [s for s in starts[first : first + BATCH] if s + BLOCK >= len(tokens)]
            for batch in filter(None, (full, rest)):
                cut = [torch.from_numpy(tokens[s : s + BLOCK + 1].astype(np.int64)) for s in batch]
                windows = torch.stack(cut)
                _, loss = model(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
                total += loss.item() * windows[:, 1:].numel()
        return total / (len(tokens) - 1)

    return whole


def gptfast(profile: str, data: Path) -> Pass:
    from gptfast.config import load
    from gptfast.data.store import Store
    from gptfast.device.machine import find_machine
    from gptfast.host import registry
    from gptfast.host.hooks import Hooks
    from gptfast.run.session import with_vocabulary
    from gptfast.run.trainer import Trainer

    loaded = load(profile, overrides=[f"data.path={data}"], folder=Path.cwd())
    store, machine = Store.open(data), find_machine("cpu")
    selection = registry.select(registry.plan(loaded.profile), machine, unsupported="skip")
    trainer = Trainer(
        with_vocabulary(loaded.profile, store),
        hooks=Hooks(selection.enabled, note=lambda line: None),
        machine=machine,
        store=store,
    )
    trainer.__enter__()  # until the process ends

    def whole() -> float:
        score = trainer.scorer.score("val")
        assert score is not None
        return score.loss

    return whole


def contend(build: Callable[[], Pass], pipe: Connection) -> None:
    """A contender's process: answers each call with seconds and loss."""
    whole = build()
    whole()
    pipe.send(None)
    while pipe.recv():
        start = time.perf_counter()
        loss = whole()
        pipe.send((time.perf_counter() - start, loss))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of nanoGPT")
    parser.add_argument("--data", type=Path, default=Path("data/shakespeare-chars.h5"))
    parser.add_argument("--profile", default="char")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()

    data = asked.data.absolute()
    builds: dict[str, Callable[[], Pass]] = {
        "nanoGPT": partial(nanogpt, asked.nanogpt, data),
        f"gptfast {asked.profile}": partial(gptfast, asked.profile, data),
    }
    context = mp.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, build in builds.items():
        ours, theirs = context.Pipe()
        context.Process(target=contend, args=(build, theirs), daemon=True).start()
        ours.recv()
        pipes[name] = ours
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    losses: dict[str, float] = {}
    for number in range(asked.rounds):
        for name in list(pipes) if number % 2 == 0 else reversed(pipes):
            pipes[name].send(True)
            taken, losses[name] = pipes[name].recv()
            seconds[name].append(taken)
    print(f"{data.name}, all of val, median of {asked.rounds} rounds by turns")
    for name, taken in seconds.items():
        print(f"{name:16}{statistics.median(taken):7.2f} s, loss {losses[name]:.4f} (untrained)")
    nanogpts, gptfasts = seconds.values()
    ratio = paired_ratio(nanogpts, gptfasts, Protocol())
    print(f"{ratio.times:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times as fast as nanoGPT")
    for pipe in pipes.values():
        pipe.send(False)


if __name__ == "__main__":
    main()
