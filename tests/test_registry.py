"""Which plugins are found, how they are checked and ordered, and what is said about it."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plugin_helpers import enabled, found, gptfast

from gptfast.cli import main
from gptfast.contract.skeleton import skeleton, write_skeleton
from gptfast.device.machine import find_machine
from gptfast.errors import Refused
from gptfast.host import registry
from gptfast.host.registry import Found, Skipped, order, plan, reasons, select
from gptfast.plugin import (
    Machine,
    Options,
    Plugin,
    Profile,
    Stage,
    Support,
    unlogged_warnings,
)


class Knobs(Options):
    count: int = 1
    """How many."""


class Surgery(Plugin):
    stage = Stage.SURGERY
    Options = Knobs


class Compiles(Plugin):
    stage = Stage.COMPILE


class Outer(Plugin):
    stage = Stage.OUTER


class NeedsOuter(Plugin):
    stage = Stage.OUTER
    requires = ("outer",)


class Reports(Plugin):
    stage = Stage.REPORT


class AgainstOuter(Plugin):
    conflicts = ("outer",)


class Ring(Plugin):
    requires = ("ring-b",)


class RingB(Plugin):
    requires = ("ring",)


class OnlyElsewhere(Plugin):
    def supports(self, machine: Machine) -> Support:
        return Support.no(f"not on a {machine.kind}")


class NeedsElsewhere(Plugin):
    requires = ("only-elsewhere",)


class ProbeFails(Plugin):
    def supports(self, machine: Machine) -> Support:
        raise OSError("the probe broke")


class HereOnly(Plugin):
    def supports(self, machine: Machine) -> Support:
        return Support.yes("as it should")


KNOWN = found(
    surgery=Surgery,
    compiles=Compiles,
    outer=Outer,
    needs_outer=NeedsOuter,
    reports=Reports,
    against_outer=AgainstOuter,
    ring=Ring,
    ring_b=RingB,
    only_elsewhere=OnlyElsewhere,
    needs_elsewhere=NeedsElsewhere,
    probe_fails=ProbeFails,
    here_only=HereOnly,
)


def profile(*names: str, **tables: Mapping[str, Any]) -> Profile:
    return Profile(
        plugins={**{name: {} for name in names}, **{k: dict(v) for k, v in tables.items()}}
    )


# order -----------------------------------------------------------------------------------------


def test_every_order_in_the_profile_gives_the_same_order_across_stages() -> None:
    """PLG-07: the text of the profile does not decide what is compiled."""
    names = ["surgery", "compiles", "outer", "reports"]
    for shuffled in itertools.permutations(names):
        assert [e.name for e in plan(profile(*shuffled), found=KNOWN)] == names


def test_within_a_stage_the_profile_decides_and_requires_goes_first() -> None:
    assert [e.name for e in plan(profile("here-only", "outer"), found=KNOWN)] == [
        "here-only",
        "outer",
    ]
    assert [e.name for e in plan(profile("outer", "here-only"), found=KNOWN)] == [
        "outer",
        "here-only",
    ]
    planned = plan(profile("reports", "needs-outer", "here-only", "outer"), found=KNOWN)
    assert [e.name for e in planned] == ["outer", "needs-outer", "here-only", "reports"]
    assert reasons(planned) == [
        "stage outer, there in the profile's order",
        "stage outer, behind outer, which it requires",
        "stage outer, there in the profile's order",
        "stage report",
    ]


@given(st.permutations(range(6)), st.lists(st.sampled_from(list(Stage)), min_size=6, max_size=6))
def test_order_is_stable_and_by_stage(shuffle: list[int], stages: list[Stage]) -> None:
    classes = [type(f"P{i}", (Plugin,), {"stage": stage}) for i, stage in enumerate(stages)]
    built = [enabled(str(i), classes[i]) for i in shuffle]
    ordered = order(built)
    keys = [(e.plugin.stage, shuffle.index(int(e.name))) for e in ordered]
    assert keys == sorted(keys)
    assert len(ordered) == len(built)


# refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (profile("surgeri"), ["surgeri", "not installed", "did you mean surgery?"]),
        (profile(surgery={"cuont": 1}), ["cuont", "did you mean count?"]),
        (profile(surgery={"count": "1"}), ["count = '1'", "integer"]),
        (profile("needs-outer"), ["needs-outer requires outer", "switch outer on"]),
        (
            profile("against-outer", "outer"),
            ["against-outer and outer conflict", "--without outer"],
        ),
        (profile("ring", "ring-b"), ["circle", "ring -> ring-b -> ring"]),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(asked: Profile, said: list[str]) -> None:
    with pytest.raises(Refused) as refusal:
        plan(asked, found=KNOWN)
    for words in said:
        assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_two_foreign_packages_with_one_name_are_refused_naming_both() -> None:
    from dataclasses import replace

    rivals = {"outer": replace(KNOWN["outer"], package="one", rivals=("two",))}
    with pytest.raises(Refused, match="registered by one and two"):
        plan(profile("outer"), found=rivals)


# this machine ----------------------------------------------------------------------------------


def test_the_unsupported_are_skipped_with_their_reasons_and_what_requires_them_too() -> None:
    planned = plan(
        profile("needs-elsewhere", "only-elsewhere", "probe-fails", "here-only"), found=KNOWN
    )
    selection = select(planned, find_machine("cpu"), unsupported="skip")
    assert [(e.name, e.detail) for e in selection.enabled] == [("here-only", "as it should")]
    assert selection.skipped == (
        Skipped("only-elsewhere", "not on a cpu"),
        Skipped("needs-elsewhere", "needs only-elsewhere, which is skipped"),
        Skipped("probe-fails", "its probe failed (OSError: the probe broke)"),
    )


@pytest.mark.parametrize(("unsupported", "asked"), [("stop", ()), ("skip", ("only-elsewhere",))])
def test_the_unsupported_that_may_not_be_skipped_are_refused(
    unsupported: str, asked: tuple[str, ...]
) -> None:
    planned = plan(profile("only-elsewhere"), found=KNOWN)
    with pytest.raises(Refused, match=r"only-elsewhere is not supported on .* not on a cpu"):
        select(planned, find_machine("cpu"), unsupported=unsupported, asked=asked)


def test_a_failed_trial_is_a_no_in_one_line() -> None:
    error = RuntimeError("\nno kernel\nfor this card\n")
    assert Support.failed("a trial", error) == Support.no("a trial failed: no kernel")
    no = Support.failed("a trial", error, instead="use another")
    assert no == Support.no("a trial failed: no kernel: use another")


def test_a_trial_that_failed_in_the_compiler_tells_what_failed_there() -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise OSError("no compiler here\nat all")

    trial = torch.compile(torch.neg, backend=backend)
    with pytest.raises(RuntimeError) as caught:
        trial(torch.ones(1))
    torch.compiler.reset()
    assert Support.failed("a trial", caught.value).reason == "a trial failed: no compiler here"


def test_warnings_are_unlogged_inside_alone(caplog: pytest.LogCaptureFixture) -> None:
    package = logging.getLogger("package")
    with suppress(ZeroDivisionError), unlogged_warnings():
        package.warning("no kernels")
        package.error("broken")
        raise ZeroDivisionError
    package.warning("old")
    assert caplog.messages == ["broken", "old"]


def test_what_was_unlogged_before_stays_so_inside(caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.CRITICAL)
    try:
        with unlogged_warnings():
            logging.getLogger("package").error("broken")
    finally:
        logging.disable(logging.NOTSET)
    assert not caplog.messages


# installed packages ----------------------------------------------------------------------------


@pytest.fixture
def on_path(inputs: Path) -> Any:
    """`run(packages, *args)`: the command line with those packages installed."""

    def run(packages: list[str], *args: str) -> subprocess.CompletedProcess[str]:
        return gptfast(*args, path=[inputs / "plugins" / package for package in packages])

    return run


def test_a_broken_package_disturbs_no_other_command(on_path: Any, tmp_path: Path) -> None:
    """PLG-01."""
    broken = ["gf_bad_import", "gf_no_attr"]
    listed = on_path(broken, "plugins", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    rows = {row["name"]: row["broken"] for row in json.loads(listed.stdout)}
    assert "No module named 'a_module_that_does_not_exist'" in rows["badimport"]
    assert "has no attribute 'Plugin'" in rows["noattr"]
    assert listed.stderr.count("\n") <= 1

    plain = on_path(broken, "plugins")
    assert "badimport" in plain.stdout
    assert "broken: plugin badimport of package gf_bad_import 0.1" in plain.stdout
    assert on_path(broken, "--help").stderr == ""

    asked = on_path(broken, "plugins", "order", "--profile", "baseline", "--plugin", "badimport")
    assert asked.returncode == 2
    assert "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'" in asked.stderr
    assert "gf_bad_import" in asked.stderr
    assert asked.stderr.count("\n") == 1


def test_a_built_in_keeps_its_name_with_one_warning(on_path: Any) -> None:
    """PLG-03."""
    listed = on_path(["gf_takes_amp"], "plugins", "list", "--json")
    amp = next(row for row in json.loads(listed.stdout) if row["name"] == "amp")
    assert amp["package"].startswith("gptfast ")
    assert amp["broken"] is None
    warnings = [line for line in listed.stderr.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "amp" in warnings[0]
    assert "gf_takes_amp" in warnings[0]


# gptfast plugins -------------------------------------------------------------------------------


@pytest.fixture
def main_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`main_with(found, *args)`: the command line in this process, with those plugins found."""
    monkeypatch.chdir(tmp_path)

    def run(known: Mapping[str, Found], *args: str) -> int:
        monkeypatch.setattr(registry, "discover", lambda: known)
        return main(args)

    return run


