"""`batchery up`: Redis, a worker, Flower and the HTTP gateway in one terminal."""

import signal
import threading
from pathlib import Path

import click

from batchery.cli.app import DEFAULT_APP, masked
from batchery.cli.console import Interrupt
from batchery.errors import SettingsError
from batchery.settings import Settings
from batchery_worker.devstack.stack import Stack

#: Colours of the prefixes.
COLOURS = {"redis": "red", "worker": "green", "flower": "magenta", "gateway": "blue", "up": "white"}

#: How much longer than a device all may take to be ready, in seconds.
START_MARGIN_S = 60.0

NO_MODELS = """\
no models configured: write a file batchery.toml here, such as

[models.embed]
kind = "embedding"
model = "sentence-transformers/all-MiniLM-L6-v2"
max_length = 256

or name a Celery app of your own with -A"""

_printing = threading.Lock()


@click.command()
@click.option("-A", "--app", default=DEFAULT_APP, help="The Celery app.")
@click.option("--redis", "redis_url", metavar="URL", help="A Redis of yours, not a private one.")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the private Redis's data in this directory.",
)
@click.option("-l", "--loglevel", default="INFO", help="Of the worker.")
@click.option("-c", "--concurrency", type=click.IntRange(1), help="Of the worker.")
@click.option("-Q", "--queues", metavar="A,B", help="Queues of the worker; else of all its tasks.")
@click.option(
    "--flower-port",
    type=click.IntRange(0, 65535),
    default=5555,
    help="Port of Flower on 127.0.0.1, or the next free one.",
)
@click.option("--no-flower", is_flag=True, help="Run without Flower.")
@click.option(
    "--gateway-port",
    type=click.IntRange(0, 65535),
    help="Port of the HTTP gateway, or the next free one; by default that of the settings.",
)
@click.option("--no-gateway", is_flag=True, help="Run without the HTTP gateway.")
def up(
    *,
    app: str,
    redis_url: str | None,
    data: Path | None,
    loglevel: str,
    concurrency: int | None,
    queues: str | None,
    flower_port: int,
    no_flower: bool,
    gateway_port: int | None,
    no_gateway: bool,
) -> None:
    """Run Redis, a worker, Flower and the HTTP gateway in this terminal.

    The Redis is a private one, unless --redis or the setting redis_url names another. What to
    export for other commands is printed once all are ready. Ctrl-C stops all in order; a second
    Ctrl-C kills.
    """
    if redis_url and data:
        raise click.UsageError("--data is for the private Redis: give it or --redis, not both")
    settings = Settings.load()
    if app == DEFAULT_APP and not settings.models:
        raise SettingsError(NO_MODELS)
    if not data and "redis_url" in settings.model_fields_set:
        redis_url = redis_url or settings.redis_url
    options = {"--loglevel": loglevel, "--concurrency": concurrency, "--queues": queues}
    stack = Stack(
        app,
        redis_url=redis_url,
        data=data,
        flower=not no_flower,
        flower_port=flower_port,
        gateway=not no_gateway,
        gateway_host=settings.gateway.host,
        gateway_port=settings.gateway.port if gateway_port is None else gateway_port,
        worker_arguments=[f"{name}={value}" for name, value in options.items() if value],
        on_line=print_line,
        start_timeout_s=settings.device_start_timeout_s + START_MARGIN_S,
    )
    with Interrupt(signal.SIGHUP, at_once=True), stack:
        try:
            task = next(iter(settings.models), None) if app == DEFAULT_APP else None
            click.echo(summary(stack, app, task, is_private=redis_url is None))
            stack.wait()
        except KeyboardInterrupt:
            print_line("up", "stopping; the worker finishes what it runs, Ctrl-C again kills it")


def print_line(name: str, line: str) -> None:
    """Prints one line of one process, behind its name; may be called from any thread."""
    with _printing:
        click.echo(f"{click.style(f'{name:<7} |', fg=COLOURS[name])} {line}")


def summary(stack: Stack, app: str, task: str | None, *, is_private: bool) -> str:
    """What runs and how to use it.

    Args:
        stack: It is ready.
        app: Name of the Celery app, as for `celery -A`.
        task: Name of one of its tasks; None if nobody knows.
        is_private: Whether the Redis is the stack's own, whose password nobody else knows.
    """
    url = stack.redis_url if is_private else masked(stack.redis_url)
    variables = ["BATCHERY_REDIS_URL"]
    if app != DEFAULT_APP:
        variables = ["CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"]
    option = "" if app == DEFAULT_APP else f" -A {app}"
    lines = [
        "",
        f"Redis    {url}",
        f"Flower   {stack.flower_url or 'does not run'}",
        f"Gateway  {stack.gateway_url or 'does not run'}",
        "",
        "In another terminal; Ctrl-C here stops all:",
        *(f"  export {name}={url}" for name in variables if is_private),
        *([f"  batchery submit texts.txt --task {task} -o results.jsonl"] if task else []),
        f"  batchery stats{option}",
        "",
    ]
    return "\n".join(lines)
