"""Calls the plugins' hooks: folds transforms, finds the one owner, surrounds with scopes, asks
observers. An error in a hook names the plugin and the hook. A hook that no plugin overrides costs
an attribute look-up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from numbers import Real
from traceback import walk_tb
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from gptfast.errors import GptfastError, Refused
from gptfast.host.plain import ALLOWED, not_plain
from gptfast.host.registry import Enabled
from gptfast.plugin import (
    Context,
    Evaluated,
    Machine,
    Parts,
    Plugin,
    Profile,
    Source,
    Stepped,
    Stepper,
    Update,
    Want,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

T = TypeVar("T")
CORE = __name__.partition(".")[0]
NO_SCOPE: AbstractContextManager[object] = nullcontext()


class Hooks:
    """The enabled plugins in their order. A context: leaving it takes every plugin down once."""

    def __init__(self, enabled: Sequence[Enabled], *, note: Callable[[str], None]) -> None:
        self.enabled = tuple(enabled)
        self._note = note
        self._begun: list[tuple[Enabled, ExitStack]] = []
        overriding = {
            hook: tuple(e for e in self.enabled if _overrides(e.plugin, hook))
            for hook in vars(Plugin)
            if not hook.startswith("_") and callable(getattr(Plugin, hook))
        }
        self._configure = overriding["configure"]
        self._wrap_model = overriding["wrap_model"]
        self._build_optimizer = overriding["build_optimizer"]
        self._build_stepper = overriding["build_stepper"]
        self._wrap_source = overriding["wrap_source"]
        self._ready = overriding["ready"]
        self._micro_scope = overriding["micro_scope"]
        self._forward_scope = overriding["forward_scope"]
        self._recover = overriding["recover"]
        self._before_step = overriding["before_step"]
        self._step = overriding["step"]
        self._agree = overriding["agree"]
        self._eval_scope = overriding["eval_scope"]
        self._evaluated = overriding["evaluated"]
        self._metrics = overriding["metrics"]
        self._load_state = overriding["load_state"]

    def __enter__(self) -> Hooks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Last words and undoing, in reverse order; the first error is the one that is raised.

        Where a plugin's code raised it, as what it hung on the model does, that plugin is named.
        """
        first = self._traced(error) or error
        while self._begun:
            enabled, undo = self._begun.pop()
            for name, last in (("teardown", enabled.plugin.teardown), ("setup's undo", undo.close)):
                try:
                    with blame(enabled, name):
                        last()
                except GptfastError as failure:
                    if first is None:
                        first = failure
                    else:
                        self._note(f"while stopping: {failure}")
        if first is not None and first is not error:
            raise first

    def _traced(self, error: BaseException | None) -> GptfastError | None:
        """The error as that of the plugin whose code raised it; None: no single plugin's did.

        Of several plugins in one module it is the one in whose class the code stands.
        """
        if not isinstance(error, Exception) or isinstance(error, GptfastError):
            return None
        for frame, _ in reversed(list(walk_tb(error.__traceback__))):
            module = frame.f_globals.get("__name__", "")
            if module.partition(".")[0] == CORE:
                break
            owners = [e for e in self.enabled if type(e.plugin).__module__ == module]
            if len(owners) > 1:
                owners = [e for e in owners if _wrote(e.plugin, frame.f_code)]
            if len(owners) == 1:
                blamed = _blamed(owners[0], frame.f_code.co_name, error)
                blamed.__cause__ = error
                return blamed
        return None

    # setup -------------------------------------------------------------------------------

    def configure(self, profile: Profile) -> Profile:
        return _fold("configure", self._configure, profile, lambda p, value: p.configure(value))

    def setup(self, profile: Profile, machine: Machine) -> None:
        for enabled in self.enabled:
            undo = ExitStack()
            # Before the call: a setup that fails half-way is undone too.
            self._begun.append((enabled, undo))
            with blame(enabled, "setup"):
                enabled.plugin.setup(Context(profile, machine, undo=undo, note=self._note))

    def wrap_model(self, model: nn.Module) -> nn.Module:
        return _fold("wrap_model", self._wrap_model, model, lambda p, value: p.wrap_model(value))

    def build_optimizer(self, model: nn.Module, profile: Profile) -> Optimizer | None:
        return _own(
            "build_optimizer", self._build_optimizer, lambda p: p.build_optimizer(model, profile)
        )

    def build_stepper(self) -> Stepper | None:
        return _own("build_stepper", self._build_stepper, lambda p: p.build_stepper())

    def wrap_source(self, source: Source) -> Source:
        return _fold(
            "wrap_source", self._wrap_source, source, lambda p, value: p.wrap_source(value)
        )

    def ready(self, parts: Parts) -> None:
        for enabled in self._ready:
            with blame(enabled, "ready"):
                enabled.plugin.ready(parts)

    # step --------------------------------------------------------------------------------

    def micro_scope(self, last: bool) -> AbstractContextManager[object]:
        if not self._micro_scope:
            return NO_SCOPE
        return _surround("micro_scope", self._micro_scope, lambda p: p.micro_scope(last))

    def forward_scope(self) -> AbstractContextManager[object]:
        if not self._forward_scope:
            return NO_SCOPE
        return _surround("forward_scope", self._forward_scope, lambda p: p.forward_scope())

    def recover(self, error: BaseException, profile: Profile) -> Profile | None:
        return _own("recover", self._recover, lambda p: p.recover(error, profile))

    def before_step(self, event: Update) -> Want:
        return _ask("before_step", self._before_step, lambda p: p.before_step(event))

    def step(self, event: Stepped) -> Want:
        return _ask("step", self._step, lambda p: p.step(event))

    @property
    def can_agree(self) -> bool:
        """Whether a plugin joins this process to others."""
        return bool(self._agree)

    def agree(self, stop: bool) -> bool | None:
        return _own("agree", self._agree, lambda p: p.agree(stop))

    def eval_scope(self) -> AbstractContextManager[object]:
        return _surround("eval_scope", self._eval_scope, lambda p: p.eval_scope())

    def evaluated(self, event: Evaluated) -> Want:
        return _ask("evaluated", self._evaluated, lambda p: p.evaluated(event))

    def metrics(self) -> dict[str, float]:
        """The plugins' numbers, as `PLUGIN.NAME`. Waits for the device where one is a tensor."""
        values: dict[str, float] = {}
        for enabled in self._metrics:
            with blame(enabled, "metrics"):
                answer: object = enabled.plugin.metrics()
                if not isinstance(answer, Mapping):
                    raise TypeError(f"{answer!r} is no mapping of names to numbers")
                for name, value in answer.items():
                    values[f"{enabled.name}.{_metric_name(name)}"] = _number(name, value)
        return values

    # always ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Package, version, options and state of each plugin, under its name.

        Raises:
            GptfastError: a plugin's state cannot be made or cannot be saved.
        """
        states = {}
        for enabled in self.enabled:
            with blame(enabled, "state"):
                state = enabled.plugin.state()
                if fault := not_plain(state, "state()"):
                    raise GptfastError(
                        f"plugin {enabled.name} ({enabled.package} {enabled.version}): {fault}, "
                        f"which no checkpoint can hold; it may hold {ALLOWED}: report it to its "
                        f"authors or use --without {enabled.name}"
                    )
                states[enabled.name] = {
                    "package": enabled.package,
                    "version": enabled.version,
                    "options": enabled.plugin.options.model_dump(mode="json"),
                    "state": state,
                }
        return states

    @property
    def have_state(self) -> bool:
        """Whether any plugin takes a state back."""
        return bool(self._load_state)

    def load_state(self, states: dict[str, Any]) -> list[str]:
        """Give each plugin its state back; returns the plugins that have none in `states`."""
        missing = []
        for enabled in self.enabled:
            if enabled.name not in states:
                missing.append(enabled.name)
                continue
            with blame(enabled, "load_state"):
                enabled.plugin.load_state(states[enabled.name]["state"])
        return missing


@contextmanager
def blame(enabled: Enabled, hook: str) -> Iterator[None]:
    """An error inside is the plugin's: say so in one line and keep the original message."""
    try:
        yield
    except GptfastError:
        raise
    except Exception as error:  # foreign code may raise anything
        raise _blamed(enabled, hook, error) from error


