"""`batchery up`: Redis, a worker, Flower and the HTTP gateway in one terminal."""

import signal
import threading
from collections.abc import Sequence

import click

from batchery.cli.app import DEFAULT_APP, masked
from batchery.errors import SettingsError
from batchery.settings import Settings
from batchery_worker.devstack.stack import Stack

#: Colours of the prefixes.
COLOURS = {"redis": "red", "worker": "green", "flower": "magenta", "gateway": "blue", "up": "white"}

NO_MODELS = """\
no models configured: write a file batchery.toml here, such as

[models.embed]
kind = "embedding"
model = "sentence-transformers/all-MiniLM-L6-v2"
max_length = 256

or name a Celery app of your own with -A"""

_printing = threading.Lock()


@click.command()
@click.argument("worker_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- WORKER_OPTION...]")
@click.option("-A", "--app", default=DEFAULT_APP, help="The Celery app.")
@click.option("--redis", "redis_url", metavar="URL", help="A Redis of yours, not a private one.")
@click.option("--no-flower", is_flag=True, help="Run without Flower.")
@click.option("--no-gateway", is_flag=True, help="Run without the HTTP gateway.")
def up(
    *,
    worker_options: Sequence[str],
    app: str,
    redis_url: str | None,
    no_flower: bool,
    no_gateway: bool,
) -> None:
    """Run Redis, a worker, Flower and the HTTP gateway in this terminal.

    The Redis is a private one, unless --redis or the setting redis_url names another. Flower and
    the gateway get another port if theirs is taken. What stands behind -- goes to `celery worker`,
    such as -Q and -c. What to export for other commands is printed once all are ready. Ctrl-C stops
    all in order; a second Ctrl-C kills.
    """
    settings = Settings.load()
    if app == DEFAULT_APP and not settings.models:
        raise SettingsError(NO_MODELS)
    if "redis_url" in settings.model_fields_set:
        redis_url = redis_url or settings.redis_url
    stack = Stack(
        app,
        redis_url=redis_url or "",
        flower=not no_flower,
        gateway=not no_gateway,
        worker_arguments=["--loglevel=INFO", *worker_options],
        on_line=print_line,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with stack:
        try:
            click.echo(summary(stack, app, next(iter(settings.models), None), redis_url is None))
            stack.wait()
        except KeyboardInterrupt:
            print_line("up", "stopping; the worker finishes what it runs, Ctrl-C again kills it")


def print_line(name: str, line: str) -> None:
    """Prints one line of one process, behind its name; may be called from any thread."""
    with _printing:
        click.echo(f"{click.style(f'{name:<7} |', fg=COLOURS[name])} {line}")


def summary(stack: Stack, app: str, model: str | None, is_private: bool) -> str:
    """What runs and how to use it.

    Args:
        stack: It is ready.
        app: Name of the Celery app, as for `celery -A`.
        model: One of the settings, which the default app has.
        is_private: Whether the Redis is the stack's own, whose password nobody else knows.
    """
    is_default = app == DEFAULT_APP
    url = stack.redis_url if is_private else masked(stack.redis_url)
    names = ["BATCHERY_REDIS_URL"] if is_default else ["CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"]
    submit = f"  batchery submit texts.txt --task {model} -o results.jsonl\n" if is_default else ""
    return (
        f"\nRedis    {url}"
        f"\nFlower   {stack.flower_url or 'does not run'}"
        f"\nGateway  {stack.gateway_url or 'does not run'}"
        "\n\nIn another terminal; Ctrl-C here stops all:\n"
        + "".join(f"  export {name}={url}\n" for name in names if is_private)
        + f"{submit}  batchery stats{'' if is_default else f' -A {app}'}\n"
    )
