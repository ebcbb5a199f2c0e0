"""`batchery dead`: shows, requeues and deletes messages that could not be executed."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, NoReturn

import click
from celery import Celery
from rich import box
from rich.table import Table

from batchery.cli.app import check_shard, with_app
from batchery.cli.console import broker_errors, printable, render
from batchery.errors import SettingsError, counted
from batchery.shards import list_shards, open_shards
from batchery.transport.dead_letters import AllDeadLetters, DeadLetter, DeadLetters

#: Exit code if a named dead letter does not exist.
NOT_FOUND = 1

#: Longest message that `show` prints without `--raw`, in characters.
SHOWN_CHARS = 4000

#: Width of the table without a terminal, in characters: enough for ids and reasons.
TABLE_WIDTH = 160


@click.group()
def dead() -> None:
    """Look after dead letters: messages that could not be executed.

    A message that cannot be understood, that names an unknown task, or that killed its device or
    its worker too often is neither run again nor thrown away. It is kept here, with the reason.
    """


@dead.command(name="list")
@with_app
@click.option("--json", "as_json", is_flag=True, help="One JSON object per dead letter and line.")
def list_(*, app: Celery, as_json: bool) -> None:
    """List all dead letters, oldest first."""
    with open_dead_letters(app) as letters:
        found = list(letters)
    # Outside, as errors of a reader who has ended, or of a full disk, are none of the broker.
    for line in [json.dumps(asdict(each)) for each in found] if as_json else [draw(found)]:
        click.echo(line)


@dead.command()
@click.argument("token")
@with_app
@click.option("--json", "as_json", is_flag=True, help="The same as a JSON object.")
@click.option("--raw", is_flag=True, help="Only the message, byte for byte.")
@click.pass_context
def show(context: click.Context, *, token: str, app: Celery, as_json: bool, raw: bool) -> None:
    """Show one dead letter: the reason, its headers, its message.

    TOKEN may be the id of its job.
    """
    with open_dead_letters(app) as letters:
        found = letters.get(token) or letters.get(letters.find(token) or token)
    if found is None:
        _leave_without(context, [token])
    letter, message = found
    if raw:
        click.echo(message, nl=False)
    elif as_json:
        text = message.decode(errors="backslashreplace")
        report = {**asdict(letter), "headers": read_headers(message), "message": text}
        click.echo(json.dumps(report))
    else:
        click.echo(describe(letter, message))


def _choice(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command `TOKEN...` and `--all`."""
    tokens = click.argument("tokens", nargs=-1, metavar="[TOKEN]...")
    every = click.option(
        "--all", "every", is_flag=True, help="All dead letters that there are now."
    )
    return tokens(every(command))


@dead.command()
@_choice
@with_app
@click.pass_context
def requeue(context: click.Context, *, tokens: Sequence[str], every: bool, app: Celery) -> None:
    """Put dead letters back into their queues, behind the jobs that wait there.

    They run like any other job, and their deaths are counted anew.
    """
    with open_dead_letters(app) as letters:
        chosen = _choose(letters, tokens, every)
        done = letters.requeue(chosen)
    _tell(context, "requeued", chosen, done, every)


@dead.command()
@_choice
@with_app
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def purge(
    context: click.Context, *, tokens: Sequence[str], every: bool, app: Celery, yes: bool
) -> None:
    """Delete dead letters for good."""
    with open_dead_letters(app) as letters:
        chosen = _choose(letters, tokens, every)
        if not yes:
            click.confirm(f"Delete {counted(len(chosen), 'dead letter')} for good?", abort=True)
        done = letters.purge(chosen)
    _tell(context, "deleted", chosen, done, every)


@contextmanager
def open_dead_letters(app: Celery) -> Iterator[AllDeadLetters]:
    """The dead letters of an app.

    Raises:
        SettingsError: The broker is not a Redis.
    """
    for shard in list_shards(app):
        check_shard(app, shard)
    with broker_errors(), open_shards(app) as connections:
        letters = [each for each in map(DeadLetters.of, connections) if each is not None]
        if not letters:
            raise SettingsError(
                f"dead letters are kept in Redis, but the broker is {connections[0].as_uri()}"
            )
        yield AllDeadLetters(letters)


def draw(letters: Sequence[DeadLetter]) -> str:
    """A table of dead letters."""
    if not letters:
        return "no dead letters"
    table = Table("token", "died", "queue", "task", "id", "reason", box=box.SIMPLE)
    for letter in letters:
        known = (letter.queue, letter.task or "-", letter.id or "-", letter.reason)
        cells = (letter.token, moment(letter.died_s), *known)
        table.add_row(*(printable(str(cell)) for cell in cells))
    return render(table, TABLE_WIDTH)


def describe(letter: DeadLetter, message: bytes) -> str:
    """Formats a dead letter for people."""
    headers = read_headers(message)
    text = message.decode(errors="backslashreplace")
    if len(text) > SHOWN_CHARS:
        text = f"{text[:SHOWN_CHARS]}... ({len(message):,} bytes; --raw prints all)"
    lines = {
        "token": letter.token,
        "died": moment(letter.died_s),
        "queue": letter.queue,
        "task": str(letter.task or "-"),
        "id": str(letter.id or "-"),
        "args": str(headers.get("argsrepr", "-")),
        "kwargs": str(headers.get("kwargsrepr", "-")),
        "reason": letter.reason,
        "headers": json.dumps(headers, indent=2),
        "message": text,
    }
    return "\n".join(f"{name + ':':<9}{printable(value)}" for name, value in lines.items())


def read_headers(message: bytes) -> Mapping[str, Any]:
    """The headers of a message; empty if they cannot be read."""
    try:
        headers = json.loads(message)["headers"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}
    return headers if isinstance(headers, dict) else {}


def moment(seconds: float) -> str:
    """Formats a time in UTC; that of what is no dead letter is a dash."""
    return "-" if not seconds else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}Z"


def _choose(letters: AllDeadLetters, tokens: Sequence[str], every: bool) -> Sequence[str]:
    if every == bool(tokens):
        raise click.UsageError("give either TOKENs or --all")
    return letters.tokens() if every else list(dict.fromkeys(tokens))


def _tell(
    context: click.Context, what: str, chosen: Sequence[str], done: Sequence[str], every: bool
) -> None:
    """Says how many there were, and which of those that were named are none."""
    click.echo(f"{what}: {len(done)}")
    missing = [token for token in chosen if token not in set(done)]
    if missing and not every:
        _leave_without(context, missing)


def _leave_without(context: click.Context, tokens: Sequence[str]) -> NoReturn:
    names = ", ".join(map(printable, tokens))
    text = f"no dead letter {names}; `batchery dead list` has all, `batchery explain` finds jobs"
    click.echo(f"batchery: error: {text}", err=True)
    context.exit(NOT_FOUND)
