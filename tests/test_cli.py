"""The command line: exit codes, one-line errors, JSON alone, and `--help` without torch."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from gptfast import __version__
from gptfast.cli import COMMANDS, main
from gptfast.cli.app import App
from gptfast.cli.options import device_option, json_option, profile_options
from gptfast.errors import STOP_SIGNALS, GptfastError, Refused, Stopped
from gptfast.report import Finished

ROOT = Path(__file__).parent.parent
GPTFAST = [sys.executable, "-m", "gptfast"]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with the checkout importable and no opinion about output."""
    kept = {
        key: text
        for key, text in os.environ.items()
        if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONUNBUFFERED")
    }
    path = os.pathsep.join(filter(None, [changes.pop("PYTHONPATH", ""), str(ROOT)]))
    return {**kept, "PYTHONPATH": path, **changes}


def gptfast(*args: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GPTFAST, *args], capture_output=True, text=True, env=environment(**changes), timeout=60
    )


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[click.Command], None]:
    """Make a command known as `gptfast fake`."""

    def register(command: click.Command) -> None:
        module = SimpleNamespace(command=command)
        monkeypatch.setitem(sys.modules, "gptfast.cli.fake", module)
        monkeypatch.setitem(COMMANDS, "fake", "Only here.")

    return register


def only_line(text: str) -> str:
    """The one line that `text` is."""
    assert text.endswith("\n"), text
    assert text.count("\n") == 1, text
    return text.rstrip("\n")


# help ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_of_commands_says_what_each_command_says(name: str) -> None:
    command = importlib.import_module(f"gptfast.cli.{name}").command
    assert command.get_short_help_str(limit=200) == COMMANDS[name]


def test_without_a_command_the_help_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for name, summary in COMMANDS.items():
        assert f"  {name}" in shown
        assert summary in shown


@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], ["train", "--help"], ["plugins"], ["config", "--help"]],
    ids=" ".join,
)
def test_help_is_quick_and_needs_no_torch(args: list[str]) -> None:  # CLI-16
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gptfast", *args],
        capture_output=True,
        text=True,
        env=environment(),
    )
    after = os.times()
    assert done.returncode == 0
    assert done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "gptfast.cli" in imported
    assert not imported & {"torch", "h5py", "tiktoken"}
    # Processor time: what the command costs, not what else the machine is doing.
    user, system = (after[kind] - before[kind] for kind in (2, 3))
    assert user + system < 1.0


def test_help_imports_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from gptfast.cli import main; main(['--help']); "
            "print(sorted(m for m in sys.modules if m.startswith('gptfast.cli.')))",
        ],
        capture_output=True,
        text=True,
        env=environment(),
    ).stdout
    assert shown.splitlines()[-1] == "['gptfast.cli.app']"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert __version__ in only_line(capsys.readouterr().out)


