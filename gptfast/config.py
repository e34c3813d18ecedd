"""From TOML files and options on the command line to one `Profile`, each value with its origin.

A file is read as it stands; profiles `extends` one another; a user's file wins over the shipped
one, profile by profile; options on the command line win over both.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptfast.errors import Refused
from gptfast.files import stands
from gptfast.profile import Profile, nearest, put, validate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Loaded:
    """A resolved profile and, for `config show` and errors, the origin of each value."""

    profile: Profile
    origins: dict[str, str]
    """Dotted key -> the file and table, option or preset that said it; absent: the default."""


CONFIG_NAME = "gptfast.toml"
DEFAULT_PROFILE = "fast"
_PROFILE_KEYS = ("name", "extends", "unsupported_plugins", "model", "data", "train", "plugins")


@dataclass(frozen=True)
class _Layer:
    """One table of one file that says something about the profile."""

    label: str
    base: Path
    tree: dict[str, Any]


@dataclass(frozen=True)
class _File:
    path: Path
    base: Path
    profiles: dict[str, dict[str, Any]]
    unnamed: dict[str, Any] | None


def shipped_config() -> Path:
    """The shipped `gptfast.toml`: inside the installed package, else at the top of a checkout."""
    package = Path(__file__).parent
    inside = package / CONFIG_NAME
    return inside if inside.exists() else package.parent / CONFIG_NAME


def load(
    name: str | None = None,
    *,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    without: Sequence[str] = (),
    folder: Path | None = None,
    may_be_off: Collection[str] = (),
) -> Loaded:
    """Read, resolve and validate one profile.

    Args:
        name: the profile; None: the file's own top-level tables where it has them, else "fast".
        config: the file that wins over the shipped one; None: `gptfast.toml` of `folder`, if any.
        overrides: `key=value` with dotted keys and TOML values, as `--set` takes them.
        plugins: switched on, keeping the options that the profile gives them.
        without: switched off.
        folder: base of relative paths in `overrides` and in the shipped file; None: current folder.
        may_be_off: plugins that `without` may name though they are off already.

    Raises:
        Refused: a file is unreadable, a key unknown, a value of the wrong kind or impossible.
    """
    folder = folder or Path.cwd()
    files = _read_files(config, folder)
    layers = _layers(name, files)
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        _merge(tree, _normalised(layer), origins, layer.label)
    for layer in _option_layers(overrides, plugins, without, tree, folder, may_be_off):
        _merge(tree, _normalised(layer), origins, layer.label)
    tree["plugins"] = {
        plugin: options
        for plugin, options in tree.get("plugins", {}).items()
        if options is not False
    }
    found = layers[-1].label if layers else "defaults"
    profile = validate(
        {"name": _default_name(files), **tree, **({"name": name} if name else {})},
        origins=origins,
        source=found,
    )
    return Loaded(profile, origins)


def names(*, config: Path | None = None, folder: Path | None = None) -> list[str]:
    """Names of the profiles that `load` knows here, shipped ones first."""
    return list(
        dict.fromkeys(
            known for file in _read_files(config, folder or Path.cwd()) for known in file.profiles
        )
    )


def own_names(config: Path) -> list[str]:
    """Names of the profiles that this file itself has.

    Raises:
        Refused: it is unreadable.
    """
    return list(_read_file(config, base=config.parent).profiles)


def _default_name(files: Sequence[_File]) -> str:
    return "default" if files[-1].unnamed is not None else DEFAULT_PROFILE


def _read_files(config: Path | None, folder: Path) -> list[_File]:
    """The shipped file and the user's, in rising precedence."""
    files = [_read_file(shipped_config(), base=folder)]
    user = config or folder / CONFIG_NAME
    if config is not None or stands(user):
        files.append(_read_file(user, base=user.absolute().parent))
    return files


def _read_file(path: Path, *, base: Path) -> _File:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror}): check --config") from error
    except UnicodeDecodeError as error:
        raise Refused(
            f"{path}: byte {error.start} is not UTF-8, which TOML requires: save it as UTF-8"
        ) from error
    try:
        tree = tomllib.loads(text.replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"{path}: not valid TOML: {error}") from error
    profiles = tree.pop("profiles", {})
    for key in tree:
        if key not in _PROFILE_KEYS:
            raise Refused(
                f"{path}: unknown key {key}: {nearest(key, [*_PROFILE_KEYS, 'profiles'])}"
            )
    if not isinstance(profiles, dict) or not all(isinstance(p, dict) for p in profiles.values()):
        raise Refused(f"{path}: profiles must be tables: write [profiles.NAME.train]")
    # An empty file is the defaults; a file of named profiles only has no unnamed one.
    return _File(path, base, profiles, None if profiles and not tree else tree)


