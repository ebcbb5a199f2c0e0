"""`BatchTask.submit_many`: sends many jobs of a registered task."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from kombu.exceptions import OperationalError

from batchery.errors import GaveUp
from batchery.retry import RetryPolicy
from batchery.task import JobSet
from batchery_producer.broker import BrokerConnection
from batchery_producer.publisher import Publisher
from batchery_producer.template import uuids

#: How long the broker may be away, in seconds; short, because a caller waits.
SEND_AWAY_S = 10.0


def send_many(
    task: Any, items: Sequence[Any], keywords: Mapping[str, Any], options: Mapping[str, Any]
) -> JobSet:
    """Sends one job per item.

    Args:
        task: A task that is registered with its app.
        items: Each becomes a job of its own.
        keywords: Keyword arguments of all jobs.
        options: Options of `apply_async` for all jobs.

    Returns:
        The results, in the order of the items.

    Raises:
        OperationalError: kombu's; the broker stays away.
        PublishError: The broker refuses, or the class of the jobs is full.
    """
    # A caller waits, and Celery has no words for how long; `wait_s` is the publisher's.
    app, options = task.app, {"wait_s": 0, **options}
    ignored = options.get("ignore_result", task.ignore_result)
    trails = options.pop("add_to_parent", True)
    away_s = SEND_AWAY_S if options.pop("retry", None) is not False else 0.0
    policy, ids = RetryPolicy(away_s=away_s), uuids(len(items))
    try:
        with closing(BrokerConnection(app, policy)) as broker:
            publisher = Publisher(app, task.name, keywords=keywords, broker=broker, **options)
            publisher.send(list(zip(ids, items, strict=True)))
    except GaveUp as error:
        raise OperationalError(f"{task.name}: {error}") from error
    results = [task.AsyncResult(task_id) for task_id in ids]
    parent = app.current_worker_task if trails else None
    for result in results:
        result.ignored = ignored
        if parent is not None:
            parent.add_trail(result)
    return JobSet(results, app=app)
