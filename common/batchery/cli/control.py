"""`batchery reload`: an order to workers that run, and what became of it."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

import click
from celery import Celery

from batchery.cli.app import check_broker, timeout_option, with_app
from batchery.cli.console import broker_errors
from batchery.cli.survey import PATIENCE_S, ask_workers, find_workers, registered_workers
from batchery.errors import StartError
from batchery.protocol.commands import RELOAD

#: Pause between two looks, in seconds.
PAUSE_S = 0.1

#: After so much time a worker that lives and does not answer is given up, in seconds.
SILENT_S = 60.0

#: Exit code if anything was not done, or no worker could do it.
NOT_DONE = 1


@click.command()
@click.argument("name")
@click.option("--worker", metavar="NAME", help="Only this one, by its whole name; default: all.")
@with_app
@timeout_option(PATIENCE_S, "How long a look waits for a worker that lives and does not answer.")
@click.pass_context
def reload(
    context: click.Context,
    *,
    name: str,
    worker: str | None,
    app: Celery,
    timeout_s: float,
) -> None:
    """Load a model as the settings say now, while workers serve it; no job is lost.

    Beside each device's process another one loads the new version and warms it up, and takes its
    place. If the new one does not load, the old one stays. Models with slots are not reloaded:
    restart their worker. NAME is that of the model's task.

    \b
    Exit codes:
      0    all devices serve the new version
      1    a device goes on with the old one, or no worker serves such a model
      2    could not start: no such app, or its broker does not answer
      130  interrupted; the workers go on
    """  # noqa: D301 (click looks for this character)
    answers = follow(app, worker, timeout_s, {"number": uuid.uuid4().hex, "task": name})
    lines, is_done = describe_reload(name, answers)
    for line in lines:
        click.echo(line)
    context.exit(0 if is_done else NOT_DONE)


def follow(
    app: Celery, worker: str | None, timeout_s: float, order: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Gives an order to workers, and asks again until all have carried it out.

    Args:
        app: The app whose workers get it.
        worker: Name of the only one; None for all that have batch tasks.
        timeout_s: How long one look waits for answers, in seconds.
        order: Arguments of the command, which begins nothing twice.

    Returns:
        The last answer of each worker with devices; of one that does not answer any more,
        `{"silent": True}`.

    Raises:
        StartError: No worker with devices answers.
    """
    check_broker(app)
    open_ = _find_live(app)
    if worker is not None:
        open_ &= {worker}
    answers: dict[str, Mapping[str, Any]] = {}
    began_s, heard_s = time.monotonic(), dict[str, float]()
    while open_:
        with broker_errors():
            found = ask_workers(app, RELOAD, timeout_s, open_, **order)
        now_s = time.monotonic()
        heard_s |= dict.fromkeys(found, now_s)
        answers |= {name: answer for name, answer in found.items() if "devices" in answer}
        open_ -= {
            name
            for name, answer in found.items()
            if "devices" not in answer or answer.get("error") or answer["is_over"]
        }
        # Redis knows who lives, and answers late, as on a busy machine.
        live = _find_live(app) if open_ - set(found) else open_
        for name in sorted(open_):
            if name not in live or now_s - heard_s.get(name, began_s) > SILENT_S:
                open_.discard(name)
                if name in live or name in heard_s:
                    answers[name] = {"silent": True}
        time.sleep(PAUSE_S if open_ else 0.0)
    if not answers:
        who = f"no worker {worker!r}" if worker else "no worker"
        raise StartError(f"{who} with devices answers; is it up?")
    return answers


def _find_live(app: Celery) -> set[str]:
    with broker_errors():
        return find_workers(app, registered_workers(app))


def describe_reload(name: str, answers: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], bool]:
    """What became of an order, in a line for each worker and device; and whether all have it."""
    lines, is_done = list[str](), True
    for worker, answer in sorted(answers.items()):
        if "silent" in answer:
            lines.append(f"{worker}: does not answer any more; it may do it yet")
            is_done = False
        if answer.get("error"):
            lines.append(f"{worker}: not reloaded: {answer['error']}")
            is_done = False
        for device, step in answer.get("devices", {}).items():
            where = f"{worker} {device}"
            if step["state"] == "reloaded":
                version = f"version {step['version']}" if step["version"] else "reloaded"
                before = f", before it was {step['before']}" if step["before"] else ""
                lines.append(
                    f"{where}: {name} is {version}{before}, {step['load_s']:.1f} s to load"
                )
            else:
                why = step["error"]
                lines.append(f"{where}: not reloaded, {name} goes on as before: {why}")
                is_done = False
    if not lines:
        return [f"no worker serves a model {name!r}; see `batchery stats`"], False
    return lines, is_done
