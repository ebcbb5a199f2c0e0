"""Messages in bulk: Celery makes one, and the others are copies with other items and ids.

This requires that nothing else can differ: see `are_alike`. Celery makes all other jobs one by
one.
"""

import base64
import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from celery import Celery, Task, signals
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute
from celery.utils.saferepr import saferepr
from celery.utils.text import truncate
from kombu.utils import json as kombu_json

from batchery.task import BatchTask, refuse_item
from batchery.tracing import is_receiver
from batchery.transport.codec import writes_kombus_json

#: A receiver of these may look at each message, and change it.
SIGNALS = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)

#: Placeholder for the item in the job that Celery makes.
ITEM = "batchery.template.item"


_encode = kombu_json.JSONEncoder().encode


class OutgoingJob(NamedTuple):
    """A job to be sent."""

    id: str
    item: Any


def are_alike(app: Celery, task: str) -> bool:
    """Whether the messages of a task differ in their ids and items alone, so that one will do."""
    known: Any = app.tasks.get(task)
    sends_as_celery = type(app).send_task is Celery.send_task and type(app.amqp) is AMQP
    return (
        not any(map(_is_listened_to, SIGNALS, repeat(task)))
        and all(isinstance(route, MapRoute) for route in app.amqp.routes)
        and app.conf.task_protocol == 2
        and not app.conf.task_send_sent_event
        and sends_as_celery
        and writes_kombus_json()
        and (known is None or _is_sent_as_celery_does(known))
    )


def _is_listened_to(signal: Any, task: str) -> bool:
    """Whether a publish signal has a receiver, besides ours for traces: that is for all copies."""
    # Celery has no public way to list the receivers, only to ask whether there is one.
    return not all(map(is_receiver, signal._live_receivers(task)))


def _is_sent_as_celery_does(task: Any) -> bool:
    kind = type(task)
    return (
        kind.apply_async in (Task.apply_async, BatchTask.apply_async)
        and kind.shadow_name is Task.shadow_name
        and task._dump_pydantic_arguments is None
    )


class Template:
    """Makes messages."""

    def __init__(self, text: str, body: tuple[str, str], repr_item: Callable[[Any], str]) -> None:
        """Prepares.

        Args:
            text: The message, with `%(id)s`, `%(body)s`, `%(repr)s` and `%(tag)s`.
            body: The parts of the body before and after the item.
            repr_item: Formats the arguments.
        """
        self._text = text
        self._before, self._after = body
        self._repr_item = repr_item

    def fill(self, jobs: Sequence[OutgoingJob]) -> Iterator[str]:
        """Yields the message of each job, in order."""
        text, before, after = self._text, self._before, self._after
        quote = json.encoder.encode_basestring_ascii
        b64encode, repr_item = base64.b64encode, self._repr_item
        for (task_id, item), tag in zip(jobs, uuids(len(jobs)), strict=True):
            body = b64encode(f"{before}{encode_item(item)}{after}".encode()).decode()
            own = {"id": quote(task_id), "body": body, "repr": quote(repr_item(item)), "tag": tag}
            yield text % own


def encode_item(item: Any) -> str:
    """An item as JSON.

    Raises:
        EncodeError: kombu's; the text names the item.
    """
    try:
        return _encode(item)
    except Exception as error:
        raise refuse_item(item, error) from error


def build_template(app: Celery, task_id: str, text: str) -> Template | None:
    """Makes a template of a job that Celery made.

    Args:
        app: App that sends the job.
        task_id: Id of the job, whose item was `ITEM`.
        text: Message of the job.

    Returns:
        None if the message has an unexpected form: another serializer, for instance.
    """
    message = json.loads(text)
    headers, properties = message["headers"], message["properties"]
    if message["content-type"] != "application/json" or "compression" in headers:
        return None
    if properties.get("body_encoding") != "base64":
        return None
    body = base64.b64decode(message["body"]).decode()
    parts = body.split(json.dumps(ITEM))
    if len(parts) != 2 or task_id in body:
        return None
    slots = {name: f"<{name}:{os.urandom(16).hex()}>" for name in ("body", "repr", "tag")}
    message["body"] = slots["body"]
    properties["delivery_tag"] = slots["tag"]
    format_item, given = _repr_function(app), headers["argsrepr"]
    if given == format_item(ITEM):
        headers["argsrepr"] = slots["repr"]
    else:
        format_item = lambda _: given  # noqa: E731 (the caller set one for all jobs)
    text = kombu_json.dumps(message).replace("%", "%%")
    # Replaced with the quotation marks, as ids and texts may need escapes.
    text = text.replace(f'"{task_id}"', "%(id)s").replace(f'"{slots["repr"]}"', "%(repr)s")
    text = text.replace(slots["body"], "%(body)s").replace(slots["tag"], "%(tag)s")
    return Template(text, (parts[0], parts[1]), format_item)


def _repr_function(app: Celery) -> Callable[[Any], str]:
    """Celery's `saferepr` of a job's arguments, with a fast path for short texts."""
    max_size = app.amqp.argsrepr_maxsize
    levels = app.conf.task_repr_maxlevels

    def format_item(item: Any) -> str:
        kind = type(item)
        if kind is str and max_size > 1:
            # Minus one for the parenthesis.
            text = truncate(item, max_size - 1).replace("'", "\\'")
            return f"('{text}',)"
        return saferepr((item,), max_size, maxlevels=levels)

    return format_item


def uuids(count: int) -> list[str]:
    """Random UUIDs of version 4, four times as fast as `uuid4`."""
    random = os.urandom(16 * count).hex()
    ids = []
    for start in range(0, len(random), 32):
        part = random[start : start + 32]
        variant = "89ab"[int(part[16], 16) & 3]
        ids.append(f"{part[:8]}-{part[8:12]}-4{part[13:16]}-{variant}{part[17:20]}-{part[20:]}")
    return ids
