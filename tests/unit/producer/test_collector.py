"""How results are collected from Redis: announced ones at once, all others by polls."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

import pytest
import redis
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from batchery.errors import SettingsError
from batchery.protocol.headers import FIELD
from batchery.retry import RetryPolicy
from batchery_producer import collector as module
from batchery_producer.answers import Answer
from batchery_producer.collector import (
    CHUNK,
    MAX_INTERVAL_S,
    MIN_INTERVAL_S,
    POLL_JOBS,
    REST_PER_POLL,
    PollingInterval,
    RedisCollector,
    collector_for,
    entries_by_key,
    read_stored,
)


@given(st.lists(st.tuples(st.integers(0, POLL_JOBS), st.floats(0, 1), st.floats(0, 5))))
def test_polling_interval_stays_between_its_limits(polls: list[tuple[int, float, float]]) -> None:
    interval = PollingInterval()
    for asked, share, poll_s in polls:
        found = int(asked * share)
        next_s = interval.next_s(asked=asked, found=found, announced=0, poll_s=poll_s)
        if found and found == asked:
            assert next_s == 0  # More may be there by now.
        else:
            assert MIN_INTERVAL_S <= next_s <= max(MAX_INTERVAL_S, poll_s)


def test_polling_interval_follows_the_rate_of_results() -> None:
    interval, next_s, found = PollingInterval(), MIN_INTERVAL_S, 0
    for _ in range(50):
        found = round(next_s * 10_000)  # Results per second, of a thousand jobs in flight.
        next_s = interval.next_s(asked=1000, found=found, announced=0, poll_s=0)
    assert 1000 / 16 <= found <= 1000 / 4


def test_polling_interval_grows_without_results_and_shrinks_with_them() -> None:
    interval = PollingInterval()

    def plan(found: int) -> float:
        return interval.next_s(asked=8, found=found, announced=0, poll_s=0)

    pauses = [plan(0) for _ in range(30)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_INTERVAL_S
    assert [plan(7) for _ in range(30)][-1] == MIN_INTERVAL_S


def test_polling_with_announcements_takes_a_tenth_of_the_time() -> None:
    interval = PollingInterval()
    long_s = interval.next_s(asked=4096, found=3, announced=5000, poll_s=0.1)
    assert long_s == pytest.approx(0.1 * REST_PER_POLL)
    short_s = interval.next_s(asked=4096, found=0, announced=5000, poll_s=0.001)
    assert short_s == MAX_INTERVAL_S


@pytest.mark.parametrize(
    "stored", [b"{", b"[]", b'{"status": "SUCCESS", "traceback": null, "task_id"']
)
def test_result_that_cannot_be_read_is_an_error_of_its_job(stored: bytes) -> None:
    backend = Celery("read", backend="redis://127.0.0.1:1", set_as_current=False).backend
    answer = read_stored(backend, stored)
    assert answer is not None
    assert answer.error is not None
    assert "cannot be read" in answer.error[1]


def test_app_without_a_backend_cannot_collect() -> None:
    app = Celery("none", backend="disabled://", set_as_current=False)
    with pytest.raises(SettingsError, match="no result backend"):
        collector_for(app, RetryPolicy())


def test_any_backend_is_polled_job_by_job() -> None:
    app = Celery("polled", backend="cache+memory://", set_as_current=False)
    collector = collector_for(app, RetryPolicy())
    assert collector.headers == {}
    collector.expect(["polled-a", "polled-b"])
    app.backend.store_result("polled-a", 1, "SUCCESS")
    assert dict(collector.collect(0.0)) == {"polled-a": Answer(value=1)}
    collector.forget(["polled-a"])
    assert app.AsyncResult("polled-a").state == "PENDING"
    collector.close()


def test_answers_of_either_protocol_are_read() -> None:
    entry = (b"1-1", {b"ids": b"[]"})
    assert entries_by_key(None) == {}
    assert entries_by_key([[b"key", [entry]]]) == {b"key": [entry]}
    assert entries_by_key({b"key": [[entry]]}) == {b"key": [entry]}
    assert entries_by_key({b"key": []}) == {b"key": []}


class Client:
    """Redis, with results and a reply stream."""

    def __init__(self) -> None:
        self.results: dict[str, bytes] = {}
        self.asked: list[list[str]] = []
        self.removed: list[str] = []
        self.commands: list[tuple[Any, ...]] = []
        #: Ids in entries of the reply stream, which is there or not.
        self.entries: list[tuple[bytes, list[str]]] = []
        self.is_there = 1
        self.is_full = False

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        self.asked.append(list(keys))
        return [self.results.get(key) for key in keys]

    def unlink(self, *keys: str) -> None:
        self.removed += keys

    # The reply stream

    def pipeline(self, transaction: bool = True) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Is left."""

    def xadd(self, *_: Any, **__: Any) -> None:
        if self.is_full:
            raise redis.OutOfMemoryError("OOM")
        self.commands.append(("xadd",))

    def expire(self, *_: Any) -> None:
        """Its answer is whether the stream is there."""

    def xtrim(self, _: str, *, minid: str, approximate: bool) -> None:
        assert not approximate
        self.commands.append(("xtrim", minid))

    def xread(self, streams: Any, *, count: int, block: int | None) -> None:
        (last,) = streams.values()
        self.commands.append(("xread", last, block))

    def execute(self) -> list[Any]:
        entries, self.entries = self.entries, []
        found = [(entry, {FIELD: json.dumps(ids).encode()}) for entry, ids in entries]
        return [self.is_there, [(b"key", found)] if found else None]