def test_plugins_imports_no_torch_and_is_quick() -> None:
    """CLI-16."""
    for args in (["plugins"], ["plugins", "list"], ["plugins", "order"], ["plugins", "--help"]):
        script = (
            "import sys; from gptfast.cli import main; code = main(sys.argv[1:]);"
            "heavy = {'torch', 'numpy', 'h5py', 'tiktoken'} & set(sys.modules);"
            "assert code == 0 and not heavy, (code, heavy)"
        )
        done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_show_explains_options_from_their_docstrings() -> None:
    shown = json.loads(gptfast("plugins", "show", "amp", "--json").stdout)
    assert shown["stage"] == "surgery"
    assert shown["claim"] in ("rounding", "exact")
    assert "forward_scope" in shown["hooks"]
    dtype = next(option for option in shown["options"] if option["name"] == "dtype")
    assert '"auto"' in dtype["default"]
    assert dtype["help"]
    assert shown["doc"]
    plain = gptfast("plugins", "show", "amp").stdout
    assert dtype["help"] in plain


def test_show_of_an_unknown_name_says_the_nearest() -> None:
    unknown = gptfast("plugins", "show", "ampp")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "did you mean amp?" in unknown.stderr


def test_order_says_why(main_with: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--plugin", "reports", "--plugin", "surgery"]
    assert main_with(KNOWN, "plugins", "order", "--profile", "baseline", *on, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["why"]) for row in rows] == [
        ("surgery", "stage surgery"),
        ("reports", "stage report"),
    ]


@pytest.mark.parametrize("names", [("outer", "against-outer"), ("ring", "ring-b")])
def test_order_exits_2_on_a_conflict_and_on_a_circle(
    names: tuple[str, ...], main_with: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    on = [word for name in names for word in ("--plugin", name)]
    assert main_with(KNOWN, "plugins", "order", "--profile", "baseline", *on) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert all(name in said.err for name in names)
    assert said.err.count("\n") == 1


# gptfast plugins new ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["My-Plugin", "my_plugin", "-x", "x-", "a--b", "", "1a", "a/b"])
def test_a_name_that_is_not_kebab_case_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="small letters"):
        skeleton(name)


def test_new_refuses_to_overwrite(tmp_path: Path) -> None:
    write_skeleton("my-plugin", tmp_path / "there")
    before = {path.name: path.read_bytes() for path in (tmp_path / "there").iterdir()}
    with pytest.raises(Refused, match="is there already"):
        write_skeleton("my-plugin", tmp_path / "there")
    assert {p.name: p.read_bytes() for p in (tmp_path / "there").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_new_leaves_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="cannot be written"):
        write_skeleton("my-plugin", tmp_path / "file" / "inside")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
