"""`batchery up`: Redis, a worker, Flower and the HTTP gateway in one terminal."""

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from batchery.announcement import Announcement, announce
from batchery.cli.app import DEFAULT_APP, masked
from batchery.cli.console import Interrupt
from batchery.errors import ModelLoadError, SettingsError
from batchery.settings import ModelSettings, Settings
from batchery_worker.devstack.stack import Stack

#: Colours of the prefixes.
STYLES = {"redis": "red", "worker": "green", "flower": "magenta", "gateway": "blue", "up": "bold"}

#: How long the hub may take to answer, in seconds; its own client tries for minutes.
HUB_TIMEOUT_S = 5.0

#: How long nothing must be printed before pinned lines are shown again, in seconds.
QUIET_S = 0.5

NO_MODELS = """\
no models configured: write a file batchery.toml here, such as

[models.embed]
kind = "embedding"
model = "sentence-transformers/all-MiniLM-L6-v2"
max_length = 256

or name a Celery app of your own with -A"""


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
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write URLs and process ids to this file, as JSON, while all is ready.",
)
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
    ready_file: Path | None,
) -> None:
    """Run Redis, a worker, Flower and the HTTP gateway in this terminal.

    The Redis is a private one, unless --redis or the setting redis_url names another. Other
    `batchery` commands in this folder find it by themselves. Ctrl-C stops all in order; a second
    Ctrl-C kills.
    """
    if redis_url and data:
        raise click.UsageError("--data is for the private Redis: give it or --redis, not both")
    settings = Settings.load()
    if app == DEFAULT_APP:
        check_models(settings)
    if not data and "redis_url" in settings.model_fields_set:
        redis_url = redis_url or settings.redis_url
    printer = LinePrinter(Console(highlight=False, soft_wrap=True))
    stack = Stack(
        app,
        redis_url=redis_url,
        data=data,
        flower=not no_flower,
        flower_port=flower_port,
        gateway=not no_gateway,
        gateway_host=settings.gateway.host,
        gateway_port=settings.gateway.port if gateway_port is None else gateway_port,
        loglevel=loglevel,
        concurrency=concurrency,
        queues=queues,
        on_line=printer,
        start_timeout_s=settings.device_start_timeout_s + 60,
    )
    with Interrupt(signal.SIGHUP, at_once=True), stack:
        try:
            tasks = stack.remote.tasks()
            with (
                announced(stack, ready_file),
                announce(Announcement(stack.redis_url, app)) as is_found,
            ):
                printer.console.print(summary(stack, app, tasks, private=redis_url is None))
                lines = what_to_type(app, tasks, stack.gateway_url, is_found=is_found)
                printer.pin(lines)
                stack.wait(printer.show_pinned)
        except KeyboardInterrupt:
            printer("up", "stopping; the worker finishes what it runs, Ctrl-C again kills it")


def check_models(settings: Settings) -> None:
    """Makes sure that the default app has models, and that they can be had.

    Raises:
        SettingsError: There is none.
        StartError: One is neither on this machine nor to be downloaded.
    """
    if not settings.models:
        raise SettingsError(NO_MODELS)
    check_hub(settings.models)


def check_hub(models: Mapping[str, ModelSettings]) -> None:
    """Makes sure that models which are not on this machine can be downloaded.

    Raises:
        ModelLoadError: One is not here, and the hub does not answer, or must not be asked.
    """
    missing = [name for name, model in models.items() if not _is_here(model)]
    if not missing or importlib.util.find_spec("huggingface_hub") is None:
        return
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _why_silent(constants.ENDPOINT)
    if why:
        first = missing[0]
        raise ModelLoadError(
            f"model {first!r}: {models[first].model} is not on this machine, and the hub at"
            f" {constants.ENDPOINT} does not answer: {why}; name a local folder, or a mirror in"
            " HF_ENDPOINT"
        )


def _is_here(model: ModelSettings) -> bool:
    if (
        Path(model.model).expanduser().exists()
        or importlib.util.find_spec("huggingface_hub") is None
    ):
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    except HFValidationError:
        return True  # It is no id of the hub: the worker names what is wrong with it.
    return isinstance(found, str)


def _why_silent(endpoint: str) -> str:
    """Why the hub does not answer; empty if it does, whatever it says."""
    try:
        urllib.request.urlopen(endpoint, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error))
    return ""


