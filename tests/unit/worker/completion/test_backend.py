"""A completion backend is the app's own, with what a completion adds."""

from typing import Any

from celery import Celery

from batchery.completion import JobCompletion, completing
from batchery_worker.completion.backend import DeadlineRetry, for_completion


def app_with(backend: str, **conf: Any) -> Celery:
    app = Celery("completion", broker="memory://", backend=backend, set_as_current=False)
    app.conf.update(conf)
    return app


def test_retries_that_the_app_chose_are_kept() -> None:
    app = app_with(
        "redis://127.0.0.1:1/0", result_backend_always_retry=True, result_backend_max_retries=3
    )
    backend = for_completion(app.backend)
    assert (backend.always_retry, backend.max_retries) == (True, 3)
    assert not isinstance(backend.client.get_retry(), DeadlineRetry)


def test_facts_of_the_batch_are_stored_within_a_completion_alone() -> None:
    backend = for_completion(app_with("cache+memory://").backend)
    with completing(JobCompletion("t1", info={"size": 3})):
        backend.store_result("t1", 1, "SUCCESS")
    backend.store_result("t2", 2, "SUCCESS")
    assert backend.get_task_meta("t1")["batch"] == {"size": 3}
    assert "batch" not in backend.get_task_meta("t2")
