"""An app with batch tasks of every form, and an ordinary one."""

import asyncio
import os
import sys
import time
from datetime import UTC, datetime
from typing import Any

from celery import Celery, current_task
from celery.exceptions import Ignore, Reject

from batchery import BatchTask, Failed, RetryAfter, install
from support import patience

#: Of functions that sleep for far longer, or not at all.
SOFT_LIMIT_S, HARD_LIMIT_S = int(patience.patient(1)), int(patience.patient(2))

app = install(Celery("shop", set_as_current=False))
app.conf.worker_hijack_root_logger = False


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def read_batch(items: list[Any], *, tag: str = "", pause_s: float = 0.0) -> list[dict[str, Any]]:
    """Says with whom each item shared its batch."""
    time.sleep(pause_s)
    return [{"item": item, "mates": list(items), "tag": tag, "pid": os.getpid()} for item in items]


@app.task(shared=False, base=BatchTask, max_batch_size=8, max_wait_ms=2000)
def patient(items: list[int]) -> list[int]:
    return [len(items)] * len(items)


@app.task(shared=False, base=BatchTask, bind=True)
def bound(self: BatchTask, texts: list[str]) -> list[str]:
    return [f"{self.name}:{text}" for text in texts]


@app.task(shared=False, base=BatchTask)
async def asynchronous(texts: list[str]) -> list[str]:
    return [text[::-1] for text in texts]


class Shelf(BatchTask):
    name = "apps.shop.shelf"

    def run(self, items: list[int]) -> list[int]:
        return [item + 1 for item in items]


shelf = app.register_task(Shelf())


@app.task(shared=False, base=BatchTask, max_retries=2)
def moody(items: list[dict[str, Any]]) -> list[Any]:
    """Answers each item as it asks for."""

    def answer(item: dict[str, Any]) -> Any:
        return {
            "value": item.get("value"),
            "failed": Failed(item.get("why", "")),
            "failed-exception": Failed(LookupError(item.get("why"))),
            "retry": RetryAfter(0.05, ConnectionError("come back later")),
            "ignore": Ignore(),
            "reject": Reject("not here", requeue=False),
            "object": object(),
            "date": datetime(2026, 1, 2, tzinfo=UTC),
        }[item["answer"]]

    return [answer(item) for item in items]


@app.task(shared=False, base=BatchTask, max_retries=5)
def third_time(paths: list[str]) -> list[Any]:
    """Succeeds at the third attempt; a file counts them."""
    outcomes: list[Any] = []
    for path in paths:
        with open(path, "a+") as file:
            file.write("x")
            file.seek(0)
            attempts = len(file.read())
        outcomes.append(attempts if attempts >= 3 else RetryAfter(0.01))
    return outcomes


@app.task(
    shared=False, base=BatchTask, autoretry_for=(ConnectionError,), retry_kwargs={"countdown": 0.01}
)
def flaky(paths: list[str]) -> list[int]:
    """Raises at the first attempt."""
    for path in paths:
        if not os.path.exists(path):
            open(path, "w").close()
            raise ConnectionError("first attempt")
    return [1 for _ in paths]


@app.task(shared=False, base=BatchTask)
def short(items: list[int]) -> list[int]:
    return items[:-1] if len(items) > 1 else []


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def nasty(texts: list[str]) -> list[str]:
    """Does what the texts say."""
    for text in texts:
        if text == "raise":
            raise KeyError("a bad one")
        if text == "exit":
            sys.exit(3)
        if text == "die":
            os._exit(13)
    return [text.upper() for text in texts]


@app.task(shared=False, base=BatchTask)
def nap(seconds: list[float]) -> list[float]:
    """A forward pass that takes its time."""
    time.sleep(max(seconds))
    return seconds


@app.task(shared=False, base=BatchTask)
def until(paths: list[str]) -> list[str]:
    """Computes until there are files of these names."""
    while not all(map(os.path.exists, paths)):
        time.sleep(0.01)
    return paths


@app.task(shared=False)
def double(number: int) -> int:
    return 2 * number


@app.task(shared=False, base=BatchTask, max_batch_size=64, soft_time_limit=SOFT_LIMIT_S)
def lazy(seconds: list[float]) -> list[float]:
    """A function with a soft time limit."""
    for each in seconds:
        time.sleep(each)
    return seconds


@app.task(shared=False, base=BatchTask, max_batch_size=64, soft_time_limit=SOFT_LIMIT_S)
async def lazy_asynchronous(seconds: list[float]) -> list[float]:
    for each in seconds:
        await asyncio.sleep(each)
    return seconds


@app.task(shared=False, base=BatchTask, max_batch_size=64, time_limit=HARD_LIMIT_S)
def stubborn(seconds: list[float]) -> list[float]:
    """A function with a hard time limit."""
    for each in seconds:
        time.sleep(each)
    return seconds


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def total(lists: list[list[int]]) -> list[int]:
    """Sums each list: what a chord's callback is given."""
    return [sum(each) for each in lists]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def increment(numbers: list[int]) -> list[int]:
    return [number + 1 for number in numbers]


@app.task(shared=False, base=BatchTask, bind=True, max_batch_size=1)
def grow(self: Any, numbers: list[int]) -> list[int]:
    """Adds another member to the chord that it is in."""
    assert (self.request.task, self.request.errbacks) == (self.name, None)
    assert current_task.request.id == self.request.id
    self.add_to_chord(increment.s(numbers[0]))
    return numbers


@app.task(shared=False, bind=True)
def family(self: Any) -> list[str]:
    """Says from which jobs this one came."""
    return [self.request.parent_id, self.request.root_id]


@app.task(shared=False, base=BatchTask, bind=True, max_batch_size=64)
def beget(self: Any, numbers: list[int]) -> list[str]:
    """Sends a job on behalf of each item's."""
    origins: list[dict[str, Any]] = [
        {"parent_id": job.id, "root_id": job.root_id} for job in self.request.per_item
    ]
    return [family.apply_async(**origin).id for origin in origins]


@app.task(shared=False)
def remember(value: Any, path: str) -> None:
    """A callback that leaves a trace."""
    with open(path, "a") as file:
        file.write(f"{value}\n")


@app.task(shared=False)
def remember_error(request: Any, error: Any, trace: Any, path: str) -> None:
    """An errback that leaves a trace."""
    with open(path, "a") as file:
        file.write(f"{request.id} {error}\n")
