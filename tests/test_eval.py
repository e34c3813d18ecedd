"""eval and generate on a run of their own: the log's number, one line of refusal, whole text."""

from __future__ import annotations

import io
import json
import math
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from data_helpers import TEXT, prepared, tiny_shakespeare, write_foreign
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from gptfast.cli import main
from gptfast.config import load
from gptfast.data.store import Store
from gptfast.model import GPT
from gptfast.profile import ModelConfig
from gptfast.report import Silent
from gptfast.run.evaluate import Score, eval_batches, evaluate
from gptfast.run.folder import Run
from gptfast.run.restore import Restored, restore
from gptfast.run.session import train
from gptfast.tokenizers.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
MARKER = "PICKLE-CODE-RAN"
PROFILE = """
[profiles.tiny]
unsupported_plugins = "stop"
[profiles.tiny.model]
n_layer = 2
n_head = 2
n_embd = 32
block_size = 32
dropout = 0.2
[profiles.tiny.data]
path = "chars.h5"
[profiles.tiny.train]
steps = 8
batch_size = 4
micro_batch = 2
learning_rate = 1e-2
eval_interval = 4
save_interval = 4
keep_checkpoints = 5
"""
RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": ((), ()),
    "plugins": (("flash", "ema", "vocab-pad", "chunked-loss", "activation-checkpointing"), ()),
    "bf16": ((), ('plugins.amp={dtype="bf16"}',)),
    "partial": ((), ("train.eval_tokens=100",)),
}
"""Name of each run: its plugins, and its other changes to the profile."""

