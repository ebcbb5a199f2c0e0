"""A job as a worker tells of it to those who record: see `batchery stats --record`."""

from typing import NamedTuple

#: Remote-control command that asks for the jobs since the last question.
COMMAND = "batchery_record"


class RecordedJob(NamedTuple):
    """A job that a worker has admitted."""

    #: When it was sent, in Unix seconds.
    time_s: float
    task: str
    priority_class: str
    tenant: str
    items: int
    #: Until when it should be answered, in seconds from `time_s`; None for no deadline.
    deadline_s: float | None
    #: The same each time that its message is delivered.
    message: str
