"""The `batchery` command; each package adds its own subcommands by entry point.

The group of the entry points is `batchery.commands`. A subcommand is imported when it is called. If
it cannot be imported, it says so, and the others work.
"""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import click

from batchery.errors import BatcheryError, StartError

if TYPE_CHECKING:
    from click import Group as DYMGroup
else:
    from click_didyoumean import DYMGroup

GROUP = "batchery.commands"

#: Headings of `batchery --help`, and the commands below each; those of other packages come last.
SECTIONS = {
    "Run": ("up", "serve", "submit"),
    "See what it does": ("stats", "explain", "doctor", "dead"),
    "Operate": ("reload", "tune", "key", "acl", "exporter", "health"),
}

#: Exit code of an interrupted command, as in every shell.
INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def one_line_errors(*, with_traceback: bool = False) -> Iterator[None]:
    """Ends the process after an error with one line on stderr and an exit code.

    Raises:
        SystemExit: With the error's exit code, or 130 after Ctrl-C. After any other error, which is
            a defect, with 70 and a traceback, as commands say something else by 1.
    """
    try:
        yield
    except BatcheryError as error:
        if with_traceback:
            traceback.print_exc()
        click.echo(f"batchery: error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        if with_traceback:
            traceback.print_exc()
        sys.exit(INTERRUPTED)
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise  # click's own, and the end of a pager.
    except Exception:  # noqa: BLE001 (whatever it is)
        traceback.print_exc()
        sys.exit(os.EX_SOFTWARE)


class CommandGroup(DYMGroup):
    """A group whose commands are entry points of installed packages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands, sorted; imports none."""
        return sorted({*super().list_commands(ctx), *entry_points(group=GROUP).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one subcommand; if that fails, returns a command that says why."""
        if command := super().get_command(ctx, cmd_name):
            return command
        for entry in entry_points(group=GROUP, name=cmd_name):
            try:
                return _load(entry)
            except Exception as error:  # noqa: BLE001 (somebody else's import may raise anything)
                return _unavailable(entry, error)
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands below their headings."""
        left = dict.fromkeys(self.list_commands(ctx))
        known = [name for names in SECTIONS.values() for name in names]
        others = [name for name in left if name not in known]
        for heading, names in {**SECTIONS, "Others": others}.items():
            found = [(each, self.get_command(ctx, each)) for each in names if each in left]
            if rows := [
                (each, command.get_short_help_str(80)) for each, command in found if command
            ]:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the subcommand; an error of ours becomes one line and its exit code."""
        with one_line_errors(with_traceback=ctx.params["traceback"]):
            return super().invoke(ctx)


def _load(entry: EntryPoint) -> click.Command:
    command = entry.load()
    if not isinstance(command, click.Command):
        raise TypeError(f"{entry.value} is no click command")
    return command


def _unavailable(entry: EntryPoint, error: Exception) -> click.Command:
    package = entry.dist.name if entry.dist else entry.module
    problem = f"{type(error).__name__}: {error}"

    def explain(**_: Any) -> None:
        raise StartError(
            f"command '{entry.name}' ({entry.value} of {package}) cannot be loaded: {problem};"
            f" reinstall {package} or remove it"
        ) from error

    return click.Command(
        entry.name,
        callback=explain,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,
        short_help=f"cannot be loaded: {problem}",
    )


#: Of all commands: their options say what they are by default.
CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=CommandGroup, context_settings=CONTEXT)
@click.version_option(package_name="batchery", prog_name="batchery")
@click.option("--traceback", is_flag=True, help="Show where an error came from.")
def main(*, traceback: bool) -> None:
    """Batched GPU inference for Celery and Redis."""
