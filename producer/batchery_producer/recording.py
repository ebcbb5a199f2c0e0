"""What Celery and kombu would send, kept instead of sent: a job's way to its Redis command."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from celery import Celery
from celery.backends.redis import RedisBackend


class Command(NamedTuple):
    """A Redis command; keys are without kombu's key prefix."""

    name: str
    args: tuple[Any, ...]


class Recording:
    """Takes the place of kombu's own batch in a producer, and keeps the commands.

    So everything that Celery does for a message is done by Celery: routing, options of the task,
    stamps, signals, declaration of the queue.
    """

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self.commands: list[Command] = []

    @contextmanager
    def __call__(self) -> Iterator[list[Command]]:
        """Within the block, what this thread publishes with the producer is kept."""
        self.commands = []
        current = self._producer._batch_local
        current.current = self
        try:
            yield self.commands
        finally:
            del current.current

    def publish(self, channel: Any, message: Any, **options: Any) -> Any:
        """Called by kombu's producer for each message."""
        return channel.basic_publish(message, _publish_batch=self, **options)

    def add(self, name: str, *args: Any) -> None:
        """Called by kombu's channel for each command."""
        self.commands.append(Command(name, args))


def send_as_celery_does(
    app: Celery,
    task: str,
    job: tuple[str, Any],
    keywords: Mapping[str, Any],
    producer: Any,
    options: Mapping[str, Any],
) -> None:
    """Sends one job by Celery's own code, without a subscription to its result.

    Args:
        app: Its tasks and settings apply.
        task: Name of the task; it need not be registered.
        job: Task id and item.
        keywords: Keyword arguments of the job.
        producer: A kombu producer.
        options: Of `apply_async`.
    """
    task_id, item = job
    known: Any = app.tasks.get(task)
    options = {**options, "task_id": task_id, "producer": producer, "add_to_parent": False}
    if isinstance(app.backend, RedisBackend):
        # Celery subscribes to the result of every job, unless nobody wants it. Workers look at the
        # header alone, which says what it would have said.
        wanted = options.get("ignore_result", getattr(known, "ignore_result", None))
        headers = {**(options.get("headers") or {}), "ignore_result": wanted}
        options |= {"ignore_result": True, "headers": headers}
    if known is None:
        app.send_task(task, (item,), dict(keywords), **options)
    else:
        known.apply_async((item,), dict(keywords), **options)


def split(commands: Sequence[Command]) -> tuple[dict[str, list[str]], list[Command]]:
    """Sorts commands: the messages of each list, in order; and the others, each of them once."""
    pushed: dict[str, list[str]] = {}
    others: dict[Command, None] = {}
    for command in commands:
        if command.name == "lpush":
            pushed.setdefault(command.args[0], []).append(command.args[1])
        else:
            others[command] = None
    return pushed, list(others)
