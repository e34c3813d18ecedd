"""Finds the plugins, checks what a profile asks of them, orders them and explains the order.

Installed is not enabled: every package may register plugins in the entry-point group
`gptfast.plugins`; only those that a profile names are loaded and run. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from gptfast.errors import Refused
from gptfast.plugin import Machine, Plugin, Support
from gptfast.profile import Profile, faults, nearest

GROUP = "gptfast.plugins"
OURS = "gptfast"


@dataclass(frozen=True)
class Found:
    """A registered plugin, not yet imported."""

    name: str
    package: str
    version: str
    entry_point: EntryPoint
    rivals: tuple[str, ...] = ()
    """Other packages that registered the same name and are not used."""

    def load(self) -> type[Plugin]:
        """Import the class.

        Raises:
            Refused: the import fails or what it yields is not a plugin; names the package.
        """
        where = f"plugin {self.name} of package {self.package} {self.version}"
        target = self.entry_point.value
        try:
            loaded = self.entry_point.load()
        # Foreign code may raise anything on import; one broken package must not take
        # the other plugins down.
        except Exception as error:
            raise Refused(
                f"{where}: {target} cannot be imported ({type(error).__name__}: {error}): "
                f"reinstall or uninstall {self.package}"
            ) from error
        if not (isinstance(loaded, type) and issubclass(loaded, Plugin)):
            raise Refused(
                f"{where}: {target} is not a subclass of gptfast.plugin.Plugin: "
                f"update or uninstall {self.package}"
            )
        return loaded


@dataclass(frozen=True)
class Enabled:
    """A plugin that the profile switches on, built from its options."""

    name: str
    plugin: Plugin
    package: str
    version: str
    detail: str = ""
    """What `supports` said of this machine."""


@dataclass(frozen=True)
class Skipped:
    """A plugin that the profile names and this machine does not support."""

    name: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """What runs, in order, and what does not and why."""

    enabled: tuple[Enabled, ...]
    skipped: tuple[Skipped, ...]


def discover() -> dict[str, Found]:
    """All registered plugins by name. A built-in keeps its name against any other package."""
    packages: dict[Distribution | None, tuple[str, str]] = {None: ("unknown", "unknown")}
    candidates: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=GROUP):
        dist = entry_point.dist
        if dist is not None and dist not in packages:  # to ask it costs 2 ms
            packages[dist] = (dist.name, dist.version)
        candidates.setdefault(entry_point.name, []).append(entry_point)
    found = {}
    for name, rivals in sorted(candidates.items()):
        rivals.sort(key=lambda e: (packages[e.dist][0] != OURS, packages[e.dist][0]))
        first, *others = rivals
        package, version = packages[first.dist]
        theirs = dict.fromkeys(packages[other.dist][0] for other in others)
        found[name] = Found(
            name, package, version, first, tuple(other for other in theirs if other != package)
        )
    return found


def plan(
    profile: Profile,
    *,
    found: Mapping[str, Found] | None = None,
    origins: Mapping[str, str] | None = None,
) -> tuple[Enabled, ...]:
    """The profile's plugins, checked and in the order in which they run. Touches no device.

    Raises:
        Refused: a plugin is unknown, broken or given a wrong option; a requirement is off, a
            conflict on, or the requirements run in a circle.
    """
    found = discover() if found is None else found
    origins = origins or {}
    for name in profile.plugins:
        if name not in found:
            where = origins.get(f"plugins.{name}", f"profile {profile.name}")
            raise Refused(f"{where} plugin {name} is not installed: {nearest(name, found)}")
        rivals = found[name].rivals
        if rivals and found[name].package != OURS:
            raise Refused(
                f"plugin {name} is registered by {found[name].package} and {', '.join(rivals)}: "
                "uninstall all but one"
            )
    built = [_build(found[name], options, origins) for name, options in profile.plugins.items()]
    _check_relations(built)
    return order(built)


def order(built: Sequence[Enabled]) -> tuple[Enabled, ...]:
    """Sorted by (stage, what `requires` puts before it in its stage, profile order)."""
    placed: dict[str, Enabled] = {}
    by_name = {enabled.name: enabled for enabled in built}

    def place(enabled: Enabled) -> None:
        if enabled.name in placed:
            return
        for required in enabled.plugin.requires:
            other = by_name[required]
            if other.plugin.stage == enabled.plugin.stage:
                place(other)
        placed[enabled.name] = enabled

    for enabled in sorted(built, key=lambda e: e.plugin.stage):
        place(enabled)
    return tuple(placed.values())


def reasons(ordered: Sequence[Enabled]) -> list[str]:
    """Why each plugin stands where `order` put it, in words."""
    lines = []
    for enabled in ordered:
        same_stage = [e.name for e in ordered if e.plugin.stage == enabled.plugin.stage]
        why = f"stage {enabled.plugin.stage.name.lower()}"
        first = [name for name in enabled.plugin.requires if name in same_stage]
        if first:
            why += f", behind {', '.join(first)}, which it requires"
        elif len(same_stage) > 1:
            why += ", there in the profile's order"
        lines.append(why)
    return lines


def select(
    planned: Sequence[Enabled],
    machine: Machine,
    *,
    unsupported: str,
    asked: Sequence[str] = (),
    pays: Callable[[Enabled], Support | None] = lambda one: None,
) -> Selection:
    """Ask each plugin whether this machine supports it.

    Args:
        planned: as `plan` gave them.
        unsupported: "skip" leaves the unsupported out and says so; "stop" refuses.
        asked: names that must work whatever `unsupported` says, as of `--plugin`.
        pays: whether a plugin is worth its start; one that is not is left out first, whatever
            `unsupported` says.

    Raises:
        Refused: a plugin that may not be skipped is not supported here.
    """
    enabled: list[Enabled] = []
    skipped: list[Skipped] = []
    out: set[str] = set()
    for one in planned:
        missing = [name for name in one.plugin.requires if name in out]
        worth = pays(one)
        if worth is not None and not worth.ok and one.name not in asked:
            skipped.append(Skipped(one.name, worth.reason))
            out.add(one.name)
            continue
        if missing:
            reason = f"needs {', '.join(missing)}, which is skipped"
        else:
            try:
                support = one.plugin.supports(machine)
            except Refused:  # its options say that it may not be skipped
                raise
            except Exception as error:  # a foreign probe may fail in any way: that is a no
                reason = f"its probe failed ({type(error).__name__}: {error})"
            else:
                if support.ok:
                    enabled.append(
                        Enabled(one.name, one.plugin, one.package, one.version, support.reason)
                    )
                    continue
                reason = support.reason
        if unsupported == "stop" or one.name in asked:
            raise Refused(
                f"plugin {one.name} is not supported on {machine.name} ({machine.kind}): {reason}: "
                f"switch it off with --without {one.name}"
            )
        skipped.append(Skipped(one.name, reason))
        out.add(one.name)
    return Selection(tuple(enabled), tuple(skipped))


def shadowed(found: Mapping[str, Found]) -> list[str]:
    """One warning for each name that a second package tried to take."""
    return [
        f"plugin {one.name}: {', '.join(one.rivals)} registers this name too; "
        f"{one.package}'s own is used"
        for one in found.values()
        if one.rivals
    ]


def _build(found: Found, options: Mapping[str, Any], origins: Mapping[str, str]) -> Enabled:
    plugin_class = found.load()
    table = f"plugins.{found.name}"
    try:
        parsed = plugin_class.Options.model_validate(options)
    except ValidationError as error:
        source = f"{origins.get(table, 'profile')} {table}:"
        raise Refused(
            faults(error, origins={}, source=source, model=plugin_class.Options)
        ) from error
    return Enabled(found.name, plugin_class(parsed), found.package, found.version)


def _check_relations(built: Sequence[Enabled]) -> None:
    on = {enabled.name: enabled.plugin for enabled in built}
    for name, plugin in on.items():
        for required in plugin.requires:
            if required not in on:
                raise Refused(
                    f"plugin {name} requires {required}, which is off: switch {required} on "
                    f"or {name} off"
                )
        for other in plugin.conflicts:
            if other in on:
                raise Refused(
                    f"plugins {name} and {other} conflict: switch one off, as with "
                    f"--without {other}"
                )
    for name in on:
        circle = _circle(name, on, [])
        if circle:
            raise Refused(f"plugins require each other in a circle: {' -> '.join(circle)}")


def _circle(name: str, on: Mapping[str, Plugin], path: list[str]) -> list[str]:
    if name in path:
        return [*path[path.index(name) :], name]
    for required in on[name].requires:
        circle = _circle(required, on, [*path, name])
        if circle:
            return circle
    return []
