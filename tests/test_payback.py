"""A training leaves out what costs more at its start than it saves; bench says what does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gptfast_plugins.compile import Compile, worth
from plugin_helpers import enabled

from gptfast.config import Loaded, load
from gptfast.contract.tiny import write_tiny_store
from gptfast.device.machine import find_machine
from gptfast.host.payback import FOLDER, keep_payback, known_payback
from gptfast.host.registry import select
from gptfast.plugin import Machine, Payback, Plugin, Profile, Support
from gptfast.report import RunInfo, Silent
from gptfast.run import session

PROFILE = """
[model]
n_layer = 1
n_head = 1
n_embd = 8
block_size = 8
[data]
path = "tiny.h5"
[train]
steps = 4
batch_size = 2
sample_tokens = 0
[plugins]
compile = { backend = "eager", joint = false, when = "auto" }
"""


@dataclass
class Watch(Silent):
    notes: list[str] = field(default_factory=list)

    def started(self, info: RunInfo) -> None:
        self.on = [plugin.name for plugin in info.plugins]
        self.skipped = dict(info.skipped)

    def note(self, line: str) -> None:
        self.notes.append(line)


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    write_tiny_store(tmp_path / "tiny.h5")
    (tmp_path / "gptfast.toml").write_text(PROFILE)
    return load(config=tmp_path / "gptfast.toml", folder=tmp_path)


def trained(loaded: Loaded, folder: Path, run: str, **how: object) -> Watch:
    watch, cache = Watch(), folder / "cache"
    session.train(loaded, run=run, device="cpu", folder=folder, cache=cache, listener=watch, **how)
    return watch


def found(loaded: Loaded, folder: Path, after_steps: int | None) -> None:
    profile, on = loaded.profile, find_machine("cpu").name
    options = profile.plugins["compile"]
    keep_payback(Payback(after_steps), "compile", options, profile, on=on, at=folder / "cache")


@pytest.mark.parametrize(
    ("steps", "payback", "ok", "said"),
    [
        (9_999, None, False, "from 10,000 steps"),
        (10_000, None, True, "gptfast bench finds out"),
        (500, Payback(500), False, "after 500 steps here, as bench found; this run has 500"),
        (501, Payback(500), True, "after 500 steps here"),
        (10**9, Payback(None), False, "no step faster"),
    ],
)
def test_a_run_compiles_where_it_has_more_steps_than_pay(
    steps: int, payback: Payback | None, ok: bool, said: str
) -> None:
    answer = worth(steps, payback, least_steps=10_000)
    assert answer.ok is ok
    assert said in answer.reason


def test_auto_goes_by_what_bench_found_and_a_resumed_run_by_what_it_had(
    tmp_path: Path, loaded: Loaded
) -> None:
    short = trained(loaded, tmp_path, "short")
    assert "from 10,000 steps" in short.skipped["compile"]
    assert not short.on
    found(loaded, tmp_path, 3)
    pays = trained(loaded, tmp_path, "pays", stop_at=2)
    assert pays.on == ["compile"]
    assert [line for line in pays.notes if "after 3 steps" in line and "took" in line]
    found(loaded, tmp_path, 4)
    assert trained(loaded, tmp_path, "not-yet").on == []
    assert trained(loaded, tmp_path, "pays", resume=True).on == ["compile"]
    asked = trained(loaded, tmp_path, "asked", asked=("compile",), stop_at=2)
    assert asked.on == ["compile"]
    found(loaded, tmp_path, 3)
    stopped = trained(loaded, tmp_path, "asked", resume=True)
    assert stopped.on == ["compile"]


def test_a_run_begun_plain_goes_on_plain(tmp_path: Path, loaded: Loaded) -> None:
    trained(loaded, tmp_path, "plain", stop_at=2)
    found(loaded, tmp_path, 0)
    resumed = trained(loaded, tmp_path, "plain", resume=True)
    assert resumed.skipped == {"compile": "the run began without it"}


def test_what_is_known_is_of_this_very_model_machine_and_plugin(tmp_path: Path) -> None:
    profile, options = Profile(), {"mode": "default"}

    def known(profile: Profile = profile, on: str = "here", **options: str) -> Payback | None:
        table = {"mode": "default", **options}
        return known_payback("compile", table, profile, on=on, at=tmp_path)

    assert known() is None
    for steps in (7, None):
        keep_payback(Payback(steps), "compile", options, profile, on="here", at=tmp_path)
        assert known() == Payback(steps)
    assert known(profile.replace({"model.vocab_size": 65})) == Payback(None)
    assert known(profile.replace({"model.n_layer": 3})) is None
    assert known(profile.replace({"train.batch_size": 3})) is None
    assert known(on="elsewhere") is None
    assert known(mode="reduce-overhead") is None
    [file] = (tmp_path / FOLDER).iterdir()
    for damaged in ("", "[]", '{"after_steps": 1}', file.read_text().replace("null", '"soon"')):
        file.write_text(damaged)
        assert known() is None


class TooDear(Plugin):
    def pays(self, steps: int, payback: Payback | None) -> Support | None:
        return Support.no("too dear")

    def supports(self, machine: Machine) -> Support:
        raise AssertionError("asked though it is left out")


class NeedsTooDear(Plugin):
    requires = ("too-dear",)


def test_what_does_not_pay_is_left_out_unasked_and_refuses_nothing() -> None:
    planned = [enabled("too-dear", TooDear), enabled("rest", NeedsTooDear)]
    selection = select(
        planned, find_machine("cpu"), unsupported="skip", pays=lambda one: one.plugin.pays(1, None)
    )
    assert [(s.name, s.reason) for s in selection.skipped] == [
        ("too-dear", "too dear"),
        ("rest", "needs too-dear, which is skipped"),
    ]
    alone = select(
        planned[:1],
        find_machine("cpu"),
        unsupported="stop",
        pays=lambda one: one.plugin.pays(1, None),
    )
    assert [s.name for s in alone.skipped] == ["too-dear"]


def test_bench_and_the_contract_check_take_what_is_on_as_on() -> None:
    one = enabled("compile", Compile, backend="eager", when="auto")
    assert [e.name for e in select([one], find_machine("cpu"), unsupported="stop").enabled]