# exit codes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "exit_code", "line"),
    [
        (GptfastError("disk: full"), 1, "gptfast: error: disk: full"),
        (GptfastError("two\nlines\x1b[2J"), 1, r"gptfast: error: two lines\x1b[2J"),
        (Refused("a [bold] name"), 2, "gptfast: error: a [bold] name"),
        (Stopped("saved at step 8", signum=2), 130, "gptfast: error: saved at step 8"),
        (Stopped("saved at step 8", signum=15), 143, "gptfast: error: saved at step 8"),
        (KeyboardInterrupt(), 130, "gptfast: error: stopped by SIGINT"),
        (click.Abort(), 130, "gptfast: error: stopped"),
        (OSError(28, "No space left", "/x/y"), 1, "gptfast: error: /x/y: No space left"),
        (
            TypeError("no\nway"),
            1,
            "gptfast: bug: TypeError: no way (run again with --debug for the traceback)",
        ),
    ],
)
def test_every_failure_is_one_line_and_its_exit_code(
    raised: BaseException,
    exit_code: int,
    line: str,
    register: Callable[[click.Command], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.command()
    def fake() -> None:
        raise raised

    register(fake)
    assert main(["fake"]) == exit_code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert only_line(shown.err) == line


@pytest.mark.parametrize("args", [["--debug", "fake"], ["fake", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(
    args: list[str],
    register: Callable[[click.Command], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.command()
    def fake() -> None:
        raise Refused("no")

    register(fake)
    assert main(args) == 2
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert shown.endswith("gptfast: error: no\n")


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["trian"], "no command trian: did you mean train?"),
        (["train", "--profle", "fast"], "--profile"),
        (["train", "--stop-at", "0"], "--stop-at"),
        (["train", "--stop-at", "soon"], "--stop-at"),
        (["train", "--device", "tpu"], "cuda"),
        (["train", "extra"], "extra"),
        (["config", "shw"], "shw"),
        (["--no-such"], "--no-such"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(
    args: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    line = only_line(shown.err)
    assert line.startswith("gptfast: error: ")
    assert hint in line
    assert "--help)" in line


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("unknown_key.toml", "learning_rate"),
        ("unknown_table.toml", "train"),
        ("wrong_type_string.toml", "batch_size"),
        ("negative.toml", "-"),
        ("head_not_divisor.toml", "32"),
        ("duplicate_key.toml", "not valid TOML"),
        ("bool_for_int.toml", "true"),
        ("float_for_int.toml", "20.5"),
        ("nan_lr.toml", "nan"),
        ("latin1_comment.toml", "UTF-8"),
        ("missing.toml", "cannot be read"),
    ],
)
def test_a_bad_profile_is_refused_before_any_work(
    name: str, hint: str, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # CLI-01, CLI-03, CLI-04
    assert main(["train", "--config", str(inputs / "profiles" / name)]) == 2
    shown = capsys.readouterr()
    line = only_line(shown.err)
    assert name in line
    assert hint in line
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("name", ["empty.toml", "bom.toml", "crlf.toml", "tiny.toml"])
def test_a_good_profile_is_read(
    name: str, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", "--config", str(inputs / "profiles" / name)]) == 0
    assert "train.steps" in capsys.readouterr().out


# signals and pipes -----------------------------------------------------------------------

WAITING = """
import sys, time, types
import click
from gptfast import cli

@click.command()
def fake():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("unwound", flush=True)

@click.command()
def spawn():
    import multiprocessing
    print(multiprocessing.get_context("spawn").Pool(1).apply(abs, (-3,)))

for command in (fake, spawn):
    sys.modules["gptfast.cli." + command.name] = types.SimpleNamespace(command=command)
    cli.COMMANDS[command.name] = "Only here."
"""


@pytest.fixture
def with_fakes(tmp_path: Path) -> dict[str, str]:
    """Environment in which `python -m gptfast` knows the commands `fake` and `spawn`."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(WAITING)
    return environment(PYTHONPATH=str(folder))


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_unwinds_and_says_so(number: signal.Signals, with_fakes: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*GPTFAST, "fake"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=with_fakes,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert out == "unwound\n"
    assert only_line(err) == f"gptfast: error: stopped by {number.name}"


def test_under_nohup_a_terminal_that_goes_away_stops_nothing(with_fakes: dict[str, str]) -> None:
    process = subprocess.Popen(
        ["nohup", *GPTFAST, "fake"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=with_fakes,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert process.returncode == 138


def test_ctrl_c_while_the_command_is_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [*GPTFAST, "--help"],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=str(tmp_path)),
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert only_line(done.stderr) == "gptfast: error: stopped by SIGINT"


def test_a_spawned_process_does_not_run_the_command_again(with_fakes: dict[str, str]) -> None:
    done = subprocess.run(
        [*GPTFAST, "spawn"], capture_output=True, text=True, env=with_fakes, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "args", [["--help"], ["config", "show"], ["config", "show", "--json"]], ids=" ".join
)
def test_a_reader_that_leaves_is_no_failure(args: list[str], unbuffered: str) -> None:  # CLI-15
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*GPTFAST, *args],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONUNBUFFERED=unbuffered),
    )
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


# what a command is given -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"GPTFAST_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, Path("/c")),
        ({"GPTFAST_CACHE": "", "XDG_CACHE_HOME": "/x"}, Path("/x/gptfast")),
        ({}, Path.home() / ".cache" / "gptfast"),
    ],
)
def test_where_downloads_are_kept(environ: dict[str, str], folder: Path) -> None:
    assert App.from_environment(environ).cache_dir == folder


def test_profile_options_give_one_loaded_profile(register: Callable[[click.Command], None]) -> None:
    given: dict[str, Any] = {}

    @click.command()
    @profile_options
    @device_option
    @click.pass_obj
    def fake(app: App, **values: Any) -> None:
        given.update(values, app=app)

    register(fake)
    Path("gptfast.toml").write_text("[profiles.mine.plugins]\ntf32 = true\nema = true\n")
    args = "fake --profile mine --set train.steps=7 --set train.seed=3 --plugin amp --without ema"
    assert main(args.split()) == 0
    profile = given["loaded"].profile
    assert (profile.name, profile.train.steps, profile.train.seed) == ("mine", 7, 3)
    assert list(profile.plugins) == ["tf32", "amp"]
    assert (given["asked"], given["device"]) == (("amp",), "auto")
    assert given["app"].folder == Path.cwd()


def strict_json(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(word: str) -> float:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def test_json_leaves_stdout_to_json(
    register: Callable[[click.Command], None], capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    @json_option
    @click.pass_obj
    def fake(app: App, as_json: bool) -> None:
        app.console.line("a line")
        app.console.table("a table", ["x"], [[1]])
        app.console.warn("careful")
        print("a stray print")  # noqa: T201  as a third party's plugin would
        app.console.json({"asked": as_json, "loss": float("nan"), "ppl": float("inf"), "a": "é["})

    register(fake)
    assert main(["fake", "--json"]) == 0
    shown = capsys.readouterr()
    assert strict_json(shown.out) == {"asked": True, "loss": "nan", "ppl": "inf", "a": "é["}
    for words in ("a line", "a table", "careful", "a stray print"):
        assert words in shown.err


# config ----------------------------------------------------------------------------------


def test_config_show_says_where_each_value_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    Path("gptfast.toml").write_text(
        "[profiles.mine.model]\npreset = 'char-small'\nn_layer = 3\n"
        "[profiles.mine.plugins]\namp = { dtype = 'bf16' }\ntf32 = true\n"
    )
    args = ["config", "show", "--profile", "mine", "--set", "train.steps=7"]
    assert main([*args, "--json"]) == 0
    values = strict_json(capsys.readouterr().out)["values"]
    file = f"{Path.cwd() / 'gptfast.toml'} [profiles.mine]"
    assert values["model.n_layer"] == {"value": 3, "origin": file}
    assert values["model.n_embd"] == {"value": 128, "origin": 'preset "char-small"'}
    assert values["model.dropout"] == {"value": 0.0, "origin": "default"}
    assert values["model.vocab_size"] == {"value": None, "origin": "default"}
    assert values["plugins.amp.dtype"] == {"value": "bf16", "origin": file}
    assert values["plugins.tf32"] == {"value": {}, "origin": file}
    assert values["train.steps"]["value"] == 7
    assert values["train.steps"]["origin"].startswith("--set train.steps=7")

    assert main(args) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()[2:]]
    assert {row[0] for row in rows} == values.keys()
    assert ["plugins.tf32", "true", file] in rows


def test_config_list_names_the_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    Path("gptfast.toml").write_text("[profiles.mine]\n")
    assert main(["config", "list"]) == 0
    names = capsys.readouterr().out.split()
    assert names[-1] == "mine"
    assert {"baseline", "fast"} <= set(names)


def test_config_keys_explains_every_key_that_a_profile_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "keys", "--json"]) == 0
    known = {one["name"]: one for one in strict_json(capsys.readouterr().out)}
    assert known["train.min_lr"] == {
        "name": "train.min_lr",
        "type": "number >= 0.0 | null",
        "default": "-",
        "help": "Learning rate at the last step. None: a tenth of the peak.",
    }
    assert known["model.norm"]["type"] == '"layernorm" | "rmsnorm"'
    assert all(one["help"] for one in known.values())
    assert main(["config", "show", "--profile", "baseline", "--json"]) == 0
    assert known.keys() == strict_json(capsys.readouterr().out)["values"].keys()
    assert main(["config", "keys"]) == 0
    assert capsys.readouterr().out.count("\n") == len(known) + 1


# train -----------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `gptfast train` hands to the trainer, which here says a word and ends."""
    given: dict[str, Any] = {}

    def train(loaded: Any, **values: Any) -> Finished:
        given.update(values, loaded=loaded)
        values["listener"].note("a word")
        return Finished(3, 0.5, 2.25, None, float("inf"), None, "runs/a")

    monkeypatch.setitem(sys.modules, "gptfast.run.session", SimpleNamespace(train=train))
    return given


def test_train_hands_everything_to_the_trainer(trained: dict[str, Any]) -> None:
    args = "train --run a --resume --stop-at 9 --device cpu --plugin tf32 --set train.steps=900"
    assert main(args.split()) == 0
    assert trained["loaded"].profile.train.steps == 900
    assert {key: trained[key] for key in ("run", "resume", "stop_at", "device", "asked")} == {
        "run": "a",
        "resume": True,
        "stop_at": 9,
        "device": "cpu",
        "asked": ("tf32",),
    }
    assert trained["folder"] == Path.cwd()


def test_train_json_is_how_the_run_ended(
    trained: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--json"]) == 0
    shown = capsys.readouterr()
    assert strict_json(shown.out) == {
        "steps": 3,
        "seconds": 0.5,
        "loss": 2.25,
        "val_loss": None,
        "best_val_loss": "inf",
        "stopped_by": None,
        "folder": "runs/a",
        "first_step_s": None,
    }
    assert "a word" in shown.err


@pytest.mark.parametrize("verify", [(), ("--verify-resume",)])
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--plugin", "emma"), "--plugin emma: plugin emma is not installed: did you mean ema?"),
        (
            ("--set", "plugins.ema.deca=0.5"),
            "--set plugins.ema.deca=0.5: plugins.ema: unknown key deca: did you mean decay?",
        ),
        (("--set", "plugins.emma.decay=0.5"), "plugin emma is not installed: did you mean ema?"),
    ],
)
def test_a_mistyped_plugin_is_said_before_a_missing_data_file(
    args: tuple[str, ...],
    said: str,
    verify: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--device", "cpu", *args, *verify]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()
