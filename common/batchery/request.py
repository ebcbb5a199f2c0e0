"""What `self.request` is while a batch function runs: the jobs whose items it was given."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from celery._state import pop_current_task, push_current_task  # type: ignore[attr-defined]
from celery.app.task import Context, Task

#: Attributes of Celery's request that all jobs of a batch share.
SHARED_ATTRIBUTES = frozenset({"hostname", "kwargs"})

#: Attributes that differ from job to job.
PER_JOB_ATTRIBUTES = frozenset(
    name
    for name, value in vars(Context).items()
    if not (name.startswith("_") or callable(value) or isinstance(value, property))
) - (SHARED_ATTRIBUTES | {"called_directly", "is_eager"})


class JobContext(Context):
    """One job, as Celery's own request: `id`, `retries`, `headers`, `delivery_info`, `root_id`."""

    __slots__ = ("items",)

    #: Positions of its items in the list that the function was given; a multi-item job has several.
    items: range

    def __init__(self, state: dict[str, Any], items: range) -> None:
        """Wraps a request.

        Args:
            state: The attributes of one of Celery's requests; shared with it, not copied.
            items: Positions of the job's items.
        """
        self.__dict__ = state
        self.items = items

    @classmethod
    def of(cls, message: Mapping[str, Any], items: range) -> "JobContext":
        """Makes the context of a job from its message alone."""
        # Whatever the message says, this process does not run Celery's tracer for it.
        return cls(vars(Context({**message, "called_directly": True})), items)


class BatchContext(Context):
    """`self.request` inside a batch function.

    With a single job it is also that job's own request, with all of Celery's attributes. With
    several jobs, the attributes that differ are only in `jobs`: no job's value fits all of them.
    """

    __slots__ = ("_jobs", "_make_jobs", "_single", "device")

    #: The device of the process that runs the function, as torch spells it, such as `cuda:1`; None
    #: where the function runs in no device process.
    device: str | None

    def __init__(
        self,
        jobs: Callable[[], Sequence[JobContext]],
        state: dict[str, Any] | None = None,
        *,
        device: str | None = None,
    ) -> None:
        """Wraps the requests of jobs.

        Args:
            jobs: Makes their contexts; called once, when somebody asks for one.
            state: The attributes of the only job's request; None if there are several jobs.
            device: The device of this process, as torch spells it.
        """
        self.device = device
        self._make_jobs = jobs
        self._jobs: Sequence[JobContext] | None = None
        self._single = state is not None
        if state is not None:
            # Shared: what Celery's own code sets here must be in the job's request afterwards.
            self.__dict__ = state

    def __getattribute__(self, name: str) -> Any:
        if name in SHARED_ATTRIBUTES and not self._single:
            return getattr(self.jobs[0], name)
        if name in PER_JOB_ATTRIBUTES and not self._single:
            raise AttributeError(
                f"request.{name} belongs to one job, and a batch may have several:"
                f" use request.jobs[i].{name} or request.per_item[i].{name}"
            )
        return super().__getattribute__(name)

    def __bool__(self) -> bool:
        """Whether it is the request of one job: Celery asks, and then reads its id and root."""
        return self._single

    @property
    def jobs(self) -> Sequence[JobContext]:
        """The jobs that have items in the list that the function was given, in order."""
        if self._jobs is None:
            self._jobs = self._make_jobs()
        return self._jobs

    @property
    def per_item(self) -> Sequence[JobContext]:
        """For each item of the list, the job that carried it."""
        return [job for job in self.jobs for _ in job.items]

    def __repr__(self) -> str:
        return f"<BatchContext: {vars(self)!r}>"


@contextmanager
def bind_request(task: "Task[..., Any]", context: Context) -> Iterator[None]:
    """Makes `task.request` this context, and the task current, in the block on this thread."""
    task.request_stack.push(context)
    push_current_task(task)
    try:
        yield
    finally:
        pop_current_task()
        task.request_stack.pop()


def shares(sizes: Sequence[int], part: Sequence[int]) -> Iterator[tuple[int, range]]:
    """Says which jobs have items in a part of a batch.

    Args:
        sizes: How many items each job of the batch has.
        part: Positions of items of the batch, in order.

    Yields:
        The index of a job, and the positions of its items within the part.
    """
    start = 0
    for index, size in enumerate(sizes):
        first, end = bisect_left(part, start), bisect_left(part, start + size)
        if first < end:
            yield index, range(first, end)
        start += size
