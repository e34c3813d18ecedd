"""What `tune` found: its record, and the profile that says what was tried, kept and why."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from gptfast import config
from gptfast.bench.measure.conditions import Conditions
from gptfast.bench.measure.messages import MachineFacts
from gptfast.bench.result.record import Drift, Protocol, Ratio
from gptfast.bench.result.table import Rows, Table, ratio_cell
from gptfast.bench.tune.moves import BEFORE
from gptfast.errors import GptfastError, Refused
from gptfast.files import sync
from gptfast.plugin import Profile

FORMAT = 1
WIDTH = 100
"""Of the lines of a comment."""
TABLES = ("model", "data", "train")


@dataclass(frozen=True)
class Trial:
    """One change that was tried."""

    what: str
    key: str
    """What of the profile it changes, dotted."""
    taken: bool
    """Whether the profile has it now."""
    why: str
    over_best: Ratio | None = None
    """How many times as fast as the best so far; None: it was not measured."""
    step_ms: float | None = None

    @property
    def reason(self) -> str:
        """Why it was taken, beside the line of the profile that says it."""
        if self.over_best is None or not self.what.startswith("without "):
            return self.why
        return f"{self.why} without it"

    def given_up(self, better: str) -> Trial:
        """As it is said when all that was taken turned out slower than `better`."""
        why = f"at first it was ({self.why}); at the end all changes together were slower than the"
        return replace(self, taken=False, why=f"{why} {better}")

    def line(self) -> str:
        measured = f" x {ratio_cell(self.over_best)}," if self.over_best else ""
        return f"{self.what}:{measured} {'taken' if self.taken else 'not taken'}, {self.why}"


@dataclass(frozen=True)
class Tuned:
    """The whole result."""

    gptfast: str
    started: str
    """UTC, ISO 8601."""
    minutes: float
    """That were given."""
    seconds: float
    """That it took."""
    machine: MachineFacts
    before: Conditions
    after: Conditions
    protocol: Protocol
    start: dict[str, Any]
    """The profile that the search began from."""
    profile: dict[str, Any]
    """The one that it found."""
    trials: list[Trial]
    untried: list[str]
    """What there was no time for."""
    step_ms: float
    over_start: Ratio | None
    """How many times as fast as the profile that the search began from, both in one sitting. None:
    it is that one, or there was no time."""
    over_known: Ratio | None
    """The same of the one that an earlier search found; None also: there was none."""
    drift: Drift | None
    """Of the losses, from those of the profile that the search began from."""
    warnings: list[str]
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it, the format first."""
        return {"format": self.format, **asdict(self)}


# shown -----------------------------------------------------------------------------------


def table(found: Tuned) -> Table:
    """A row for each change that was tried."""
    rows: Rows = [
        [
            trial.what,
            None if trial.step_ms is None else f"{trial.step_ms:,.2f}",
            ratio_cell(trial.over_best),
            "yes" if trial.taken else "no",
            trial.why,
        ]
        for trial in found.trials
    ]
    return ["tried", "ms/step", "x best so far", "taken", "why"], rows


def remarks(found: Tuned) -> Iterator[str]:
    """What came of it, a line each."""
    name = found.start["name"]
    if found.over_start is not None:
        drift = f", losses within {found.drift.largest:.1e}" if found.drift else ""
        yield (
            f"{found.step_ms:,.2f} ms/step, x {ratio_cell(found.over_start)} as fast as profile "
            f"{name} as it is{drift}"
        )
    elif any(trial.taken and trial.over_best for trial in found.trials):
        yield f"{found.step_ms:,.2f} ms/step"
    else:
        yield f"{found.step_ms:,.2f} ms/step: nothing that was tried beats profile {name} as it is"
    if found.over_known is not None:
        yield f"x {ratio_cell(found.over_known)} as fast as the profile tuned before"
    if any(trial.over_best and not trial.over_best.significant for trial in found.trials):
        yield "~ no significant difference: the 95 % interval holds 1"
    if found.untried:
        yield (
            f"left untried: {', '.join(found.untried)}; {found.seconds / 60:.1f} of "
            f"{found.minutes:g} minutes were used, one more try might have taken what is kept for "
            "the last sitting, the result beside the profile as it is: give more with --minutes"
        )


