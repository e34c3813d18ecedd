"""torch.compile: the model's forward and backward pass as a few fused kernels.

What: the model is compiled where it stands, once for training and once for evaluation. Text is
written by the plain model: a cache grows by a token each time, and every length would be compiled
anew. With `optimizer`, the update is compiled too; its learning rate becomes a tensor, because a
Python number that changes would be compiled anew at each step.
On a CPU in float32 loss and gradients are one graph (`joint`), without autograd's hand-over between
two in Python, and called from C++; where a gradient cannot be had so (activation checkpointing,
torch's chunked loss) there are two, which is said. GELU's tanh is computed by way of exp.
Helps: everywhere a compiler works, most on GPUs and with small layers.
Costs: half a minute to some minutes at the first step and again at the first evaluation. The
modes "reduce-overhead" and "max-autotune" replay CUDA graphs: what the host would launch one by one
it launches as a whole, which helps where a step is short and the host cannot keep up. torch copies
each batch to where the graph reads it; losses, and gradients that more are added to, are copied out
of what the next replay overwrites. They keep more memory.
On a CPU the compiled sums are made in one order, so that two runs are equal bit for bit; no cost of
that was seen (40.0 against 40.8 ms a step). On GPUs it may cost, and is left as torch has it.
Claim: rounding, within 0.5 % of the baseline's loss: fused sums are made in another order. With
dropout, other random numbers are drawn.

A machine without a compiler, or whose cache folder cannot be written, is found out by compiling a
line before anything is loaded.

Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html;
https://docs.pytorch.org/docs/stable/generated/torch.func.grad_and_value.html
"""

# Over 400 lines: a plugin is one module, which imports no other.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

from gptfast.plugin import (
    Claim,
    Context,
    GptfastError,
    Machine,
    Options,
    Parts,
    Payback,
    Plugin,
    Refused,
    Stage,
    Support,
    Tries,
    with_gradients,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
LEAST_STEPS = 10_000
"""Steps from which `auto` compiles where nobody has measured what it brings: the smallest model
("char-small", 2 cores of a Xeon) waited 23 s for 2.3 ms a step. Larger ones pay sooner."""
GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes that replay CUDA graphs, which write their results to the same memory each time."""


class JointLoss:
    """A model's loss and its gradients as one compiled graph, with no autograd in between.

    Two graphs hand all that is kept for the second over in Python, which on a small model is a good
    part of a step, and in which threads wait for each other.

    Args:
        plain: the model's own forward, from (model, tokens, targets) to the summed loss.
        note: told once where the model cannot be had this way.
    """

    def __init__(
        self,
        model: nn.Module,
        plain: Callable[..., Tensor],
        compiler: Compiler,
        note: Callable[[str], None],
    ) -> None:
        from torch.func import grad_and_value

        whole = with_forward(model, plain)
        named = {name: p for name, p in whole.named_parameters() if p.requires_grad}
        self._model = model
        self._parameters = list(named.values())
        self._plain = grad_and_value(partial(loss_at, whole, list(named)))
        self._compiled = compiler(self._plain)
        self._note = note
        self._is_functional: bool | None = None

    def serves(self, model: nn.Module) -> bool:
        """Whether this call of `model`, perhaps a copy, is one in float32 that wants gradients."""
        import torch

        return (
            model is self._model
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )

    def __call__(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor | None:
        """The summed loss, scalar; None where the gradient is not one that this can follow."""
        import torch

        with torch.no_grad():
            if self._is_functional is None:
                self._is_functional = self._tried(tokens_BT[:1], targets_BT[:1])
            if not self._is_functional:
                return None
            gradients, loss = self._compiled(self._parameters, tokens_BT, targets_BT)
        return with_gradients(loss, gradients, self._parameters)

    def _tried(self, tokens_BT: Tensor, targets_BT: Tensor) -> bool:
        """Found out without the compiler, which does not clean up behind such a failure."""
        import torch

        try:
            with torch.random.fork_rng(devices=()):
                self._plain(self._parameters, tokens_BT, targets_BT)
        except RuntimeError as error:
            self._note(f"compile: forward and backward are two graphs here: {explain(error)}")
            return False
        return True


def with_forward(model: nn.Module, plain: Callable[..., Tensor]) -> nn.Module:
    """A module around `model`, whose own `forward` may be another by now, that calls `plain`."""
    from torch import nn

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
            return plain(self.model, tokens_BT, targets_BT)

    return Whole()


def loss_at(
    whole: nn.Module,
    names: Sequence[str],
    parameters: Sequence[Tensor],
    tokens_BT: Tensor,
    targets_BT: Tensor,
) -> Tensor:
    """The loss as a function of the parameters."""
    from torch.func import functional_call

    named = dict(zip(names, parameters, strict=True))
    loss: Tensor = functional_call(whole, named, (tokens_BT, targets_BT))
    return loss


def compile_loss(
    model: nn.Module,
    compiler: Compiler,
    *,
    jointly: Callable[[Callable[..., Tensor]], JointLoss] | None = None,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Have `compiler` compile `model(tokens, targets)`; without targets the model stays plain.

    Not by `model.compile()`, which would compile the calls with a growing cache as well.

    Args:
        jointly: makes of the plain forward what is called instead, wherever it serves.
        begin: called before each compiled forward pass.
    """
    plain = model.forward.__func__ if isinstance(model.forward, MethodType) else type(model).forward
    compiled = compiler(plain)
    joint = jointly(plain) if jointly is not None else None

    def forward(
        self: nn.Module, tokens_BT: Tensor, targets_BT: Tensor | None = None, **rest: Any
    ) -> Any:
        if targets_BT is None:
            return plain(self, tokens_BT, **rest)
        from torch._dynamo.exc import TorchDynamoException

        try:
            if joint is not None and joint.serves(self):
                loss = joint(tokens_BT, targets_BT)
                if loss is not None:
                    return loss
            begin()
            # A CUDA graph writes each loss to one place; an evaluation keeps many.
            return compiled(self, tokens_BT, targets_BT).clone()
        except (TorchDynamoException, OSError) as error:
            raise GptfastError(
                f"plugin compile: torch.compile failed on the model: {explain(error)}: "
                "use --without compile"
            ) from error

    # A bound method, so that a deep copy of the model gets one bound to the copy.
    model.forward = MethodType(forward, model)


@contextmanager
def own_gradients(model: nn.Module) -> Iterator[None]:
    """On leaving, gradients are copied out of what the next replay of a CUDA graph overwrites."""
    yield
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def compile_step(optimizer: Optimizer, compiler: Compiler) -> None:
    """Have `compiler` compile `optimizer.step`, with rates that change without compiling anew."""
    import torch

    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]))
    # On the instance: the class is everybody's.
    optimizer.step = compiler(optimizer.step)  # type: ignore[method-assign]


