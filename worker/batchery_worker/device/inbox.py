"""The messages that a device has leased: read, checked, and handed over."""

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import redis
from celery import Celery

from batchery.transport.codec import read_json
from batchery.transport.dead_letters import check_size
from batchery.transport.lease_store import LeaseStore
from batchery.transport.suspects import (
    MAX_DELIVERY_DEATHS,
    build_delivery_field,
    build_expired_field,
    build_items_field,
    build_suspect_field,
    read_deaths,
)
from batchery_worker.dispatch.dead_letters import dead_letter_unread

#: What is raised by reading a message that is none: anybody can push anything into a list.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)

#: A lease's token, the key of the queue, and the message as it was in the queue.
Taken = tuple[str, str, bytes]


class Inbox:
    """Hands over what was leased with one broker."""

    def __init__(
        self,
        app: Celery,
        store: LeaseStore,
        deliver: Callable[[Any], None],
        prepare_anew: Callable[[], None],
    ) -> None:
        """Knows no message yet.

        Args:
            app: Callers of what cannot be read are told by its result backend.
            store: The leases.
            deliver: Takes in a message, as kombu reads it from a queue.
            prepare_anew: Has leases compared with Redis before more messages are taken.
        """
        self._app = app
        self._store = store
        self._deliver = deliver
        self._prepare_anew = prepare_anew

    def take_in(self, answer: list[Any], keys: tuple[str, ...]) -> None:
        """Hands over what a fetch has brought.

        Args:
            answer: The script's answer, not empty.
            keys: The queues that the script was given.
        """
        suspects, first = int(answer[0]), int(answer[1])
        taken = [
            (str(first + at), keys[answer[2 + 2 * at]], answer[3 + 2 * at])
            for at in range(len(answer) // 2 - 1)
        ]
        self.hand_over(taken, with_suspects=suspects > 0)

    def dead_letter(self, token: str, error: Exception) -> None:
        """Makes a dead letter of a message that cannot be understood.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        reason = f"the message cannot be understood: {type(error).__name__}: {error}"
        dead_letter_unread(self._app, self._store, token, reason)

    def hand_over(
        self, taken: list[Taken], *, with_suspects: bool = False, again: bool = False
    ) -> None:
        """Hands messages over that were leased.

        Args:
            taken: In their order.
            with_suspects: Whether some may have ended a worker.
            again: Whether they may have been handed over before.
        """
        for token, key, _ in taken:
            self._store.leases.take(token, key)
        waiting = [token for token, _, _ in taken]
        try:
            payloads = self._read(taken)
            if again:
                for _, payload in payloads:
                    _mark_redelivered(payload)
            suspects: Collection[str] = ()
            if with_suspects:
                payloads, suspects = self._recognise_suspects(payloads)
            waiting = [token for token, _ in payloads]
            self._deliver_all(payloads, waiting, suspects)
        except (redis.RedisError, OSError):
            # The rest is handed over again with the next connection. If it went back to the queue,
            # nobody could tell that a job has been here.
            self._store.leases.leave(waiting)
            self._prepare_anew()
            raise
        except BaseException:
            # Whoever takes them raised: those behind it are as good as never taken.
            with contextlib.suppress(redis.RedisError):
                left = [token for token in waiting if self._store.holds(token)]
                self._store.requeue(left, first=True)
            raise

    def _deliver_all(
        self, payloads: list[tuple[str, Any]], waiting: list[str], suspects: Collection[str]
    ) -> None:
        for token, payload in payloads:
            waiting.pop(0)
            if token in suspects:
                self._store.note_delivery(token)
            try:
                self._deliver(payload)
            except SystemExit as error:
                if type(error) is SystemExit:  # Celery's own shutdown is a subclass.
                    self._store.blame_delivery(build_suspect_field(payload))
                raise
        if suspects:
            self._store.forget_delivery()

    def _read(self, taken: list[Taken]) -> list[tuple[str, Any]]:
        payloads = []
        for token, _, raw in taken:
            try:
                check_size(raw)
                payload = read_json(raw)
                properties = payload["properties"]
                # The token differs at each delivery; the tag stays, and tells a message sent twice.
                properties["publish_tag"] = properties.get("delivery_tag")
                properties["delivery_tag"] = token
            except MALFORMED as error:
                self.dead_letter(token, error)
            else:
                payloads.append((token, payload))
        return payloads

    def _recognise_suspects(
        self, payloads: list[tuple[str, Any]]
    ) -> tuple[list[tuple[str, Any]], Collection[str]]:
        """Finds out which jobs were on a device, or were being read, when their worker died.

        Returns:
            What may be read, and the suspects' tokens. The others become dead letters.
        """
        ids = [build_suspect_field(payload) for _, payload in payloads]
        if not ids:
            return [], ()
        store, suspects, unread = self._store, set(), set()
        builders = (build_delivery_field, build_expired_field, build_items_field)
        fields = [*ids, *(build(each) for build in builders for each in ids)]
        found: Any = store.client.hmget(store.keys.suspects, fields)
        columns = [found[start : start + len(ids)] for start in range(0, len(found), len(ids))]
        for suspect, (token, _), deaths, read, expired, items in zip(
            ids, payloads, *columns, strict=True
        ):
            if deaths is None and read is None and expired is None:
                continue
            if lease := store.leases.get(token):
                lease.suspect = suspect
                lease.deaths = None if deaths is None else read_deaths(deaths)
                lease.expired_s = None if expired is None else float(expired)
                lease.last_items = [int(each) for each in (items or b"").split()]
            if int(read or 0) >= MAX_DELIVERY_DEATHS:
                reason = f"its delivery ended {int(read)} workers, so it is not read again"
                dead_letter_unread(self._app, store, token, reason)
                unread.add(token)
            else:
                suspects.add(token)
        return [each for each in payloads if each[0] not in unread], suspects


def _mark_redelivered(payload: Any) -> None:
    """Marks a message as kombu does: whoever has seen the job before looks twice."""
    for marked in (payload.get("headers"), payload["properties"].get("delivery_info")):
        if isinstance(marked, dict):
            marked["redelivered"] = True
