"""`batchery submit`: a file in, a file of results out; the command around `submit_file`."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from textwrap import shorten
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from batchery.cli.app import SECONDS, app_options, load_app
from batchery.cli.console import Interrupt
from batchery.cli.main import main
from batchery.priority_class import LOWEST_PRIORITY
from batchery_producer.files.options import WINDOW, Snapshot, SubmitOptions, Summary, duration
from batchery_producer.files.run import submit_file
from batchery_producer.files.source import FORMATS, STANDARD_STREAM

#: Time between two lines without a terminal, in seconds.
LINE_EVERY_S = 5.0

#: Maximum number of characters of a failure's reason in the summary.
REASON_CHARS = 300


@contextmanager
def display(console: Console, title: str) -> Iterator[Mapping[str, Any]]:
    """A bar and figures that are updated in place; without a terminal, a line now and then.

    Yields:
        The options of a run that say what to show.
    """
    bar = Progress(
        *(TextColumn("{task.description}"), BarColumn(bar_width=24)),
        TextColumn("{task.fields[figures]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(title, total=None, figures="")
    next_s = time.monotonic() + LINE_EVERY_S

    def note(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(run: Snapshot) -> None:
        nonlocal next_s
        bar.update(task, completed=run.done, total=run.total, figures=figures(run))
        if bar.disable and (now_s := time.monotonic()) >= next_s:
            next_s = now_s + LINE_EVERY_S
            note(figures(run))

    with bar:
        yield {"progress": show, "began": note, "notice": note}


def figures(run: Snapshot) -> str:
    """The state of a run in one line: `1,200 done, 3 failed, 64 in flight, 410/s, 0:42 left`."""
    parts = [
        f"{run.succeeded:,} done",
        f"{run.failed:,} failed",
        f"{run.in_flight:,} in flight",
        f"{run.rate:,.0f}/s" if run.rate >= 10 else f"{run.rate:.1f}/s",
        *([f"{duration(run.left_s)} left"] if run.left_s is not None else []),
    ]
    return ", ".join(parts)


def _read_options(_context: Any, _parameter: Any, values: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for each in values:
        key, equals, value = each.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{each!r}: expected KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


NUMBER = click.IntRange(min=1)
PRIORITY = click.IntRange(0, LOWEST_PRIORITY)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", nargs=-1, required=True)
@click.option("--task", required=True, metavar="NAME", help="Task that runs the jobs, or model.")
@click.option("-o", "--output", required=True, metavar="FILE", help="Results; - for stdout.")
@click.option("--errors", metavar="FILE", help="Failures; default: OUTPUT's stem.errors.jsonl.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--resume", is_flag=True, help="Finish an existing output.")
@click.option("--format", type=click.Choice(FORMATS), help="Default: by SOURCE's extension.")
@click.option("--field", metavar="FIELD", help="The item; default: text, or the only string.")
@click.option("--id-field", metavar="FIELD", help="Default: id, custom_id, or the row's number.")
@click.option("--limit", type=NUMBER, metavar="N", help="Only the first N rows.")
@click.option(
    "--queue", metavar="NAME", help="Default: as the app routes it, else the task's name."
)
@app_options
@click.option(
    "--option",
    "keywords",
    multiple=True,
    callback=_read_options,
    metavar="KEY=VALUE",
    help="A keyword of all jobs; the value may be JSON.",
)
@click.option("--window", type=NUMBER, default=WINDOW, help="Maximum number of jobs in flight.")
@click.option(
    "--timeout", "timeout_s", type=SECONDS, help="Give up after so long without a result."
)
@click.option("--expires", "expires_s", type=SECONDS, help="Fail jobs that have not begun by then.")
@click.option(
    "--priority", type=PRIORITY, help="Celery's: in Redis, 0 is the highest, 9 the lowest."
)
@click.option("--tenant", metavar="NAME", help="For whom the jobs run.")
@click.option("--quiet", is_flag=True, help="No progress and no summary.")
@click.option("--json", "as_json", is_flag=True, help="Summary as JSON on stdout.")
def submit(
    source: Sequence[str],
    task: str,
    output: str,
    app_path: str,
    redis_url: str | None,
    **flags: Any,
) -> None:
    """Submit every row of SOURCE as one job, and write every result to a file.

    SOURCE is one or many files, URLs (s3://, hf://, https://) or patterns ('data/*.jsonl'), or -
    for standard input: JSON lines, CSV, TSV, plain text (one item per line), Parquet or Arrow,
    compressed or not.

    OUTPUT gets JSON lines {"id", "row", "result"} in order of completion, or a table if it ends in
    .parquet. Rows that fail go to the file of failures as {"id", "row", "line", "error"}.

    After Ctrl-C or a crash, the same command with --resume goes on: it submits only rows that have
    neither a result nor a failure, and awaits jobs that are still in flight. A second Ctrl-C ends
    the command at once.

    \b
    Exit codes:
      0    every row has a result
      1    some rows failed; they are in the file of failures
      2    could not start, or the output can no longer be written: the disk is full, for example
      3    gave up: no result, or no room in the queue, for --timeout; or Redis stayed away for
           two minutes
      70   a defect of Batchery: the traceback says where
      130  interrupted
    """  # noqa: D301 (click looks for this character)
    quiet, as_json = flags.pop("quiet"), flags.pop("as_json")
    if as_json and output == STANDARD_STREAM:
        raise click.UsageError("--json and -o - both want stdout")
    with Interrupt() as interrupt:
        app = load_app(app_path, redis_url)
        options = SubmitOptions(stop=interrupt, **flags)
        with display(Console(stderr=True, quiet=quiet), task) as shown:
            summary = submit_file(source, task, output, app=app, options=options, **shown)
    if as_json:
        click.echo(json.dumps(as_dict(summary)))
    if not quiet or summary.message:
        click.echo(describe(summary), err=True)
    sys.exit(summary.ending.value)


def as_dict(summary: Summary) -> dict[str, Any]:
    """A summary as JSON."""
    return {
        **asdict(summary),
        "ending": summary.ending.name.lower(),
        "seconds": round(summary.seconds, 3),
        "rate": round(summary.rate, 1),
    }


def describe(summary: Summary) -> str:
    """A summary in one to five lines."""
    done = summary.succeeded + summary.failed
    first = (
        f"{done:,} done in {duration(summary.seconds)} ({summary.rate:,.1f}/s):"
        f" {summary.succeeded:,} succeeded, {summary.failed:,} failed"
    )
    if summary.results:
        first += f"; results in {summary.results}"
    lines = [f"batchery: {summary.message}", first] if summary.message else [first]
    if summary.errors:
        why = summary.first_failure
        reason = f"; the first: {shorten(why, REASON_CHARS)}" if why else ""
        lines.append(f"failures in {summary.errors}{reason}")
    if summary.before:
        lines.append(f"done before: {summary.before:,}")
    if summary.in_flight:
        lines.append(
            f"{summary.in_flight:,} jobs still in flight in queue {summary.queue!r}:"
            " workers will run them; their results stay in the backend until they expire"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(["submit", *sys.argv[1:]], prog_name="batchery")