def order_sums(context: Context) -> None:
    """Have compiled kernels add in one order until the run ends, so that it can be repeated.

    On a CPU, inductor otherwise lets its threads add the embedding's gradient as they come.
    Source: torch.use_deterministic_algorithms.
    """
    import torch

    before = torch.get_deterministic_debug_mode()
    context.undo(lambda: torch.set_deterministic_debug_mode(before))
    torch.use_deterministic_algorithms(True)
    # Of no use here, and a write to every new tensor.
    context.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


def cpu_options(mode: str, *, cpp_wrapper: bool) -> dict[str, Any]:
    """What inductor is told on a CPU: what `mode` stands for, and tanh by way of exp.

    torch's own vector tanh takes 1.5 times as long, and GPT-2's GELU is one. The other is within
    1e-7 of it; only where tanh itself is as small as that does it lose digits.
    """
    import torch

    modes = torch._inductor.list_mode_options(mode)
    return {**modes, "cpp.use_decompose_tanh": True, "cpp_wrapper": cpp_wrapper}


def worth(steps: int, payback: Payback | None, *, least_steps: int) -> Support:
    """Whether compiling pays in a run of `steps` steps, and in words after how many it does."""
    if payback is None:
        reason = (
            "after how many steps compiling pays here is not known, gptfast bench finds out; with "
            f'when = "auto" it is on from {least_steps:,} steps'
        )
        return Support(steps >= least_steps, reason)
    if payback.after_steps is None:
        return Support.no("bench found no step faster with it here")
    reason = f"compiling pays after {payback.after_steps:,} steps here, as bench found"
    return Support(steps > payback.after_steps, f"{reason}; this run has {steps:,}")


def explain(error: Exception) -> str:
    """One line of what went wrong in the compiler, which buries it in several."""
    cause = getattr(error, "inner_exception", error)
    if isinstance(cause, OSError) and cause.filename:
        return (
            f"{cause.filename}: {cause.strerror}: set TORCHINDUCTOR_CACHE_DIR to a folder "
            "that you can write"
        )
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"


class CompileOptions(Options):
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = (
        "default"
    )
    """torch.compile's mode: how long it tries, and whether CUDA graphs are replayed."""
    backend: str = "inductor"
    """torch.compile's backend; "aot_eager" and "eager" generate no code."""
    fullgraph: bool = True
    """Stop where a part of the model cannot be compiled, instead of leaving it plain."""
    dynamic: bool = False
    """Compile once for sizes that change. Here they do not."""
    optimizer: bool = False
    """Compile the optimizer's update too."""
    joint: bool = True
    """On a CPU in float32: loss and gradients as one graph, called from C++."""
    when: Literal["always", "auto"] = "always"
    """"auto" leaves a training plain that is too short to pay for the compiler: see `least_steps`.
    `--plugin compile` compiles all the same."""
    least_steps: int = LEAST_STEPS
    """Steps from which "auto" compiles where `bench` has not measured the payback here."""
    required: bool = False
    """Refuse to run where nothing can be compiled, even in a profile that skips what it may."""


