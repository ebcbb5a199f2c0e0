"""Messages that a broker delivers again while their job runs, or after it has succeeded."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery.worker import state as worker_state

from batchery_worker.in_flight import InFlight, TaskCall


class Request:
    """As much of Celery's request as is looked at."""

    def __init__(
        self,
        job_id: str,
        redelivered: bool = False,
        retries: int = 0,
        discarded: bool = False,
        is_revoked: bool = False,
    ) -> None:
        self.id = job_id
        self.delivery_info = {"redelivered": redelivered}
        self.retries = retries
        self.discarded = discarded
        self.is_revoked = is_revoked
        self.worker_pid: int | None = None
        self.acknowledged = False

    def acknowledge(self) -> None:
        self.acknowledged = True

    def on_accepted(self, pid: int, _: float) -> None:
        self.worker_pid = pid
        worker_state.active_requests.add(self)

    def revoked(self) -> bool:
        return bool(self.is_revoked)


def call(job_id: str = "a", **changes: Any) -> TaskCall:
    request: Any = Request(job_id, **changes)
    return TaskCall(
        target=lambda: (0, None, 0.0),
        args=("task", job_id, {"retries": request.retries}),
        callback=lambda _: request.acknowledge(),
        accept_callback=request.on_accepted,
        error_callback=lambda _: None,
        request=request,
    )


@pytest.fixture
def accepted() -> Iterator[InFlight]:
    yield InFlight()
    worker_state.reset_state()


def test_a_job_that_runs_goes_on_with_the_message_that_came_last(accepted: InFlight) -> None:
    older, newer = call(), call(redelivered=True)
    first, second = older.request, newer.request
    accepted.add(older, 17)
    assert accepted.takes(newer)
    assert older.request is second
    older.callback((0, None, 0.0))
    assert second is not None
    assert second.acknowledged
    assert first is not None
    assert not first.acknowledged
    # Celery counts it once, as running where it runs.
    assert set(worker_state.active_requests) == {second}
    assert second.worker_pid == 17
    accepted.remove(older)
    assert len(accepted) == 0


def test_it_may_come_more_than_once(accepted: InFlight) -> None:
    older = call()
    accepted.add(older, 17)
    last = None
    for _ in range(3):
        last = call(redelivered=True)
        assert accepted.takes(last)
    assert last is not None
    assert older.request is last.request


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        # A client that sends twice under one id wants two runs.
        ({}, {}),
        # A retry has the id of its job.
        ({}, {"redelivered": True, "retries": 1}),
        # Revoked, or cancelled as the connection broke: nobody waits for that outcome.
        ({"discarded": True}, {"redelivered": True}),
        # Another job.
        ({"job_id": "b"}, {"redelivered": True}),
    ],
)
def test_whatever_is_not_the_same_run_has_a_run_of_its_own(
    accepted: InFlight, older: dict[str, Any], newer: dict[str, Any]
) -> None:
    accepted.add(call(**older), 17)
    assert not accepted.takes(call(**newer))


def test_a_job_that_is_settled_is_no_longer_under_way(accepted: InFlight) -> None:
    older = call()
    accepted.add(older, 17)
    accepted.remove(older)
    assert not accepted.takes(call(redelivered=True))


def test_an_older_ticket_does_not_remove_a_newer_one(accepted: InFlight) -> None:
    older, newer = call(discarded=True), call(redelivered=True)
    accepted.add(older, 17)
    accepted.add(newer, 18)
    accepted.remove(older)
    assert accepted.takes(call(redelivered=True))


def test_a_job_that_has_succeeded_is_acknowledged_and_not_run(accepted: InFlight) -> None:
    worker_state.successful_requests.add("a")
    again = call(redelivered=True)
    assert accepted.takes(again)
    assert again.request is not None
    assert again.request.acknowledged
    # Not redelivered: somebody wants it once more.
    assert not accepted.takes(call())


def test_a_job_is_accepted_once(accepted: InFlight) -> None:
    job = call()
    accepted.add(job, 17)
    accepted.add(job, 18)
    assert job.request is not None
    assert job.request.worker_pid == 17


def test_a_job_that_cannot_be_accepted_runs_all_the_same(
    accepted: InFlight, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("the broker is away")

    job = call()
    job.accept_callback = broken
    accepted.add(job, 17)
    assert job.accepted
    assert "cannot be accepted" in caplog.text


@pytest.mark.parametrize("revoked", [True, False])
def test_a_job_that_is_revoked_while_it_waits_is_not_wanted(
    accepted: InFlight, revoked: bool
) -> None:
    assert accepted.wants(call(is_revoked=revoked)) is not revoked


def test_a_suspect_that_was_revoked_while_it_ran_gets_no_other_device(accepted: InFlight) -> None:
    job = call()
    accepted.add(job, 17)
    assert accepted.wants(job)
    assert job.request is not None
    job.request.discarded = True  # type: ignore[misc]
    assert not accepted.wants(job)
    assert len(accepted) == 0


def test_a_revocation_that_cannot_be_stored_does_not_stop_the_batch(accepted: InFlight) -> None:
    job = call()

    def broken() -> bool:
        raise OSError("the backend is away")

    assert job.request is not None
    job.request.revoked = broken
    assert accepted.wants(job)
