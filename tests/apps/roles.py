"""An app with a task for each way in which a role uses Redis."""

from collections.abc import Generator
from typing import Any

from celery import Celery

from batchery import BatchTask, Partial, install
from support.patience import patient

app = install(Celery("roles", set_as_current=False), stream_grace_s=patient(5))
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {"lease_expiry_s": patient(1.5)}
app.conf.task_routes = {"apps.roles.shout": {"queue": "loud"}}


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


@app.task(shared=False, base=BatchTask, max_batch_size=64, cache="1")
def remember(texts: list[str]) -> list[str]:
    return [text[::-1] for text in texts]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def spell(words: list[str]) -> Generator[Partial, None, list[Any]]:
    """Yields the letters of all words."""
    for index, word in enumerate(words):
        for letter in word:
            yield Partial(index, letter)
    return [word.upper() for word in words]


@app.task(shared=False)
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(shared=False)
def double(number: int) -> int:
    return 2 * number
