"""What `gptfast generate` does before its first token, for a prompt of three tokens.

Makes a run of one step on GPT-2 tokens, then starts it several times, each in a process of its own,
and prints the median of each part. Imports, most of them torch's, are counted by themselves.

    python benchmarks/prompt_start.py
    python benchmarks/prompt_start.py --preset gpt2 --rounds 5
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT = "To be or"
PARTS = ("imports", "tokenizer", "prompt", "model", "first token")

CONFIG = """
[profiles.start.model]
preset = "{preset}"
block_size = 64
[profiles.start.data]
path = "text-gpt2.h5"
[profiles.start.train]
steps = 1
batch_size = 1
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="char-small", help="the shape of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.start is not None:
        print(json.dumps(start(asked.start)))
        return

    with tempfile.TemporaryDirectory() as folder:
        train_one_step(Path(folder), asked.preset)
        command = [sys.executable, __file__, "--start", folder]
        rounds = [
            json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            for _ in range(asked.rounds)
        ]
    medians = {part: statistics.median(found[part] for found in rounds) for part in PARTS}
    for part, seconds in medians.items():
        print(f"{part:12} {seconds * 1e3:8.1f} ms")
    work = sum(seconds for part, seconds in medians.items() if part != "imports")
    print(f"{'work':12} {work * 1e3:8.1f} ms: all but the imports")


def train_one_step(folder: Path, preset: str) -> None:
    from gptfast.config import load
    from gptfast.data.prepare.prepare import prepare
    from gptfast.report import Silent
    from gptfast.run.session import train

    (folder / "text.txt").write_text("To be or not to be, that is the question. " * 50)
    prepare([folder / "text.txt"], out=folder / "text-gpt2.h5")
    config = folder / "gptfast.toml"
    config.write_text(CONFIG.format(preset=preset))
    loaded = load("start", config=config, folder=folder)
    train(loaded, run="start", device="cpu", folder=folder, listener=Silent())


def start(folder: Path) -> dict[str, float]:
    """Seconds of each part, in the order in which `generate` has them."""
    clock = [time.perf_counter()]

    def lap() -> None:
        clock.append(time.perf_counter())

    from gptfast.run.folder import find_checkpoint
    from gptfast.run.generate import Sampling, generate_tokens, prompt_ids, seeded
    from gptfast.run.restore import restore
    from gptfast.tokenizers.tokenizer import from_definition

    lap()
    definition = find_checkpoint("start", parent=folder / "runs").tokenizer_definition()
    assert definition is not None
    tokenizer = from_definition(definition)
    lap()
    ids = prompt_ids(tokenizer, PROMPT)
    lap()
    with restore("start", folder=folder, device="cpu", note=print) as restored:
        lap()
        tokens = generate_tokens(
            restored.raw_model,
            ids,
            max_new_tokens=1,
            sampling=Sampling(),
            generator=seeded(1, restored.machine.device),
            forward_scope=restored.hooks.forward_scope,
            vocab_size=tokenizer.vocab_size,
        )
        next(tokens)
        lap()
    parts = [after - before for before, after in itertools.pairwise(clock)]
    parts[PARTS.index("model")] -= parts[PARTS.index("tokenizer")]  # `restore` builds it again
    return dict(zip(PARTS, parts, strict=True))


if __name__ == "__main__":
    main()