def _blamed(enabled: Enabled, hook: str, error: Exception) -> GptfastError:
    return GptfastError(
        f"plugin {enabled.name} ({enabled.package} {enabled.version}) failed in {hook}: "
        f"{type(error).__name__}: {error}: report it to its authors or use --without {enabled.name}"
    )


def _wrote(plugin: Plugin, code: CodeType) -> bool:
    """Whether code stands within the class of a plugin."""
    try:
        lines, first = inspect.getsourcelines(type(plugin))
    except (OSError, TypeError):  # without its source, or typed in
        return False
    return first <= code.co_firstlineno < first + len(lines)


def _overrides(plugin: Plugin, hook: str) -> bool:
    return getattr(type(plugin), hook) is not getattr(Plugin, hook)


def _metric_name(name: object) -> str:
    if not isinstance(name, str) or not name or "." in name:
        raise ValueError(f"{name!r} is no name of a metric: a text without a dot is")
    return name


def _number(name: str, value: object) -> float:
    from torch import Tensor

    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Real):
        raise TypeError(f"{name} is neither a number nor a tensor of one element: {value!r}")
    return float(value)


def _fold(hook: str, chain: Sequence[Enabled], value: T, call: Callable[[Plugin, T], T]) -> T:
    for enabled in chain:
        with blame(enabled, hook):
            value = call(enabled.plugin, value)
    return value


def _own(hook: str, chain: Sequence[Enabled], call: Callable[[Plugin], T | None]) -> T | None:
    owner: tuple[Enabled, T] | None = None
    for enabled in chain:
        with blame(enabled, hook):
            answer = call(enabled.plugin)
        if answer is None:
            continue
        if owner is not None:
            raise Refused(
                f"plugins {owner[0].name} and {enabled.name} both do {hook}, which one may do: "
                f"switch one off, as with --without {enabled.name}"
            )
        owner = (enabled, answer)
    return owner[1] if owner is not None else None


@contextmanager
def _surround(
    hook: str,
    chain: Sequence[Enabled],
    call: Callable[[Plugin], AbstractContextManager[object]],
) -> Iterator[None]:
    with ExitStack() as stack:
        for enabled in chain:
            with blame(enabled, hook):
                stack.enter_context(call(enabled.plugin))
        yield


def _ask(hook: str, chain: Sequence[Enabled], call: Callable[[Plugin], Want]) -> Want:
    want = Want.NOTHING
    first: GptfastError | None = None
    for enabled in chain:
        try:
            with blame(enabled, hook):
                answer = call(enabled.plugin)
                if not isinstance(answer, Want):
                    raise GptfastError(
                        f"plugin {enabled.name} ({enabled.package} {enabled.version}): {hook} "
                        f"returned {answer!r}, where a Want is asked for, as Want.NOTHING: report "
                        f"it to its authors or use --without {enabled.name}"
                    )
                want |= answer
        except GptfastError as error:
            # The others hear of it too, so that what they count agrees in a checkpoint made now.
            first = first or error
    if first is not None:
        raise first
    return want
