"""How much faster generation is with the cache of keys and values than without.

Both write the same tokens. Rounds are interleaved, A B A B, so that drift of the machine cancels;
medians of the rounds and of their ratios are printed.

    python benchmarks/generate_cache.py --preset char-base --rounds 5
    python benchmarks/generate_cache.py --preset gpt2 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext

import torch

from gptfast.device.machine import find_machine, synchronize
from gptfast.model import GPT
from gptfast.profile import PRESETS, ModelConfig
from gptfast.run.generate import Sampling, generate_tokens, seeded

VOCABULARY = {"char-small": 65, "char-base": 65}
"""Ids of the shapes that are used with characters; the others have GPT-2's."""


def seconds(model: GPT, device: torch.device, new_tokens: int, *, cached: bool) -> float:
    start = time.perf_counter()
    tokens = generate_tokens(
        model,
        [0],
        max_new_tokens=new_tokens,
        sampling=Sampling(temperature=0),
        generator=seeded(0, device),
        forward_scope=nullcontext,
        cached=cached,
    )
    assert sum(1 for _ in tokens) == new_tokens
    synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=list(PRESETS), default="char-base")
    parser.add_argument("--attention", choices=["plain", "sdpa"], default="plain")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()

    machine = find_machine(asked.device)
    torch.manual_seed(0)
    config = ModelConfig.model_validate(
        {
            "preset": asked.preset,
            "attention": asked.attention,
            "vocab_size": VOCABULARY.get(asked.preset, 50_257),
        }
    )
    model = GPT(config).to(machine.device).eval()  # as `generate` has it
    for cached in (True, False):
        seconds(model, machine.device, 8, cached=cached)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(asked.rounds):
        for cached, taken in times.items():
            taken.append(seconds(model, machine.device, asked.new_tokens, cached=cached))
    with_cache, without = (statistics.median(taken) for taken in times.values())
    ratios = [b / a for a, b in zip(times[True], times[False], strict=True)]
    print(
        f"{asked.preset} {asked.attention}, {asked.new_tokens} new tokens on {machine.name}, "
        f"{torch.get_num_threads()} threads, median of {asked.rounds} rounds:\n"
        f"with the cache     {with_cache / asked.new_tokens * 1e3:8.2f} ms per token\n"
        f"without            {without / asked.new_tokens * 1e3:8.2f} ms per token\n"
        f"ratio              {statistics.median(ratios):8.1f} x "
        f"({min(ratios):.1f} to {max(ratios):.1f})"
    )


if __name__ == "__main__":
    main()
