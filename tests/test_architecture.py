"""The arrows between the parts of the house, held by reading the imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
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


GROUND = "gptfast"
"""The modules that lie loose in the package."""

LOOSE_MODULES = 13
ROOMS = 20
ARROWS = 96
"""At most so many: loose modules and folders of the package, and imports between two of them."""


def room(path: Path) -> str:
    """The folder of the package that a file is in; the loose modules are one room."""
    parts = path.relative_to(PACKAGE).parts
    return GROUND if len(parts) == 1 else parts[0]


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in files(PACKAGE):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def arrows() -> set[tuple[str, str]]:
    """Pairs of modules of which the first imports the second, wherever in the file."""
    known = modules()
    found = set()
    for module, path in known.items():
        for name in imports(path):
            if within(name, "gptfast"):
                while name not in known:
                    name = name.rpartition(".")[0]
                found.add((module, name))
    return {(a, b) for a, b in found if a != b and b != "gptfast"}


@cache
def house() -> dict[str, set[str]]:
    """The table of docs/architecture.md: each folder, and which others it may import."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("| folder | what it is for | may import |")[2].partition("\n\n")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]
    return {
        folder.strip("`").rstrip("/"): {name.strip(" `/") for name in may.split(",") if name != "-"}
        for folder, _, may in rows
    }


def test_the_documented_house_is_the_one_that_stands() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(house()) == {GROUND, *folders}


@pytest.mark.parametrize("path", files(PACKAGE), ids=ids)
def test_a_file_imports_what_its_folder_may(path: Path) -> None:
    if path.name == "__main__.py":  # the command itself
        return
    known = modules()
    (module,) = [name for name, file in known.items() if file == path]
    wanted = {room(known[b]) for a, b in arrows() if a == module} - {room(path)}
    assert wanted <= house()[room(path)], wanted - house()[room(path)]


def test_what_the_table_allows_is_needed_and_goes_one_way() -> None:
    known = modules()
    between = {(room(known[a]), room(known[b])) for a, b in arrows() if a != "gptfast.__main__"}
    allowed = {(folder, other) for folder, others in house().items() for other in others}
    assert allowed == {(a, b) for a, b in between if a != b}
    assert not circles(allowed)


def circles(pairs: set[tuple[str, str]]) -> set[str]:
    """What is left when all that nobody points to, or that points to nobody, is taken away."""
    while True:
        tails, heads = {a for a, _ in pairs}, {b for _, b in pairs}
        rest = {(a, b) for a, b in pairs if a in heads and b in tails}
        if rest == pairs:
            return {a for a, _ in pairs}
        pairs = rest


def test_circles_are_found() -> None:
    assert circles({("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")}) == {"b", "c"}
    assert not circles({("a", "b"), ("b", "c"), ("a", "c")})


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not circles(arrows())


def test_the_house_stays_small(capsys: pytest.CaptureFixture[str]) -> None:
    loose = [path.name for path in PACKAGE.glob("*.py")]
    rooms = {module.split(".")[1] for module in modules() if module != "gptfast"}
    between = {(a.split(".")[1], b.split(".")[1]) for a, b in arrows() if a != "gptfast"}
    n_arrows = sum(a != b for a, b in between)
    with capsys.disabled():
        print(f"\n{len(loose)} loose modules, {len(rooms)} rooms, {n_arrows} arrows")  # noqa: T201
    assert len(loose) <= LOOSE_MODULES
    assert len(rooms) <= ROOMS
    assert n_arrows <= ARROWS


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
