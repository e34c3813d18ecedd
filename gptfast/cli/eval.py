"""`gptfast eval`: the loss of a trained model over a whole split."""

from __future__ import annotations

from pathlib import Path

import click

from gptfast.cli.app import App
from gptfast.cli.options import device_option, json_option


@click.command()
@click.argument("checkpoint", metavar="RUN_OR_CHECKPOINT")
@click.option(
    "--data",
    metavar="FILE.h5",
    type=click.Path(path_type=Path),
    help="Tokens to score.  [default: those of the training]",
)
@click.option("--split", metavar="NAME", default="val", show_default=True, help="Part to score.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Score only the first N targets.  [default: all]",
)
@device_option
@json_option
@click.pass_obj
def command(
    app: App,
    *,
    checkpoint: str,
    data: Path | None,
    split: str,
    tokens: int | None,
    device: str,
    as_json: bool,
) -> None:
    """Score a model on held-out text.

    RUN_OR_CHECKPOINT is a run's name, of which the newest checkpoint is taken, or the folder of a
    run or checkpoint. Each target token is scored once, so the same command gives the same number.
    """
    from gptfast.data.store import Store
    from gptfast.run.restore import restore

    console = app.console
    with restore(checkpoint, folder=app.folder, device=device, note=console.note) as restored:
        trained_on = restored.checkpoint.meta["data"]
        with Store.open(data or trained_on["path"]) as store:
            if data is None and store.fingerprint != trained_on["fingerprint"]:
                console.warn(f"{store.path}: has changed since this model was trained on it")
            score = restored.score(store, split, max_targets=tokens)
            n_targets = store.n_tokens(split) - 1
        step, folder = restored.checkpoint.step, restored.checkpoint.folder
        logged = restored.profile.train.eval_tokens
    if logged is not None and logged < n_targets and tokens is None and data is None:
        console.note(
            f"the training's log scored the first {logged:,} of these targets: "
            f"--tokens {logged} does the same"
        )
    if as_json:
        console.json(
            {
                "checkpoint": folder,
                "step": step,
                "data": store.path,
                "split": split,
                "tokens": score.tokens,
                "loss": score.loss,
                "perplexity": score.perplexity,
                "bits_per_byte": score.bits_per_byte,
            }
        )
        return
    partial = f" of {n_targets:,}" if score.tokens < n_targets else ""
    console.line(f"checkpoint     {console.path(str(folder))} (step {step})")
    console.line(f"data           {console.path(str(store.path))}, {split}")
    console.line(f"tokens scored  {score.tokens:,}{partial}")
    console.line(f"loss           {score.loss:.6f} nats per token")
    console.line(f"perplexity     {score.perplexity:.6g}")
    if score.bits_per_byte is not None:
        console.line(f"bits per byte  {score.bits_per_byte:.6f}")