Cli = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs, their data, and data of another tokenizer."""
    folder = tmp_path_factory.mktemp("trained")
    text = tiny_shakespeare(folder)
    text.write_text(text.read_text()[:6000])
    for name, tokenizer in (("chars", "chars"), ("gpt2", "gpt2")):
        prepared(folder, text, tokenizer=tokenizer)[0].path.rename(folder / f"{name}.h5")
    config = folder / "gptfast.toml"
    config.write_text(PROFILE)
    for run, (plugins, overrides) in RUNS.items():
        loaded = load("tiny", config=config, overrides=overrides, plugins=plugins, folder=folder)
        train(loaded, run=run, device="cpu", folder=folder, listener=Silent())
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to spoil, and the current folder."""
    shutil.copytree(trained, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def cli(folder: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command here, in this process: `cli("eval", "plain").out`."""

    def run(*args: str) -> SimpleNamespace:
        code = main(args)
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def logged(folder: Path, run: str, step: int) -> dict[str, Any]:
    """What the training's log says of the evaluation after `step`."""
    (record,) = (
        record
        for record in Run(folder / "runs" / run).metrics()
        if record["kind"] == "eval" and record["step"] == step
    )
    return record


def checkpoint_of(folder: Path, run: str, step: int = 8) -> Path:
    return folder / "runs" / run / "checkpoints" / f"step-{step:06d}"


def rewrite(folder: Path, run: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the weights of a run's newest checkpoint."""
    path = checkpoint_of(folder, run) / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


# the sum ------------------------------------------------------------------------------------------


class Scripted(nn.Module):
    """Gives each target the loss that its id says."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.where(targets >= 0, targets, 0).sum().float()


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_every_target_weighs_the_same(tmp_path: Path, batch_size: int) -> None:
    """EVL-04: 64, 64 and 8 targets with means 2, 4 and 10 are 3.4118, not 5.3333."""
    path = write_foreign(tmp_path / "x.h5", np.array([0] + [2] * 64 + [4] * 64 + [10] * 8, "u2"))
    with Store.open(path) as store:
        score = score_of(Scripted(), store, "train", batch_size=batch_size, block_size=64)
    assert score.tokens == 136
    assert score.loss == pytest.approx(3.4118, abs=5e-5)


def score_of(
    model: nn.Module, store: Store, split: str, *, batch_size: int, block_size: int
) -> Score:
    score = evaluate(
        model,
        store,
        split,
        block_size=block_size,
        batch_size=batch_size,
        device=CPU,
        forward_scope=torch.no_grad,
    )
    assert score is not None
    return score


def test_the_last_short_window_counts_whatever_the_batch(tmp_path: Path) -> None:
    """EVL-04 end to end: 137 tokens are 136 targets, and their loss that of one long look."""
    prepared(tmp_path, TEXT / "tok137_gpt2.txt", val_fraction=0)
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=64, vocab_size=50_257))
    with Store.open(tmp_path / "corpus.h5") as store:
        assert store.n_tokens("train") == 137
        scores = [
            score_of(model, store, "train", batch_size=batch, block_size=64) for batch in (1, 2, 4)
        ]
        ids = torch.from_numpy(store.tokens("train")[:].astype(np.int64))
    alone = sum(
        model(ids[at : at + 64][None, : 136 - at], ids[at + 1 : at + 65][None]).item()
        for at in (0, 64, 128)
    )
    for score in scores:
        assert score.tokens == 136
        assert score.loss == pytest.approx(scores[0].loss, abs=1e-6)
        assert score.loss == pytest.approx(alone / 136, abs=1e-6)


@given(st.integers(2, 300), st.integers(1, 20), st.integers(1, 5), st.none() | st.integers(1, 400))
def test_each_target_is_scored_once(
    n_tokens: int, block_size: int, batch_size: int, max_targets: int | None
) -> None:
    seen: list[int] = []
    for starts, lengths in eval_batches(
        n_tokens, block_size=block_size, batch_size=batch_size, max_targets=max_targets
    ):
        assert len(starts) == len(lengths) == batch_size
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            seen += range(start + 1, start + 1 + length)
    assert seen == list(range(1, min(n_tokens - 1, max_targets or n_tokens) + 1))


def test_a_score_in_other_units() -> None:
    score = Score(2 * math.log(2), 100, 50)
    assert score.perplexity == pytest.approx(4)
    assert score.bits_per_byte == pytest.approx(4)
    assert Score(800.0, 1, None).perplexity == math.inf
    assert Score(1.0, 1, None).bits_per_byte is None


# eval ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize("run", ["plain", "plugins", "bf16"])
def test_the_number_is_that_of_the_log_each_time(
    folder: Path, cli: Cli, run: str, step: int
) -> None:
    """EVL-05, EVL-02: with dropout in the profile, swapped weights and autocast."""
    expected = logged(folder, run, step)
    first, second = (
        json.loads(cli("eval", str(checkpoint_of(folder, run, step)), "--json", "--device=cpu").out)
        for _ in range(2)
    )
    assert first == second
    assert first["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert first["tokens"] == expected["tokens"]
    assert first["step"] == step
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]))
    # The text is ASCII, and each character a token.
    assert first["bits_per_byte"] == pytest.approx(first["loss"] / math.log(2))


def test_a_run_means_its_newest_checkpoint_and_text_says_what_json_does(
    folder: Path, cli: Cli
) -> None:
    shown = cli("eval", "plain", "--device=cpu")
    assert shown.code == 0
    report = dict(line.split("  ", 1) for line in shown.out.splitlines())
    expected = logged(folder, "plain", 8)
    assert report["loss"].split()[0] == f"{expected['loss']:.6f}"
    assert report["tokens scored"].strip() == f"{expected['tokens']:,}"
    assert "step 8" in report["checkpoint"]
    assert cli("eval", "runs/plain", "--device=cpu").out == shown.out


def test_a_partial_evaluation_says_so_and_can_be_done_again(folder: Path, cli: Cli) -> None:
    """EVL-05."""
    expected = logged(folder, "partial", 8)
    assert expected["tokens"] == 100
    whole = cli("eval", "partial", "--json", "--device=cpu")
    assert json.loads(whole.out)["tokens"] == 599
    assert "first 100 of these targets: --tokens 100" in whole.err
    part = cli("eval", "partial", "--tokens=100", "--device=cpu")
    assert f"{expected['loss']:.6f}" in part.out
    assert "100 of 599" in part.out
    assert not part.err


def test_plugins_that_change_the_number_are_on_and_those_that_only_train_are_not(
    folder: Path,
) -> None:
    notes: list[str] = []
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with restore("plugins", folder=folder, device="cpu", note=notes.append) as restored:
        on = [enabled.name for enabled in restored.hooks.enabled]
        assert "ema" in on
        assert "activation-checkpointing" not in on
        assert restored.profile.model.attention == "sdpa"
        assert restored.profile.model.vocab_rows % 64 == 0
        with Store.open(folder / "chars.h5") as store:
            averaged = restored.score(store, "val").loss
            last = score_of(restored.model, store, "val", batch_size=2, block_size=32).loss
    assert abs(averaged - last) > 1e-3, "the averaged weights are others than the last"
    assert not notes
    assert torch.equal(torch.get_rng_state(), before)


def test_data_may_be_others_of_the_same_tokenizer(folder: Path, cli: Cli) -> None:
    assert cli("eval", "plain", "--data=chars.h5", "--split=train", "--device=cpu").code == 0
    refused = cli("eval", "plain", "--data=gpt2.h5")
    assert refused.code == 2
    assert "tokenizer gpt2 (50257 ids)" in refused.err
    assert "trained with chars" in refused.err
    write_foreign(folder / "bare.h5", np.array([1, 2, 60_000], "u2"))
    bare = cli("eval", "plain", "--data=bare.h5", "--split=train")
    assert bare.code == 2
    assert "id 60000 >= " in bare.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("plain", "--split", "test"), "has no split test, only train, val"),
        (("nothing",), "neither a run nor a checkpoint folder: runs here: "),
        (("plain", "--data", "nowhere.h5"), "nowhere.h5: no such file"),
        (("plain", "--tokens", "0"), "0 is not in the range"),
    ],
)
def test_what_eval_refuses(cli: Cli, args: tuple[str, ...], said: str) -> None:
    refused = cli("eval", *args)
    assert refused.code == 2
    assert said in refused.err
    assert len(refused.err.splitlines()) == 1
    assert not refused.out


def test_a_split_of_one_token_has_nothing_to_score(folder: Path, cli: Cli) -> None:
    write_foreign(folder / "one.h5", np.array([3], "u2"))
    refused = cli("eval", "plain", "--data=one.h5", "--split=train")
    assert refused.code == 2
    assert "has 1 token" in refused.err


def test_changed_data_are_warned_of(folder: Path, cli: Cli) -> None:
    shutil.copy(folder / "chars.h5", folder / "old.h5")
    text = (folder / "tinyshakespeare.txt").read_text()
    (folder / "again.txt").write_text(text[::-1])
    prepared(folder, folder / "again.txt", tokenizer="chars")[0].path.rename(folder / "chars.h5")
    # The data's path in the checkpoint is that of the training, which is another folder.
    meta = checkpoint_of(folder, "plain") / "meta.json"
    described = json.loads(meta.read_text())
    described["data"]["path"] = str(folder / "chars.h5")
    meta.write_text(json.dumps(described))
    changed = cli("eval", "plain", "--device=cpu")
    assert changed.code == 0
    assert "has changed since this model was trained" in changed.err


def test_a_loss_beyond_the_exponent_is_shown(folder: Path, cli: Cli) -> None:
    """EVL-06."""

    def scale_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["ln_f.weight"] *= 1e5

    rewrite(folder, "plain", scale_head)
    shown = cli("eval", "plain", "--device=cpu")
    assert shown.code == 0
    assert "perplexity     inf" in shown.out
    report = json.loads(cli("eval", "plain", "--json").out, parse_constant=pytest.fail)
    assert report["loss"] > 710
    assert report["perplexity"] == "inf"


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_weights_that_are_not_numbers(folder: Path, cli: Cli, command: str) -> None:
    """GEN-11."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["h.0.mlp.c_fc.weight"][0, 0] = math.nan

    rewrite(folder, "plain", spoil)
    failed = cli(command, "plain", "--device=cpu")
    assert failed.code == 1
    assert "non-finite logits" in failed.err
    assert str(checkpoint_of(folder, "plain").relative_to(folder)) in failed.err
    assert len(failed.err.splitlines()) == 1


# damaged and hostile files ------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["eval", "generate"])
@pytest.mark.parametrize(
    "hostile", ["runs_code_on_load.pt", "zero_byte.pt", "text_named.pt", "cut_zip.pt"]
)
def test_no_file_runs_code(
    folder: Path, inputs: Path, cli: Cli, command: str, hostile: str
) -> None:
    """RES-07: as the checkpoint, as its weights, and as the state of its plugins."""
    path = inputs / "checkpoint" / hostile
    answers = [cli(command, str(path))]
    shutil.copy(path, checkpoint_of(folder, "plain") / "model.safetensors")
    answers.append(cli(command, "plain", "--device=cpu"))
    shutil.copy(path, checkpoint_of(folder, "plugins") / "trainer.pt")
    answers.append(cli(command, "plugins", "--device=cpu"))
    for answer in answers:
        assert answer.code == 2
        assert len(answer.err.splitlines()) == 1
        assert MARKER not in answer.out + answer.err
        assert not answer.out
    assert MARKER in (inputs / "checkpoint" / "runs_code_on_load.pt").read_text("latin-1")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("meta.json", "{"),
        ("meta.json", "[]"),
        ("meta.json", '{"format": 1}'),
        ("meta.json", '{"format": 1, "step": 8, "profile": 3, "plugins": {}, "data": {}}'),
        ("meta.json", '{"format": 99}'),
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"kind": "bpe"}'),
        ("tokenizer.json", '{"kind": "chars", "alphabet": 3}'),
        ("tokenizer.json", '{"kind": "unheard-of"}'),
    ],
)
@pytest.mark.parametrize("command", ["eval", "generate"])
def test_a_damaged_description_is_refused(
    folder: Path, cli: Cli, command: str, file: str, content: str
) -> None:
    (checkpoint_of(folder, "plain") / file).write_text(content)
    refused = cli(command, "plain")
    assert refused.code == 2
    assert file in refused.err
    assert len(refused.err.splitlines()) == 1


