"""Jobs that came by a queue of the other kind: batch jobs go to devices, ordinary ones to Celery.

A queue by which only batch jobs come is taken by devices, and any other one by Celery's consumer.
Anybody may send any job to any queue, so each queue has a list beside it for the other kind.
"""

import logging
from collections.abc import Callable
from typing import Any

import redis
from kombu.utils.json import dumps

from batchery.transport.redis_schema import BATCHES, transport_scripts

logger = logging.getLogger("batchery.worker")


def forward_to_devices(_task: Any, app: Any, _consumer: Any, **_: Any) -> Callable[..., None]:
    """Celery's strategy of a batch task whose jobs come to the worker's own consumer."""
    consumed = set(app.amqp.queues.consume_from)

    def find_queue(came_by: Any) -> Any:
        return came_by if came_by in consumed else app.conf.task_default_queue

    return _make_handle(find_queue)


def forward_to_own(task: Any, *_: Any, **__: Any) -> Callable[..., None]:
    """The same of a task that not every device serves: its list is beside no queue."""
    return _make_handle(lambda _: task.name)


def _make_handle(find_queue: Callable[[Any], Any]) -> Callable[..., None]:
    def handle(
        message: Any,
        body: Any,  # noqa: ARG001 - as Celery calls it
        ack: Callable[..., Any],
        reject: Callable[..., Any],  # noqa: ARG001
        callbacks: Any,
        **_: Any,
    ) -> None:
        channel = message.channel
        beside = find_queue(message.delivery_info.get("routing_key")) + BATCHES
        priority = channel._get_message_priority({"properties": message.properties})
        scripts = transport_scripts(redis.Redis(connection_pool=channel.pool))
        prefix = channel.global_keyprefix
        keys = [
            f"{prefix}{channel.unacked_key}",
            f"{prefix}{channel.unacked_index_key}",
            f"{prefix}{channel._q_for_pri(beside, priority)}",
        ]
        scripts.run("forward_unacked", keys, message.delivery_tag, _spell(channel, message))
        # Kombu's own count of messages that are not settled goes down.
        ack(logger, ())
        for callback in callbacks:
            callback(message)

    return handle


def _spell(channel: Any, message: Any) -> str:
    """A message as it stood in its queue."""
    raw = read_raw(message)
    body = channel.encode_body(raw["body"], "base64")[0]
    properties = {**raw["properties"], "body_encoding": "base64"}
    return str(dumps({**raw, "body": body, "properties": properties}))


def read_raw(message: Any) -> dict[str, Any]:
    """A message as kombu reads it from a queue, with its body as bytes or text."""
    body, properties = message.body, message.properties
    # Kombu has undone both.
    undone = {"body_encoding", "publish_tag"}
    return {
        "body": bytes(body) if isinstance(body, memoryview) else body,
        "headers": {key: each for key, each in message.headers.items() if key != "compression"},
        "properties": {
            "delivery_info": message.delivery_info,
            **{key: each for key, each in properties.items() if key not in undone},
        },
        "content-type": message.content_type,
        "content-encoding": message.content_encoding,
    }


def forward_lease(find_list: Callable[[str], str]) -> Callable[..., Any]:
    """Makes a device's strategy of a task whose jobs it cannot run.

    Args:
        find_list: Where such jobs belong, for the list that a message came by.
    """

    def handle(message: Any, *_: Any, **__: Any) -> None:
        store, token = message.channel.lease_store, message.delivery_tag
        lease = store.leases.get(token)
        name = find_list("" if lease is None else lease.key)
        keys = [store.lease_key, store.keys.queue(name)]
        store.scripts.run("forward", keys, token)
        store.lost([token])

    return handle
