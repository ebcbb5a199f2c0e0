"""`batchery submit`: the command around `submit_file`."""

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import click
from rich.console import Console

from batchery.cli.app import app_options, load_app
from batchery.cli.console import Interrupt
from batchery.cli.main import main, one_line_errors
from batchery_producer.cli.dry_run import describe_dry_run, try_file
from batchery_producer.cli.progress import LineDisplay, LiveDisplay, display_on
from batchery_producer.files.source import FORMATS, STANDARD_STREAM
from batchery_producer.run.api import submit_file
from batchery_producer.run.options import WINDOW, SubmitOptions
from batchery_producer.run.summary import Ending, Summary, duration

#: Maximum number of characters of a failure's reason in the summary.
REASON_CHARS = 300

HELP = """Submit every row of SOURCE as one job, and write every result to a file.

SOURCE is one or many files, URLs (s3://, hf://, https://) or patterns ('data/*.jsonl'), or - for
standard input: JSON lines, CSV, TSV, plain text (one item per line), Parquet, Arrow, or requests of
OpenAI's batch API for embeddings. gzip, zstd, bz2 and xz are recognised, and so are semicolons,
tabs and bars in a CSV. Blank lines are skipped.

Results are JSON lines {"id", "line", "result"} in order of completion; if OUTPUT ends in .csv,
.tsv, .parquet or .arrow, they are a table that is written at the end. Jobs that fail, and lines
that cannot be read, go to the file of failures as {"id", "line", "error"}; without failures there
is no such file. Requests in OpenAI's form get output and error files in OpenAI's form.

--resume continues a run that ended early, even by kill -9: it submits only rows that have neither a
result nor a failure, and awaits jobs that are still in flight. OUTPUT.journal identifies the run
and is removed at the end; without it, or with another input, a run cannot be resumed.

The first Ctrl-C ends the run cleanly: it writes the results that are ready, and leaves jobs in
flight in the queue, where workers still run them. The second Ctrl-C ends the run at once.

\b
Exit codes:
  0    every row has a result
  1    some rows failed, or --on-error=stop met the first; they are in the file of failures
  2    could not start, or the output can no longer be written: the disk is full, for example
  3    gave up: no result for --timeout, or Redis stayed away for two minutes
  130  interrupted
"""


def _keywords(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> dict[str, Any]:
    try:
        keywords = json.loads(value or "{}")
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"not JSON: {error}") from None
    if not isinstance(keywords, dict):
        raise click.BadParameter('expected a JSON object, such as \'{"prompt": "query"}\'')
    return keywords


def _options(
    _context: click.Context, _parameter: click.Parameter, values: Sequence[str]
) -> dict[str, Any]:
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


@click.command(help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", nargs=-1, required=True)
@click.option("--task", metavar="NAME", help="Task that runs the jobs, or model.")
@click.option("-o", "--output", required=True, metavar="FILE", help="Results; - for stdout.")
@click.option("--errors", metavar="FILE", help="Failures; default: OUTPUT's stem.errors.jsonl.")
@click.option("--ordered", is_flag=True, help="Keep SOURCE's order; writes the output at the end.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--resume", is_flag=True, help="Finish an existing output.")
@click.option(
    "--on-error",
    type=click.Choice(["continue", "stop"]),
    default="continue",
    show_default=True,
    help="What to do after a failure.",
)
@click.option("--format", type=click.Choice(list(FORMATS)), help="Default: by SOURCE's extension.")
@click.option("--field", metavar="FIELD", help="The item; default: text, or the only string.")
@click.option("--id-field", metavar="FIELD", help="Default: id, custom_id, or the line number.")
@click.option("--delimiter", metavar="CHAR", help="Of CSV; default: as header and rows show.")
@click.option("--encoding", default="utf-8", show_default=True, help="Of lines and CSV.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N rows.")
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Only N rows at random.")
@click.option("--retry-failed", metavar="FILE", help="Only rows that this file of failures names.")
@click.option("--dry-run", is_flag=True, help="Check everything, try some rows, write nothing.")
@click.option(
    "--queue", metavar="NAME", help="Default: as the app routes it, else the task's name."
)
@app_options
@click.option(
    "--kwargs",
    "keywords",
    callback=_keywords,
    metavar="JSON",
    help="Keyword arguments of all jobs.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    callback=_options,
    metavar="KEY=VALUE",
    help="One keyword argument, as JSON or text; repeatable.",
)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    default=WINDOW,
    show_default=True,
    metavar="N",
    help="Maximum number of jobs in flight.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Give up when no result has come for so long; default: never.",
)
@click.option(
    "--expires",
    "expires_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Fail jobs that no worker has begun by then.",
)
@click.option("--report", metavar="FILE.html", help="A page with figures and plots of the run.")
@click.option("--keep-results", is_flag=True, help="Leave results in the result backend, too.")
@click.option("--quiet", is_flag=True, help="No progress and no summary.")
@click.option("--json", "as_json", is_flag=True, help="Summary as JSON on stdout.")
def submit(
    source: Sequence[str],
    task: str | None,
    output: str,
    app_path: str,
    redis_url: str | None,
    **flags: Any,
) -> None:
    """Runs the command; see `HELP`."""
    dry_run, quiet, as_json = (flags.pop(name) for name in ("dry_run", "quiet", "as_json"))
    flags["keywords"] |= flags.pop("options")
    flags["stop_at_failure"] = flags.pop("on_error") == "stop"
    if as_json and output == STANDARD_STREAM:
        raise click.UsageError("--json and -o - both want stdout")
    with Interrupt() as interrupt, one_line_errors():
        app = load_app(app_path, redis_url)
        options = SubmitOptions(stop=interrupt, **flags)
        if dry_run:
            tried = try_file(source, task, output, app=app, options=options)
            click.echo(describe_dry_run(tried, " ".join(source)), err=True)
            sys.exit(tried.ending.value)
        display: AbstractContextManager[LiveDisplay | LineDisplay | None] = (
            nullcontext() if quiet else display_on(Console(stderr=True), task or "submit")
        )
        with display as shown:
            if shown:
                options = replace(options, progress=shown.show, began=shown.note, notice=shown.note)
            summary = submit_file(source, task, output, app=app, options=options)
    if as_json:
        click.echo(json.dumps(as_dict(summary)))
    if not quiet or summary.message:
        can_resume = Path(f"{output}.journal").exists()
        click.echo(describe(summary, can_resume=can_resume), err=True)
    sys.exit(summary.ending.value)


def as_dict(summary: Summary) -> dict[str, Any]:
    """A summary as JSON."""
    return {
        **asdict(summary),
        "ending": summary.ending.name.lower(),
        "seconds": round(summary.seconds, 3),
        "rate": round(summary.rate, 1),
    }


def describe(summary: Summary, *, can_resume: bool = False) -> str:
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
        why = summary.first_failure if summary.first_failure not in summary.message else ""
        reason = f"; the first: {shorten(why, REASON_CHARS)}" if why else ""
        lines.append(f"failures in {summary.errors}{reason}")
    if summary.before:
        lines.append(f"{summary.before:,} were done before")
    if summary.in_flight:
        lines.append(
            f"{summary.in_flight:,} jobs still in flight in queue {summary.queue!r}:"
            " workers will run them; their results stay in the backend until they expire"
        )
    ended_early = summary.ending in (Ending.INTERRUPTED, Ending.GAVE_UP)
    if ended_early and can_resume:
        lines.append("the same command with --resume goes on from here")
    return "\n".join(lines)


if __name__ == "__main__":
    main(["submit", *sys.argv[1:]], prog_name="batchery")
