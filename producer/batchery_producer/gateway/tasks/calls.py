"""Sends any task of the app, on behalf of a caller."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from celery import Celery
from kombu.exceptions import EncodeError, OperationalError

from batchery.errors import BatchArgumentError
from batchery.protocol.headers import with_tenant
from batchery.task import BatchTask
from batchery.tracing import trace_headers
from batchery_producer.answers import build_header
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.json_lists import json_of_arguments
from batchery_producer.gateway.problems import Kind, Problem, build_problem, redis_problem
from batchery_producer.publisher import is_known


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """What a caller wants to run.

    Attributes:
        task: Name of the task.
        args: Positional arguments; of a batch task, its item or its list of items.
        kwargs: Keyword arguments.
        count: Number of items in the list; 0 if there is a single one, or arguments.
        is_batch: Whether the caller takes it for a batch task.
    """

    task: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    count: int
    is_batch: bool

    @property
    def json(self) -> bytes:
        """The arguments, for limits and digests.

        Raises:
            Problem: Workers could not read them.
        """
        return json_of_arguments([self.args, self.kwargs])

    def digest(self, *more: str | None) -> str:
        """Digest of the call, and of other fields of its request."""
        parts = [self.task, self.count, self.is_batch, *more]
        return hashlib.sha256(orjson.dumps(parts) + self.json).hexdigest()


class TaskSender:
    """Sends as the app's own code would: to its queues, in stock messages."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def knows(self, task: str) -> bool:
        """Whether the app has this task, or a route for it."""
        return is_known(self._app, task)

    def check(self, call: RequestedCall) -> None:
        """Makes sure that the arguments are of the right form, if the app knows the task.

        Raises:
            Problem: A batch task takes an item, and others take arguments.
        """
        known: Any = self._app.tasks.get(call.task)
        if known is None or isinstance(known, BatchTask) is call.is_batch:
            return
        if call.is_batch:
            raise Problem(
                Kind.INVALID, f"{call.task}: is no batch task; send args and kwargs, not items"
            )
        raise Problem(
            Kind.INVALID, f"{call.task}: is a batch task; send item or items, and keywords"
        )

    async def send(
        self,
        call: RequestedCall,
        task_id: str,
        caller: Caller,
        *,
        reply: Mapping[str, Any],
        expires_s: int | None,
        callback: Any = None,
    ) -> None:
        """Sends a task.

        Args:
            call: The task.
            task_id: Its id.
            caller: For whom it runs.
            reply: Headers that ask for an announcement of its end.
            expires_s: Within how many seconds a worker must begin it.
            callback: What its worker sends when it has ended, well or not.

        Raises:
            Problem: It could not be sent.
        """
        options: dict[str, Any] = {
            "task_id": task_id,
            "headers": {**trace_headers(), **build_header(call.count, reply)},
            "expires": expires_s,
        }
        if callback is not None:
            options |= {"link": [callback], "link_error": [callback]}
        if caller.priority is not None:
            options["priority"] = caller.priority
        if call.is_batch and not self.knows(call.task):
            options["queue"] = call.task
        send = partial(self._send, call, with_tenant(options, caller.tenant))
        try:
            await asyncio.to_thread(send)
        except (BatchArgumentError, EncodeError, TypeError) as error:
            # Celery compares the arguments with the signature of a task that it knows.
            raise Problem(Kind.INVALID, f"{call.task}: {error}") from error
        except Exception as error:
            raise build_problem(error) from error

    def _send(self, call: RequestedCall, options: Mapping[str, Any]) -> None:
        known: Any = self._app.tasks.get(call.task)
        send = partial(self._app.send_task, call.task) if known is None else known.apply_async
        send(tuple(call.args), dict(call.kwargs), **options)

    async def revoke(self, task_id: str) -> None:
        """Tells the workers not to begin a task.

        Raises:
            Problem: The broker is away.
        """
        control: Any = self._app.control
        try:
            await asyncio.to_thread(control.revoke, task_id)
        except OperationalError as error:
            raise redis_problem(error) from error
