"""Results that are posted to their callers: each attempt is a job of the gateway's own queue.

The task itself brings it on its way, by a callback that its worker sends with the result. What
fails is due again after a pause. So nobody waits, and whoever is killed loses nothing: a webhook
comes at least once, or is given up after its last attempt.
"""

import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson
from celery import states

from batchery.gateway_settings import GatewaySettings
from batchery_producer.gateway.job_queue import LOST_S, WEBHOOK, JobQueue
from batchery_producer.gateway.problems import Problem
from batchery_producer.gateway.store import Store
from batchery_producer.gateway.tasks.records import TaskRecord, TaskRecords, to_json
from batchery_producer.gateway.tasks.webhook_post import (
    DEADLINE_S,
    Undeliverable,
    derive_secret,
    post,
)
from batchery_producer.gateway.tasks.webhook_target import resolve_target

logger = logging.getLogger(__name__)

#: Pauses before further attempts, in seconds.
PAUSES_S = (1.0, 5.0, 25.0, 125.0, 625.0)

#: How many attempts may go to one host at once, and how many of one caller, by all workers.
MAX_PER_HOST = 4
MAX_PER_CALLER = 6

#: After how long an attempt is made again that found no place, in seconds.
BUSY_S = 2.0

#: How long a callback waits for its result, in seconds: stock workers store it just afterwards.
RESULT_WAIT_S = 2.0

#: How often it looks meanwhile, in seconds.
RESULT_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Webhook:
    """A promise to post a result.

    Attributes:
        url: Where to.
        record: Of the task.
        attempts: How often it was tried.
    """

    url: str
    record: TaskRecord
    attempts: int = 0

    def packed(self) -> bytes:
        """As it is kept."""
        return orjson.dumps(asdict(self))

    @classmethod
    def unpacked(cls, text: bytes) -> "Webhook":
        """As it was."""
        known = orjson.loads(text)
        return cls(known["url"], TaskRecord(**known["record"]), known["attempts"])


class Webhooks:
    """The webhooks of all gateways' tasks."""

    def __init__(
        self, store: Store, records: TaskRecords, jobs: JobQueue, settings: GatewaySettings
    ) -> None:
        self._store = store
        self._records = records
        self._jobs = jobs
        self._settings = settings

    async def add(self, url: str, record: TaskRecord) -> None:
        """Keeps a webhook, before its task is sent.

        Raises:
            Problem: Redis is away.
        """

        def write(client: Any) -> None:
            with client.pipeline() as pipe:
                lifetime_s = self._records.lifetime_s
                pipe.set(self._key(record.id), Webhook(url, record).packed(), ex=lifetime_s)
                pipe.zadd(self._jobs.due_key, {_work(record.id): time.time() + LOST_S})
                pipe.execute()

        await self._store.run(write)

    def callback(self, task_id: str, tenant: str | None) -> Any:
        """What the task's worker sends when the task has ended."""
        return self._jobs.callback(_work(task_id), RESULT_WAIT_S, tenant=tenant)

    def forget(self, task_id: str) -> None:
        """Posts nothing more.

        Raises:
            Problem: Redis is away.
        """
        self._store.call(lambda client: client.delete(self._key(task_id)))
        self._jobs.forget(_work(task_id))

    def ended(self, task_ids: Sequence[str]) -> list[str]:
        """Those of some tasks that have a result, or whose webhook is over.

        Raises:
            Problem: Redis is away.
        """

        def look(client: Any) -> list[int]:
            with client.pipeline(transaction=False) as pipe:
                for each in task_ids:
                    pipe.exists(self._store.backend.get_key_for_task(each))
                    pipe.exists(self._key(each))
                found: list[int] = pipe.execute()
            return found

        there = self._store.call(look)
        return [
            task_id
            for task_id, has_result, is_kept in zip(task_ids, there[::2], there[1::2], strict=True)
            if has_result or not is_kept
        ]

    def attempt(self, task_id: str, wait_s: float = 0.0) -> None:
        """Posts a result, if there is one and it is still wanted.

        Args:
            task_id: Of the task.
            wait_s: How long to wait for the result, in seconds.

        Raises:
            Problem: Redis is away; it is due again by itself.
        """
        work = _work(task_id)
        webhook = self._load(task_id)
        if webhook is None:
            self._jobs.forget(work)
            return
        self._jobs.postpone(work)
        state = self._state(webhook.record, wait_s)
        # Its caller may have revoked the task meanwhile.
        if state["status"] not in states.READY_STATES or self._load(task_id) is None:
            return
        try:
            self._post_once(webhook, to_json(state))
        except Undeliverable as error:
            self._failed(webhook, error)

    def _state(self, record: TaskRecord, wait_s: float) -> dict[str, Any]:
        until_s = time.monotonic() + wait_s
        while True:
            state = self._records.read_state(record)
            if state["status"] in states.READY_STATES or time.monotonic() >= until_s:
                return state
            time.sleep(RESULT_LOOK_S)

    def _load(self, task_id: str) -> Webhook | None:
        found = self._store.call(lambda client: client.get(self._key(task_id)))
        return None if found is None else Webhook.unpacked(found)

    def _post_once(self, webhook: Webhook, body: bytes) -> None:
        """Posts, unless as many are posted at once as may be.

        Raises:
            Undeliverable: It did not arrive.
        """
        hosts, caller = self._settings.webhook_hosts, webhook.record.caller
        key = self._settings.keys.get(caller)
        if key is None and self._settings.keys:
            # A key may be so new that only the gateway knows it by now.
            raise Undeliverable(f"its key {caller!r} is not in the settings of this worker")
        try:
            target = resolve_target(webhook.url, hosts)
        except Problem as problem:  # The settings have changed.
            raise Undeliverable(problem.message, is_final=True) from problem
        secret = None if key is None else derive_secret(key.hash)
        task_id = webhook.record.id
        limits = {
            # Itself, as a message may come twice.
            self._store.key("posting", "task", task_id): 1,
            self._store.key("posting", "host", target.host): MAX_PER_HOST,
            self._store.key("posting", "caller", caller): MAX_PER_CALLER,
        }
        with self._places(limits) as are_free:
            if not are_free:
                self._jobs.postpone(_work(task_id), BUSY_S)
                return
            post(target, hosts, body, task_id, int(time.time()), secret)
            self.forget(task_id)

    @contextmanager
    def _places(self, limits: dict[bytes, int]) -> Iterator[bool]:
        """Places in some sets; says whether there are any."""
        token = secrets.token_hex(8)
        keys = list(limits)
        if not self._store.script("take_places", keys, token, 2 * DEADLINE_S, *limits.values()):
            yield False
            return
        try:
            yield True
        finally:
            self._store.call(lambda client: [client.zrem(key, token) for key in keys])

    def _failed(self, webhook: Webhook, error: Undeliverable) -> None:
        task_id = webhook.record.id
        where = f"webhook of task {task_id} to {webhook.url}"
        if error.is_final or webhook.attempts >= len(PAUSES_S):
            logger.error("%s is given up: %s", where, error)
            self.forget(task_id)
            return
        pause_s = PAUSES_S[webhook.attempts]
        logger.warning("%s failed, again in %g s: %s", where, pause_s, error)
        tried = replace(webhook, attempts=webhook.attempts + 1).packed()
        key = self._key(task_id)
        self._store.call(lambda client: client.set(key, tried, keepttl=True, xx=True))
        self._jobs.postpone(_work(task_id), pause_s)

    def _key(self, task_id: str) -> bytes:
        return self._store.key("webhook", task_id)


def _work(task_id: str) -> str:
    return f"{WEBHOOK} {task_id}"