class LinePrinter:
    """Prints lines of several processes, each behind the name of its process.

    On a terminal, some lines can be pinned: they come last whenever nothing has been printed for a
    moment, and make room for what comes next.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._lock = threading.Lock()
        self._pinned: Sequence[str] = ()
        self._pinned_rows = 0
        self._last_s = 0.0
        # Rendered once and written as it is: Rich would need longer for a line than the worker
        # needs for a job, and the worker would wait for its log.
        self._prefixes = {name: self._render(name, style) for name, style in STYLES.items()}

    def __call__(self, name: str, line: str) -> None:
        """Prints one line of one process; may be called from any thread."""
        with self._lock:
            self._unpin()
            self._last_s = self._clock()
            self.console.file.write(f"{self._prefixes[name]}{line}\n")
            self.console.file.flush()

    def pin(self, lines: Sequence[str]) -> None:
        """Keeps lines at the end; without a terminal, prints them once."""
        with self._lock:
            self._unpin()
            self._pinned = lines
            self._pin()

    def show_pinned(self) -> None:
        """Prints the pinned lines again, if others have come and nothing has for a moment."""
        with self._lock:
            is_quiet = self._clock() - self._last_s >= QUIET_S
            if self.console.is_terminal and self._pinned and not self._pinned_rows and is_quiet:
                self._pin()

    def _pin(self) -> None:
        self.console.file.write("".join(f"{line}\n" for line in self._pinned))
        self.console.file.flush()
        if self.console.is_terminal:
            width = self.console.width
            self._pinned_rows = sum(max(1, -(-len(line) // width)) for line in self._pinned)

    def _unpin(self) -> None:
        """Moves the cursor to the first pinned row, and erases all below."""
        if self._pinned_rows:
            self.console.file.write(f"\x1b[{self._pinned_rows}A\r\x1b[J")
            self._pinned_rows = 0

    def _render(self, name: str, style: str) -> str:
        with self.console.capture() as capture:
            self.console.print(Text(f"{name:<7} | ", style), end="")
        return capture.get()


def what_to_type(
    app: str, tasks: Collection[str], gateway_url: str | None = None, *, is_found: bool
) -> list[str]:
    """The commands for another terminal.

    Args:
        app: Name of the Celery app.
        tasks: Names of its tasks.
        gateway_url: URL of the gateway; None if it does not run.
        is_found: Whether commands in this folder find the Redis.
    """
    option = "" if app == DEFAULT_APP else f" -A {app}"
    where = "in this folder" if is_found else "with what is exported above"
    return [
        f"In another terminal, {where}; Ctrl-C stops all:",
        *(
            f"  batchery submit texts.txt --task {task}{option} -o results.jsonl"
            for task in list(tasks)[:1]
        ),
        f"  batchery stats{option}",
        *([f"In a browser: {gateway_url}"] if gateway_url is not None else []),
    ]


def summary(stack: Stack, app: str, tasks: Mapping[str, str | None], *, private: bool) -> Text:
    """What runs and how to use it, for the terminal.

    Args:
        stack: It is ready.
        app: Name of the Celery app, as for `celery -A`.
        tasks: The queue of each of its tasks.
        private: Whether the Redis is the stack's own, whose password nobody else knows.
    """
    url = stack.redis_url if private else masked(stack.redis_url)
    rows = [
        ("Redis", url),
        ("Flower", stack.flower_url or "does not run"),
        ("Gateway", stack.gateway_url or "does not run"),
    ]
    # Both empty where the app has switched remote control off: then we do not ask twice.
    if tasks:
        rows += [
            ("Task", f"{name} (queue {queue or 'of the app'})") for name, queue in tasks.items()
        ]
        rows.append(("Queues", ", ".join(stack.remote.queues())))
    lines = [Text.assemble((f"{label:<8}", "bold"), fact) for label, fact in rows]
    if private:
        names = ["BATCHERY_REDIS_URL"]
        if app != DEFAULT_APP:
            names = ["CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"]
        # Lines of their own, to be copied into another terminal.
        lines += [Text(f"export {name}={url}") for name in names]
    return Text("\n").join([Text(), *lines, Text()])


@contextlib.contextmanager
def announced(stack: Stack, path: Path | None) -> Iterator[None]:
    """Keeps a file with the stack's URLs and process ids for as long as it is ready.

    Raises:
        SettingsError: The file cannot be written.
    """
    if path is None:
        yield
        return
    info = {
        "redis_url": stack.redis_url,
        "flower_url": stack.flower_url,
        "gateway_url": stack.gateway_url,
        "pids": stack.pids,
    }
    try:
        # Readable for the owner alone, as it has the password; complete as soon as it is there.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(info, file)
        Path(temporary).replace(path)
    except OSError as error:
        raise SettingsError(f"--ready-file {path}: {error.strerror}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
