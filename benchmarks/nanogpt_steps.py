"""Milliseconds a step beside nanoGPT: the same model, the same batch, by turns.

nanoGPT is used as it is, from a checkout that you name; its loop here does per step what its
`train.py` does (batch, forward, backward, clipping, update; on CUDA bf16 autocast, TF32, pinned
memory and fused AdamW) and reads the loss as often as its recipe logs, as our loop does ours.
Presets are its recipes: `char` for a CPU (4 layers, 4 heads, width 128, block 64, batch 12), `gpt2`
(GPT-2 124M, block 1024, batch 16), and `tiny` to try the script. Each contender is a process of its
own and runs alone; rounds go A B C, C B A, so that drift of the machine cancels.

    git clone https://github.com/karpathy/nanoGPT
    gptfast prepare shakespeare --tokenizer chars
    python benchmarks/nanogpt_steps.py --nanogpt nanoGPT --rounds 9

Profiles may be changed on the way: NAME+PLUGIN, NAME~PLUGIN, and NAME~all for one without plugins.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """Model and batch of nanoGPT's recipe, and what of ours is compared with it."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    batch_size: int
    rows: int | None
    """Of nanoGPT's embedding; None: the data's vocabulary."""
    learning_rate: float
    beta2: float
    log_interval: int
    """Steps between nanoGPT's readings of the loss."""
    data: str
    profiles: tuple[str, ...]


CHARS, WORDS = "data/shakespeare-chars.h5", "data/shakespeare-gpt2.h5"
RECIPES = {
    "char": Recipe(4, 4, 128, 64, 12, None, 1e-3, 0.99, 1, CHARS, ("baseline", "fast")),
    "gpt2": Recipe(
        12, 12, 768, 1024, 16, 50304, 6e-4, 0.95, 10, WORDS, ("gpt2-124m~all", "gpt2-124m")
    ),
    "tiny": Recipe(1, 2, 32, 32, 2, 50304, 6e-4, 0.95, 10, WORDS, ("gpt2-124m~all", "gpt2-124m")),
}


@dataclass(frozen=True)
class Contender:
    """A loop that can be advanced.

    Attributes:
        laps: does so many steps, and returns when the device is through with them.
        flops_per_step: 6 N + 12 L C T of each token.
    """

    laps: Callable[[int], None]
    flops_per_step: int


def nanogpt(
    recipe: Recipe, checkout: Path, data: Path, device: str, *, compiled: bool
) -> Contender:
    """nanoGPT's step."""
    import numpy as np
    import torch

    from gptfast.data.store import Store
    from gptfast.device.machine import synchronize

    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]  # of the checkout

    on_cuda = device == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = True
    store = Store.open(data)
    tokens = store.tokens("train")
    torch.manual_seed(1337)
    model = GPT(
        GPTConfig(
            n_layer=recipe.n_layer,
            n_head=recipe.n_head,
            n_embd=recipe.n_embd,
            block_size=recipe.block_size,
            bias=False,
            vocab_size=recipe.rows or store.vocab_size,
            dropout=0.0,
        )
    ).to(device)
    rate, betas = recipe.learning_rate, (0.9, recipe.beta2)
    optimizer = model.configure_optimizers(0.1, rate, betas, device)
    stepped = torch.compile(model) if compiled else model
    scope: Any = torch.amp.autocast("cuda", dtype=torch.bfloat16) if on_cuda else nullcontext()
    length = recipe.block_size + 1

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(tokens) - length + 1, (recipe.batch_size,)).tolist()
        windows = [torch.from_numpy(tokens[i : i + length].astype(np.int64)) for i in starts]
        stacked = torch.stack(windows)
        inputs, targets = stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()
        if not on_cuda:
            return inputs, targets
        return (
            inputs.pin_memory().to(device, non_blocking=True),
            targets.pin_memory().to(device, non_blocking=True),
        )

    ahead = batch()
    done = 0

    def laps(steps: int) -> None:
        nonlocal ahead, done
        for _ in range(steps):
            with scope:
                _, loss = stepped(*ahead)
            ahead = batch()  # while the device is at work, as train.py does
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
            if done % recipe.log_interval == 0:
                loss.item()
        synchronize(torch.device(device))

    parameters = sum(p.numel() for p in model.parameters())
    return Contender(laps, flops_per_step(recipe, parameters))


def flops_per_step(recipe: Recipe, parameters: int) -> int:
    from gptfast.model import flops_per_token
    from gptfast.profile import ModelConfig

    shape = ModelConfig(
        n_layer=recipe.n_layer,
        n_head=recipe.n_head,
        n_embd=recipe.n_embd,
        block_size=recipe.block_size,
    )
    return recipe.batch_size * recipe.block_size * flops_per_token(shape, parameters)


