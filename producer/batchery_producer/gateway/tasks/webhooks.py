"""Results that are posted to their callers, even if the gateway that promised it was killed.

Each webhook is a record in Redis, and a member of a sorted set that says when somebody should look
at it. A gateway takes it by moving that time: a lease, which it renews while it waits for the
result. When a gateway dies, its leases end, and another one takes up what it held.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from batchery.gateway_settings import GatewaySettings
from batchery.redis_scripts import RedisScripts
from batchery_producer.gateway.problems import Problem
from batchery_producer.gateway.store import Store
from batchery_producer.gateway.tasks.records import TaskRecord, TaskRecords, to_json
from batchery_producer.gateway.tasks.result_waiter import ResultWaiter
from batchery_producer.gateway.tasks.webhook_post import Undeliverable, post, secret_of
from batchery_producer.gateway.tasks.webhook_target import target_of

logger = logging.getLogger(__name__)

SCRIPTS = Path(__file__).parent / "lua"

#: How long a gateway holds a webhook before it must say that it is alive, in seconds.
LEASE_S = 10.0

#: How often leases are renewed and others taken up, in seconds.
TICK_S = 1.0

#: Webhooks that a process holds at most; each costs a few kilobytes.
MAX_HELD = 10_000

#: Webhooks that are posted at once.
MAX_POSTING = 16

#: Pauses before further attempts, in seconds.
PAUSES_S = (1.0, 5.0, 25.0, 125.0, 625.0)

#: How long to wait for a result before looking whether the webhook is still wanted, in seconds.
LOOK_S = 60.0


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
    """Posts the results of all gateways' tasks."""

    def __init__(
        self, store: Store, records: TaskRecords, waiter: ResultWaiter, settings: GatewaySettings
    ) -> None:
        self._store = store
        self._records = records
        self._waiter = waiter
        self._settings = settings
        self._due = store.key("webhooks")
        self._held: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(MAX_POSTING, "batchery-webhook")

    def keys_of(self, url: str, record: TaskRecord) -> Mapping[bytes, bytes]:
        """What must be kept with the record of a task, so that its webhook is not lost."""
        return {self._key(record.id): Webhook(url, record).packed()}

    async def begin(self, task_id: str) -> None:
        """Takes up a webhook whose keys are kept.

        Raises:
            Problem: Redis is away.
        """
        await self._postpone([task_id], LEASE_S)
        self._hold(task_id)

    async def forget(self, task_id: str) -> None:
        """Posts nothing.

        Raises:
            Problem: Redis is away.
        """

        def remove(client: Any) -> None:
            client.delete(self._key(task_id))
            client.zrem(self._due, task_id)

        await self._store.run(remove)

    async def watch(self) -> None:
        """Takes up what others have left, until it is cancelled."""
        try:
            while True:
                with suppress(Problem):  # Redis is away: leases end, and are taken up later.
                    await self._look()
                await asyncio.sleep(TICK_S)
        finally:
            held = list(self._held)
            for serving in self._held.values():
                serving.cancel()
            self._threads.shutdown(wait=False, cancel_futures=True)
            if held:
                with suppress(Problem):
                    await self._postpone(held, 0)

    async def _look(self) -> None:
        if self._held:
            await self._postpone(list(self._held), LEASE_S)
        space = MAX_HELD - len(self._held)
        if space > 0:
            for task_id in await self._run("claim_due", LEASE_S, space):
                self._hold(task_id.decode())

    def _hold(self, task_id: str) -> None:
        if task_id not in self._held:
            serving = asyncio.create_task(self._serve(task_id))
            self._held[task_id] = serving
            serving.add_done_callback(lambda _: self._held.pop(task_id, None))

    async def _serve(self, task_id: str) -> None:
        try:
            while (webhook := await self._load(task_id)) is not None:
                if await self._waiter.wait(task_id, LOOK_S):
                    await self._deliver(webhook)
                    return
            await self.forget(task_id)
        except Problem:
            pass  # As in `watch`.
        except Exception:
            logger.exception("webhook of task %s", task_id)

    async def _load(self, task_id: str) -> Webhook | None:
        found = await self._store.run(lambda client: client.get(self._key(task_id)))
        return None if found is None else Webhook.unpacked(found)

    async def _deliver(self, webhook: Webhook) -> None:
        task_id = webhook.record.id
        state = await self._records.state(webhook.record)
        # Its caller may have revoked the task meanwhile.
        if await self._load(task_id) is None:
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, self._post, webhook, to_json(state))
        except Undeliverable as error:
            await self._failed(webhook, error)
        else:
            await self.forget(task_id)

    def _post(self, webhook: Webhook, body: bytes) -> None:
        hosts, caller = self._settings.webhook_hosts, webhook.record.caller
        key = self._settings.keys.get(caller)
        if key is None and self._settings.keys:
            raise Undeliverable(f"its key {caller!r} is no longer in the settings", is_final=True)
        try:
            target = target_of(webhook.url, hosts)
        except Problem as problem:  # The settings have changed.
            raise Undeliverable(problem.message, is_final=True) from problem
        secret = None if key is None else secret_of(key.hash)
        post(target, hosts, body, webhook.record.id, int(time.time()), secret)

    async def _failed(self, webhook: Webhook, error: Undeliverable) -> None:
        task_id = webhook.record.id
        where = f"webhook of task {task_id} to {webhook.url}"
        if error.is_final or webhook.attempts >= len(PAUSES_S):
            logger.error("%s is given up: %s", where, error)
            await self.forget(task_id)
            return
        pause_s = PAUSES_S[webhook.attempts]
        logger.warning("%s failed, again in %g s: %s", where, pause_s, error)
        tried = replace(webhook, attempts=webhook.attempts + 1).packed()
        key = self._key(task_id)
        await self._store.run(lambda client: client.set(key, tried, keepttl=True, xx=True))
        # It is no longer renewed: whoever sees first that it is due takes it.
        self._held.pop(task_id, None)
        await self._postpone([task_id], pause_s)

    async def _postpone(self, task_ids: list[str], seconds: float) -> None:
        await self._run("postpone", seconds, *task_ids)

    async def _run(self, script: str, *arguments: Any) -> Any:
        return await self._store.run(
            lambda client: RedisScripts(client, SCRIPTS).run(script, [self._due], *arguments)
        )

    def _key(self, task_id: str) -> bytes:
        return self._store.key("webhook", task_id)
