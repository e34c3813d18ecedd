"""What a plugin is shown, field by field, as docs/plugins.md has it: taken from the code.

`python tests/plugin_fields.py` writes the block of the page anew.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gptfast.cli.fields import fields
from gptfast.plugin import Batch, Context, Evaluated, Machine, Parts, Profile, Stepped, Update
from gptfast.profile import DataConfig, ModelConfig, Table, TrainConfig

PAGE = Path(__file__).parent.parent / "docs/plugins.md"
BEGIN = "<!-- fields: written by tests/plugin_fields.py -->\n"
END = "<!-- end of fields -->\n"
SHOWN: tuple[type, ...] = (Update, Stepped, Evaluated, Context, Machine, Parts, Batch)
TABLES: dict[str, type[Table]] = {
    "profile": Profile,
    "profile.model": ModelConfig,
    "profile.data": DataConfig,
    "profile.train": TrainConfig,
}


class Row(NamedTuple):
    """A field, a property or a method."""

    name: str
    type: str
    says: str


def rows(shown: type) -> Iterator[Row]:
    """Everything public that a class has, with what the code says of it."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(shown))).body
    assert isinstance(node, ast.ClassDef)
    for one, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield Row(one.target.id, ast.unparse(one.annotation), _text(after))
        elif isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
            says = " ".join((ast.get_docstring(one) or "").split())
            returns = "" if one.returns is None else ast.unparse(one.returns)
            if any(ast.unparse(by) == "property" for by in one.decorator_list):
                yield Row(one.name, returns, says)
            else:
                arguments = ", ".join(argument.arg for argument in one.args.args[1:])
                yield Row(f"{one.name}({arguments})", returns, says)


def table_rows(key: str) -> Iterator[Row]:
    """The values of a table of the profile."""
    for field in fields(TABLES[key]):
        name = f"{key}.{field.name}"
        if name not in TABLES:
            yield Row(name, field.type, f"{' '.join(field.help.split())} Default: {field.default}")


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def block() -> str:
    """The marked block of the page, without its marks."""
    parts = []
    for shown in SHOWN:
        summary = (inspect.getdoc(shown) or "").partition("\n\n")[0].replace("\n", " ")
        parts.append(f"**`{shown.__name__}`** {summary}\n\n{_table(rows(shown))}")
    every = (row for key in TABLES for row in table_rows(key))
    parts.append(
        "**`Profile`** is frozen: `configure` returns `profile.replace({KEY: VALUE})`, with KEY as "
        'in `"model.attention"`.\nIt may change what is in `profile.model` and `profile.train`; '
        "`recover` "
        f"only `train.micro_batch`. A default of `-` is None.\n\n{_table(every)}"
    )
    return "\n".join(parts)


def _table(found: Iterator[Row]) -> str:
    lines = ["| field | type | what it is |", "|---|---|---|"]
    for row in found:
        cells = (f"`{row.name}`", f"`{row.type}`", row.says)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the block that the code gives."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"the page has no block between {BEGIN!r} and {END!r}"
    return f"{before}{BEGIN}{block()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
