"""`batchery submit`: a file in, a file of results out; the command around `submit_file`."""

import itertools
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

import click
from celery import Celery
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from batchery.cli.app import SECONDS, app_options, load_app
from batchery.cli.console import Interrupt
from batchery.cli.main import main
from batchery.priority_class import LOWEST_PRIORITY
from batchery.retry import Interrupted
from batchery_producer.diagnosis import explain_stall
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.journal import Journal
from batchery_producer.files.records import Broken, Record
from batchery_producer.files.source import FORMATS, STANDARD_STREAM, is_url
from batchery_producer.run.file_run import FileRun, begin_run, submit_file
from batchery_producer.run.options import WINDOW, Ending, Snapshot, SubmitOptions, Summary, duration
from batchery_producer.run.output import Output

#: Time between two lines without a terminal, in seconds.
LINE_EVERY_S = 5.0

#: Maximum number of kinds of failures that are named.
MAX_KINDS = 3

#: Number of jobs in the probe, its maximum duration, and after how long they expire, in seconds.
PROBE_JOBS = 512
PROBE_S = 15.0
PROBE_EXPIRES_S = PROBE_S + 5

#: Maximum number of broken rows that are shown.
MAX_SHOWN = 5

#: Maximum number of characters of a failure's reason in the summary.
REASON_CHARS = 300

HELP = """Submit every row of SOURCE as one job, and write every result to a file.

SOURCE is one or many files, URLs (s3://, hf://, https://) or patterns ('data/*.jsonl'), or - for
standard input: JSON lines, CSV, TSV, plain text (one item per line), Parquet, Arrow, or requests of
OpenAI's batch API for embeddings and texts. gzip, zstd, bz2 and xz are recognised, and so are
semicolons, tabs and bars in a CSV. Blank lines are skipped.

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
  1    some rows failed, or --on-error=stop met the first; they are in the file of failures.
       Or some that --retry-failed names are not in SOURCE
  2    could not start, or the output can no longer be written: the disk is full, for example
  3    gave up: no result, or no room in the queue, for --timeout; or Redis stayed away for
       two minutes
  70   a defect of Batchery: the traceback says where
  130  interrupted
"""