def _layers(name: str | None, files: Sequence[_File]) -> list[_Layer]:
    """The named profile behind everything it extends, the furthest parent first."""
    if name is None:
        user = files[-1]
        if user.unnamed is not None and len(files) > 1:
            own = _Layer(str(user.path), user.base, user.unnamed)
            parent = user.unnamed.get("extends")
            return [*(_chain(parent, files, own.label) if parent else []), own]
        name = DEFAULT_PROFILE
    return _chain(name, files, None)


def _chain(name: str, files: Sequence[_File], asked_by: str | None) -> list[_Layer]:
    chain: list[_Layer] = []
    seen: list[str] = []
    level = len(files) - 1
    while True:
        # A profile that extends its own name means the one that it hides: the shipped one.
        if seen and seen[-1] == name:
            level -= 1
        elif name in seen:
            raise Refused(f"{asked_by}: extends runs in a circle: {' -> '.join([*seen, name])}")
        else:
            level = len(files) - 1
        while level >= 0 and name not in files[level].profiles:
            level -= 1
        if level < 0:
            if name in seen:
                raise Refused(f"{asked_by}: extends itself: remove it or name another profile")
            known = {known for file in files for known in file.profiles}
            where = f"{asked_by}: extends" if asked_by else f"{files[-1].path}: profile"
            raise Refused(f'{where} "{name}" is not known: {nearest(name, known)}')
        file = files[level]
        label = f"{file.path} [profiles.{name}]"
        chain.insert(0, _Layer(label, file.base, file.profiles[name]))
        seen.append(name)
        parent = file.profiles[name].get("extends")
        if parent is None:
            return chain
        if not isinstance(parent, str):
            raise Refused(f"{label}: extends = {parent!r} must be the name of a profile")
        name, asked_by = parent, label


def _option_layers(
    overrides: Sequence[str],
    plugins: Sequence[str],
    without: Sequence[str],
    tree: Mapping[str, Any],
    folder: Path,
    may_be_off: Collection[str],
) -> list[_Layer]:
    layers = []
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key.strip():
            raise Refused(f"--set {override}: write --set KEY=VALUE, as in --set train.steps=100")
        if key.strip() in ("name", "extends"):
            raise Refused(
                f"--set {override}: {key.strip()} is said in a file only: choose a profile with "
                "--profile and the run's name with --run"
            )
        value_tree: dict[str, Any] = {}
        put(value_tree, key.strip(), _toml_value(text.strip()))
        layers.append(_Layer(f"--set {override}:", folder, value_tree))
    for plugin in plugins:
        layers.append(_Layer(f"--plugin {plugin}:", folder, {"plugins": {plugin: True}}))
    for plugin in without:
        on = {p for p, options in tree.get("plugins", {}).items() if options is not False}
        if plugin not in {*on, *plugins, *may_be_off}:
            raise Refused(f"--without {plugin}: it is not on: {nearest(plugin, on)}")
        layers.append(_Layer(f"--without {plugin}:", folder, {"plugins": {plugin: False}}))
    return layers


def _toml_value(text: str) -> Any:
    """What a shell leaves of a value: a word that is no TOML is a string without its quotes."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # More keys than one: a line break in the text began another.
    return tree["value"] if len(tree) == 1 else text


def _normalised(layer: _Layer) -> dict[str, Any]:
    """The layer with plugin switches as tables or False, and its paths made absolute."""
    tree = {key: value for key, value in layer.tree.items() if key != "extends"}
    plugins = tree.get("plugins", {})
    if not isinstance(plugins, dict):
        raise Refused(f"{layer.label} plugins must be a table: write [plugins] NAME = true")
    for plugin, switch in plugins.items():
        if not isinstance(switch, bool | dict):
            raise Refused(
                f"{layer.label} plugins.{plugin} = {switch!r}: "
                "use true, false or a table of options"
            )
    if plugins:
        tree["plugins"] = {
            plugin: {} if switch is True else switch for plugin, switch in plugins.items()
        }
    data = tree.get("data")
    if isinstance(data, dict) and isinstance(data.get("path"), str):
        tree["data"] = {**data, "path": str((layer.base / data["path"]).resolve())}
    return tree


def _merge(
    tree: dict[str, Any], new: Mapping[str, Any], origins: dict[str, str], label: str, at: str = ""
) -> None:
    for key, value in new.items():
        dotted = f"{at}{key}"
        if isinstance(value, dict):
            if not isinstance(tree.get(key), dict):
                tree[key] = {}
            origins[dotted] = label
            _merge(tree[key], value, origins, label, f"{dotted}.")
        else:
            tree[key] = value
            origins[dotted] = label
