"""The `batchery` command: where its subcommands are, and how their errors end it."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from batchery.errors import BatcheryError

if TYPE_CHECKING:
    from click import Group as DYMGroup
else:
    from click_didyoumean import DYMGroup

#: Headings of `batchery --help`, and the commands below each.
SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Run": {
        "up": "batchery_worker.cli.up:up",
        "serve": "batchery_producer.cli.serve:serve",
        "submit": "batchery_producer.cli.submit:submit",
    },
    "See what it does": {
        "stats": "batchery.cli.stats:stats",
        "explain": "batchery.cli.explain:explain",
        "doctor": "batchery.cli.doctor:doctor",
        "dead": "batchery.cli.dead_letters:dead",
    },
    "Operate": {
        "reload": "batchery.cli.control:reload",
        "tune": "batchery_worker.cli.tune:tune",
        "key": "batchery_producer.cli.serve:key",
        "acl": "batchery.cli.acl:acl",
        "exporter": "batchery.operations.exporter:exporter",
    },
}

#: Where each command is.
PLACES = {name: place for part in SECTIONS.values() for name, place in part.items()}

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
    """A group that imports a subcommand when it is called, or described."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands, sorted; imports none."""
        return sorted({*super().list_commands(ctx), *PLACES})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one subcommand."""
        if cmd_name not in PLACES:
            return super().get_command(ctx, cmd_name)
        module, _, name = PLACES[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands below their headings."""
        for heading, names in SECTIONS.items():
            found = [(each, self.get_command(ctx, each)) for each in names]
            with formatter.section(heading):
                formatter.write_dl(
                    [(each, one.get_short_help_str(80)) for each, one in found if one]
                )

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the subcommand; an error of ours becomes one line and its exit code."""
        with one_line_errors(with_traceback=ctx.params["traceback"]):
            return super().invoke(ctx)


#: Of all commands: their options say what they are by default.
CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=CommandGroup, context_settings=CONTEXT)
@click.version_option(package_name="batchery", prog_name="batchery")
@click.option("--traceback", is_flag=True, help="Show where an error came from.")
def main(*, traceback: bool) -> None:
    """Batched GPU inference for Celery and Redis."""
