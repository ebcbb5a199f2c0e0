"""Results that Celery's own code stores: how long they stay, and a Redis that is full."""

import threading
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from batchery.completion import JobCompletion, completing
from batchery.installer import install
from batchery_worker.completion.backend import for_completion
from support.patience import patient

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")


@pytest.mark.parametrize("conf", [{}, {"result_failure_expires": 5000}], ids=str)
def test_failures_expire_when_the_app_says(url: str, bare: Any, conf: dict[str, Any]) -> None:
    app = install(Celery("expire", broker=url, backend=url, set_as_current=False))
    app.conf.update({"result_expires": 10_000, **conf})
    backend: Any = for_completion(app.backend)
    backend.mark_as_failure("failed", ValueError("bad"))
    backend.mark_as_done("done", 1)
    longest_s = conf.get("result_failure_expires", 10_000)
    assert longest_s - 1000 < bare.ttl("celery-task-meta-failed") <= longest_s
    assert 9000 < bare.ttl("celery-task-meta-done") <= 10_000
    app.close()


def test_result_of_the_tracer_waits_while_redis_is_full(url: str, bare: Any) -> None:
    """Redis 6.2 does not say clearly that a script found no memory."""
    app = install(Celery("full", broker=url, backend=url, set_as_current=False))
    backend: Any = for_completion(app.backend)
    bare.config_set("maxmemory-policy", "noeviction")
    bare.config_set("maxmemory", 1)
    later = threading.Timer(1.0, bare.config_set, ("maxmemory", 0))
    later.start()
    try:
        with completing(JobCompletion()):
            backend.mark_as_done("full-1", "a result", request=Context({"id": "full-1"}))
    finally:
        later.join()
        bare.config_set("maxmemory", 0)
    assert app.AsyncResult("full-1").get(timeout=patient(30)) == "a result"
