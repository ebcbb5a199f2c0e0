"""The channel's side of the outbox: each message of a job's completion is published once."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import redis
from kombu.utils.json import dumps

from batchery.completion import HeldMessage, Outbox, current_completion
from batchery.redis_scripts import RedisScripts
from batchery.transport.dead_letters import check_size
from batchery.transport.redis_schema import Keys, transport_scripts

if TYPE_CHECKING:
    _Channel: Any
else:
    _Channel = object

#: How long dedupe keys stay if no acknowledgement removes them, in seconds. An interrupted job must
#: run again within this time; it goes to the head of its queue.
DEDUPE_TTL_S = 3600


class OutboxChannel(_Channel):  # type: ignore[misc]
    """Publishes through the outbox of a job's completion; mixed into kombu's Redis channels."""

    def _put(self, queue: str, message: Mapping[str, Any], **kwargs: Any) -> None:
        check_size(message.get("body") or "")
        completion = current_completion()
        outbox = None if completion is None else completion.outbox
        is_plain = kwargs.get("_publish_batch") is None and queue not in (self._expires or ())
        if outbox is None or not is_plain:
            super()._put(queue, message, **kwargs)
            return
        priority = self._get_message_priority(message, reverse=False)
        key = Keys(self.global_keyprefix).queue(self._q_for_pri(queue, priority))
        outbox.publish(HeldMessage(self, key, message))

    def publish_once(self, outbox: Outbox, key: str, message: Mapping[str, Any]) -> None:
        """Puts a message into a queue, unless its dedupe key is there already.

        Args:
            outbox: The outbox of the job that publishes.
            key: Key of the queue.
            message: In kombu's form.
        """
        keys = [Keys(self.global_keyprefix).dedupe_keys(outbox.publish_tag), key]
        args = [outbox.dedupe_key(message), DEDUPE_TTL_S, dumps(message)]
        if outbox.lease is not None:
            holder, token = outbox.lease
            keys.append(holder.lease_key)
            args.append(token)
        self._outbox_scripts.run("publish_once", keys, *args)
        outbox.has_dedupe_keys = True

    @cached_property
    def _outbox_scripts(self) -> RedisScripts:
        # Kombu's own client would add its prefix to the first key of a script only.
        return transport_scripts(redis.Redis(connection_pool=self.pool))
