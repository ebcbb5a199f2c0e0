"""Results in bulk: announced on one stream, found by sweeps where nobody announces them."""

import contextlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery, uuid

from batchery.protocol.headers import read_stream_name, stream_key
from batchery.retry import RetryPolicy
from batchery.transport.redis_schema import Keys
from batchery_producer.answers import Answer
from batchery_producer.collector import Collector
from batchery_producer.publisher import Publisher
from batchery_worker.commit.committer import CommitStatus, JobResult, RedisCommitter
from batchery_worker.work import CommitContext
from support.harness import Worker, wait_for
from support.patience import patient
from support.publishing import bulk_app

APP = "apps.shop"
FACTS = {"id": "b1", "size": 2}
NEVER_S = float("inf")


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    """On each kind of Redis in turn."""
    with bulk_app(url) as made:
        yield made


@pytest.fixture
def collector(app: Celery) -> Iterator[Any]:
    with contextlib.closing(Collector(app, RetryPolicy(away_s=20))) as made:
        yield made


def collect(collector: Any, count: int, timeout_s: float = patient(60)) -> dict[str, Answer]:
    """Collects until so many jobs have ended."""
    answers: dict[str, Answer] = {}

    def enough() -> bool:
        answers.update(collector.collect(0.2))
        return len(answers) >= count

    wait_for(enough, f"{count} jobs ended", timeout_s)
    return answers


def without_sweeps(collector: Any) -> None:
    collector._poll_at_s = NEVER_S


class Commits:
    """A device's commit, with leases of its own."""

    def __init__(self, app: Any, bare: Any) -> None:
        self._bare = bare
        self._committer = RedisCommitter(app.backend, lambda: None)
        bare.zadd("batchery:workers", {"me": 1})

    def __call__(self, ids: list[str], replies: dict[str, list[int]], *, lease: bool = True) -> Any:
        tokens = [str(number) for number in range(len(ids))]
        if lease:
            self._bare.hset("lease", mapping=dict.fromkeys(tokens, "celery\0message"))
        jobs = [JobResult(task_id, f'"of {task_id}"'.encode()) for task_id in ids]
        own: Any = [(token, 0.5, {}) for token in tokens]
        store: Any = SimpleNamespace(
            worker="me", keys=Keys(), lease_key="lease", db=0, client=self._bare
        )
        context = CommitContext(store, own, completion_streams=replies)
        return self._committer.send(jobs, context, FACTS)()


@pytest.fixture
def commit(app: Celery, bare: Any) -> Commits:
    return Commits(app, bare)


def store(app: Any, bare: Any, task_id: str, status: str, result: Any) -> None:
    """What any worker stores."""
    content = json.dumps({"status": status, "result": result})
    bare.set(app.backend.get_key_for_task(task_id), content)


def describe_function(collector: Any) -> str:
    name = read_stream_name(collector.headers["batchery"])
    assert name is not None
    return name


def test_jobs_of_several_runs_in_one_batch_are_announced_to_each(
    app: Celery, collector: Any, commit: Commits, bare: Any
) -> None:
    with contextlib.closing(Collector(app, RetryPolicy())) as other:
        for each, ids in ((collector, ["a", "c"]), (other, ["b"])):
            each.expect(ids)
            without_sweeps(each)
        replies = {describe_function(collector): [0, 2], describe_function(other): [1]}
        assert commit(["a", "b", "c", "d"], replies) == [CommitStatus.COMMITTED] * 4
        mine = collect(collector, 2)
        assert mine == {"a": Answer("of a"), "c": Answer("of c")}
        assert collect(other, 1) == {"b": Answer("of b")}
    assert not bare.hlen("lease")


