"""Jobs that came by a queue of the other kind: batch jobs go to devices, ordinary ones to Celery.

A queue by which only batch jobs come is taken by devices, and any other one by Celery's consumer.
Anybody may send any job to any queue, so each queue has a list beside it for the other kind.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import redis
from kombu.utils.json import dumps

from batchery.protocol.headers import TENANT
from batchery.retry import pause_s
from batchery.shards import Shard, shard_of
from batchery.transport.outbox import DEDUPE_TTL_S
from batchery.transport.redis_schema import BATCHES, Keys, find_tenant_list, transport_scripts
from batchery_worker.brokers import open_channel

logger = logging.getLogger("batchery.worker")

#: Maximum pause between two attempts to reach a Redis that is away, in seconds.
MAX_FORWARD_PAUSE_S = 2.0


def forward_to_devices(_task: Any, app: Any, _consumer: Any, **_: Any) -> Callable[..., None]:
    """Celery's strategy of a batch task whose jobs come to the worker's own consumer."""
    return _make_handle(_make_find_queue(app), _move_beside)


def forward_to_own(task: Any, *_: Any, **__: Any) -> Callable[..., None]:
    """The same of a task that not every device serves: its list is beside no queue."""
    return _make_handle(lambda _: task.name, _move_beside)


def publish(_task: Any, app: Any, _consumer: Any, **_: Any) -> Callable[..., None]:
    """The same where the devices' Redis is not the worker's broker.

    A message is put into its queue there, and then acknowledged. One whose acknowledgement is lost
    comes again, and is put there once.
    """

    def put(sent: Forwarded) -> None:
        get_forwarder(app, shard_of(app, sent.queue)).put(sent)

    return _make_handle(_make_find_queue(app), put)


def _make_find_queue(app: Any) -> Callable[[Any], str]:
    """Makes what finds the queue of a message by what it came by."""
    consumed = set(app.amqp.queues.consume_from)
    return lambda came_by: came_by if came_by in consumed else app.conf.task_default_queue


def _make_handle(
    find_queue: Callable[[Any], str], send: Callable[["Forwarded"], None]
) -> Callable[..., None]:
    def handle(
        message: Any,
        body: Any,  # noqa: ARG001 - as Celery calls it
        ack: Callable[..., Any],
        reject: Callable[..., Any],  # noqa: ARG001
        callbacks: Any,
        **_: Any,
    ) -> None:
        queue = find_queue(message.delivery_info.get("routing_key"))
        send(Forwarded(queue, message, partial(ack, logger, ())))
        for callback in callbacks:
            callback(message)

    return handle


def _move_beside(sent: "Forwarded") -> None:
    """Moves a message into the list beside its queue, in one step."""
    message, channel = sent.message, sent.message.channel
    priority = channel._get_message_priority({"properties": message.properties})
    scripts = transport_scripts(redis.Redis(connection_pool=channel.pool))
    prefix = channel.global_keyprefix
    keys = [
        f"{prefix}{channel.unacked_key}",
        f"{prefix}{channel.unacked_index_key}",
        f"{prefix}{channel._q_for_pri(sent.queue + BATCHES, priority)}",
    ]
    scripts.run("forward_unacked", keys, message.delivery_tag, _spell(channel, message))
    # Kombu's own count of messages that are not settled goes down.
    sent.ack()


class Forwarded(NamedTuple):
    """A message that Celery's broker has until it is in its queue."""

    queue: str
    message: Any
    #: Tells the broker; from any thread.
    ack: Callable[[], Any]


@cache
def get_forwarder(app: Any, shard: Shard) -> "Forwarder":
    """The forwarder of a shard."""
    return Forwarder(app, shard)


class Forwarder:
    """Puts messages into queues of a shard, on a thread that waits for a Redis that is away.

    Celery's broker gives no more of them than its prefetch count allows.
    """

    def __init__(self, app: Any, shard: Shard) -> None:
        self._app = app
        self._shard = shard
        self._waiting = SimpleQueue[Forwarded]()
        self.put = self._waiting.put
        threading.Thread(target=self._run, name="batchery-forwarder", daemon=True).start()

    def _run(self) -> None:
        sent, failures = None, 0
        while True:
            try:
                with open_channel(self._app, self._shard) as channel:
                    client = redis.Redis(connection_pool=channel.pool)
                    while True:
                        sent = sent or self._waiting.get()
                        self._publish(channel, client, sent)
                        sent, failures = None, 0
            except (redis.RedisError, OSError) as error:
                failures += 1
                logger.warning("jobs cannot be forwarded yet: %s", error)
                time.sleep(pause_s(failures, MAX_FORWARD_PAUSE_S))
            except Exception:
                sent = None
                logger.exception("a message cannot be forwarded, and stays with the broker")

    def _publish(self, channel: Any, client: "redis.Redis", sent: Forwarded) -> None:
        message = sent.message
        headers, properties = message.headers, message.properties
        priority = channel._get_message_priority({"properties": properties}, reverse=False)
        tenant, name = headers.get(TENANT), sent.queue
        if isinstance(tenant, str) and tenant:
            name = find_tenant_list(name, channel.sep, tenant)
        keys = Keys(channel.global_keyprefix)
        seen, attempt = keys.dedupe_keys(str(headers["id"])), f"forwarded {headers.get('retries')}"
        if not message.delivery_info.get("redelivered"):
            # The same job may be sent again on purpose.
            client.srem(seen, attempt)
        into = [seen, keys.queue(channel._q_for_pri(name, priority))]
        text = _spell(channel, message)
        transport_scripts(client).run("publish_once", into, attempt, DEDUPE_TTL_S, text)
        sent.ack()


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
