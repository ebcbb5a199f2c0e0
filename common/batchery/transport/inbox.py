"""What a channel has leased: read, recognised and handed to its consumers."""

import contextlib
import sys
from typing import Any

import redis

from batchery.transport.dead import bury_malformed
from batchery.transport.ledger import Ledger
from batchery.transport.message import read_json
from batchery.transport.notes import suspect_of

#: What reading a message raises that is not one: anybody can push anything into a list.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)

#: A lease's token, the key of the queue, and the message as it was in there.
Taken = tuple[str, str, bytes]


class Inbox:
    """Of one channel that leases."""

    def __init__(self, channel: Any, ledger: Ledger) -> None:
        self._channel = channel
        self._ledger = ledger
        #: How many messages were handed over so far.
        self.count = 0

    def take_in(self, answer: list[Any], keys: tuple[str, ...]) -> None:
        """Hands over what a drain has brought.

        Args:
            answer: Of the script, not empty.
            keys: The queues that the script was given.
        """
        suspects, first = int(answer[0]), int(answer[1])
        taken = [
            (str(first + at), keys[answer[2 + 2 * at]], answer[3 + 2 * at])
            for at in range(len(answer) // 2 - 1)
        ]
        self._channel._queue_cycle.rotate(self.queue_of(taken[0][1]))
        self._hand_over(taken, with_suspects=suspects > 0)

    def reconcile(self) -> None:
        """Hands over (again) what was leased for a channel that is gone, or with a lost answer.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        taken = self._ledger.reconcile(self._channel.qos, active_tokens())
        self._hand_over(taken, with_suspects=True, again=True)

    def bury(self, token: str, error: Exception) -> None:
        """Moves a message that cannot be understood to the dead letters.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        bury_malformed(self._ledger, token, error)

    def queue_of(self, key: str) -> str:
        """The queue of a key, which may be that of one of its priorities."""
        name = key.removeprefix(self._channel.global_keyprefix)
        head, separator, step = name.rpartition(self._channel.sep)
        return head if separator and step.isdigit() else name

    def _hand_over(self, taken: list[Taken], *, with_suspects: bool, again: bool = False) -> None:
        for token, key, _ in taken:
            self._ledger.take(token, self._channel.qos, key)
        waiting = [token for token, _, _ in taken]
        try:
            payloads = self._read(taken)
            if again:
                for _, _, payload in payloads:
                    _mark_redelivered(payload)
            if with_suspects:
                self._recognise(payloads)
            waiting = [token for token, _, _ in payloads]
            self._deliver(payloads, waiting)
        except (redis.RedisError, OSError):
            # With the next connection the rest is handed over once more. In the queue, nobody could
            # tell that a job has been here.
            self._ledger.leases.disown(waiting)
            self._channel.prepare_anew()
            raise
        except BaseException:
            # A consumer raised: those behind it are as good as never taken.
            with contextlib.suppress(redis.RedisError):
                left = [token for token in waiting if self._ledger.holds(token)]
                self._ledger.requeue(left, first=True)
            raise

    def _deliver(self, payloads: list[tuple[str, str, Any]], waiting: list[str]) -> None:
        transport = self._channel.connection
        unwanted = []
        for token, queue, payload in payloads:
            waiting.pop(0)
            if queue in transport._callbacks:
                self.count += 1
                transport._callbacks[queue](payload)
            else:
                # Its consumer was cancelled while the answer was under way.
                unwanted.append(token)
        self._ledger.requeue(unwanted, first=True)

    def _read(self, taken: list[Taken]) -> list[tuple[str, str, Any]]:
        payloads = []
        for token, key, raw in taken:
            try:
                payload = read_json(raw)
                properties = payload["properties"]
                # The token is another one each time; this stays, and tells a message sent twice.
                properties["publish_tag"] = properties.get("delivery_tag")
                properties["delivery_tag"] = token
            except MALFORMED as error:
                self.bury(token, error)
            else:
                payloads.append((token, self.queue_of(key), payload))
        return payloads

    def _recognise(self, payloads: list[tuple[str, str, Any]]) -> None:
        """Finds out which of the jobs were on a device when their worker died."""
        ids = [suspect_of(payload) for _, _, payload in payloads]
        if not ids:
            return
        deaths: Any = self._ledger.client.hmget(self._ledger.keys.suspects, ids)
        for suspect, count, (token, _, _) in zip(ids, deaths, payloads, strict=True):
            if count is not None:
                self._ledger.suspect(token, suspect, int(count))


def _mark_redelivered(payload: Any) -> None:
    """As kombu marks it: whoever has seen the job before looks twice."""
    info = payload["properties"].get("delivery_info")
    if isinstance(info, dict):
        info["redelivered"] = True


def active_tokens() -> set[str]:
    """Tokens of the jobs that Celery's worker has accepted and not settled, if there is one."""
    state = sys.modules.get("celery.worker.state")
    if state is None:
        return set()
    return {str(request.message.delivery_tag) for request in list(state.active_requests)}
