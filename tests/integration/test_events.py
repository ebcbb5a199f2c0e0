"""The events of batch jobs, as Celery's own client of events hears them and adds them up."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from celery.events.state import State

from apps import commits
from conftest import StartWorker
from support.event_stream import Events
from support.harness import Worker, wait_for
from support.patience import TIMEOUT_S, patient

RECEIVED, STARTED, SUCCEEDED = "task-received", "task-started", "task-succeeded"
FAILED, RETRIED = "task-failed", "task-retried"

#: Jobs of one kind.
JOBS = 20


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, redis_url: str) -> Worker:
    commits.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.commits", "-E").wait_answers(commits.app)


def add_up(events: Events) -> Any:
    """What Celery's client makes of the events, in the order in which they came."""
    state: Any = State()
    for event in events.seen:
        state.event(event)
    return state


def assert_in_order(told: list[dict[str, Any]]) -> None:
    """Events of one job and one worker: each is later than the one before, on both clocks."""
    for before, after in itertools.pairwise(told):
        assert before["clock"] < after["clock"], told
        assert before["timestamp"] <= after["timestamp"], told


def hear_last(events: Events) -> None:
    """Hears all that the worker told of jobs that have ended: that of a later job comes last."""
    events.of(commits.shout.delay("the last one").id)


def test_each_job_is_received_and_started_and_ends_once(worker: Worker) -> None:
    with Events(commits.app) as events:
        good = [commits.shout.delay(f"text {number}").id for number in range(JOBS)]
        bad = [commits.shout.delay("bad").id for _ in range(3)]
        for job in good:
            events.of(job)
        for job in bad:
            events.of(job, FAILED)
        hear_last(events)
    state = add_up(events)
    for jobs, end, ends_as in ((good, SUCCEEDED, "SUCCESS"), (bad, FAILED, "FAILURE")):
        for job in jobs:
            told = events.all_of(job)
            assert [event["type"] for event in told] == [RECEIVED, STARTED, end]
            assert {event["hostname"] for event in told} == {worker.name}
            assert_in_order(told)
            task = state.tasks[job]
            assert (task.state, task.worker.hostname) == (ends_as, worker.name)
            assert task.name == commits.shout.name


def test_process_that_takes_the_place_of_a_dead_one_sends_events_that_were_asked_for(
    start_worker: StartWorker, redis_url: str
) -> None:
    commits.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    worker = start_worker("apps.commits").wait_answers(commits.app)
    (first,) = wait_for(worker.devices, "its device")
    commits.app.control.enable_events([worker.name], reply=True, timeout=TIMEOUT_S, limit=1)
    first.kill()
    wait_for(lambda: [each for each in worker.devices() if each.pid != first.pid], "a new one")
    with Events(commits.app) as events:
        assert events.of(commits.shout.delay("text").id).keys() == {RECEIVED, STARTED, SUCCEEDED}


def test_each_attempt_of_a_retried_job_is_told_once(worker: Worker, tmp_path: Path) -> None:
    paths = [str(tmp_path / str(number)) for number in range(JOBS)]
    with Events(commits.app) as events:
        # So late that the worker has told of the retry by then.
        jobs = [commits.second_time.delay(path, after_s=patient(1)).id for path in paths]
        for job in jobs:
            events.of(job)
        hear_last(events)
    state = add_up(events)
    for job in jobs:
        told = events.all_of(job)
        kinds = [event["type"] for event in told]
        # The worker may have the message of the retry before it tells that it has sent it.
        assert kinds[:2] == [RECEIVED, STARTED]
        assert sorted(kinds[2:4]) == [RECEIVED, RETRIED]
        assert kinds[4:] == [STARTED, SUCCEEDED]
        assert {event["hostname"] for event in told} == {worker.name}
        assert_in_order(told)
        retries = [event["retries"] for event in told if event["type"] == RECEIVED]
        assert retries == [0, 1]
        assert state.tasks[job].state == "SUCCESS"
