"""Milliseconds a step beside nanoGPT: the same model, the same batch, by turns.

nanoGPT is used as it is, from a checkout that you name; its loop here does per step what its
`train.py` does (batch, forward, backward, clipping, update, the loss read). Its own recipe for a
CPU is 4 layers, 4 heads, width 128, block 64, batch 12. Each contender is a process of its own and
runs alone; rounds go A B C, C B A, so that drift of the machine cancels.

    git clone https://github.com/karpathy/nanoGPT
    gptfast prepare shakespeare --tokenizer chars
    python benchmarks/nanogpt_steps.py --nanogpt nanoGPT --rounds 9
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

Laps = Callable[[int], None]
"""Does so many steps."""


def nanogpt(checkout: Path, data: Path, *, compiled: bool) -> Laps:
    """nanoGPT's step, with the settings of its recipe for a CPU."""
    import numpy as np
    import torch

    from gptfast.data.store import Store

    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]  # of the checkout

    store = Store.open(data)
    tokens, vocab_size = store.tokens("train"), store.vocab_size
    torch.manual_seed(1337)
    model = GPT(
        GPTConfig(
            n_layer=4,
            n_head=4,
            n_embd=128,
            block_size=64,
            bias=False,
            vocab_size=vocab_size,
            dropout=0.0,
        )
    )
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
    stepped = torch.compile(model) if compiled else model

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(tokens) - 64, (12,))
        windows = [torch.from_numpy(tokens[i : i + 65].astype(np.int64)) for i in starts.tolist()]
        stacked = torch.stack(windows)
        return stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()

    def laps(steps: int) -> None:
        for _ in range(steps):
            inputs, targets = batch()
            _, loss = stepped(inputs, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()

    return laps


def gptfast(profile: str, data: Path) -> Laps:
    """gptfast's own trainer on a shipped profile; NAME+PLUGIN and NAME~PLUGIN change it."""
    import re

    from gptfast import registry
    from gptfast.config import load
    from gptfast.data.store import Store
    from gptfast.hooks import Hooks
    from gptfast.machine import find_machine
    from gptfast.session import with_vocabulary
    from gptfast.trainer import Trainer

    name, *changes = re.split(r"(?=[+~])", profile)
    loaded = load(
        name,
        overrides=[
            f"data.path={data}",
            "model.bias=false",
            "train.steps=1000000",
            "train.save_interval=0",
        ],
        plugins=[change[1:] for change in changes if change[0] == "+"],
        without=[change[1:] for change in changes if change[0] == "~"],
        folder=Path.cwd(),
    )
    store = Store.open(data)
    machine = find_machine("cpu")
    selection = registry.select(registry.plan(loaded.profile), machine, unsupported="skip")
    trainer = Trainer(
        with_vocabulary(loaded.profile, store),
        hooks=Hooks(selection.enabled, note=lambda line: None),
        machine=machine,
        store=store,
    )
    trainer.__enter__()  # until the process ends

    def laps(steps: int) -> None:
        for _ in range(steps):
            trainer.one_step()
        trainer.journal.flush()

    return laps


def contend(build: Callable[[], Laps], pipe: Connection) -> None:
    """A contender's process: answers each number of steps with the milliseconds a step."""
    laps = build()
    laps(10)
    pipe.send(0.0)
    while steps := pipe.recv():
        laps(2)
        start = time.perf_counter()
        laps(steps)
        pipe.send((time.perf_counter() - start) / steps * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of nanoGPT")
    parser.add_argument("--data", type=Path, default=Path("data/shakespeare-chars.h5"))
    parser.add_argument("--profiles", nargs="+", default=["baseline", "fast"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()

    data = asked.data.absolute()
    builds: dict[str, Callable[[], Laps]] = {
        "nanoGPT eager": partial(nanogpt, asked.nanogpt, data, compiled=False),
        "nanoGPT compile": partial(nanogpt, asked.nanogpt, data, compiled=True),
        **{f"gptfast {profile}": partial(gptfast, profile, data) for profile in asked.profiles},
    }
    context = mp.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, build in builds.items():
        ours, theirs = context.Pipe()
        context.Process(target=contend, args=(build, theirs), daemon=True).start()
        ours.recv()
        pipes[name] = ours
        print(f"{name} is warm", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in pipes}
    for number in range(asked.rounds):
        for name in list(pipes) if number % 2 == 0 else reversed(pipes):
            pipes[name].send(asked.steps)
            times[name].append(pipes[name].recv())
    references = list(builds)[:2]
    print(f"{'':28}{'ms/step':>9}" + "".join(f"{'x over ' + name:>28}" for name in references))
    for name, taken in times.items():
        row = f"{name:28}{statistics.median(taken):9.1f}"
        for reference in references:
            ratios = [a / b for a, b in zip(times[reference], taken, strict=True)]
            low, high = min(ratios), max(ratios)
            row += f"{statistics.median(ratios):14.2f} [{low:.2f} to {high:.2f}]"
        print(row)
    for pipe in pipes.values():
        pipe.send(0)


if __name__ == "__main__":
    main()
