"""A tiny run: a model of two layers, a generated corpus, and plugins to try on them.

The contract check is made of such runs, and so are many tests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptfast.data.prepare.writer import Draft
from gptfast.data.store import Store
from gptfast.device.machine import find_machine
from gptfast.host import registry
from gptfast.host.hooks import Hooks
from gptfast.host.registry import Enabled, Found
from gptfast.plugin import ORDER_SLACK, Context, Machine, Parts, Plugin, Profile, Stage
from gptfast.report import EvalRecord, Logged, Silent
from gptfast.run.checkpoint import Checkpoint
from gptfast.run.folder import Run
from gptfast.run.trainer import Trainer
from gptfast.tokenizers.tokenizer import Characters

Tables = Mapping[str, Mapping[str, Any]]
"""Options of each plugin that is on, as a profile holds them."""

STEPS = 6
STOP = 3
"""Where the resumed run is stopped; the training split's first epoch ends one step later."""
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,;"[:61]
"""61 characters, so that no padding fits by chance."""


class Broken(Exception):
    """A promise is broken; says how."""


@dataclass(frozen=True)
class Outcome:
    """What a tiny run came to.

    Attributes:
        losses: of each step, in nats.
        weights: (name -> tensor) of the raw model.
        val_loss: at the end over all of `val`, as an evaluation sees the model.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    val_loss: float


@dataclass
class Recorder(Silent):
    losses: list[float] = field(default_factory=list)
    evaluations: list[EvalRecord] = field(default_factory=list)

    def logged(self, record: Logged) -> None:
        self.losses.append(record.loss)

    def evaluated(self, record: EvalRecord) -> None:
        self.evaluations.append(record)


def tiny_profile(plugins: Tables) -> Profile:
    """Two layers of width 32 and windows of 16 tokens: a step takes milliseconds."""
    return Profile.model_validate(
        {
            "name": "contract",
            "model": {
                "n_layer": 2,
                "n_head": 2,
                "n_embd": 32,
                "block_size": 16,
                "vocab_size": len(_ALPHABET),
            },
            "train": {
                "steps": STEPS,
                "batch_size": 4,
                "learning_rate": 1e-2,
                "warmup_steps": 2,
                "eval_interval": 3,
                "save_interval": 0,
                "log_interval": 1,
                "seed": 7,
            },
            "plugins": {name: dict(options) for name, options in plugins.items()},
        }
    )


def write_tiny_store(path: Path, *, train_tokens: int = 257, val_tokens: int = 49) -> None:
    """A data file in which each token follows from the one before it: quick to learn."""
    tokenizer = Characters(_ALPHABET)
    with Draft(path, vocab_size=tokenizer.vocab_size) as draft:
        for split, count in (("train", train_tokens), ("val", val_tokens)):
            ids = np.arange(count) * 7 % tokenizer.vocab_size
            draft.append(split, ids, documents=[0], n_bytes=count)
        draft.finish(
            tokenizer=tokenizer,
            source="generated for the contract check",
            documents=[],
            attributes={},
        )


@dataclass(frozen=True)
class Rig:
    """Plugins, a machine and a data file to try them on."""

    plugins: Tables
    machine: Machine
    found: Mapping[str, Found]
    store: Store
    folder: Path

    def profile(self, plugins: Tables | None = None, **changes: Any) -> Profile:
        """The tiny profile with `plugins` (None: all of the rig's) and `table__key` changed."""
        profile = tiny_profile(self.plugins if plugins is None else plugins)
        return profile.replace({key.replace("__", "."): v for key, v in changes.items()})

    def unsupported(self, profile: Profile) -> dict[str, str]:
        """Plugins that this machine does not support, with the reason."""
        selection = registry.select(self.plan(profile), self.machine, unsupported="skip")
        return {skipped.name: skipped.reason for skipped in selection.skipped}

    def plan(self, profile: Profile) -> tuple[Enabled, ...]:
        return registry.plan(profile, found=self.found)

    def trainer(
        self,
        profile: Profile,
        *,
        extra: Sequence[Enabled] = (),
        run: Run | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> tuple[Trainer, Recorder]:
        recorder = Recorder()
        hooks = Hooks([*self.plan(profile), *extra], note=recorder.note)
        trainer = Trainer(
            profile,
            hooks=hooks,
            machine=self.machine,
            store=self.store,
            run=run,
            checkpoint=checkpoint,
            listener=recorder,
        )
        return trainer, recorder

    def train(
        self,
        profile: Profile,
        *,
        extra: Sequence[Enabled] = (),
        run: Run | None = None,
        checkpoint: Checkpoint | None = None,
        until: int | None = None,
    ) -> Outcome:
        trainer, recorder = self.trainer(profile, extra=extra, run=run, checkpoint=checkpoint)
        with trainer:
            trainer.run(until)
            with trainer.hooks.eval_scope():
                score = trainer.scorer.score("val")
            assert score is not None, "only an interrupt ends an evaluation early"
            return Outcome(recorder.losses, copied(trainer.raw_model), score.loss)

    def difference(self, one: Sequence[float], other: Sequence[float]) -> float:
        """Largest relative difference of two runs' losses."""
        assert len(one) == len(other)
        return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))

    def require_equal(self, one: Outcome, other: Outcome, *, what: str) -> None:
        """Equal bits; off the CPU, equal losses as far as its kernels add in one order."""
        if self.machine.kind == "cpu":
            if one.losses != other.losses:
                raise Broken(f"{what}: losses {one.losses}, expected {other.losses}")
            require_equal_tensors(one.weights, other.weights, what=what)
            if one.val_loss != other.val_loss:
                raise Broken(f"{what}: validation loss {one.val_loss}, expected {other.val_loss}")
        elif (difference := self.difference(one.losses, other.losses)) > ORDER_SLACK:
            raise Broken(f"{what}: losses differ by {difference:.1e}")


@contextmanager
def build_rig(
    plugins: Tables, *, machine: Machine | None, found: Mapping[str, Found]
) -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="gptfast-contract-") as name:
        folder = Path(name)
        write_tiny_store(folder / "tiny.h5")
        with Store.open(folder / "tiny.h5") as store:
            yield Rig(plugins, machine or find_machine("cpu"), found, store, folder)


def copied(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def require_equal_tensors(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], *, what: str
) -> None:
    unequal = sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    )
    if unequal:
        raise Broken(f"{what}: {', '.join(unequal[:3])} of {len(one)} tensors differ")


# plugins that look, or fail on purpose ---------------------------------------------------------


def ours(plugin: Plugin) -> Enabled:
    return Enabled(type(plugin).__name__, plugin, registry.OURS, "contract check")


class Looks(Plugin):
    """Keeps the parts that it is shown."""

    stage = Stage.REPORT

    def __init__(self, seen: list[Parts]) -> None:
        super().__init__(self.Options())
        self.seen = seen

    def ready(self, parts: Parts) -> None:
        self.seen.append(parts)


class Planned(Exception):
    """The failure that `FailsInSetup` makes."""


class FailsInSetup(Plugin):
    stage = Stage.REPORT

    def __init__(self) -> None:
        super().__init__(self.Options())

    def setup(self, context: Context) -> None:
        raise Planned


class Interrupts(Plugin):
    """Ctrl-C in the forward pass of the second step."""

    stage = Stage.REPORT

    def __init__(self) -> None:
        super().__init__(self.Options())
        self.calls = 0

    def micro_scope(self, last: bool) -> AbstractContextManager[object]:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt
        return nullcontext()