def test_a_reply_expires_and_is_bounded_trimmed_and_removed(
    app: Any, collector: Any, commit: Commits, bare: Any
) -> None:
    key = stream_key(app.backend, describe_function(collector))
    for task_id in ("a", "b"):
        collector.expect([task_id])
        commit([task_id], {describe_function(collector): [0]})
        collect(collector, 1)
    assert bare.xlen(key) == 1
    assert 0 < bare.ttl(key) <= 3600
    collector.close()
    commit(["c"], {describe_function(collector): [0]})
    assert not bare.exists(key)


def test_a_reply_that_nobody_reads_does_not_grow_for_ever(
    app: Any, collector: Any, commit: Commits, bare: Any
) -> None:
    key = stream_key(app.backend, describe_function(collector))
    with bare.pipeline() as pipe:
        for number in range(9000):
            pipe.xadd(key, {"ids": f'["{number}"]'})
        pipe.execute()
    commit(["c"], {describe_function(collector): [0]})
    assert bare.xlen(key) < 9000


def test_a_reply_that_was_lost_is_made_again(
    app: Any, collector: Any, commit: Commits, bare: Any
) -> None:
    collector.expect(["a"])
    without_sweeps(collector)
    bare.delete(stream_key(app.backend, describe_function(collector)))
    assert list(collector.collect(0)) == []
    commit(["a"], {describe_function(collector): [0]})
    assert collect(collector, 1) == {"a": Answer("of a")}


def test_commits_are_announced_when_redis_is_full(
    collector: Any, commit: Commits, bare: Any
) -> None:
    collector.expect(["a", "b"])
    without_sweeps(collector)
    bare.hset("lease", "0", "celery\0message")
    bare.config_set("maxmemory", 1)
    assert commit(["a"], {describe_function(collector): [0]}, lease=False) == [
        CommitStatus.COMMITTED
    ]
    assert collect(collector, 1) == {"a": Answer("of a")}


def test_results_have_the_prefix_that_replies_have(url: str, bare: Any) -> None:
    options = {"global_keyprefix": "mine"}
    with (
        bulk_app(url, result_backend_transport_options=options) as app,
        contextlib.closing(Collector(app, RetryPolicy())) as collector,
    ):
        collector.expect(["a"])
        without_sweeps(collector)
        Commits(app, bare)(["a"], {describe_function(collector): [0]})
        assert bare.exists("mine_batchery:reply:" + describe_function(collector))
        assert collect(collector, 1) == {"a": Answer("of a")}


def test_results_that_nobody_announces_are_found(app: Any, collector: Any, bare: Any) -> None:
    ids = [f"job-{number}" for number in range(10_000)]
    collector.expect(ids)
    assert list(collector.collect(0)) == []
    last = ids.pop()
    stored = {
        app.backend.get_key_for_task(each): json.dumps({"status": "SUCCESS", "result": each})
        for each in ids
    }
    bare.mset(stored)
    error = {"exc_type": "LookupError", "exc_module": "builtins", "exc_message": ["lost"]}
    store(app, bare, "job-7", "FAILURE", error)
    store(app, bare, last, "STARTED", None)
    assert collector.find_missing(["job-7", "job-8", last], {"job-8"}) == [last]
    answers = collect(collector, len(ids))
    assert set(answers) == set(ids)
    assert answers["job-1"] == Answer("job-1")
    assert answers["job-7"].error == ("LookupError", "lost")


def test_a_worker_announces_what_it_commits(client: Any, worker: Worker) -> None:
    assert isinstance(client.backend.client, redis.Redis)
    with contextlib.closing(Collector(client, RetryPolicy())) as collector:
        without_sweeps(collector)
        ids = [uuid() for _ in range(300)]
        collector.expect(ids)
        task = f"{APP}.shout"
        with Publisher(client, task, queue="celery", headers=collector.headers) as publisher:
            publisher.send([(task_id, f"text {n}") for n, task_id in enumerate(ids)])
        answers = collect(collector, len(ids))
    assert [answers[each].value for each in ids] == [f"TEXT {n}" for n in range(len(ids))]
    assert all(each.batch and each.batch.device == "cpu" for each in answers.values())
