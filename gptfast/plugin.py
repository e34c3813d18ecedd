"""The plugin contract: all that a plugin imports from gptfast.

Four kinds of hook, because four different things hide in one list of events:

- **transforms** take a value and return a new one, folded in order;
- **owners** do a job that exactly one party may do: two that answer are an error naming both;
- **scopes** surround a region and are always left, in reverse order, on error too;
- **observers** look, and ask for something; answers are OR-ed, so their order cannot matter.

A plugin overrides the hooks it needs; a hook left alone costs nothing. Modules of plugins import
torch inside their functions, so that listing the plugins answers at once.

Over 400 lines: whoever writes a plugin finds all of it here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from enum import Enum, Flag, IntEnum, auto
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from gptfast.errors import GptfastError, Refused
from gptfast.helpers import decay_groups, doubling, unlogged_warnings, with_gradients
from gptfast.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = [
    "Batch",
    "Claim",
    "Context",
    "Evaluated",
    "GptfastError",
    "Machine",
    "Options",
    "Parts",
    "Payback",
    "Plugin",
    "Profile",
    "Refused",
    "Source",
    "Stage",
    "Stepped",
    "Stepper",
    "Support",
    "Tries",
    "Update",
    "Want",
    "Windows",
    "decay_groups",
    "doubling",
    "unlogged_warnings",
    "with_gradients",
]

T = TypeVar("T")


class Stage(IntEnum):
    """Where in the order a plugin stands. Within a stage the profile's order holds."""

    SURGERY = 0
    """Changes what the model or a process-wide switch is."""
    RECOMPUTE = 1
    """Changes what is kept for the backward pass."""
    COMPILE = 2
    """Compiles what the earlier stages left."""
    SHARD = 3
    """Spreads the compiled model over devices."""
    OUTER = 4
    """Works around the finished model: loaders, optimizers, averages."""
    REPORT = 5
    """Only looks."""


class Claim(Enum):
    """What a plugin promises about the loss. `bench` tests it on the run's own data."""

    EXACT = "exact"
    """The same function and gradient; at most the order of float32 sums differs."""
    ROUNDING = "rounding"
    """The same mathematics in other rounding, within `tolerance` of the baseline's loss."""
    RECIPE = "recipe"
    """Changes what is learnt; judged by the loss at equal time."""


ORDER_SLACK = 1e-3
"""Relative difference of two losses put down to kernels that add in any order, off the CPU. Chosen,
not measured: no GPU has run it yet."""


def least_tolerance(kind: str) -> float:
    """What equal bits come to: a CPU adds in one order, other devices in any."""
    return 0.0 if kind == "cpu" else ORDER_SLACK


class Want(Flag):
    """What an observer asks of the trainer."""

    NOTHING = 0
    SKIP = auto()
    """Leave the update out; before a step."""
    EVAL = auto()
    SAVE = auto()
    STOP = auto()


class Options(BaseModel):
    """A plugin's table in the profile: one field and one docstring line for each option."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class Tries:
    """Values of a plugin's options that are worth trying, as in `Tries(workers=(0, 2, 4))`.

    Without any it is only tried on and off.
    """

    def __init__(self, **values: Sequence[Any]) -> None:
        self.values: Mapping[str, Sequence[Any]] = values


@dataclass(frozen=True)
class Support:
    """Whether this machine supports a plugin, and in words why or how."""

    ok: bool
    reason: str = ""

    @classmethod
    def yes(cls, how: str = "") -> Support:
        return cls(True, how)

    @classmethod
    def no(cls, reason: str) -> Support:
        return cls(False, reason)

    @classmethod
    def failed(cls, trial: str, error: Exception, *, instead: str | None = None) -> Support:
        """No: `trial` failed, with the first line of why and what can be done instead."""
        cause = getattr(error, "inner_exception", error)  # torch's compiler wraps it in many lines
        reason = f"{trial} failed: {str(cause).strip().partition(chr(10))[0]}"
        return cls.no(reason if instead is None else f"{reason}: {instead}")


@dataclass(frozen=True)
class Payback:
    """What `bench` found of a plugin on this machine."""

    after_steps: int | None
    """Steps after which its start has paid. None: never, no step was faster."""


@dataclass(frozen=True)
class Machine:
    """The device that the run is on."""

    device: torch.device
    """Where the model and its tensors are."""
    name: str
    """As the driver calls it."""
    rank: int = 0
    """Of this process among those of the run, from 0; the first keeps the run."""
    world: int = 1
    """Processes of the run."""

    @property
    def kind(self) -> str:
        """ "cuda", "mps" or "cpu"."""
        return self.device.type

    @property
    def runs_ahead(self) -> bool:
        """Whether the device works while the program goes on, so that reading a tensor waits."""
        return self.kind != "cpu"


@dataclass(frozen=True)
class Batch:
    """The windows of one step, or a part of them."""

    step: int
    """The optimizer step that they belong to, from 1."""
    starts: np.ndarray[Any, np.dtype[np.int64]]
    """(B,) int64, on the host: first token of each of the B windows, counted from the start of the
    training split."""
    tokens: Tensor
    """(B, block_size + 1) int64: token ids, on the host or, where a source put them there, on the
    device; there reading them waits."""


class Windows(Protocol):
    """Which tokens each step sees: pure, picklable, the same for every loader."""

    @property
    def tokens(self) -> np.ndarray[Any, np.dtype[np.integer[Any]]]:
        """(n,) the whole training split, uint16 or uint32, perhaps memory-mapped."""

    @property
    def block_size(self) -> int:
        """A window is `block_size + 1` tokens."""

    def starts(self, step: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(B,) first token of each window of `step` (from 1)."""

    def read(self, step: int) -> Batch:
        """The windows of `step`, on the host."""


