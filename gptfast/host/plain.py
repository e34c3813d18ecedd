"""What a plugin may put into a checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

ALLOWED = "tensors, numbers, strings, None, and lists, tuples and dicts of them (keys: str or int)"
_LEAVES = (bool, int, float, str, type(None))


def not_plain(value: Any, path: str) -> str | None:
    """Where `value` holds what a checkpoint cannot give back, and its type; None: nowhere.

    Types are compared exactly: numpy's float64 is a float, which loading would refuse.
    """
    from torch import Tensor

    if isinstance(value, Tensor) or type(value) in _LEAVES:
        return None
    if type(value) in (list, tuple):
        parts = ((item, f"{path}[{index}]") for index, item in enumerate(value))
    elif type(value) in (dict, OrderedDict):  # the latter as `state_dict()` of a module
        for key in value:
            if type(key) not in (str, int):
                return f"{path} has a key of type {type(key).__name__}"
        parts = ((item, f"{path}[{key!r}]") for key, item in value.items())
    else:
        return f"{path} is of type {type(value).__name__}"
    return next((found for item, at in parts if (found := not_plain(item, at))), None)
