"""Messages as they stand in a queue, copied by the thousand from a real one."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

#: What stands between a queue and a priority in the name of its list, and the priorities that have
#: a list: both are kombu's.
SEPARATOR, STEPS = "\x06\x16", (0, 3, 6, 9)

#: What the body of a job has besides its arguments.
EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}

#: What stands for id and body in a template, and for the time in one that says when it is sent.
ID, BODY, SENT = "the-id-of-a-copy", "the-body-of-a-copy", "the-time-of-a-copy"


def list_of(queue: str, priority: int) -> str:
    """Name of the list that has the jobs of a queue and priority."""
    step = max(each for each in STEPS if each <= priority)
    return f"{queue}{SEPARATOR}{step}" if step else queue


def body_of(argument: Any, keywords: Mapping[str, Any] | None = None) -> str:
    """The body of a job with one argument."""
    return base64.b64encode(json.dumps([[argument], keywords or {}, EMBED]).encode()).decode()


@dataclass(frozen=True, slots=True)
class Template:
    """A message without id and body."""

    #: The list that its copies go to.
    key: str
    text: str

    @classmethod
    def of(
        cls,
        message: bytes,
        task: str,
        queue: str,
        priority: int = 0,
        *,
        items: int | None = None,
        tenant: str | None = None,
        is_stamped: bool = False,
    ) -> Self:
        """Makes a template of a real message.

        Args:
            message: As it stands in a queue.
            task: Name of the task.
            queue: Where the copies go.
            priority: As Redis counts: 0 is the highest.
            items: Items of each job, if it is a multi-item one.
            tenant: For whom the jobs run, if anybody says.
            is_stamped: Whether they say when they were sent; whoever sends one calls `stamp`.
        """
        real = json.loads(message)
        headers = {**real["headers"], "id": ID, "root_id": ID, "task": task}
        if items is not None:
            headers["batchery"] = {"v": 1, "n": items}
        if tenant is not None:
            headers["batchery_tenant"] = tenant
        if is_stamped:
            headers["batchery_sent_at"] = SENT
        properties = {
            **real["properties"],
            "correlation_id": ID,
            "delivery_tag": ID,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": priority,
        }
        made = {**real, "body": BODY, "headers": headers, "properties": properties}
        return cls(list_of(queue, priority), json.dumps(made))

    def copy(self, task_id: str, body: str) -> str:
        """A message with this id and body."""
        return self.text.replace(ID, task_id).replace(BODY, body)


def stamp(message: str, unix_s: float) -> str:
    """Puts the time into a message of a template that has a place for it."""
    return message.replace(f'"{SENT}"', f"{unix_s:.3f}")
