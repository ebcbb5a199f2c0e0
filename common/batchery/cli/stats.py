"""`batchery stats`: figures of all workers' batches, live."""

import json
import time
from pathlib import Path

import click
from celery import Celery
from rich.live import Live

from batchery.cli.app import app_options, check_broker, load_app, timeout_option
from batchery.cli.console import Interrupt, render
from batchery.cli.dashboard import dashboard
from batchery.cli.record import record
from batchery.cli.survey import Survey, WorkerDirectory, app_queues, survey
from batchery.errors import StartError

#: Time of one look, in seconds: how long it collects the workers' answers.
REFRESH_S = 1.0

#: Exit code if no worker with batches answers.
NO_WORKER = 1

HELP = """Show what the batches of all workers look like, each second.

Queue depths come from the broker, for the queues of the app and those that workers consume.
Everything else comes from the workers that have batch tasks; others are not asked for figures.
"Oldest" is the age of the oldest job that waits in a worker; what is still in the queue may be
older. Rates are those between two looks.

With --record the jobs that the workers take are written to a file until Ctrl-C, and no figures are
shown; --once has no use there, and --json prints at the end what was recorded. The file is one for
`batchery simulate --trace`.

\b
Exit codes:
  0    shown, or recorded
  1    with --once or --record: no worker with devices answered
  2    could not start: no such app, its broker does not answer, or FILE cannot be written
  130  interrupted
"""


@click.command(help=HELP)
@app_options
@click.option("--once", is_flag=True, help="Look twice, for the rates, and show it once.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per look, on a line each.")
@click.option(
    "--record",
    "trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the jobs that come to a trace, until Ctrl-C.",
)
@click.option("--overwrite", is_flag=True, help="With --record: replace a file that is there.")
@timeout_option(REFRESH_S, "How long a look waits for the workers' answers.")
@click.pass_context
def stats(
    context: click.Context,
    *,
    app_path: str,
    redis_url: str | None,
    once: bool,
    as_json: bool,
    trace: Path | None,
    overwrite: bool,
    timeout_s: float,
) -> None:
    """Runs the command; see `HELP`."""
    if trace is None and overwrite:
        raise click.UsageError("--overwrite is for --record FILE")
    if trace is not None and once:
        raise click.UsageError("--record goes on until Ctrl-C; leave out --once")
    app = load_app(app_path, redis_url)
    if trace is not None:
        context.exit(record(app, trace, overwrite=overwrite, as_json=as_json, timeout_s=timeout_s))
    context.exit(watch(app, once=once, as_json=as_json, timeout_s=timeout_s))


def watch(app: Celery, *, once: bool, as_json: bool, timeout_s: float = REFRESH_S) -> int:
    """Shows the figures of all workers until Ctrl-C, or once.

    Args:
        app: The app whose workers and queues are shown.
        once: Look twice and show the second look.
        as_json: Print JSON lines instead of tables.
        timeout_s: How long a look takes, in seconds.

    Returns:
        The exit code.

    Raises:
        RedisUnavailable: The broker does not answer; with `once`, also if it stops answering.
        StartError: The broker is not a Redis, and does not answer.
    """
    check_broker(app)
    if once:
        return _show_once(app, as_json, timeout_s)
    with Interrupt(at_once=True) as interrupt:
        if as_json:
            _print_lines(app, timeout_s, interrupt)
        else:
            _live(app, timeout_s, interrupt)
    return 0


def _show_once(app: Celery, as_json: bool, timeout_s: float) -> int:
    directory, queues = WorkerDirectory(app), app_queues(app)
    first = survey(directory, app, timeout_s, queues)
    time.sleep(timeout_s)
    second = survey(directory, app, timeout_s, queues)
    if as_json:
        click.echo(json.dumps(second.report(first)))
    else:
        click.echo(render(dashboard(second, first)))
    return 0 if any("batches" in figures for figures in second.workers.values()) else NO_WORKER


def _print_lines(app: Celery, timeout_s: float, interrupt: Interrupt) -> None:
    before: Survey | None = None
    directory, queues = WorkerDirectory(app), app_queues(app)
    while True:
        next_s = time.monotonic() + timeout_s
        now = survey(directory, app, timeout_s, queues)
        interrupt.check()
        click.echo(json.dumps(now.report(before)))
        before = now
        time.sleep(max(0.0, next_s - time.monotonic()))


def _live(app: Celery, timeout_s: float, interrupt: Interrupt) -> None:
    before: Survey | None = None
    directory, queues = WorkerDirectory(app), app_queues(app)
    with Live("asking the workers ...", auto_refresh=False) as live:
        while True:
            interrupt.check()
            next_s = time.monotonic() + timeout_s
            try:
                now = survey(directory, app, timeout_s, queues)
            except StartError as error:
                # The broker was there before. A person who watches wants to see it come back.
                live.update(str(error), refresh=True)
                time.sleep(timeout_s)
                continue
            live.update(dashboard(now, before), refresh=True)
            before = now
            time.sleep(max(0.0, next_s - time.monotonic()))