class Source(Protocol):
    """Yields the windows of one step after another. Its cursor is all the state it has.

    A plugin may work around the source it is given, or make another from `windows`.
    """

    @property
    def windows(self) -> Windows:
        """What each step sees."""

    step: int
    """The step whose windows come next, from 1."""

    def next(self) -> Batch:
        """The windows of `self.step`, which then moves on by one."""

    def seek(self, step: int) -> None:
        """Continue with the windows of `step`."""

    def close(self) -> None:
        """Stop threads and processes, close files. A second call does nothing."""


class Stepper(Protocol):
    """The way from a loss to an update."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` (a scalar) to the parameters' `.grad`."""

    def unscale(self, optimizer: Optimizer) -> None:
        """Make `.grad` the true gradient, before clipping."""

    def step(self, optimizer: Optimizer) -> bool:
        """Update the parameters. False: this update was skipped and nothing changed."""

    def skip(self, optimizer: Optimizer) -> None:
        """Called in place of `step` where a plugin wants the update left out."""


@dataclass(frozen=True)
class Parts:
    """What a run is made of, once everything is built."""

    profile: Profile
    """After every `configure`."""
    machine: Machine
    """The device that the run is on."""
    raw_model: nn.Module
    """The GPT itself; its parameters, on the device, are those that are saved. Reading one
    waits."""
    model: nn.Module
    """After every `wrap_model`; what the loop calls."""
    optimizer: Optimizer
    """The one that some plugin built, or else torch's AdamW. Its groups' `lr` are set before every
    update to the schedule's share of their `initial_lr`, the peak."""
    source: Source
    """After every `wrap_source`; at the windows of the first step to come."""


@dataclass(frozen=True)
class Update:
    """An update that is about to be made."""

    step: int
    """The optimizer step that it would end, from 1."""
    loss: Tensor
    """Scalar float32 on the device: mean over the target tokens of the step, in nats per token.
    Reading it waits for the device."""
    grad_norm: Tensor
    """Scalar float32 on the device: L2 norm of the gradient of all parameters, before clipping.
    Reading it waits for the device."""


@dataclass(frozen=True)
class Stepped:
    """A finished optimizer step."""

    step: int
    """Which one, from 1."""
    steps: int
    """Optimizer steps of the whole run."""
    loss: Tensor
    """Scalar float32 on the device: mean over the target tokens of the step, in nats per token,
    before the update. Reading it waits for the device."""
    grad_norm: Tensor
    """Scalar float32 on the device: L2 norm of the gradient of all parameters, before clipping.
    Reading it waits for the device."""
    learning_rate: float
    """Of the step, by the schedule: the peak of the profile times the schedule's share."""
    tokens: int
    """Target tokens in the step."""
    committed: bool
    """False: the update was skipped, by the stepper or because a plugin wanted it."""


@dataclass(frozen=True)
class Evaluated:
    """A finished evaluation."""

    step: int
    """The optimizer step after which it was made, from 1."""
    loss: float
    """Mean over the target tokens of `val` that were scored, in nats per token; read already."""
    tokens: int
    """Target tokens scored."""
    best: bool
    """Whether the loss is the lowest of the run so far."""
    seconds: float
    """Wall time that it took, in seconds."""


