"""The documents say what the code does."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import plugin_fields
import pytest
from plugin_helpers import found

from gptfast import config
from gptfast.host import registry
from gptfast.plugin import Plugin

PROJECT = Path(__file__).parent.parent
PLUGINS = (PROJECT / "docs/plugins.md").read_text(encoding="utf-8")
SHIPPED = {name: one for name, one in registry.discover().items() if one.package == "gptfast"}


def hooks() -> set[str]:
    return {name for name, value in vars(Plugin).items() if inspect.isfunction(value)} - {
        "__init__"
    }


def test_plugins_page_gives_the_signatures_of_the_code() -> None:
    (block,) = re.findall(r"```python signatures\n(.*?)```", PLUGINS, re.S)
    documented = {
        node.name: (ast.unparse(node.args), ast.unparse(node.returns))
        for node in ast.parse(block).body
        if isinstance(node, ast.FunctionDef) and node.returns is not None
    }
    actual = {}
    for name in hooks():
        source = textwrap.dedent(inspect.getsource(getattr(Plugin, name)))
        (node,) = ast.parse(source).body
        assert isinstance(node, ast.FunctionDef)
        assert node.returns is not None
        actual[name] = (ast.unparse(node.args), ast.unparse(node.returns))
    assert documented == actual


def test_plugins_page_has_every_hook_in_its_table() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PLUGINS, re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert hooks() <= named


def test_plugins_page_has_the_fields_of_the_code() -> None:
    assert plugin_fields.written(PLUGINS) == PLUGINS, "run python tests/plugin_fields.py"


@pytest.mark.parametrize("shown", plugin_fields.SHOWN)
def test_the_code_says_of_every_field_what_it_is(shown: type) -> None:
    rows = list(plugin_fields.rows(shown))
    assert {row.name for row in rows} >= set(getattr(shown, "__dataclass_fields__", {}))
    for row in rows:
        assert row.says, f"{shown.__name__}.{row.name} has no docstring"
        assert f"| `{row.name}` |" in PLUGINS
        if row.type == "Tensor":
            assert "wait" in row.says, f"{shown.__name__}.{row.name}: whether reading it waits"
            assert re.search(r"Scalar|\(B", row.says), f"{shown.__name__}.{row.name}: its shape"
        if "None" in row.type and row.type != "None":
            assert "None" in row.says, f"{shown.__name__}.{row.name}: when it is None"


def test_the_code_says_of_every_value_of_a_profile_what_it_is() -> None:
    for key in plugin_fields.TABLES:
        for row in plugin_fields.table_rows(key):
            assert not row.says.startswith(" Default"), f"{row.name} has no docstring"
            if "null" in row.type:
                assert "None" in row.says, f"{row.name}: what None means"


@pytest.mark.parametrize("name", SHIPPED)
def test_plugins_page_has_every_shipped_plugin(name: str) -> None:
    plugin = SHIPPED[name].load()
    row = re.search(rf"^\| `{name}` \| (.*?) \| (.*?) \| (.*?) \|", PLUGINS, re.M)
    assert row is not None, f"docs/plugins.md lacks {name}"
    tolerance = 0.0 if row[3] == "-" else float(row[3])
    assert (row[1], row[2], tolerance) == (
        plugin.stage.name.lower(),
        plugin.claim.value,
        plugin.tolerance,
    )


def test_the_smallest_plugin_of_the_page_works() -> None:
    code = re.findall(r"```python\n(.*?)```", PLUGINS, re.S)[0]
    namespace: dict[str, object] = {}
    exec(compile(code, "docs/plugins.md", "exec"), namespace)
    made = namespace["StopAtLoss"]
    assert isinstance(made, type)
    assert issubclass(made, Plugin)
    assert made.Options.model_fields["loss"].default == 1.5


@pytest.mark.usefixtures("one_thread")
def test_the_plugin_of_the_page_that_logs_and_keeps_state_keeps_the_contract(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("gptfast_loss_mean")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", PLUGINS, re.S) if "Mean" in code)
    exec(compile(code, "docs/plugins.md", "exec"), vars(module))
    (test,) = re.findall(r"```python test\n(.*?)```", PLUGINS, re.S)
    known = found(loss_mean=module.LossMean)
    monkeypatch.setattr(registry, "discover", lambda: known)
    namespace: dict[str, Any] = {}
    exec(compile(test, "docs/plugins.md", "exec"), namespace)
    namespace["test_keeps_the_contract"]()


@pytest.mark.parametrize("name", config.names(folder=PROJECT / "docs"))
def test_every_shipped_profile_is_valid_and_names_known_plugins(name: str) -> None:
    loaded = config.load(name, folder=PROJECT / "docs")
    planned = registry.plan(loaded.profile, origins=loaded.origins)
    assert {enabled.name for enabled in planned} == set(loaded.profile.plugins)
    assert loaded.profile.unsupported_plugins == "skip"


@pytest.mark.parametrize("name", config.names(folder=PROJECT / "docs"))
def test_every_shipped_profile_opens_with_its_command(name: str) -> None:
    text = (PROJECT / "gptfast.toml").read_text(encoding="utf-8")
    header = re.search(rf"^\[profiles\.{name}\] *# gptfast train --profile {name}\b", text, re.M)
    assert header is not None


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_each_case_in_a_test_has_one_line_and_the_other_way_round() -> None:
    tag = r"[A-Z][A-Z0-9]{1,3}-\d\d"
    tests = (path.read_text(encoding="utf-8") for path in (PROJECT / "tests").glob("*.py"))
    tagged = {name for text in tests for name in re.findall(rf"\b{tag}\b", text)}
    cases = (PROJECT / "tests/cases.md").read_text(encoding="utf-8")
    lines = re.findall(rf"^\| ({tag}) \|", cases, re.M)
    encodings = {"UTF-16", "UTF-32"}
    assert sorted(lines) == sorted(tagged - encodings)
