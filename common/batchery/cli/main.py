"""The `batchery` command: where its subcommands are, and how their errors end it."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from batchery.errors import BatcheryError

if TYPE_CHECKING:
    from click import Group as DYMGroup
else:
    from click_didyoumean import DYMGroup

#: Where each command is.
PLACES = {
    "acl": "batchery.cli.acl:acl",
    "dead": "batchery.cli.dead_letters:dead",
    "doctor": "batchery.cli.doctor:doctor",
    "explain": "batchery.cli.explain:explain",
    "exporter": "batchery.operations.exporter:exporter",
    "key": "batchery_producer.cli.serve:key",
    "purge": "batchery.cli.purge:purge",
    "reload": "batchery.cli.control:reload",
    "serve": "batchery_producer.cli.serve:serve",
    "stats": "batchery.cli.stats:stats",
    "submit": "batchery_producer.cli.submit:submit",
    "tune": "batchery_worker.cli.tune:tune",
    "up": "batchery_worker.cli.up:up",
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
