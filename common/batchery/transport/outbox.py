"""The channel's side of the outbox: each message of a job's completion is published once."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import redis

from batchery.completion import HeldMessage, Lease, LeaseHolder, current_completion
from batchery.errors import InvalidItem
from batchery.protocol.headers import TENANT
from batchery.redis_scripts import RedisScripts, get_database
from batchery.retry import LASTING_REFUSALS, explain_refusal, find_refusal
from batchery.transport.dead_letters import check_size
from batchery.transport.redis_schema import OWN_NAMES, Keys, find_tenant_list, transport_scripts

_Channel: Any = object

#: How long dedupe keys stay if no acknowledgement removes them, in seconds. An interrupted job must
#: run again within this time; it goes to the head of its queue.
DEDUPE_TTL_S = 3600


class OutboxChannel(_Channel):  # type: ignore[misc]
    """Publishes through the outbox of a job's completion; mixed into kombu's Redis channels."""

    leases: bool

    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> Any:
        """Declares a queue, unless a key has its name that is none."""
        if passive:
            return super().queue_declare(queue, passive, **kwargs)
        self._check_queue(queue)
        with _lasting_refusals_explained(queue):
            return super().queue_declare(queue, passive, **kwargs)

    def _put(self, queue: str, message: Mapping[str, Any], **kwargs: Any) -> None:
        self._check_queue(queue)
        check_size(message.get("body") or "")
        completion = current_completion()
        outbox = None if completion is None else completion.outbox
        expires = queue in (self._expires or ())
        is_plain = kwargs.get("_publish_batch") is None and not expires
        name, tenant = queue, (message.get("headers") or {}).get(TENANT)
        # Kombu renews none of such lists.
        if isinstance(tenant, str) and tenant and not expires:
            name = find_tenant_list(queue, self.sep, tenant)
        with _lasting_refusals_explained(queue):
            if outbox is None or not is_plain:
                super()._put(name, message, **kwargs)
                return
            priority = self._get_message_priority(message, reverse=False)
            key = Keys(self.global_keyprefix).queue(self._q_for_pri(name, priority))
            outbox.publish(HeldMessage(self, key, message))

    def _check_queue(self, queue: str | None) -> None:
        """Makes sure that a queue's name is not that of a key of ours or of kombu's.

        Whoever may push a job chooses the queues of its callbacks, and the worker publishes them
        with its own rights.

        Raises:
            InvalidItem: It is.
        """
        kombus = (self.unacked_key, self.unacked_index_key, self.unacked_mutex_key)
        if str(queue).startswith(OWN_NAMES) or queue in kombus:
            raise InvalidItem(
                f"queue {queue!r:.200}: the key of that name is no queue's; name another queue"
            )

    def is_beside(self, holder: LeaseHolder) -> bool:
        """Whether its queues are in the same database of the same server as a worker's leases."""
        return _place(self.pool) == _place(holder.client.connection_pool)

    def publish_once(
        self, tag: str, dedupe_key: str, held: HeldMessage, lease: Lease | None
    ) -> None:
        """Puts a message into its queue, unless its dedupe key is there, or the lease is gone."""
        keys = [Keys(self.global_keyprefix).dedupe_keys(tag), held.queue_key]
        args = [dedupe_key, DEDUPE_TTL_S, held.text]
        if lease is not None:
            holder, token = lease
            keys.append(holder.lease_key)
            args.append(token)
        self._outbox_scripts.run("publish_once", keys, *args)

    @cached_property
    def _outbox_scripts(self) -> RedisScripts:
        # Kombu's own client would add its prefix to the first key of a script only.
        return transport_scripts(redis.Redis(connection_pool=self.pool))


def _place(pool: Any) -> tuple[Any, ...]:
    """The server and the database of a pool's connections; a Sentinel's by the name it goes by."""
    given = pool.connection_kwargs
    server = (getattr(pool, "service_name", None), *map(given.get, ("host", "port", "path")))
    return *server, get_database(pool)


@contextmanager
def _lasting_refusals_explained(queue: str | None) -> Iterator[None]:
    """Raises another error for a refusal that no further attempt changes.

    Kombu takes each of Redis's refusals for a lost connection, and tries again: for as long and as
    often as the retry policy says, which may have come with a message.
    """
    try:
        yield
    except redis.ResponseError as error:
        if find_refusal(error) not in LASTING_REFUSALS:
            raise
        raise explain_refusal(error, str(queue)) or error from error