def display_on(console: Console, title: str) -> "LiveDisplay | LineDisplay":
    """Picks the display for a console."""
    return LiveDisplay(console, title) if console.is_terminal else LineDisplay(console)


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """A bar and figures, which are updated in place."""

    def __init__(self, console: Console, title: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task(title, total=None, figures="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, run: Snapshot) -> None:
        """Shows the state of the run."""
        self._progress.update(self._task, completed=run.done, total=run.total, figures=figures(run))

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)


class LineDisplay(AbstractContextManager["LineDisplay"]):
    """A line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = time.monotonic() + LINE_EVERY_S

    def __exit__(self, *_: object) -> None:
        """Nothing to clean up."""

    def show(self, run: Snapshot) -> None:
        """Prints the state of the run, if a line is due."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LINE_EVERY_S
            self.note(figures(run))

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def figures(run: Snapshot) -> str:
    """The state of a run in one line: `1,200 done, 3 failed, 64 in flight, 410/s, 0:42 left`.

    It also has the kinds of failures and the size of batches, if they are known.
    """
    parts = [
        f"{run.succeeded:,} done",
        f"{run.failed:,} failed{_kinds(run)}",
        f"{run.in_flight:,} in flight",
        *([f"in batches of {run.batch_size:.0f}"] if run.batch_size else []),
        f"{run.rate:,.0f}/s" if run.rate >= 10 else f"{run.rate:.1f}/s",
    ]
    if run.left_s is not None:
        parts.append(f"{duration(run.left_s)} left")
    return ", ".join(parts)


def _kinds(run: Snapshot) -> str:
    named = [f"{count:,} {name}" for name, count in islice(run.kinds.items(), MAX_KINDS)]
    named += ["..."] if len(run.kinds) > MAX_KINDS else []
    return f" ({', '.join(named)})" if named else ""


@dataclass(frozen=True, slots=True)
class DryRun:
    """Findings of a dry run.

    Attributes:
        description: How rows are read.
        rows: Number of rows that can become jobs.
        broken: Number of rows that cannot.
        shown: The first broken rows, each with file, line and reason.
        probe: Summary of the probe; None if there were no rows to try.
        left_s: Estimated duration for all rows, in seconds; None if the probe had no result.
        reason: Why the probe had no result; empty if it had one, or was interrupted.
    """

    description: str
    rows: int
    broken: int
    shown: Sequence[str]
    probe: Summary | None
    left_s: float | None
    reason: str = ""

    @property
    def ending(self) -> Ending:
        """How the run would probably end."""
        if self.probe is not None and self.left_s is None:
            return Ending.GAVE_UP
        failed = self.broken or (self.probe is not None and self.probe.failed)
        return Ending.SOME_FAILED if failed else Ending.SUCCEEDED


def try_file(
    source: str | Path | Sequence[str | Path],
    task: str | None,
    output: str | Path,
    *,
    app: Celery,
    options: SubmitOptions,
) -> DryRun:
    """Checks input, output, app, task and workers; reads all rows, and submits the first ones.

    It takes the arguments of `submit_file`, and ignores options without effect on a dry run.

    Raises:
        BatcheryError: As `submit_file` does.
    """
    dataset, end_s = Dataset(source, **options.reading), float("inf")
    Output(dataset, output, **options.writing)
    stop = options.stop
    probe_options = SubmitOptions(
        window=min(options.window, PROBE_JOBS),
        queue=options.queue,
        keywords=options.keywords,
        priority=options.priority,
        tenant=options.tenant,
        # Those that no worker has begun by then wait for nobody.
        expires_s=PROBE_EXPIRES_S,
        stop=lambda: stop() or time.monotonic() > end_s,
    )
    try:
        run, all_rows = begin_run(app, dataset, task, probe_options)
    except Interrupted:
        return DryRun("interrupted", 0, 0, (), None, None)
    first, rows, shown = _read(itertools.takewhile(lambda _: not stop(), all_rows), dataset)
    end_s = time.monotonic() + PROBE_S
    probe = _probe(run, dataset, first) if first else None
    left_s = rows[0] / probe.rate if probe and probe.rate else None
    has_failed = probe is not None and left_s is None and not stop()
    reason = explain_stall(app, run.task, {"queue": run.queue}) if has_failed else ""
    return DryRun(dataset.description, *rows, shown, probe, left_s, reason)


def _read(
    rows: Iterable[Record | Broken], dataset: Dataset
) -> tuple[list[Record], tuple[int, int], list[str]]:
    """The first records, the numbers of good and broken rows, and the first reasons."""
    first: list[Record] = []
    shown: list[str] = []
    good = broken = 0
    for row in rows:
        if isinstance(row, Record):
            good += 1
            if len(first) < PROBE_JOBS:
                first.append(row)
        else:
            broken += 1
            if len(shown) < MAX_SHOWN:
                shown.append(f"{dataset.line_name(row.source, row.line)}: {row.reason}")
    return first, (good, broken), shown


def _probe(run: FileRun, dataset: Dataset, rows: Sequence[Record]) -> Summary:
    names = [each.name for each in dataset.sources]
    journal = Journal(secrets.token_hex(8), run.task, {}, names, [], len(rows))
    with (
        tempfile.TemporaryDirectory(prefix="batchery-") as folder,
        Output(dataset, Path(folder, "probe.jsonl")) as files,
    ):
        files.open(journal)
        return run.run(rows, files)


def describe_dry_run(run: DryRun, name: str) -> str:
    """Findings of a dry run, as text."""
    lines = [run.description, f"{name}: {run.rows:,} rows can be sent, {run.broken:,} cannot"]
    lines += [f"  {each}" for each in run.shown]
    if run.broken > len(run.shown):
        lines.append(f"  and {run.broken - len(run.shown):,} more")
    if run.probe is not None and run.left_s is not None:
        done = run.probe.succeeded + run.probe.failed
        lines.append(
            f"probe: {done:,} jobs in {run.probe.seconds:.1f} s, {run.probe.failed:,} of them"
            f" failed; all rows would take about {duration(run.left_s)}"
        )
    elif run.probe is not None:
        reason = f": {run.reason}" if run.reason else ""
        lines.append(f"probe: no result within {run.probe.seconds:.0f} s{reason}")
    return "\n".join(lines)


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
    type=SECONDS,
    metavar="SECONDS",
    help="Give up when no result has come for so long; default: never.",
)
@click.option(
    "--expires",
    "expires_s",
    type=SECONDS,
    metavar="SECONDS",
    help="Fail jobs that no worker has begun by then.",
)
@click.option(
    "--priority",
    type=click.IntRange(0, LOWEST_PRIORITY),
    metavar="N",
    help="Celery's priority of all jobs: in Redis, 0 is the highest, 9 the lowest.",
)
@click.option("--tenant", metavar="NAME", help="For whom the jobs run.")
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
    with Interrupt() as interrupt:
        app = load_app(app_path, redis_url)
        options = SubmitOptions(stop=interrupt, **flags)
        if dry_run:
            tried = try_file(source, task, output, app=app, options=options)
            click.echo(describe_dry_run(tried, " ".join(source)), err=True)
            sys.exit((Ending.INTERRUPTED if interrupt() else tried.ending).value)
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
        click.echo(describe(summary, output), err=True)
    sys.exit(summary.ending.value)


def as_dict(summary: Summary) -> dict[str, Any]:
    """A summary as JSON."""
    return {
        **asdict(summary),
        "ending": summary.ending.name.lower(),
        "seconds": round(summary.seconds, 3),
        "rate": round(summary.rate, 1),
    }


def describe(summary: Summary, output: str = "") -> str:
    """A summary in one to six lines, of a run with such an output."""
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
    ended_early = bool(summary.message)
    if ended_early and Path(f"{output}.journal").exists():
        lines.append("the same command with --resume goes on from here")
    if is_url(output) and summary.results != output:
        begins = "begins anew with --overwrite" if summary.errors else "begins anew"
        lines.append(
            f"nothing was written to {output}, as some rows are not done: the same command"
            f" {begins}; -o FILE writes to a file, with which --resume can go on"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(["submit", *sys.argv[1:]], prog_name="batchery")
