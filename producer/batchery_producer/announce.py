"""Events `task-sent`, many in one message, as Celery's workers send theirs."""

import base64
import json
from collections.abc import Callable, Sequence
from time import time
from typing import Any

from celery import Celery
from kombu.utils import json as kombu_json

from batchery_producer.recording import Command
from batchery_producer.template import Job

#: Fields that differ from job to job.
SENT = "task-sent"


class SentEvents:
    """Makes the events of many jobs of the one that Celery made."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def instead_of(
        self, commands: Sequence[Command], jobs: Sequence[Job], repr_item: Callable[[Any], str]
    ) -> list[Command]:
        """Puts the events of all jobs in the place of the template's, where there is one."""
        return [self._of_all(command, jobs, repr_item) for command in commands]

    def _of_all(
        self, command: Command, jobs: Sequence[Job], repr_item: Callable[[Any], str]
    ) -> Command:
        if command.name != "publish":
            return command
        topic, payload = command.args
        message = json.loads(payload)
        event = json.loads(base64.b64decode(message["body"]))
        root_is_own = event["root_id"] == event["uuid"]
        clock: Any = self._app.clock  # type: ignore[attr-defined]  # Celery's own clock of events.
        events = [
            {
                **event,
                "uuid": job.id,
                "root_id": job.id if root_is_own else event["root_id"],
                "args": repr_item(job.item),
                "clock": clock.forward(),
                "timestamp": time(),
            }
            for job in jobs
        ]
        many = json.dumps(events).encode()
        message["body"] = base64.b64encode(many).decode()
        info = message["properties"]["delivery_info"]
        topic = topic.replace(info["routing_key"], "task.multi")
        info["routing_key"] = "task.multi"
        return Command("publish", (topic, kombu_json.dumps(message)))
