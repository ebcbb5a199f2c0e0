"""Jobs that succeed, fail, or are retried once: of Celery as it is, or of Batchery beside it."""

import os
from typing import Any

from celery import Celery

from batchery import BatchTask, Failed, RetryAfter, install
from benchmarks.peers.celery_client import configure, run

#: Whether the worker is Celery as it is.
IS_STOCK = bool(os.environ.get("PEER_STOCK"))

app = Celery("bench")
if not IS_STOCK:
    install(app)
configure(app)


class Unwanted(Exception):
    """What failing jobs raise."""


@app.task(name="ordinary.succeed")
def succeed(item: Any) -> Any:
    """Does nothing."""
    return item


@app.task(name="ordinary.fail")
def fail(item: Any) -> Any:
    """Raises."""
    raise Unwanted(item)


@app.task(name="ordinary.retry", bind=True, max_retries=1, default_retry_delay=0)
def retry(self: Any, item: Any) -> Any:
    """Is retried once."""
    if self.request.retries:
        return item
    raise self.retry(exc=Unwanted(item), countdown=0)


if not IS_STOCK:

    @app.task(base=BatchTask, name="batch.succeed", max_batch_size=64)
    def succeed_together(items: list[Any]) -> list[Any]:
        """Does nothing."""
        return items

    @app.task(base=BatchTask, name="batch.fail", max_batch_size=64)
    def fail_together(items: list[Any]) -> list[Any]:
        """Fails each item."""
        return [Failed(Unwanted(item)) for item in items]

    @app.task(base=BatchTask, name="batch.retry", bind=True, max_batch_size=64, max_retries=1)
    def retry_together(self: Any, items: list[Any]) -> list[Any]:
        """Has each item retried once."""
        return [
            item if job.retries else RetryAfter(0, Unwanted(item))
            for item, job in zip(items, self.request.per_item, strict=True)
        ]


if __name__ == "__main__":
    run(app, os.environ["PEER_TASK"])
