"""The state STARTED of the jobs of a batch, stored in one round trip before they run."""

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.states import STARTED

from batchery.cluster_client import split_keys
from batchery.errors import counted
from batchery.redis_scripts import RedisScripts
from batchery.task import BatchTask
from batchery_worker.commit.committer import (
    encode_fields,
    make_results_client,
    only_celery_stores,
    result_scripts,
    store_states,
    stored_fields,
)
from batchery_worker.device.functions import decode_message
from batchery_worker.work import Work

logger = logging.getLogger("batchery.device")


class StartedStates:
    """Stores STARTED for tasks that ask for it; used by one thread at a time."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._extended = bool(app.conf.find_value_for_key("extended", "result"))
        self._paused_until_s = 0.0

    def store(self, work: Work) -> None:
        """Stores the state of all jobs of a batch, unless their task does not ask for it.

        A job need not wait for a backend that is away: it goes on without this state. Nor does one
        that comes soon after it, as long as that has waited.
        """
        task: Any = self._app.tasks.get(work.task)
        if task is None or not task.track_started:
            return
        began_s = time.monotonic()
        if began_s < self._paused_until_s:
            return
        try:
            if only_celery_stores(self._app, task) is None:
                self._store_all(task, work)
            else:
                self._store_each(task, work)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises, the jobs must run
            self._paused_until_s = 2 * time.monotonic() - began_s
            logger.warning(
                "the state STARTED of %s of %s cannot be stored: %s: %s",
                counted(len(work.jobs), "job"),
                work.task,
                type(error).__name__,
                error,
            )

    def _store_all(self, task: BatchTask, work: Work) -> None:
        backend: Any = self._app.backend
        values = {
            backend.get_key_for_task(task_id): _stored(task_id, _meta(message), fields)
            for task_id, message, fields in self._stored_jobs(task, work)
        }
        for keys in split_keys(self._client, values):
            own = {key: values[key] for key in keys}
            store_states(self._scripts, own, int(backend.expires or 0))

    def _store_each(self, task: BatchTask, work: Work) -> None:
        for task_id, message, _ in self._stored_jobs(task, work):
            request = Context(message)
            task.backend.store_result(task_id, _meta(message), STARTED, request=request)

    def _stored_jobs(
        self, task: BatchTask, work: Work
    ) -> Iterator[tuple[str, dict[str, Any], Mapping[str, Any]]]:
        """Id, headers and further fields of each job of which anything is stored."""
        ignores_result = bool(task.ignore_result)
        for index, (task_id, _, _) in enumerate(work.jobs):
            message = {**decode_message(work, index), "task": work.task}
            fields = stored_fields(message, ignores_result=ignores_result, extended=self._extended)
            if fields is not None:
                yield task_id, message, fields

    @cached_property
    def _scripts(self) -> RedisScripts:
        return result_scripts(self._client)

    @cached_property
    def _client(self) -> Any:
        return make_results_client(self._app.backend)


def _meta(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"pid": os.getpid(), "hostname": message.get("hostname")}


def _stored(task_id: str, meta: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """What Celery would store; the status comes first, as the scripts look for it there."""
    return (
        f'{{"status": "STARTED", "result": {json.dumps(meta)}, "traceback": null, "children": [],'
        f' "date_done": null, {encode_fields(task_id, fields)}}}'
    )