class Scene:
    """A collector of the results in a Redis whose clock is the test's."""

    backend: Any

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now_s = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=lambda _: None)
        monkeypatch.setattr(module, "time", clock)
        self.client = Client()
        self.backend = SimpleNamespace(
            client=self.client,
            connparams={},
            connection_errors=(),
            serializer="json",
            get_key_for_task=lambda task_id: task_id.encode() if task_id == "-" else task_id,
            decode=json.loads,
        )
        self.retries = options.pop("retries", RetryPolicy())
        self.collector = RedisCollector(self.backend, self.retries, **options)
        self.collector._is_plain = True

    def store(self, task_id: str, value: Any, **more: Any) -> None:
        head = {"status": "SUCCESS", "traceback": None, **more, "task_id": task_id}
        self.client.results[task_id] = json.dumps({**head, "result": value}).encode()

    def announce(self, *ids: str, entry: bytes = b"5-7") -> None:
        self.client.entries.append((entry, list(ids)))

    def collect(self, wait_s: float = 0.0) -> dict[str, Answer]:
        return dict(self.collector.collect(wait_s))

    @property
    def reads(self) -> list[tuple[Any, ...]]:
        return [command for command in self.client.commands if command[0] == "xread"]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def poll_is_not_due(scene: Scene) -> None:
    """Lets only announced results be found."""
    scene.collector._poll_at_s = scene.now_s + 60


# Announcements


def test_announced_results_are_found_without_a_poll_and_once(scene: Scene) -> None:
    scene.collector.expect(["a", "b"])
    poll_is_not_due(scene)
    scene.store("a", 1)
    scene.store("other", 2)
    scene.announce("a", "other")
    scene.announce("a", entry=b"5-8")
    assert scene.collect() == {"a": Answer(value=1)}
    assert list(scene.collector.awaited) == ["b"]
    assert scene.client.asked == [["a", "a"]]
    # What was read is removed with the next read.
    assert scene.collect() == {}
    assert scene.client.commands[-2:] == [("xtrim", "5-9"), ("xread", b"5-8", None)]


def test_full_redis_has_no_stream_and_results_all_the_same(scene: Scene) -> None:
    scene.client.is_full = True
    scene.collector.expect(["a"])
    scene.store("a", 1)
    assert scene.collect() == {"a": Answer(value=1)}


