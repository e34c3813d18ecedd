"""The arrows between the parts of the house, held by reading the imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gptfast"
PLUGINS = ROOT / "plugins"


def files(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found, folder
    return found


def imports(path: Path, *, at_import: bool = False) -> set[str]:
    """Dotted names that a file imports; `at_import`: only what importing the file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in _run_at_import(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes outside of functions and of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _run_at_import(child)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", files(PLUGINS), ids=ids)
def test_a_plugin_imports_nothing_of_ours_but_the_contract(path: Path) -> None:
    ours = {name for name in imports(path) if within(name, "gptfast")}
    assert all(within(name, "gptfast.plugin") for name in ours), ours
    assert not [name for name in imports(path) if within(name, "gptfast_plugins")]


@pytest.mark.parametrize("path", files(PLUGINS), ids=ids)
def test_importing_a_plugin_imports_no_torch(path: Path) -> None:
    assert not [name for name in imports(path, at_import=True) if within(name, "torch")]


def test_a_plugin_can_import_all_that_it_is_offered() -> None:
    import gptfast.plugin

    assert sorted(gptfast.plugin.__all__) == gptfast.plugin.__all__
    assert all(hasattr(gptfast.plugin, name) for name in gptfast.plugin.__all__)


@pytest.mark.parametrize("path", files(PACKAGE), ids=ids)
def test_the_package_imports_no_plugin_and_knows_none_by_name(path: Path) -> None:
    assert not [name for name in imports(path) if within(name, "gptfast_plugins")]
    built_in = {e.name for e in entry_points(group="gptfast.plugins") if e.dist.name == "gptfast"}
    assert len(built_in) == 27
    strings = {
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not strings & built_in


FLOORS = [
    {"errors", "__version__"},
    {"gradients", "place", "profile", "quiet"},
    {"config", "model", "optim"},
    {"plugin"},
    {"data", "report"},
    {"answers", "checkpoint", "console", "machine", "memory", "randomness", "registry"},
    {"evaluate", "generate", "hooks", "payback", "provenance", "runs"},
    {"assembly", "journal"},
    {"trainer"},
    {"fit", "rehearsal", "restore", "signals", "session"},
    {"bench", "contract"},
    {"cli", "__main__"},
]
"""A part may import of ours what stands on its own floor or below."""


@pytest.mark.parametrize("path", files(PACKAGE), ids=ids)
def test_the_arrows_run_one_way(path: Path) -> None:
    floors = {part: number for number, floor in enumerate(FLOORS) for part in floor}
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    assert part in floors, f"{part} is new: give it a floor"
    names = {name.split(".")[1] for name in imports(path) if name.startswith("gptfast.")}
    above = {name for name in names if floors[name] > floors[part]}
    assert not above, f"imports {sorted(above)}, which stand above it"


@pytest.mark.parametrize("part", ["data", "model.py", "profile.py", "config.py"])
def test_data_model_and_profile_know_nothing_of_training(part: str) -> None:
    place = PACKAGE / part
    known = {"__version__", "data", "errors", "plugin", "profile"}
    for path in files(place) if place.is_dir() else [place]:
        names = {name.split(".")[1] for name in imports(path) if name.startswith("gptfast.")}
        assert names <= known, f"{path.name} imports {sorted(names - known)}"


@pytest.mark.parametrize("path", files(PACKAGE / "cli"), ids=ids)
def test_a_command_imports_what_is_heavy_in_its_function(path: Path) -> None:
    heavy = ("torch", "numpy", "h5py", "tiktoken", "safetensors")
    above = imports(path, at_import=True)
    assert not [name for name in above if any(within(name, module) for module in heavy)]


@pytest.mark.parametrize("path", files(PACKAGE), ids=ids)
def test_only_the_console_prints(path: Path) -> None:
    if "console" in path.relative_to(PACKAGE).parts:
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("print", "sys.stdout.write", "sys.stderr.write"), called


@pytest.mark.parametrize("path", files(PACKAGE), ids=ids)
def test_only_the_command_line_reads_the_environment(path: Path) -> None:
    if "cli" in path.relative_to(PACKAGE).parts:
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # A process of its own may be given a cache folder: that writes, and reads nothing.
    written = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    reads = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("os.environ", "os.getenv")
        and id(node) not in written
    ]
    # The contract check compares it before and after; it decides nothing by it.
    assert not reads or path.name == "process.py", reads