# generate -----------------------------------------------------------------------------------------


def generate(cli: Cli, *args: str, run: str = "plain") -> SimpleNamespace:
    return cli("generate", run, "--device=cpu", *args)


def test_the_checkpoint_alone_is_enough(folder: Path, cli: Cli, tmp_path: Path) -> None:
    expected = generate(cli, "--prompt=First", "--max-new-tokens=40")
    assert expected.code == 0
    assert expected.out.startswith("First")
    assert len(expected.out) == len("First") + 40 + 1
    shutil.move(checkpoint_of(folder, "plain"), tmp_path / "alone")
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    alone = generate(cli, "--prompt=First", "--max-new-tokens=40", run=str(tmp_path / "alone"))
    assert alone.out == expected.out


def test_a_seed_is_a_text_streamed_or_not(cli: Cli) -> None:
    """GEN-09; sample i of seed N is sample 1 of seed N + i - 1."""
    first = generate(cli, "--seed=5").out
    assert generate(cli, "--seed=5").out == first
    assert generate(cli, "--seed=5", "--no-stream").out == first
    assert generate(cli, "--seed=6").out != first
    two = generate(cli, "--seed=5", "--samples=2").out
    assert two == (
        f"--- sample 1 of 2, seed 5\n{first}--- sample 2 of 2, seed 6\n"
        f"{generate(cli, '--seed=6').out}"
    )
    report = json.loads(generate(cli, "--seed=5", "--samples=2", "--json").out)
    assert report["samples"][0] == {"seed": 5, "text": first.removesuffix("\n")}
    assert report["samples"][1]["seed"] == 6