def gptfast(recipe: Recipe, profile: str, data: Path, device: str) -> Contender:
    """gptfast's own trainer on a shipped profile, perhaps changed."""
    from gptfast.config import load
    from gptfast.data.store import Store
    from gptfast.device.machine import find_machine, synchronize
    from gptfast.host import registry
    from gptfast.host.hooks import Hooks
    from gptfast.model import count_parameters
    from gptfast.run.session import with_vocabulary
    from gptfast.run.trainer import Trainer

    name, *changes = re.split(r"(?=[+~])", profile)
    shape = ("n_layer", "n_head", "n_embd", "block_size")
    loaded = load(
        name,
        overrides=[
            f"data.path={data}",
            *(f"model.{key}={getattr(recipe, key)}" for key in shape),
            "model.bias=false",
            f"train.batch_size={recipe.batch_size}",
            "train.steps=1000000",
            "train.save_interval=0",
            "train.eval_interval=0",
        ],
        plugins=[change[1:] for change in changes if change[0] == "+"],
        without=[change[1:] for change in changes if change[0] == "~" and change != "~all"],
        folder=Path.cwd(),
    )
    asked = loaded.profile
    if "~all" in changes:
        asked = asked.model_copy(update={"plugins": {}})
    store = Store.open(data)
    machine = find_machine(device)
    selection = registry.select(registry.plan(asked), machine, unsupported="skip")
    for skipped in selection.skipped:
        print(f"{profile}: without {skipped.name}: {skipped.reason}", file=sys.stderr)
    trainer = Trainer(
        with_vocabulary(asked, store),
        hooks=Hooks(selection.enabled, note=lambda line: print(line, file=sys.stderr)),
        machine=machine,
        store=store,
    )
    trainer.__enter__()  # until the process ends

    def laps(steps: int) -> None:
        for _ in range(steps):
            trainer.one_step()
            if trainer.progress.step % trainer.profile.train.log_interval == 0:
                trainer.log.flush()
        trainer.log.flush()
        synchronize(machine.device)

    return Contender(laps, flops_per_step(recipe, count_parameters(trainer.raw_model)))


def contend(build: Callable[[], Contender], device: str, pipe: Connection) -> None:
    """A contender's process: answers each number of steps with (milliseconds a step, bytes)."""
    import torch

    from gptfast.device.machine import peak_memory_bytes

    contender = build()
    contender.laps(10)
    pipe.send(contender.flops_per_step)
    while steps := pipe.recv():
        contender.laps(2)
        start = time.perf_counter()
        contender.laps(steps)
        step_ms = (time.perf_counter() - start) / steps * 1e3
        pipe.send((step_ms, peak_memory_bytes(torch.device(device))))


def started(
    builds: dict[str, Callable[[], Contender]], device: str
) -> tuple[dict[str, Connection], dict[str, int]]:
    """Pipes and FLOPs a step of the contenders, once all are warm; one that ends is left out."""
    context = mp.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, build in builds.items():
        ours, theirs = context.Pipe()
        context.Process(target=contend, args=(build, device, theirs), daemon=True).start()
        theirs.close()  # so that the end of the process is the end of the pipe
        pipes[name] = ours
    flops = {}
    for name, pipe in list(pipes.items()):
        try:
            flops[name] = pipe.recv()
            print(f"{name} is warm", file=sys.stderr)
        except EOFError:
            print(f"{name} failed and is left out", file=sys.stderr)
            del pipes[name]
    return pipes, flops


def measured(
    pipes: dict[str, Connection], *, rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Milliseconds a step of each round, and the most memory; of each contender."""
    times: dict[str, list[float]] = {name: [] for name in pipes}
    memory: dict[str, int] = {}
    for number in range(rounds):
        for name in list(pipes) if number % 2 == 0 else reversed(pipes):
            pipes[name].send(steps)
            step_ms, memory[name] = pipes[name].recv()
            times[name].append(step_ms)
    for pipe in pipes.values():
        pipe.send(0)
    return times, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without: ours alone")
    parser.add_argument("--preset", choices=RECIPES, default="char")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data", type=Path, help="default: the preset's")
    parser.add_argument("--profiles", nargs="+", help="default: the preset's")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a JSON file for every number")
    asked = parser.parse_args()

    recipe = RECIPES[asked.preset]
    data, device = (asked.data or Path(recipe.data)).absolute(), asked.device
    builds: dict[str, Callable[[], Contender]] = {}
    for name, compiled in {"nanoGPT eager": False, "nanoGPT compile": True}.items():
        if asked.nanogpt is not None:
            builds[name] = partial(
                nanogpt, recipe, asked.nanogpt.absolute(), data, device, compiled=compiled
            )
    for profile in asked.profiles or recipe.profiles:
        builds[f"gptfast {profile}"] = partial(gptfast, recipe, profile, data, device)

    pipes, flops = started(builds, device)
    peak = matmul_peak(device)
    times, memory = measured(pipes, rounds=asked.rounds, steps=asked.steps)
    references = [name for name in builds if name in times][:3]
    print(f"{asked.preset} on {device}; largest matmul {peak / 1e12:.2f} TFLOP/s")
    width = max(map(len, times)) + 2
    heads = "".join(f"{'x over ' + name:>{max(30, width + 7)}}" for name in references)
    print(f"{'':{width}}{'ms/step':>9}{'of peak':>9}{'MiB':>8}{heads}")
    for name, taken in times.items():
        step_ms = statistics.median(taken)
        share = flops[name] / (step_ms / 1e3) / peak
        row = f"{name:{width}}{step_ms:9.1f}{share:9.1%}{memory[name] / 2**20:8.0f}"
        for reference in references:
            ratios = [a / b for a, b in zip(times[reference], taken, strict=True)]
            ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f} to {max(ratios):.2f}]"
            row += f"{ratio:>{max(30, width + 7)}}"
        print(row)
    if asked.out is not None:
        record = {
            "preset": asked.preset,
            "device": device,
            "matmul_peak_flops": peak,
            "steps": asked.steps,
            "step_ms": times,
            "flops_per_step": flops,
            "memory_bytes": memory,
        }
        asked.out.write_text(json.dumps(record, indent=1), encoding="utf-8")


def matmul_peak(device: str) -> float:
    """FLOP/s of the fastest large matmul, while the contenders wait."""
    import torch

    from gptfast.device.machine import measure_matmul_peak, peak_dtype

    place = torch.device(device)
    return measure_matmul_peak(place, peak_dtype(place), seconds=1.0)


if __name__ == "__main__":
    main()