def test_wait_for_announcements_is_no_longer_than_the_caller_or_the_next_poll(
    scene: Scene,
) -> None:
    # Without jobs there is no poll.
    scene.collect(3.0)
    scene.collector.expect(["a"])
    poll_is_not_due(scene)
    scene.collect(2.0)
    scene.collector._poll_at_s = scene.now_s + 0.5
    scene.collect(2.0)
    # To Redis, 0 means for ever.
    scene.collect(0.0001)
    scene.collect(0.0)
    assert [block for *_, block in scene.reads] == [3000, 2000, 500, 1, None]


@pytest.mark.parametrize(("timeout_s", "block_ms"), [(3.0, 1500), (None, 9000)])
def test_redis_is_not_asked_to_wait_for_longer_than_its_answer_may_take(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, block_ms: int
) -> None:
    retries: Any = RetryPolicy()
    monkeypatch.setattr(RetryPolicy, "shorten", lambda *_: timeout_s)
    scene = Scene(monkeypatch, retries=retries)
    scene.collect(9.0)
    assert scene.reads[0][2] == block_ms


def test_results_of_dropped_jobs_are_removed_only_if_somebody_wants_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for forgets, removed in ((True, ["b"]), (False, [])):
        scene = Scene(monkeypatch, forgets_dropped=forgets)
        scene.collector.expect(["a", "b"])
        scene.collector.drop(["b", "unknown"])
        poll_is_not_due(scene)
        scene.announce("a", "b")
        scene.collect()
        assert scene.client.removed == removed


# Polls


def test_poll_finds_what_nobody_has_announced_and_then_waits_for_nothing(scene: Scene) -> None:
    scene.collector.expect(["a", "b"])
    scene.store("b", 2)
    assert scene.collect(5.0) == {"b": Answer(value=2)}
    assert [block for *_, block in scene.reads] == [None]
    # The next poll is due later.
    scene.store("a", 1)
    assert scene.collect() == {}
    scene.now_s += 10
    assert scene.collect() == {"a": Answer(value=1)}


def test_each_poll_asks_for_some_jobs_oldest_first_and_goes_on_there(scene: Scene) -> None:
    ids = [str(number) for number in range(POLL_JOBS + CHUNK + 1)]
    scene.collector.expect(ids)
    scene.collect()
    assert [key for keys in scene.client.asked for key in keys] == ids[:POLL_JOBS]
    assert {len(keys) for keys in scene.client.asked} == {CHUNK}
    scene.client.asked.clear()
    # One of the rest was dropped meanwhile.
    scene.collector.drop([ids[POLL_JOBS]])
    scene.now_s += 10
    scene.collect()
    assert [key for keys in scene.client.asked for key in keys] == ids[POLL_JOBS + 1 :]
    scene.client.asked.clear()
    scene.now_s += 10
    scene.collect()
    assert scene.client.asked[0][0] == ids[0]


# Results


BATCH = {"id": "b7", "size": 3, "padding": 0.2, "forward_ms": 1.5, "device": "cuda:0"}


@pytest.mark.parametrize("is_plain", [True, False])
def test_result_has_the_facts_of_its_batch(scene: Scene, is_plain: bool) -> None:
    scene.collector._is_plain = is_plain
    scene.store("a", {"task_id": "x"}, batch=BATCH)
    scene.collector.expect(["a"])
    answer = scene.collect()["a"]
    assert (answer.value, answer.error) == ({"task_id": "x"}, None)
    assert answer.batch is not None
    assert (answer.batch.id, answer.batch.size, answer.batch.device) == ("b7", 3, "cuda:0")


@pytest.mark.parametrize(("is_spent", "removed"), [(False, 1), (True, 0)])
def test_stream_is_removed_at_the_end_unless_redis_was_away_for_too_long(
    monkeypatch: pytest.MonkeyPatch, is_spent: bool, removed: int
) -> None:
    scene = Scene(monkeypatch)
    scene.retries.is_spent = is_spent
    scene.collector.close()
    assert len(scene.client.removed) == removed


def test_failure_whose_result_is_stored_last_is_no_success(scene: Scene) -> None:
    scene.collector.expect(["a"])
    stored = {"exc_type": "OutOfStock", "exc_message": ["none left"]}
    scene.store("a", stored, status="FAILURE")
    assert scene.collect() == {"a": Answer(error=("OutOfStock", "none left"))}