def test_a_half_character_is_never_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GEN-09: 'a👩b' through the streaming printer."""
    from gptfast.run import generate as module

    ids = [int(i) for i in load_tokenizer("gpt2").encode("a👩b")]
    monkeypatch.setattr(module, "generate_tokens", lambda *args, **options: iter(ids))
    monkeypatch.setattr(Restored, "tokenizer_for_text", lambda self, asked: load_tokenizer("gpt2"))
    shown = []
    for extra in ([], ["--no-stream"]):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["generate", "plain", "--device=cpu", *extra]) == 0
        stdout.flush()
        shown.append(stdout.buffer.getvalue())
    assert shown == ["a👩b\n".encode()] * 2


def test_lengths_of_prompt_and_text(cli: Cli) -> None:
    """GEN-04: block 32."""
    long = "First Citizen: " * 4
    longer = generate(cli, f"--prompt={long}", "--max-new-tokens=5")
    assert longer.err == (
        "the prompt has 60 tokens, of which the last 32 are used: "
        "the model's context holds no more\n"
    )
    assert longer.out.startswith(long)
    assert longer.out[60:] == generate(cli, f"--prompt={long[-32:]}", "--max-new-tokens=5").out[32:]
    assert len(generate(cli, "--max-new-tokens=100").out) == 101
    assert generate(cli, "--prompt=abc", "--max-new-tokens=0").out == "abc\n"


def test_greedy_is_the_same_for_every_seed(cli: Cli) -> None:
    """GEN-07, EVL-02: trained with dropout, which is off."""
    greedy = generate(cli, "--temperature=0").out
    assert generate(cli, "--temperature=0", "--seed=7").out == greedy
    assert generate(cli, "--temperature=1e-45", "--seed=8").out == greedy


def test_text_is_written_with_the_weights_that_evaluations_see(folder: Path, cli: Cli) -> None:
    """Of a run with averaged weights it is the average that writes, whatever the last ones are."""
    expected = generate(cli, run="plugins")

    def forget(tensors: dict[str, torch.Tensor]) -> None:
        tensors["wte.weight"].zero_()

    rewrite(folder, "plugins", forget)
    assert generate(cli, run="plugins").out == expected.out
    rewrite(folder, "plain", forget)
    assert generate(cli).out != expected.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--max-new-tokens=-1",), "max-new-tokens -1"),
        (("--temperature=nan",), "temperature nan"),
        (("--temperature=-1",), "temperature -1"),
        (("--top-k=-3",), "top-k -3"),
        (("--top-p=2",), "top-p 2.0"),
        (("--samples=0",), "--samples"),
        (("--prompt=é",), "'é', is not among the"),
        (("--tokenizer=gpt2",), "--tokenizer gpt2: "),
        (("--tokenizer=unheard-of",), "--tokenizer unheard-of"),
    ],
    ids=str,
)
def test_what_generate_refuses(cli: Cli, args: tuple[str, ...], said: str) -> None:
    """GEN-04, GEN-06, GEN-07, TOK-05: exit 2, one line, no text."""
    refused = generate(cli, *args)
    assert refused.code == 2
    assert said in refused.err
    assert len(refused.err.splitlines()) == 1
    assert not refused.out


def test_a_model_of_bare_ids_needs_a_tokenizer_named(folder: Path, cli: Cli) -> None:
    (checkpoint_of(folder, "plain") / "tokenizer.json").write_text("null")
    unnamed = generate(cli)
    assert unnamed.code == 2
    assert "name theirs with --tokenizer" in unnamed.err
    larger = generate(cli, "--tokenizer=bytes")
    assert larger.code == 2
    assert "has 256 ids" in larger.err


def test_a_reader_may_leave_early(folder: Path) -> None:
    """CLI-15: `gptfast generate plain | head -c 20`."""
    with Popen(
        [sys.executable, "-u", "-m", "gptfast", "generate", "plain", "--max-new-tokens=5000"],
        stdout=PIPE,
        stderr=PIPE,
        cwd=folder,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(20)) == 20
        process.stdout.close()
        assert process.wait(60) in (0, 141, -signal.SIGPIPE)
        assert process.stderr.read() == b""


def edit_profile(folder: Path, run: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the profile that a run's newest checkpoint keeps."""
    path = checkpoint_of(folder, run) / "meta.json"
    meta = json.loads(path.read_text())
    change(meta["profile"])
    path.write_text(json.dumps(meta))


def test_a_profile_of_another_shape_is_refused(folder: Path, cli: Cli) -> None:
    edit_profile(folder, "plain", lambda profile: profile["model"].update(n_layer=3))
    refused = cli("eval", "plain", "--device=cpu")
    assert refused.code == 2
    assert "model.safetensors is not this model: lacks: h.2." in refused.err


def test_a_plugin_that_this_machine_lacks_is_told_and_left_off(folder: Path, cli: Cli) -> None:
    edit_profile(folder, "bf16", lambda profile: profile["plugins"].update(amp={"dtype": "fp16"}))
    told = cli("eval", "bf16", "--device=cpu")
    assert told.code == 0
    assert told.err.startswith("plugin amp of the run is left off: fp16 is no training format")


def test_a_plugin_that_is_no_longer_installed_is_named(folder: Path, cli: Cli) -> None:
    path = checkpoint_of(folder, "plain") / "meta.json"
    meta = json.loads(path.read_text())
    meta["plugins"] = meta["profile"]["plugins"] = {"gone": {}}
    path.write_text(json.dumps(meta))
    refused = cli("eval", "plain", "--device=cpu")
    assert refused.code == 2
    assert "plugin gone is not installed" in refused.err
