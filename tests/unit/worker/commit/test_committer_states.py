"""How a batch's results get to Redis: in parts, again after a failure, in steps for two servers.

The scripts are stand-ins. What they do in Redis is held by the tests on a real one.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery.backends.redis import RedisBackend

from batchery.transport.channel import SOCKET_TIMEOUT_S
from batchery.transport.leases import Leases
from batchery_worker.commit import committer as module
from batchery_worker.commit.committer import (
    MAX_COMMIT_PAUSE_S,
    MAX_JOBS_PER_SCRIPT,
    MAX_TRIES,
    CommitStatus,
    EncodedOutcome,
    RedisCommitter,
    RetryingRedis,
    get_database,
    only_celery_stores,
)
from batchery_worker.ipc.messages import CommitContext

COMMITTED, FENCED, TRACER = (
    CommitStatus.COMMITTED,
    CommitStatus.FENCED,
    CommitStatus.NEEDS_TRACER,
)
FACTS = {"id": "b1", "size": 1}


class Server:
    """A Redis: what is run on it, and what it answers, or raises."""

    def __init__(self, database: int | None = 0) -> None:
        self.connection_pool = self
        self.connection_kwargs = {"db": database}
        self.ran: list[tuple[str, list[Any], list[Any]]] = []
        self.answers: list[Any] = []
        #: What the write that asks whether the server can write raises, in turn.
        self.refusals: list[Exception] = []
        self.connections_closed = 0

    def run_once(self, name: str, keys: Sequence[Any], *args: Any) -> Any:
        self.ran.append((name, list(keys), list(args)))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def hdel(self, key: str, field: str) -> None:
        if self.refusals:
            raise self.refusals.pop(0)

    def disconnect(self) -> None:
        self.connections_closed += 1


class Scene:
    """A committer with the servers of results and of leases."""

    def __init__(self) -> None:
        self.results, self.broker = Server(3), Server(1)
        self.waits, self.pauses_s = list[bool](), list[float]()
        self.backend: Any = SimpleNamespace(
            connparams={},
            _create_client=lambda **_: self.results,
            app=SimpleNamespace(timezone=None),
            expires=None,
            _MAX_STR_VALUE_SIZE=2**29,
            get_key_for_task=lambda task_id: f"celery-task-meta-{task_id}".encode(),
        )
        self.committer = RedisCommitter(
            self.backend,
            lambda: self.broker,
            lambda: self.waits.append(True),
            self.pauses_s.append,
        )

    def commit(
        self, *outcomes: Sequence[Any], worker: str = "w1", **context: Any
    ) -> list[CommitStatus]:
        """Commits outcomes; each job has a lease and a stored result unless `jobs` says more."""
        jobs = [EncodedOutcome(f"j{index}", spelled) for index, spelled in enumerate(outcomes)]
        known: dict[str, Any] = {"jobs": [(str(index), 1.5, {}) for index in range(len(jobs))]}
        made = CommitContext(worker, "workers", "lease", 1, **{**known, **context})
        return list(self.committer.commit(jobs, made, FACTS))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(module, "result_scripts", lambda client: client)
    return Scene()


VALUE = ("value", "x")


# One server


def test_whole_batch_is_one_call_with_the_database_of_results_and_of_leases(scene: Scene) -> None:
    scene.results.answers = [b"102"]
    assert scene.commit(VALUE, ("json", '"y"'), ("encoded", b'"z"')) == [COMMITTED, FENCED, TRACER]
    ((name, keys, args),) = scene.results.ran
    assert name == "commit"
    assert keys == ["workers", "lease", *(b"celery-task-meta-j%d" % index for index in range(3))]
    worker, database, broker, expiries, streams, tokens, *values = args
    assert (worker, database, broker) == ("w1", 3, 1)
    assert (expiries, streams, tokens) == ("0", 0, "0 1 2")
    for value, result in zip(values, (b'"x"', b'"y"', b'"z"'), strict=True):
        assert value.endswith(b'"result": %b}' % result)


@pytest.mark.parametrize("spelled", [("failed", None), ("retry", 1)])
def test_what_is_no_result_is_left_to_the_tracer_and_the_others_are_stored(
    scene: Scene, spelled: Sequence[Any]
) -> None:
    scene.results.answers = [b"1"]
    assert scene.commit(spelled, VALUE) == [TRACER, COMMITTED]
    assert scene.results.ran[0][1][2:] == [b"celery-task-meta-j1"]


def test_job_without_a_context_is_left_to_the_tracer(scene: Scene) -> None:
    assert scene.commit(VALUE, jobs=[None]) == [TRACER]
    assert scene.results.ran == []


def test_job_that_ignores_its_result_stores_nothing(scene: Scene) -> None:
    scene.results.answers = [b"1"]
    assert scene.commit(VALUE, jobs=[("7", 1.5, None)]) == [COMMITTED]
    assert scene.results.ran[0][2][-2:] == ["7", b""]


def test_job_whose_fields_json_cannot_write_is_left_to_the_tracer(scene: Scene) -> None:
    assert scene.commit(VALUE, jobs=[("7", 1.5, {"args": [object()]})]) == [TRACER]
    assert scene.results.ran == []


@pytest.mark.parametrize(("size_bytes", "status"), [(100, COMMITTED), (101, TRACER)])
def test_result_that_is_larger_than_redis_holds_is_left_to_the_tracer(
    scene: Scene, size_bytes: int, status: CommitStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.MetaWriter, "write", lambda *_: b"x" * size_bytes)
    scene.backend._MAX_STR_VALUE_SIZE = 100
    scene.results.answers = [b"1"]
    assert scene.commit(VALUE) == [status]


def test_large_batch_is_stored_in_several_calls(scene: Scene) -> None:
    count = MAX_JOBS_PER_SCRIPT + 1
    scene.results.answers = [b"1" * MAX_JOBS_PER_SCRIPT, b"0"]
    statuses = scene.commit(*[VALUE] * count)
    assert statuses == [COMMITTED] * MAX_JOBS_PER_SCRIPT + [FENCED]
    assert [len(keys) - 2 for _, keys, _ in scene.results.ran] == [MAX_JOBS_PER_SCRIPT, 1]


def test_large_results_are_stored_in_several_calls(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two of them are just enough.
    size_bytes = module.MAX_BYTES_PER_SCRIPT // 2
    monkeypatch.setattr(module.MetaWriter, "write", lambda *_: b"x" * size_bytes)
    scene.results.answers = [b"11", b"11", b"1"]
    assert scene.commit(*[VALUE] * 5) == [COMMITTED] * 5
    assert [len(keys) - 2 for _, keys, _ in scene.results.ran] == [2, 2, 1]
    # While Redis copies it, it serves nobody else.
    assert 2**20 <= module.MAX_BYTES_PER_SCRIPT <= 2**24


@pytest.mark.parametrize(
    ("app_s", "keep_s", "expected"),
    [(None, {}, "0"), (60, {}, "60"), (60, {1: 5}, "60 5"), (None, {0: 5, 1: 99}, "5 99")],
)
def test_results_expire_as_the_app_says_or_sooner_as_a_job_says(
    scene: Scene, app_s: int | None, keep_s: Mapping[int, int], expected: str
) -> None:
    scene.backend.expires = app_s
    scene.results.answers = [b"11"]
    scene.commit(VALUE, VALUE, keep_s=keep_s)
    assert scene.results.ran[0][2][3] == expected


def test_streams_get_the_jobs_of_a_call_that_ask_for_them(scene: Scene) -> None:
    scene.results.answers = [b"11"]
    failed = ("failed", None)
    scene.commit(failed, VALUE, VALUE, completion_streams={"mine": [0, 2], "other": [1, 2]})
    _, keys, args = scene.results.ran[0]
    assert keys[-2:] == [b"batchery:reply:mine", b"batchery:reply:other"]
    assert args[4] == 2
    # How many; then the number in the call, and the id, of each.
    assert args[8:] == [1, 2, "j2", 2, 1, "j1", 2, "j2"]


# A server that is away


def test_results_wait_for_a_server_that_is_away_with_growing_pauses(scene: Scene) -> None:
    scene.results.answers = [redis.ConnectionError("lost"), b"1"]
    scene.results.refusals = [redis.ConnectionError("away") for _ in range(9)]
    assert scene.commit(VALUE) == [COMMITTED]
    assert scene.waits == [True]
    assert scene.results.connections_closed == 9
    assert scene.pauses_s == sorted(scene.pauses_s)
    assert scene.pauses_s[0] < scene.pauses_s[1]
    assert scene.pauses_s[-1] == MAX_COMMIT_PAUSE_S


def test_lost_connection_to_a_server_that_can_write_is_tried_again_at_once(scene: Scene) -> None:
    scene.results.answers = [redis.ConnectionError("lost"), b"1"]
    assert scene.commit(VALUE) == [COMMITTED]
    assert (scene.waits, scene.pauses_s) == ([], [])
    # A refusal of that write alone is an answer as well.
    scene.results.answers = [redis.ConnectionError("lost"), b"1"]
    scene.results.refusals = [redis.exceptions.NoPermissionError("NOPERM")]
    assert scene.commit(VALUE) == [COMMITTED]
    assert scene.waits == []


def test_refused_commit_is_left_to_the_tracer_and_logged_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        scene.results.answers = [redis.ResponseError("wrong kind")] * MAX_TRIES
        assert scene.commit(VALUE) == [TRACER]
    assert len(scene.results.ran) == 2 * MAX_TRIES
    assert caplog.text.count("Redis refuses commits") == 1
    scene.results.answers = [redis.ResponseError("another")] * MAX_TRIES
    scene.commit(VALUE)
    assert caplog.text.count("Redis refuses commits") == 2


@pytest.mark.parametrize(
    ("fields", "lost", "status"),
    [(None, True, COMMITTED), (None, False, FENCED), ({}, True, FENCED)],
)
def test_lost_answer_is_told_from_a_lost_lease(
    scene: Scene, fields: Any, lost: bool, status: CommitStatus
) -> None:
    # Its earlier try has ended the lease. A stored result would say so.
    scene.results.answers = [redis.ConnectionError("lost")] * lost + [b"0"]
    assert scene.commit(VALUE, jobs=[("7", 1.5, fields)]) == [status]


def test_client_is_made_anew_after_each_loss() -> None:
    made: list[Server] = []

    def connect() -> Server:
        made.append(Server())
        return made[-1]

    retrying = RetryingRedis(connect, lambda: None, lambda _: None)
    retrying.disconnect()
    assert made == []
    assert retrying.client is retrying.client
    assert retrying.scripts is retrying.scripts
    retrying.disconnect()
    assert retrying.client is made[1]
    assert made[0].connections_closed == 1


# Two servers


def test_with_two_servers_results_are_stored_before_leases_end(scene: Scene) -> None:
    scene.results.answers = [None, b"12"]
    scene.broker.answers = [b"101", b""]
    assert scene.commit(VALUE, VALUE, VALUE) == [COMMITTED, FENCED, TRACER]
    assert [name for name, *_ in scene.broker.ran] == ["held", "end"]
    assert scene.broker.ran[0][1:] == (["workers", "lease"], ["w1", "0 1 2"])
    # Only of what was stored; what the tracer completes is still held.
    assert scene.broker.ran[1][1:] == (["lease"], ["0"])
    _, keys, args = scene.results.ran[1]
    assert keys[2:] == [b"celery-task-meta-j0", b"celery-task-meta-j2"]
    assert args[2] == ""
    # It is known where the leases are: the next batch does not ask again.
    scene.results.answers = [b"1"]
    scene.broker.answers = [b"1", b""]
    assert scene.commit(VALUE) == [COMMITTED]
    assert len(scene.results.ran) == 3


def test_batch_whose_leases_are_all_lost_is_not_stored(scene: Scene) -> None:
    scene.results.answers = [None]
    scene.broker.answers = [b"00"]
    assert scene.commit(VALUE, VALUE) == [FENCED, FENCED]
    assert [name for name, *_ in scene.broker.ran] == ["held"]


def test_no_lease_ends_if_nothing_was_stored(scene: Scene) -> None:
    scene.results.answers = [None, b"2"]
    scene.broker.answers = [b"1"]
    assert scene.commit(VALUE) == [TRACER]
    assert [name for name, *_ in scene.broker.ran] == ["held"]


def test_worker_that_no_server_knows_is_left_to_the_tracer_until_it_has_another_id(
    scene: Scene,
) -> None:
    scene.results.answers = [None]
    scene.broker.answers = [None]
    assert scene.commit(VALUE) == [TRACER]
    assert scene.broker.connections_closed == 1
    assert scene.commit(VALUE) == [TRACER]
    assert (len(scene.results.ran), len(scene.broker.ran)) == (1, 1)
    scene.results.answers = [b"1"]
    assert scene.commit(VALUE, worker="w2") == [COMMITTED]


# What only Celery can store


def test_database_is_that_of_the_url_or_the_first() -> None:
    assert [get_database(Server(db)) for db in (4, 0, None)] == [4, 0, 0]


def test_reasons_why_only_celery_stores_are_found_one_by_one() -> None:
    class Backend(RedisBackend):
        serializer, compression = "json", None

        def __init__(self) -> None:
            """Connects to nothing."""

    def reason(change: Callable[[Any], None]) -> str | None:
        backend: Any = Backend()
        backend.stock_class = RedisBackend
        task: Any = SimpleNamespace(backend=backend)
        app: Any = SimpleNamespace(backend=backend)
        change(task)
        return only_celery_stores(app, task)

    def use_own(task: Any) -> None:
        task.backend = Backend()
        task.backend.stock_class = RedisBackend

    assert reason(lambda _: None) is None
    assert reason(use_own) == "a result backend of its own"
    assert "other than Celery's" in str(
        reason(lambda task: setattr(task.backend, "stock_class", Leases))
    )
    assert "serializer" in str(reason(lambda task: setattr(task.backend, "serializer", "yaml")))
    assert "compressed" in str(reason(lambda task: setattr(task.backend, "compression", "gzip")))


@pytest.mark.parametrize(("alternatives", "tries"), [(None, 0), (["a", "b", "c"], 3)])
def test_client_of_the_broker_tries_each_of_its_servers_once(
    alternatives: list[str] | None, tries: int
) -> None:
    asked: dict[str, Any] = {}
    closed: list[bool] = []
    channel = SimpleNamespace(
        _make_separate_client=lambda timeout_s: timeout_s, close=lambda: closed.append(True)
    )
    connection: Any = SimpleNamespace(
        alt=alternatives,
        ensure_connection=lambda **options: asked.update(options),
        channel=lambda: channel,
    )
    app: Any = SimpleNamespace(connection_for_read=lambda: contextlib.nullcontext(connection))
    assert module.broker_client(app) == SOCKET_TIMEOUT_S
    assert asked["max_retries"] == tries
    assert closed == [True]