class Compile(Plugin):
    summary = "Forward and backward as fused kernels by torch.compile"
    stage = Stage.COMPILE
    claim = Claim.ROUNDING
    tolerance = 5e-3
    tries = Tries(mode=("default", "reduce-overhead", "max-autotune"), optimizer=(False, True))
    Options = CompileOptions

    _model: nn.Module
    _is_on_cpu = False
    _worth: Support | None = None
    """Whether it pays in this training; None once its first pass is over, or nobody asked."""

    def pays(self, steps: int, payback: Payback | None) -> Support | None:
        self._worth = worth(steps, payback, least_steps=self.options.least_steps)
        return self._worth if self.options.when == "auto" else None

    def supports(self, machine: Machine) -> Support:
        try:
            self._trial(machine)
        except (RuntimeError, OSError, ImportError) as error:
            reason = f"a trial compilation failed: {explain(error)}"
            if self.options.required:
                raise Refused(
                    f"plugin compile is required and {reason}: repair it, set "
                    "plugins.compile.required = false or use --without compile"
                ) from error
            return Support.no(reason)
        return Support.yes(self.options.backend)

    def setup(self, context: Context) -> None:
        import torch

        # What this run compiled holds its model, and counts against torch's limit of versions.
        context.undo(torch.compiler.reset)
        self._note = context.note
        self._is_on_cpu = context.machine.kind == "cpu"
        self._is_joint = self.options.joint and self._is_on_cpu
        if self._is_on_cpu:
            order_sums(context)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        import torch

        # Without it torch guesses where an iteration ends, and takes an update compiled too for
        # the next one, in which the gradients' memory is free. Source: the function's own page.
        begin = torch.compiler.cudagraph_mark_step_begin if self._replays else lambda: None
        self._model = model
        compile_loss(
            model, self._compiled, jointly=self._jointly if self._is_joint else None, begin=begin
        )
        return model

    def _jointly(self, plain: Callable[..., Tensor]) -> JointLoss:
        # Called from C++, other threads run meanwhile.
        compiler = partial(self._compiled, cpp_wrapper=True)
        return JointLoss(self._model, plain, compiler, self._note)

    def micro_scope(self, last: bool) -> AbstractContextManager[object]:
        scope = own_gradients(self._model) if self._replays and not last else nullcontext()
        if self._worth is None:
            return scope
        worth, self._worth = self._worth, None
        return self._compiling(scope, worth)

    def ready(self, parts: Parts) -> None:
        if self.options.optimizer:
            # Not "fullgraph": torch's optimizers open a profiler range, which breaks the graph.
            compile_step(parts.optimizer, lambda step: self._compiled(step, fullgraph=False))

    @contextmanager
    def _compiling(self, scope: AbstractContextManager[None], worth: Support) -> Iterator[None]:
        """Around the first pass, nearly all of which is the compiler's."""
        start = time.perf_counter()
        with scope:
            yield
        seconds = time.perf_counter() - start
        self._note(f"compile: the first pass took {seconds:.1f} s; {worth.reason}")

    @property
    def _replays(self) -> bool:
        return self.options.mode in GRAPH_MODES

    def _compiled(
        self,
        function: Callable[..., Any],
        *,
        fullgraph: bool | None = None,
        cpp_wrapper: bool = False,
    ) -> Callable[..., Any]:
        import torch

        options = self.options
        how: dict[str, Any] = {"mode": options.mode}
        if self._is_on_cpu and options.backend == "inductor":
            how = {"options": cpu_options(options.mode, cpp_wrapper=cpp_wrapper)}
        compiled: Callable[..., Any] = torch.compile(
            function,
            backend=options.backend,
            fullgraph=options.fullgraph if fullgraph is None else fullgraph,
            dynamic=options.dynamic,
            **how,
        )
        return compiled

    def _trial(self, machine: Machine) -> None:
        import warnings

        import torch

        def line(x: Tensor) -> Tensor:
            return (x.sin() + 1).sum()

        with warnings.catch_warnings():
            # torch's compiler uses on import what torch itself calls deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._compiled(line)(torch.zeros(8, 8, device=machine.device))
        if self.options.backend == "inductor":
            from tempfile import TemporaryFile

            from torch._inductor.runtime.cache_dir_utils import cache_dir

            # Somebody else's warm cache can be read, and then the model's own code not be written.
            with TemporaryFile(dir=cache_dir()):
                pass
