"""Messages that are none, one of each way to be wrong; each with a reason to be in the queue."""

import base64
import json
from typing import Any

from benchmarks.chaos.tasks import QUEUE, STEP

#: Id of the task in those messages that have one.
GARBAGE_ID = "00000000-0000-4000-8000-{:012d}"


def garbage(number: int) -> bytes:
    """The malformed message of this number; there are a few kinds, in turn."""
    kinds = [
        b"not json",
        b"[1,2]",
        b'"a string"',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        _changed(number, properties=None),
        _changed(number, **{"content-type": "application/x-unheard-of"}),
        _changed(number, body="%%% not base64 %%%"),
        _changed(number, body=base64.b64encode(b"\xff\xff").decode()),
        _changed(number, body=base64.b64encode(b"[1, 2").decode()),
        _changed(number, headers={}),
        _changed(number, task="chaos.unheard_of"),
    ]
    return kinds[number % len(kinds)]


def _changed(number: int, *, task: str = STEP, **changes: Any) -> bytes:
    """A good message with something changed, or left out where the new value is None."""
    task_id = GARBAGE_ID.format(number)
    body = json.dumps([[{"job": -1 - number, "value": 0}], {}, {}])
    message: dict[str, Any] = {
        "body": base64.b64encode(body.encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": task, "id": task_id, "root_id": task_id},
        "properties": {
            "correlation_id": task_id,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": QUEUE},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": f"garbage-{number}",
        },
    }
    message.update(changes)
    return json.dumps({key: value for key, value in message.items() if value is not None}).encode()
