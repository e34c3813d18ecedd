"""What `tune` may change of a profile, from what the plugins themselves declare worth trying.

Pure: a move takes a profile and gives another, or None where there is nothing to change by now.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from typing import Protocol as Interface

from pydantic import ValidationError

from gptfast.device.memory import micro_batches
from gptfast.errors import Refused
from gptfast.host.registry import Found
from gptfast.plugin import Claim, Plugin, Profile, Tries

Classes = Mapping[str, type[Plugin]]
"""All plugins that can be tried, by name."""
MICRO_BATCH = "train.micro_batch"
BEFORE = "profile tuned before"
SMALLEST_SHARE = 8
"""Micro-batches are tried down to this part of a batch; smaller ones only where memory asks."""


class Apply(Interface):
    def __call__(self, profile: Profile, /) -> Profile | None: ...


@dataclass(frozen=True)
class Move:
    """One change that is tried."""

    what: str
    """In words, as "without NAME" or "NAME.OPTION = VALUE"."""
    key: str
    """What of the profile it changes, dotted."""
    apply: Apply
    plugin: str | None = None
    """Whose claim it puts to the test, because it switches that on or sets it."""
    leaves_out: bool = False
    """Whether something is left out by it, which is right where that brings nothing."""


def classes_of(found: Mapping[str, Found], profile: Profile) -> Classes:
    """All plugins that load; a broken one that the profile does not name is left alone."""
    loaded = {}
    for name, one in found.items():
        try:
            loaded[name] = one.load()
        except Refused:
            if name in profile.plugins:
                raise
    return loaded


def tries(plugin: type[Plugin]) -> Tries | None:
    """What may be tried of a plugin. None: it stays as the profile has it."""
    return None if plugin.claim is Claim.RECIPE else plugin.tries


def moves(profile: Profile, classes: Classes) -> Iterator[Move]:
    """All that may be tried from a profile, what is likely to matter first.

    First each of its plugins is left out, so that what comes then is not slowed or hidden by it;
    then micro-batches, plugins that it does not name, and at last their options, which are many.
    """
    able = {name: may for name, plugin in classes.items() if (may := tries(plugin)) is not None}
    for name in profile.plugins:
        if name in able:
            apply = partial(without, name=name, classes=classes)
            yield Move(f"without {name}", f"plugins.{name}", apply, leaves_out=True)
    batch_size = profile.train.batch_size
    for windows in micro_batches(batch_size):
        if windows * SMALLEST_SHARE >= batch_size:
            apply = partial(with_micro_batch, windows=windows)
            yield Move(f"{MICRO_BATCH} = {windows}", MICRO_BATCH, apply)
    for name in able:
        if name not in profile.plugins:
            apply = partial(with_plugin, plugin=classes[name], name=name)
            yield Move(f"with {name}", f"plugins.{name}", apply, name)
    for name, may in able.items():
        for option, values in may.values.items():
            for value in values:
                what = f"{name}.{option} = {json.dumps(value)}"
                apply = partial(
                    with_option, plugin=classes[name], name=name, option=option, value=value
                )
                yield Move(what, f"plugins.{name}.{option}", apply, name)


def without(profile: Profile, *, name: str, classes: Classes) -> Profile | None:
    """A plugin left out, with those that require it, where all of them may be."""
    if name not in profile.plugins:
        return None
    gone = {name}
    while more := {n for n in profile.plugins if gone & set(classes[n].requires)} - gone:
        gone |= more
    if any(tries(classes[one]) is None for one in gone):
        return None
    return _with_plugins(profile, {n: o for n, o in profile.plugins.items() if n not in gone})


def with_plugin(profile: Profile, *, plugin: type[Plugin], name: str) -> Profile | None:
    """A plugin switched on as it comes, where it does without being told more."""
    if name in profile.plugins:
        return None
    try:
        plugin.Options()
    except ValidationError:
        return None
    return _with_plugins(profile, {**profile.plugins, name: {}})


def with_option(
    profile: Profile, *, plugin: type[Plugin], name: str, option: str, value: Any
) -> Profile | None:
    """An option of a plugin that is on set to another value."""
    if name not in profile.plugins:
        return None
    options = profile.plugins[name]
    field = plugin.Options.model_fields.get(option)
    if value == options.get(option, field.default if field else None):
        return None
    return _with_plugins(profile, {**profile.plugins, name: {**options, option: value}})


def with_micro_batch(profile: Profile, *, windows: int) -> Profile | None:
    """Another number of windows in a forward pass."""
    if profile.train.windows_per_micro == windows:
        return None
    return profile.replace({MICRO_BATCH: windows})


def as_before(known: Profile) -> Move:
    """To what an earlier search found."""

    def apply(profile: Profile, /) -> Profile | None:
        return None if equal(profile, known) else known

    return Move(BEFORE, "plugins", apply, leaves_out=True)


def equal(one: Profile, other: Profile) -> bool:
    """As far as `tune` may change them."""
    return (one.plugins, one.train.windows_per_micro) == (
        other.plugins,
        other.train.windows_per_micro,
    )


def like(start: Profile, other: Profile) -> Profile:
    """`start` with what `tune` may change as `other` has it."""
    return start.replace(
        {"plugins": dict(other.plugins), MICRO_BATCH: other.train.windows_per_micro}
    )


def same_task(one: Profile, other: Profile, classes: Classes) -> bool:
    """Whether two profiles train the same and differ at most by what `tune` may change."""
    return _task(one, classes) == _task(other, classes)


def _task(profile: Profile, classes: Classes) -> dict[str, Any]:
    kept = {n: o for n, o in profile.plugins.items() if n in classes and tries(classes[n]) is None}
    return {
        "model": profile.model.model_dump(exclude={"preset"}),
        "data": profile.data.model_dump(),
        "train": profile.train.model_dump(exclude={"micro_batch"}),
        "plugins": kept,
    }


def _with_plugins(profile: Profile, plugins: Mapping[str, Any]) -> Profile:
    return profile.replace({"plugins": dict(plugins)})
