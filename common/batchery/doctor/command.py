"""`batchery doctor`: what is wrong with a deployment, and how to mend it."""

import json
from collections.abc import Mapping

import click
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from batchery.cli.app import app_options, load_app, timeout_option
from batchery.cli.console import render
from batchery.doctor import checks_celery, checks_machine, checks_redis, checks_workers
from batchery.doctor.findings import Diagnosis, Find, diagnose
from batchery.doctor.gather import gather
from batchery.errors import counted

#: All checks, by id.
CHECKS: Mapping[str, Find] = {
    **checks_redis.CHECKS,
    **checks_celery.CHECKS,
    **checks_workers.CHECKS,
    **checks_machine.CHECKS,
}

#: How long workers are awaited after each question, in seconds.
ANSWER_TIMEOUT_S = 1.0

#: Colour of a severity.
STYLES = {"error": "bold red", "warning": "yellow"}

#: Width of the table without a terminal, in characters: lines to copy are not broken.
MIN_WIDTH = 140

HELP = """Check a deployment, running or planned, and say how to mend what is wrong.

Looks at the broker's Redis, the app's Celery settings, the workers that answer, the settings of
Batchery with their models, and this machine; so run it where workers run. It changes nothing. A
check that could not be made, because Redis forbids a command or no worker answers, says why, and
does not count. docs/doctor.md lists all checks.

\b
Exit codes:
  0  nothing is wrong
  1  warnings: it works, but slower, or less safely, than it could
  2  errors: jobs are lost, wait for ever, or are open to strangers; or there is no such app
"""


@click.command(help=HELP)
@app_options
@click.option(
    "--flower",
    "flower_url",
    metavar="URL",
    help="URL of your Flower, as the network has it; by default port 5555 of this machine.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
@timeout_option(ANSWER_TIMEOUT_S, "How long each question waits for the workers' answers.")
@click.pass_context
def doctor(
    context: click.Context,
    *,
    app_path: str,
    redis_url: str | None,
    flower_url: str | None,
    as_json: bool,
    timeout_s: float,
) -> None:
    """Runs the command; see `HELP`."""
    app = load_app(app_path, redis_url)
    diagnosis = diagnose(CHECKS, gather(app, app_path, timeout_s, flower_url))
    text = json.dumps(diagnosis.report()) if as_json else render(draw(diagnosis), MIN_WIDTH)
    click.echo(text)
    context.exit(diagnosis.exit_code)


def draw(diagnosis: Diagnosis) -> RenderableType:
    """Draws what was found, and what could not be checked."""
    table = Table(box=box.SIMPLE, show_header=False)
    for each in diagnosis.findings:
        text = Text.assemble(each.found, "\n", (each.why, "dim"), "\n", (each.fix, "bold"))
        table.add_row(Text(each.severity, STYLES[each.severity]), each.check, text)
    for why in dict.fromkeys(diagnosis.unchecked.values()):
        names = [name for name, each in diagnosis.unchecked.items() if each == why]
        table.add_row("unchecked", counted(len(names), "check"), f"{why}\n{', '.join(names)}")
    wrong, unchecked = counted(len(diagnosis.findings), "finding"), len(diagnosis.unchecked)
    return Group(
        *([table] if table.row_count else []),
        Text(
            f"{counted(diagnosis.passed, 'check')} found nothing wrong, {wrong};"
            f" {counted(unchecked, 'check')} could not be made"
        ),
    )
