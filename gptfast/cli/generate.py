"""`gptfast generate`: continue a text with a trained model, as a stream or at once."""

from __future__ import annotations

import itertools

import click

from gptfast.cli.app import App
from gptfast.cli.options import device_option, json_option


@click.command()
@click.argument("checkpoint", metavar="RUN_OR_CHECKPOINT")
@click.option("--prompt", metavar="TEXT", default="", help="Text to continue.  [default: none]")
@click.option("--max-new-tokens", metavar="N", type=int, default=256, show_default=True)
@click.option(
    "--temperature",
    metavar="T",
    type=float,
    default=0.8,
    show_default=True,
    help="0: the likeliest token each time; higher: more variety.",
)
@click.option(
    "--top-k",
    metavar="K",
    type=int,
    default=200,
    show_default=True,
    help="Choose among the K likeliest tokens; 0: among all.",
)
@click.option(
    "--top-p",
    metavar="P",
    type=float,
    help="Choose among the likeliest tokens that reach probability P.  [default: off]",
)
@click.option("--samples", metavar="N", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0, 2**63 - 1),
    default=1337,
    show_default=True,
    help="The same seed gives the same text; sample i has seed N + i - 1.",
)
@click.option(
    "--tokenizer",
    metavar="NAME_OR_FILE",
    help="For a model that was trained on bare ids.  [default: the model's own]",
)
@click.option("--no-stream", is_flag=True, help="Print a text when it is complete.")
@device_option
@json_option
@click.pass_obj
def command(
    app: App,
    *,
    checkpoint: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float | None,
    samples: int,
    seed: int,
    tokenizer: str | None,
    no_stream: bool,
    device: str,
    as_json: bool,
) -> None:
    """Continue a text with a model.

    RUN_OR_CHECKPOINT is a run's name, of which the newest checkpoint is taken, or the folder of a
    run or checkpoint. The checkpoint is all that is needed: it carries its tokenizer.
    """
    from gptfast.run.generate import Sampling, generate_tokens, prompt_ids, seeded
    from gptfast.run.restore import restore

    console = app.console
    sampling = Sampling(temperature, top_k, top_p)
    texts = []
    with restore(checkpoint, folder=app.folder, device=device, note=console.note) as restored:
        words = restored.tokenizer_for_text(tokenizer)
        ids = prompt_ids(words, prompt)
        block_size = restored.profile.model.block_size
        if len(ids) > block_size:
            console.note(
                f"the prompt has {len(ids)} tokens, of which the last {block_size} are used: "
                "the model's context holds no more"
            )
        for number in range(samples):
            tokens = generate_tokens(
                restored.raw_model,
                ids,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                generator=seeded(seed + number, restored.machine.device),
                forward_scope=restored.hooks.forward_scope,
                vocab_size=words.vocab_size,
                source=str(restored.checkpoint.folder),
            )
            pieces = itertools.chain([prompt], words.pieces(tokens))
            with restored.hooks.eval_scope():
                if as_json:
                    texts.append("".join(pieces))
                    continue
                if samples > 1:
                    console.line(f"--- sample {number + 1} of {samples}, seed {seed + number}")
                for piece in ["".join(pieces)] if no_stream else pieces:
                    console.stream(piece)
            console.line()
        step, folder = restored.checkpoint.step, restored.checkpoint.folder
    if as_json:
        drawn = [{"seed": seed + number, "text": text} for number, text in enumerate(texts)]
        console.json({"checkpoint": folder, "step": step, "prompt": prompt, "samples": drawn})
