"""The channel's side of the outbox: each message of a job's completion is published once."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import redis
from kombu.utils.json import dumps

from batchery.completion import JobCompletion, current_completion
from batchery.errors import InvalidItem
from batchery.protocol.headers import TENANT
from batchery.redis_scripts import RedisScripts, find_place
from batchery.retry import LASTING_REFUSALS, explain_refusal, find_refusal
from batchery.transport.dead_letters import check_size
from batchery.transport.redis_schema import OWN_NAMES, Keys, find_tenant_list, transport_scripts

_Channel: Any = object

#: How long dedupe keys stay if no acknowledgement removes them, in seconds. An interrupted job must
#: run again within this time; it goes to the head of its queue.
DEDUPE_TTL_S = 3600


class OutboxChannel(_Channel):  # type: ignore[misc]
    """Publishes through the outbox of a job's completion; mixed into kombu's Redis channels."""

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
        expires = queue in (self._expires or ())
        is_plain = kwargs.get("_publish_batch") is None and not expires
        name, tenant = queue, (message.get("headers") or {}).get(TENANT)
        # Kombu renews none of such lists.
        if isinstance(tenant, str) and tenant and not expires:
            name = find_tenant_list(queue, self.sep, tenant)
        with _lasting_refusals_explained(queue):
            if completion is None or completion.publish_tag is None or not is_plain:
                super()._put(name, message, **kwargs)
                return
            priority = self._get_message_priority(message, reverse=False)
            self._publish_once(completion, self._q_for_pri(name, priority), message)

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

    def _publish_once(
        self, completion: JobCompletion, name: str, message: Mapping[str, Any]
    ) -> None:
        """Puts a message into a list, unless its dedupe key is there, or the lease is gone.

        The dedupe key is the message's place among those of its task, in the order in which the
        completion publishes them: the same when the job runs again. To another database or server
        than that of the lease a message goes without a look at that, and nobody removes its dedupe
        key before its time.
        """
        handle, tag = completion.lease, completion.publish_tag
        headers = message.get("headers") or {}
        place = f"{headers.get('task')} {headers.get('retries')}"
        schema = Keys(self.global_keyprefix)
        keys = [schema.dedupe_keys(str(tag)), schema.queue(name)]
        args = [f"{place} {completion.published[place] + 1}", DEDUPE_TTL_S, dumps(message)]
        if handle is not None:
            if lease := handle.store.leases.get(handle.token):
                lease.publish_tag = tag
            if find_place(self.pool) == find_place(handle.store.client.connection_pool):
                keys.append(handle.store.lease_key)
                args.append(handle.token)
        self._outbox_scripts.run("publish_once", keys, *args)
        # Counted when it is in its list: kombu may try it again.
        completion.published[place] += 1

    @cached_property
    def _outbox_scripts(self) -> RedisScripts:
        # Kombu's own client would add its prefix to the first key of a script only.
        return transport_scripts(redis.Redis(connection_pool=self.pool))


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
