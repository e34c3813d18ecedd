"""From the name of a run or checkpoint to a model that is ready to score or to write text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from gptfast.data.store import Store
from gptfast.device.machine import find_machine
from gptfast.device.memory import build_model
from gptfast.device.randomness import random_state_kept
from gptfast.errors import GptfastError, Refused
from gptfast.host import registry
from gptfast.host.hooks import Hooks
from gptfast.model import GPT
from gptfast.plugin import Machine, Profile, Stage
from gptfast.profile import validate
from gptfast.run.checkpoint import Checkpoint
from gptfast.run.evaluate import Score, evaluate
from gptfast.run.folder import find_checkpoint
from gptfast.tokenizers.tokenizer import Tokenizer, from_definition, load_tokenizer

STAGES = (Stage.SURGERY, Stage.OUTER)
"""Stages whose plugins can change a loss or a text: switches, surgery, swapped weights. The others
recompute for a backward pass that there is none of, compile for minutes to save seconds, spread
over devices that training had, or report a training."""


@dataclass(frozen=True)
class Restored:
    """A trained model as its run left it."""

    checkpoint: Checkpoint
    profile: Profile
    """After every `configure`."""
    machine: Machine
    hooks: Hooks
    raw_model: GPT
    model: nn.Module
    """After every `wrap_model`."""
    tokenizer: Tokenizer | None
    """The one of its training data; None: the data were bare ids."""

    def score(self, store: Store, split: str, *, max_targets: int | None = None) -> Score:
        """The loss over a split, in the batches and scopes in which training evaluates.

        Raises:
            Refused: the data are not in this model's vocabulary, or have no such split.
            GptfastError: the loss is not finite.
        """
        self._check_data(store)
        with self.hooks.eval_scope():
            score = evaluate(
                self.model,
                store,
                split,
                block_size=self.profile.model.block_size,
                batch_size=self.profile.train.windows_per_micro,
                device=self.machine.device,
                forward_scope=self.hooks.forward_scope,
                max_targets=max_targets,
            )
        assert score is not None, "nothing stops this evaluation"
        if not score.is_finite:
            raise GptfastError(
                f"{self.checkpoint.folder}: non-finite logits, the loss over {split} is "
                f"{score.loss}: its weights are damaged, use an older checkpoint"
            )
        return score

    def tokenizer_for_text(self, asked: str | None) -> Tokenizer:
        """The model's own tokenizer; where it was trained on bare ids, the one `asked` for.

        Raises:
            Refused: `asked` is another than the model's own, or none is known.
        """
        folder = self.checkpoint.folder
        if self.tokenizer is not None:
            if asked not in (None, self.tokenizer.name):
                raise Refused(
                    f"--tokenizer {asked}: {folder} was trained with {self.tokenizer.name} "
                    f"({self.tokenizer.vocab_size} ids), whose ids mean other text: leave "
                    "--tokenizer out"
                )
            return self.tokenizer
        if asked is None:
            raise Refused(
                f"{folder}: was trained on bare ids and knows no tokenizer: name theirs with "
                "--tokenizer, as in --tokenizer gpt2"
            )
        tokenizer, known = load_tokenizer(asked), self.profile.model.vocab_size
        assert known is not None
        if tokenizer.vocab_size > known:
            raise Refused(
                f"--tokenizer {asked} has {tokenizer.vocab_size} ids, but {folder} knows only "
                f"{known}: name the tokenizer that made its data"
            )
        return tokenizer

    def _check_data(self, store: Store) -> None:
        vocab_size = self.profile.model.vocab_size
        assert vocab_size is not None
        if self.tokenizer is not None and store.tokenizer_name is not None:
            if self.tokenizer.definition() != store.tokenizer_definition:
                raise Refused(
                    f"{store.path}: made by tokenizer {store.tokenizer_name} ({store.vocab_size} "
                    f"ids), but {self.checkpoint.folder} was trained with {self.tokenizer.name} "
                    f"({self.tokenizer.vocab_size} ids): prepare the text with the model's own"
                )
        else:
            store.check_ids(vocab_size)


@contextmanager
def restore(
    name: str, *, folder: Path, device: str = "auto", note: Callable[[str], None]
) -> Iterator[Restored]:
    """The model of a run or checkpoint, with those plugins of its run that can change a number.

    Process-wide switches and random state are as found afterwards.

    Args:
        name: a run in `folder`/runs, or the path of a run or checkpoint; of a run, its newest.
        note: told in one line what is left off and why.

    Raises:
        Refused: there is no such checkpoint, it is damaged, or a plugin of its run is missing.
    """
    checkpoint = find_checkpoint(name, parent=folder / "runs")
    tokenizer = _tokenizer(checkpoint)
    profile = _profile(checkpoint)
    machine = find_machine(device)
    origins = {f"plugins.{plugin}": str(checkpoint.folder) for plugin in profile.plugins}
    planned = registry.plan(profile, origins=origins)
    selection = registry.select(
        [one for one in planned if one.plugin.stage in STAGES], machine, unsupported="skip"
    )
    for skipped in selection.skipped:
        note(f"plugin {skipped.name} of the run is left off: {skipped.reason}")
    with random_state_kept(machine.device), Hooks(selection.enabled, note=note) as hooks:
        profile = hooks.configure(profile)
        hooks.setup(profile, machine)
        raw_model = build_model(profile.model, machine.device)
        checkpoint.load_model(raw_model)
        model = hooks.wrap_model(raw_model).eval()
        if hooks.have_state:  # not otherwise: most of that file is the optimizer
            hooks.load_state(checkpoint.load_trainer()["plugins"])
        yield Restored(checkpoint, profile, machine, hooks, raw_model, model, tokenizer)


def _profile(checkpoint: Checkpoint) -> Profile:
    """The run's profile with the plugins that ran, which leaves out those skipped there."""
    path = checkpoint.folder / "meta.json"
    try:
        saved, ran = checkpoint.meta["profile"], checkpoint.meta["plugins"]
        plugins = {name: options for name, options in saved["plugins"].items() if name in ran}
        return validate({**saved, "plugins": plugins}, origins={}, source=str(path))
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(
            f"{path}: does not describe a run ({type(error).__name__}: {error}): "
            "use an older checkpoint"
        ) from error


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    definition = checkpoint.tokenizer_definition()
    if definition is None:
        return None
    path = checkpoint.folder / "tokenizer.json"
    try:
        return from_definition(definition)
    except Refused as error:
        raise Refused(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(
            f"{path}: does not describe a tokenizer ({type(error).__name__}: {error}): "
            "use an older checkpoint"
        ) from error