def _comment(found: Tuned) -> Iterator[str]:
    machine, protocol = found.machine, found.protocol
    yield (
        f"Made by gptfast tune --profile {found.start['name']} --minutes {found.minutes:g}, "
        f"{found.started.replace('T', ' ')}, on {machine.name} ({machine.where}, "
        f"{machine.platform}): gptfast {found.gptfast}, "
        f"torch {machine.torch}, Python {machine.python}. {protocol.rounds} rounds of "
        f"{protocol.steps} steps each, by turns."
    )
    yield from remarks(found)
    yield from (f"warning: {warning}" for warning in found.warnings)
    yield "Tried, each beside the best so far (x: how many times as fast):"
    yield from (f"  {trial.line()}" for trial in found.trials)


# written ---------------------------------------------------------------------------------


def marks(name: str) -> tuple[str, str]:
    """The lines around what `tune` may write anew in somebody's file."""
    return (
        f"# >>> gptfast tune: it writes [profiles.{name}] anew, from here to the end mark",
        f"# <<< gptfast tune: end of [profiles.{name}]",
    )


def has_earlier(path: Path, name: str) -> bool:
    """Whether a file has the profile of an earlier search."""
    return path.exists() and _holds(_read(path), name)


def check_place(path: Path, name: str) -> None:
    """Refuse a file into which the result could not be written.

    Raises:
        Refused: its folder is not there, or it has a profile of that name that is not `tune`'s.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise Refused(f"--name {name}: use letters, digits, - and _ for the name of a profile")
    if not path.parent.is_dir():
        raise Refused(f"{path}: there is no folder {path.parent}: make it, or use another --out")
    if not os.access(path.parent, os.W_OK):
        raise Refused(f"{path}: its folder cannot be written to: use another --out")
    if path.exists() and name in config.own_names(path) and not has_earlier(path, name):
        raise Refused(
            f"{path}: has a [profiles.{name}] that is not tune's: choose another with --name, or "
            "another file with --out"
        )


def keep(path: Path, found: Tuned, *, name: str, folder: Path) -> None:
    """Write the profile into a file, whose other lines stay as they are.

    It extends the one that the search began from where the file can name that, and is complete
    where it cannot.

    Args:
        folder: base of relative paths in the shipped profiles.

    Raises:
        GptfastError: the file cannot be written.
    """
    profile = Profile.model_validate(found.profile)
    parent = str(found.start["name"])
    text = _read(path) if path.exists() else ""
    draft = path.with_name(f".{path.name}.tune")
    try:
        draft.write_bytes(text.encode())
        for extends in (_known(parent, draft, folder), None):
            block = _as_toml(found, profile, name=name, extends=extends)
            draft.write_bytes(_with_block(text, block, name).encode())
            if _says(draft, profile, name, folder):
                break
        else:
            raise GptfastError(
                f"{path}: the profile cannot be added to it: use a new file with --out"
            )
        sync(draft)
        draft.replace(path)
    except OSError as error:
        raise GptfastError(
            f"{path}: cannot be written ({error.strerror}): use another file with --out"
        ) from error
    finally:
        draft.unlink(missing_ok=True)


def _known(name: str, draft: Path, folder: Path) -> tuple[str, Profile] | None:
    """The profile of that name, as the file would have it; None: it knows none."""
    try:
        return name, config.load(name, config=draft, folder=folder).profile
    except Refused:
        return None


def _says(draft: Path, profile: Profile, name: str, folder: Path) -> bool:
    """Whether the file, read back, has the profile under that name."""
    try:
        read = config.load(name, config=draft, folder=folder).profile
    except Refused:
        return False
    return _content(read) == _content(profile)


def _content(profile: Profile) -> tuple[Any, ...]:
    tree = profile.model_dump(exclude={"name", "plugins"})
    tree["train"]["micro_batch"] = profile.train.windows_per_micro
    return tree, list(profile.plugins.items())


def _as_toml(
    found: Tuned, profile: Profile, *, name: str, extends: tuple[str, Profile] | None
) -> str:
    """The profile as a commented block, with what differs from the one that it extends."""
    parent = extends[1] if extends else Profile()
    train = parent.train
    windows = profile.train.windows_per_micro
    if train.micro_batch != "auto" and (
        train.windows_per_micro == windows
        or (train.micro_batch is None and windows == profile.train.batch_size)
    ):
        profile = profile.replace({"train.micro_batch": train.micro_batch})
    begin, end = marks(name)
    why = {trial.key: trial.reason for trial in found.trials if trial.taken}
    lines = [begin]
    for text in _comment(found):
        lines += textwrap.wrap(
            text, WIDTH, initial_indent="# ", subsequent_indent="#     ", break_long_words=False
        )
    lines.append(f"[profiles.{name}]")
    if extends:
        lines.append(f'extends = "{extends[0]}"')
    if profile.unsupported_plugins != parent.unsupported_plugins:
        lines.append(_line("unsupported_plugins", profile.unsupported_plugins))
    new, old = profile.model_dump(exclude_none=True), parent.model_dump(exclude_none=True)
    for table_name in TABLES:
        changed = {
            key: value
            for key, value in new[table_name].items()
            if old[table_name].get(key) != value
        }
        if changed:
            lines.append(f"[profiles.{name}.{table_name}]")
            lines += [
                _line(key, value, why.get(f"{table_name}.{key}")) for key, value in changed.items()
            ]
    switches = dict(_switches(profile.plugins, parent.plugins))
    if switches:
        lines.append(f"[profiles.{name}.plugins]")
        given = found.start["plugins"]
        lines += [
            _line(
                key, value, _why(key, why) if profile.plugins.get(key) != given.get(key) else None
            )
            for key, value in switches.items()
        ]
    return "\n".join([*lines, end, ""])


def _switches(
    new: Mapping[str, dict[str, Any]], old: Mapping[str, dict[str, Any]]
) -> Iterator[tuple[str, Any]]:
    """What a profile has to say of its plugins, where it extends one with `old`."""
    for name in old:
        if name not in new:
            yield name, False
    for name, options in new.items():
        before = old.get(name, {})
        changed = {key: value for key, value in options.items() if before.get(key) != value}
        if changed or name not in old:
            yield name, changed or True


def _why(plugin: str, why: Mapping[str, str]) -> str | None:
    """Of a plugin's line, which may say several of its options, or what was found before."""
    key = f"plugins.{plugin}"
    reasons = [reason for of, reason in why.items() if of == key or of.startswith(f"{key}.")]
    before = f"{BEFORE}: {why['plugins']}" if "plugins" in why else None
    return "; ".join(dict.fromkeys(reasons)) or before


def _line(key: str, value: Any, why: str | None = None) -> str:
    comment = f"  # {' '.join(why.split())}" if why else ""
    return f"{_key(key)} = {_value(value)}{comment}"


def _key(key: str) -> str:
    return tomli_w.dumps({key: True}).removesuffix(" = true\n")


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


def _block(name: str) -> re.Pattern[str]:
    begin, end = map(re.escape, marks(name))
    return re.compile(rf"^{begin}\r?\n.*?^{end}(?:\r?\n|\Z)", re.M | re.S)


def _holds(text: str, name: str) -> bool:
    return _block(name).search(text) is not None


def _with_block(text: str, block: str, name: str) -> str:
    """The text with its block of that name replaced, or with one more at its end."""
    if "\r\n" in text:
        block = block.replace("\n", "\r\n")
    if _holds(text, name):
        return _block(name).sub(lambda found: block, text)
    newline = "\r\n" if "\r\n" in text else "\n"
    if text and not text.endswith("\n"):
        text += newline
    return f"{text}{newline if text else ''}{block}"


def _read(path: Path) -> str:
    """As it stands, its line ends and its mark of UTF-8 too."""
    return path.read_bytes().decode()
