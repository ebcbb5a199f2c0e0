"""An app that has installed Batchery and has no batch task yet."""

from celery import Celery

from batchery import install

app = install(Celery("ordinary", set_as_current=False))


@app.task(shared=False)
def double(number: int) -> int:
    return 2 * number
