"""From the outcome of one item to what Celery expects of a task: a value, or an exception."""

from typing import TYPE_CHECKING, Any

from celery.app.autoretry import add_autoretry_behaviour
from celery.canvas import Signature, maybe_signature

from batchery.outcome import Failed, Ignore, Reject, Replace, RetryAfter

if TYPE_CHECKING:
    from batchery.task import BatchTask


class Delivery:
    """Turns one outcome into what Celery expects of a task: a value or an exception.

    Stands in for the task where Celery's own autoretry is applied, so that `autoretry_for` sees the
    exception of one job. Everything but `run` is the task's.
    """

    def __init__(self, task: "BatchTask") -> None:
        self.__dict__["_task"] = task
        add_autoretry_behaviour(self)

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_run":
            raise AttributeError(name)
        return getattr(self._task, name)

    def __delattr__(self, name: str) -> None:
        delattr(self._task, name)

    def run(self, outcome: Any) -> Any:
        """Returns a value, or raises what says that there is none."""
        if isinstance(outcome, Failed):
            raise outcome.exception
        if isinstance(outcome, Ignore | Reject):
            raise outcome
        if isinstance(outcome, RetryAfter):
            raise self._task.retry(countdown=outcome.seconds, exc=outcome.error)
        if isinstance(outcome, Replace):
            return self._replace(outcome.signature)
        return outcome

    def _replace(self, signature: Signature[Any]) -> Any:
        # A device has sent it as plain data.
        whole: Any = maybe_signature(signature, app=self._task.app)
        if self._task.request.called_directly:
            # There is no caller to wait for another job: it runs here, as this one has.
            return whole.apply().get()
        return self._task.replace(whole)
