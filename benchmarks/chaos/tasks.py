"""The app that a run's workers serve: tasks that write down each execution before they compute."""

import time
from pathlib import Path
from typing import Any

from celery import Celery, signals

from batchery import BatchTask, install
from benchmarks.chaos.ledger import Book
from benchmarks.chaos.plan import BATCH, TRANSPORTS, TransportName
from benchmarks.chaos.workload import Item, advance, total

QUEUE = "chaos"
STEP = "chaos.step"
TOTAL = "chaos.total"
ORDINARY = "chaos.ordinary"

#: Each has a queue that is named like it; all others use the default one.
BATCH_TASKS = (STEP, TOTAL)

#: A module of this text is what `celery -A` and the device processes import.
MODULE = """\
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
from benchmarks.chaos.tasks import make_app

app = make_app({broker!r}, {url!r}, {transport!r}, Path({folder!r}), {batch_s!r}, {keep_s!r})
"""


def make_app(
    broker: str, url: str, transport: TransportName, folder: Path, batch_s: float, keep_s: int
) -> Celery:
    """Makes the app.

    Args:
        broker: That of Celery, with batch jobs if it is the same Redis.
        url: Redis or cluster for batch jobs and results.
        transport: Name of the transport under test.
        folder: Where executions are written down, far from Redis.
        batch_s: How long a batch takes.
        keep_s: How long results are kept; 0 for Celery's default.
    """
    app = Celery("chaos", broker=broker, backend=url, set_as_current=False)
    install(app, redis_url=None if broker == url else url)
    if broker.startswith("redis"):
        app.conf.broker_transport = TRANSPORTS[transport]
    app.conf.update(
        broker_connection_retry_on_startup=True,
        task_acks_late=True,
        # Or a killed child would fail its task, as it does on stock Celery.
        task_reject_on_worker_lost=True,
        task_default_queue=QUEUE,
        worker_hijack_root_logger=False,
    )
    if keep_s:
        app.conf.result_expires = keep_s
    book = Book(folder)

    @app.task(shared=False, base=BatchTask, name=STEP, max_batch_size=BATCH)
    def step(items: list[Item]) -> list[Item]:
        book.executed(items)
        time.sleep(batch_s)
        return [advance(item) for item in items]

    @app.task(shared=False, name=ORDINARY)
    def ordinary(item: Item) -> Item:
        book.executed([item])
        time.sleep(batch_s)
        return advance(item)

    @app.task(shared=False, base=BatchTask, name=TOTAL, max_batch_size=BATCH)
    def body(chords: list[list[Item]]) -> list[Item]:
        sums = [total(items) for items in chords]
        book.executed(sums)
        return sums

    def receive(request: Any, **_: Any) -> None:
        # Batchery's transport gives a message another tag each time that it leases it.
        tag = request.message.properties.get("publish_tag") or request.message.delivery_tag
        book.received(request.hostname.partition("@")[0], request.id, tag)

    signals.task_received.connect(receive, weak=False)
    return app
