"""What a table of a profile may hold, in words: for `plugins show` and `config keys`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pydantic import BaseModel


class Field(NamedTuple):
    name: str
    type: str
    """`integer >= 1`, `"bf16" | "fp16"`."""
    default: str
    """As a profile would write it; a value not set is `-`."""
    help: str


def fields(table: type[BaseModel]) -> Iterator[Field]:
    """Each field of `table`, in its order."""
    schema = table.model_json_schema()
    for name, field in table.model_fields.items():
        default = "required" if field.is_required() else _toml(field.get_default())
        yield Field(name, _type(schema["properties"][name]), default, field.description or "")


_LIMITS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
}


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"])
    if "anyOf" in schema:
        return " | ".join(_type(part) for part in schema["anyOf"])
    limits = [f"{sign} {schema[limit]}" for limit, sign in _LIMITS.items() if limit in schema]
    return " ".join([schema.get("type", "table"), *limits])


def _toml(value: object) -> str:
    return "-" if value is None else json.dumps(value, default=str)
