"""The command line: one file per command, imported only when that command is asked for.

A command's module exposes `command`, a click command or group, and imports what is heavy inside
the function, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

import click

from gptfast import __version__
from gptfast.cli.app import App
from gptfast.errors import GptfastError, stop_signals
from gptfast.profile import nearest

__all__ = ["COMMANDS", "App", "group", "main"]

COMMANDS = {
    "prepare": "Turn text into a file of tokens.",
    "data": "Look into data files, check them, move tokens between programs.",
    "train": "Train a model as a profile says.",
    "eval": "Score a model on held-out text.",
    "generate": "Continue a text with a model.",
    "bench": "Measure what each plugin of a profile brings on this machine.",
    "tune": "Search the fastest form of a profile on this machine.",
    "runs": "List, describe and plot trainings.",
    "plugins": "List, explain and check the optimizations.",
    "config": "Show profiles and where each value comes from.",
}
"""Name of each command, which is its module in this package, and its short help."""

BROKEN_PIPE = 141
"""128 + SIGPIPE, as a shell reports a writer whose reader left."""


class _Commands(click.Group):
    """Knows its commands by `COMMANDS` and imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"gptfast.cli.{name}").command
        _add_debug(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]}: {nearest(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.obj.debug = True


def _debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_set_debug,
        help="Show the traceback of an error.",
    )


def _add_debug(command: click.Command) -> None:
    """Have `--debug` also behind the command's name, where hands put it."""
    if all(param.name != "debug" for param in command.params):
        command.params.append(_debug_option())
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        _add_debug(inner)


@click.command(
    cls=_Commands,
    invoke_without_command=True,
    params=[_debug_option()],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="gptfast")
@click.pass_context
def group(ctx: click.Context) -> None:
    """Train GPT-2-class language models as fast as this machine allows, and prove it."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code; the console script and `python -m gptfast`.

    0 done, 1 failed, 2 refused before work, 128 + n stopped by signal n, 141 the reader of
    the output left. Every failure is one line on stderr.
    """
    app = App.from_environment(os.environ)
    app.arguments = tuple(sys.argv[1:] if args is None else args)
    try:
        with _signals_unwind():
            return _run(app)
    except BrokenPipeError:
        _forget_stdout()
        return BROKEN_PIPE


def _run(app: App) -> int:
    try:
        try:
            with group.make_context("gptfast", list(app.arguments), obj=app) as ctx:
                group.invoke(ctx)
            sys.stdout.flush()
        except click.exceptions.Exit as leave:
            sys.stdout.flush()
            return leave.exit_code
    except BrokenPipeError:
        raise
    except click.exceptions.Abort:
        return _say(app, "stopped", 130)
    except click.ClickException as error:
        return _say(app, _usage(error), error.exit_code)
    except GptfastError as error:
        return _say(app, str(error), error.exit_code)
    except KeyboardInterrupt:
        return _say(app, "stopped by SIGINT", 130)
    except _Stop as stop:
        return _say(app, f"stopped by {stop.signal.name}", 128 + stop.signal)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _say(app, f"{where}{error.strerror or error}", 1)
    except Exception as error:  # the one place where a bug becomes a line instead of a traceback
        said = f"{type(error).__name__}: {error} (run again with --debug for the traceback)"
        return _say(app, said, 1, label="bug")
    return 0


def _say(app: App, message: str, exit_code: int, *, label: str = "error") -> int:
    """Show the error that is being handled."""
    if app.debug:
        traceback.print_exc()
    app.console.error(message, label=label)
    return exit_code


def _usage(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    message = message[:1].lower() + message[1:]
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message} (see {error.ctx.command_path} --help)"
    return message


class _Stop(BaseException):
    """A signal to stop, where no run is there to save in its own way."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Have them unwind as Ctrl-C does, so that temporary files go and the cursor comes back."""
    owner = os.getpid()

    def handle(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked worker that its parent ends: as without us
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        raise _Stop(signum)

    ours = [number for number in stop_signals() if number != signal.SIGINT]
    before = {number: signal.signal(number, handle) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _forget_stdout() -> None:
    """Send what is still buffered nowhere, or the interpreter's last flush complains."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
