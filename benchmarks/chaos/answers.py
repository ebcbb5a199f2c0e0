"""What was seen of stored results, by whom it was read or announced. Pure."""

import json
from dataclasses import dataclass, field
from typing import Any

#: States that are no answer yet; whatever follows them is no doubled result.
WAITING = {"PENDING", "RECEIVED", "STARTED", "RETRY"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The first answer to a task that was seen."""

    at_s: float
    payload: bytes
    state: str
    result: Any


@dataclass(slots=True)
class Answers:
    """All answers of a run. One that differs from an earlier success is remembered, too."""

    first: dict[str, Answer] = field(default_factory=dict)
    #: Task id -> the other answer. The date in a payload tells even equal results apart.
    changed: dict[str, bytes] = field(default_factory=dict)

    def saw(self, task_id: str, payload: bytes, at_s: float) -> bool:
        """Takes one sighting of a result; returns whether it is the first answer to its task."""
        known = self.first.get(task_id)
        if known is not None:
            # A failure that is followed by something else is wrong as it is.
            if payload != known.payload and known.state == "SUCCESS":
                self._differs(task_id, payload)
            return False
        state, result = _read(payload)
        if state in WAITING:
            return False
        self.first[task_id] = Answer(at_s, payload, state, result)
        return True

    def _differs(self, task_id: str, payload: bytes) -> None:
        # An announcement may arrive late: then it is older than the answer that was read.
        if _read(payload)[0] not in WAITING:
            self.changed[task_id] = payload


def _read(payload: bytes) -> tuple[str, Any]:
    try:
        meta = json.loads(payload)
        return str(meta["status"]), meta["result"]
    except (ValueError, LookupError, TypeError):
        return "UNREADABLE", payload
