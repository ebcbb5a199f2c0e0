"""`batchery explain TASK_ID`: what became of one job, in one line."""

import json

import click
from celery import Celery
from celery.app.control import flatten_reply
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from batchery.errors import RedisUnavailable
from batchery.named_app import app_options, check_backend, check_broker, load_app, timeout_option
from batchery.whereabouts import Whereabouts, from_result, from_workers

HELP = """Say what became of a job, and in which batch it ran.

A job with a stored result is explained by it. Of any other one the workers are asked: is it
waiting, active or scheduled there? A job that is still in its queue cannot be told from one that
has expired or was never sent.

\b
Exit codes:
  0  it succeeded
  1  it failed, or was revoked
  2  could not start: no such app, or its Redis does not answer
  3  it is not finished
  4  nothing is known of it
"""

#: How long workers may take to say whether they have the job, in seconds.
ASK_S = 1.0


@click.command(help=HELP)
@click.argument("task_id")
@app_options
@timeout_option(ASK_S, "How long to wait for the workers' answers.")
@click.option("--json", "as_json", is_flag=True, help="The same as a JSON object.")
@click.pass_context
def explain(
    context: click.Context,
    *,
    task_id: str,
    app_path: str,
    redis_url: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Runs the command; see `HELP`."""
    found = find(load_app(app_path, redis_url), task_id, timeout_s)
    click.echo(json.dumps(found.report()) if as_json else found.line)
    context.exit(found.exit_code)


def find(app: Celery, task_id: str, timeout_s: float = ASK_S) -> Whereabouts:
    """Looks for a job: in the result backend first, then in the workers.

    Args:
        app: Whose backend and workers are asked.
        task_id: Of the job.
        timeout_s: How long workers may take to answer; not waited for where there is a result.

    Raises:
        RedisUnavailable: Backend or broker does not answer.
        SettingsError: The app stores no results.
        StartError: A broker that is no Redis does not answer.
    """
    check_backend(app)
    try:
        stored = app.backend.get_task_meta(task_id)
        if stored["status"] != "PENDING":
            return from_result(task_id, stored)
        check_broker(app)
        replies = app.control.broadcast(
            "query_task", arguments={"ids": [task_id]}, reply=True, timeout=timeout_s
        )
        return from_workers(task_id, flatten_reply(replies or []))
    except (OperationalError, RedisError, OSError) as error:
        raise RedisUnavailable(f"Redis does not answer: {error}; is it up?") from error