class Context:
    """What `setup` may do: each way to change something outside the plugin undoes it at the end."""

    profile: Profile
    """After every `configure`."""
    machine: Machine
    """The device that the run is on."""

    def __init__(
        self,
        profile: Profile,
        machine: Machine,
        *,
        undo: ExitStack,
        note: Callable[[str], None],
    ) -> None:
        self.profile = profile
        self.machine = machine
        self._undo = undo
        self._note = note

    def setattr(self, owner: object, name: str, value: object) -> None:
        """Set an attribute until the run ends, as in `setattr(torch.backends.cudnn, ...)`."""
        before = getattr(owner, name)
        self._undo.callback(setattr, owner, name, before)
        setattr(owner, name, value)

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Enter a context that is left when the run ends."""
        return self._undo.enter_context(manager)

    def undo(self, call: Callable[[], object]) -> None:
        """Have `call` run when the run ends; write it beside what it undoes."""
        self._undo.callback(call)

    def note(self, line: str) -> None:
        """Tell the user something in one line: a choice made, a feature left off and why."""
        self._note(line)


class Plugin:
    """One optimization or observer. Subclass it, override hooks, register it as an entry point.

    The entry point goes into the group `gptfast.plugins`; its name is the plugin's name in a
    profile. The constructor stores the options and does nothing else.
    """

    summary: ClassVar[str] = ""
    """One line: what it does."""
    stage: ClassVar[Stage] = Stage.OUTER
    claim: ClassVar[Claim] = Claim.RECIPE
    tolerance: ClassVar[float] = 0.0
    """Largest relative difference from the baseline's loss that keeps the claim; 0: equal bits."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Plugins that must be on too; those of the same stage come before this one."""
    conflicts: ClassVar[tuple[str, ...]] = ()
    """Plugins that must be off."""
    tries: ClassVar[Tries | None] = None
    """What `gptfast tune` may try of a plugin that is there to make steps faster. None: it is there
    for something else and stays as the profile has it. So does every recipe."""
    Options: ClassVar[type[BaseModel]] = Options

    def __init__(self, options: Any) -> None:
        self.options = options

    # setup -------------------------------------------------------------------------------

    def supports(self, machine: Machine) -> Support:
        """Whether it works here, found out by a tiny real launch where a launch can fail."""
        return Support.yes()

    def pays(self, steps: int, payback: Payback | None) -> Support | None:
        """Whether its start pays in a run of `steps` steps. None: not a question here.

        Asked by a training alone, before `supports`, and not where the plugin was asked for by
        name; a resumed run keeps the answer that it began with. `payback` is what is known.
        """
        return None

    def configure(self, profile: Profile) -> Profile:
        """Transform, pure, before anything is built. `profile.model.vocab_size` is known."""
        return profile

    def setup(self, context: Context) -> None:
        """Scope: process-wide switches, through `context` so that they are undone."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Transform, before the optimizer exists. The names of the parameters stay.

        Also called for evaluation and generation without training, where `ready` is not.
        """
        return model

    def build_optimizer(self, model: nn.Module, profile: Profile) -> Optimizer | None:
        """Owner: the optimizer. None: not this plugin's job."""
        return None

    def build_stepper(self) -> Stepper | None:
        """Owner: backward, unscale, step. None: not this plugin's job."""
        return None

    def wrap_source(self, source: Source) -> Source:
        """Transform: another way to the same windows."""
        return source

    def ready(self, parts: Parts) -> None:
        """Observer, once, when everything is built and resumed, before the first step."""

    # step --------------------------------------------------------------------------------

    def micro_scope(self, last: bool) -> AbstractContextManager[object]:
        """Scope: forward and backward of one micro-batch; `last` of its step or not."""
        return nullcontext()

    def forward_scope(self) -> AbstractContextManager[object]:
        """Scope: the forward pass, in training and in evaluation."""
        return nullcontext()

    def recover(self, error: BaseException, profile: Profile) -> Profile | None:
        """Owner: a profile to repeat the step with, before anything was committed. None: no idea.

        Only `train.micro_batch` may change. The same windows are seen again, and the same random
        numbers of torch. Where none has an idea, the trainer halves the micro-batch after an
        out-of-memory error.
        """
        return None

    def before_step(self, event: Update) -> Want:
        """Observer, before every update, when loss and gradient are known; may want SKIP."""
        return Want.NOTHING

    def step(self, event: Stepped) -> Want:
        """Observer, after every optimizer step."""
        return Want.NOTHING

    def agree(self, stop: bool) -> bool | None:
        """Owner, after every step of a run of several processes: whether any of them is to stop.

        None: not this plugin's job.
        """
        return None

    def eval_scope(self) -> AbstractContextManager[object]:
        """Scope: an evaluation or a sample; weights may be swapped inside."""
        return nullcontext()

    def evaluated(self, event: Evaluated) -> Want:
        """Observer, after every evaluation."""
        return Want.NOTHING

    def metrics(self) -> Mapping[str, float | Tensor]:
        """Observer, at logged steps alone: numbers for the log, each under a name without a dot.

        They are logged as `PLUGIN.NAME`. A tensor has one element and is read here, where the
        device is waited for anyway. What is not finite is null in `metrics.jsonl`.
        """
        return {}

    # teardown ----------------------------------------------------------------------------

    def teardown(self) -> None:
        """Scope: last words. Once, in reverse order, also after an error or a signal."""

    # always ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: tensors, numbers, strings, lists and dicts of them."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave, tensors on the CPU. Before `ready`, after `wrap_model`."""
