"""Methods of a plugin that are named nearly as a hook is, which nobody would ever call."""

from __future__ import annotations

import inspect

from gptfast.plugin import Plugin

HOOKS = [
    name
    for name, value in vars(Plugin).items()
    if inspect.isfunction(value) and not name.startswith("_")
]


def mistaken_hooks(plugin: type[Plugin]) -> dict[str, str]:
    """(method -> the hook that it may mean): one edit away, or the hook's name after `on_`."""
    methods = [
        name
        for name in dir(plugin)
        if not name.startswith("_")
        and not hasattr(Plugin, name)
        and inspect.isroutine(getattr(plugin, name))
    ]
    return {
        method: hook
        for method in methods
        for hook in HOOKS
        if method == f"on_{hook}" or _one_edit(method, hook)
    }


def _one_edit(one: str, other: str) -> bool:
    """Whether a letter more, less or another makes one word the other; they are not equal."""
    short, long = sorted((one, other), key=len)
    same = next((i for i, letter in enumerate(short) if letter != long[i]), len(short))
    rest = short[same:] if len(short) < len(long) else short[same + 1 :]
    return rest == long[same + 1 :]
