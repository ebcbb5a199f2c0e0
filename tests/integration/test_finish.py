"""What the tracer would write for a job is held back, and written at once."""

import base64
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from celery.app.task import Context

from batchery.completion import HeldMessage, JobCompletion, Outbox, completing
from batchery.installer import install
from batchery.redis_scripts import RedisScripts
from batchery.transport.redis_schema import Keys
from batchery_worker.commit.committer import CommitStatus
from batchery_worker.completion import atomic_finish
from batchery_worker.completion.atomic_finish import AtomicFinisher, WithheldJob
from batchery_worker.completion.backend import for_completion
from batchery_worker.request import LeaseHandle
from support.own_redis import OwnRedis
from support.patience import patient

COMMITTED, FENCED, NEEDS_TRACER = (
    CommitStatus.COMMITTED,
    CommitStatus.FENCED,
    CommitStatus.NEEDS_TRACER,
)

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")


def held_outbox(task_id: str, tag: str = "tag") -> Outbox:
    """An outbox that holds back what is written for a job."""
    outbox = Outbox(tag, {}, task_id=task_id)
    outbox.holds = True
    return outbox


class House:
    """An app whose results are in database 0, and leases wherever they should be."""

    def __init__(self, url: str, bare: Any, broker_url: str) -> None:
        self.app = install(Celery("finish", broker=url, backend=url, set_as_current=False))
        self.backend: Any = for_completion(self.app.backend)
        self.bare = bare
        self.broker = redis.Redis.from_url(broker_url, decode_responses=True)
        self.broker.flushdb()
        self.keys = Keys()
        self.lease_store: Any = SimpleNamespace(
            worker="me",
            keys=self.keys,
            lease_key=self.keys.lease("me"),
            db=int(broker_url[-1]),
            client=redis.Redis.from_url(broker_url),
        )
        self.broker.zadd(self.keys.workers, {"me": 1})
        self.finisher = AtomicFinisher(self.backend)
        self.has_two_servers = broker_url[:-1] != url[:-1]

    def job(
        self,
        token: str,
        value: Any = None,
        sends: tuple[str, ...] = (),
        held: bool = True,
        chord: str = "",
    ) -> WithheldJob:
        """A job that the tracer has completed; each message goes to the queue of its name."""
        if held:
            self.broker.hset(self.lease_store.lease_key, token, "celery\0message")
        outbox = held_outbox(f"t{token}", f"tag-{token}")
        with completing(JobCompletion(outbox=outbox)):
            request = Context(id=f"t{token}", ignore_result=value is None)
            if chord:
                request.update(group=chord, group_index=int(token), chord=self.body())
            self.backend.mark_as_done(f"t{token}", value, request)
        channel: Any = SimpleNamespace()
        outbox.messages += [HeldMessage(channel, each, {"to": each}) for each in sends]
        return WithheldJob(LeaseHandle(self.lease_store, token), outbox)

    def body(self) -> Any:
        """What follows a chord."""
        return self.app.signature("body", options={"task_id": "the-body", "queue": "bodies"})

    def replay(self, job: WithheldJob) -> None:
        """What the tracer does with a job that is left to it."""
        with completing(JobCompletion(outbox=job.outbox)):
            job.outbox.replay()

    def joined(self) -> list[Any]:
        """What the bodies of chords were sent."""
        sent: list[Any] = self.bare.lrange("bodies", 0, -1)
        return [json.loads(base64.b64decode(json.loads(each)["body"]))[0] for each in sent]

    def leased(self) -> set[str]:
        tokens: Any = self.broker.hkeys(self.lease_store.lease_key)
        return set(tokens)

    def stored(self, task_id: str) -> Any:
        content = self.bare.get(f"celery-task-meta-{task_id}")
        return content and json.loads(content)["result"]

    def queue(self, name: str) -> list[Any]:
        """What is in a queue, oldest first."""
        found: Any = self.broker.lrange(name, 0, -1)
        return [json.loads(each) for each in reversed(found)]

    def close(self) -> None:
        self.broker.flushdb()
        self.broker.close()
        self.lease_store.client.close()
        self.app.close()


@pytest.fixture(scope="module")
def other_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with OwnRedis(tmp_path_factory.mktemp("redis") / "data") as own:
        yield own.url


@pytest.fixture(params=["one database", "two databases", "two servers"])
def house(request: pytest.FixtureRequest, url: str, bare: Any, other_url: str) -> Iterator[House]:
    places = {"two databases": f"{url[:-1]}3", "two servers": other_url}
    made = House(url, bare, places.get(request.param, url))
    yield made
    made.close()


def test_jobs_are_finished_each_with_its_own_messages(house: House) -> None:
    with house.bare.pubsub() as channel:
        channel.subscribe("celery-task-meta-t1")
        channel.get_message(timeout=5)
        jobs = [house.job("1", "A", ("next", "other", "next")), house.job("2", [2.5])]
        late, ignored = house.job("3", "late", ("next",), held=False), house.job("4", sends=("x",))
        assert house.finisher.finish([*jobs, late, ignored]) == [
            *[COMMITTED, COMMITTED, FENCED, COMMITTED]
        ]
        said = channel.get_message(timeout=5)
    assert json.loads(said["data"])["result"] == "A"
    assert (house.stored("t1"), house.stored("t2"), house.stored("t3")) == ("A", [2.5], None)
    assert house.bare.ttl("celery-task-meta-t1") > 3600
    assert house.queue("next") == [{"to": "next"}] * 2
    assert house.queue("other") == [{"to": "other"}]
    assert house.queue("x") == [{"to": "x"}]
    assert house.leased() == set()


def test_an_answer_that_is_lost_finishes_nothing_twice(house: House) -> None:
    jobs = [house.job("1", "A", ("next",)), house.job("2", "B", ("next",))]
    for _ in range(2):
        assert house.finisher.finish(jobs) == [COMMITTED, COMMITTED]
    assert len(house.queue("next")) == 2


def test_parts_of_chords_are_counted_and_the_last_one_sends_the_body(house: House) -> None:
    house.backend.set_chord_size("first", 3)
    house.backend.set_chord_size("second", 1)
    jobs = [
        house.job("1", "A", chord="first"),
        house.job("2", "plain", ("next",)),
        house.job("3", "B", ("next",), chord="first"),
        house.job("4", "alone", chord="second"),
    ]
    late = house.job("5", "late", chord="first", held=False)
    assert house.finisher.finish([*jobs, late]) == [
        *[COMMITTED, COMMITTED, COMMITTED, NEEDS_TRACER, FENCED]
    ]
    assert [house.stored(f"t{number}") for number in range(1, 6)] == [
        *["A", "plain", "B", "alone", None]
    ]
    assert len(house.queue("next")) == 2
    assert house.leased() == {"4"}
    assert house.joined() == []
    house.replay(jobs[3])
    assert house.joined() == [[["alone"]]]
    last = house.job("6", "C", chord="first")
    assert house.finisher.finish([last]) == [NEEDS_TRACER]
    house.replay(last)
    assert sorted(house.joined()) == [[["A", "B", "C"]], [["alone"]]]
    # Who comes again after that finds the chord over.
    assert house.finisher.finish([house.job("3", "B", chord="first")]) == [COMMITTED]
    assert len(house.joined()) == 2


def test_part_of_a_chord_that_runs_twice_counts_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.backend.set_chord_size("chord", 2)
    run_many = RedisScripts.run_many

    def lose(scripts: RedisScripts, name: str, calls: Any) -> list[Any]:
        if name == "finish":
            raise redis.ConnectionError("killed before the acknowledgement")
        return run_many(scripts, name, calls)

    with monkeypatch.context() as patched:
        patched.setattr(RedisScripts, "run_many", lose)
        patched.setattr(atomic_finish, "_patiently", lambda command: command())
        with pytest.raises(redis.ConnectionError):
            house.finisher.finish([house.job("1", "A", chord="chord")])
    assert house.leased() == {"1"}
    assert house.finisher.finish([house.job("1", "again", chord="chord")]) == [COMMITTED]
    assert house.stored("t1") == "A"
    last = house.job("2", "B", chord="chord")
    assert house.finisher.finish([last]) == [NEEDS_TRACER]
    house.replay(last)
    assert house.joined() == [[["A", "B"]]]


def test_stored_success_is_not_overwritten(house: House) -> None:
    job = house.job("1", "later", ("next",))
    house.backend.store_result("t1", "first", "SUCCESS")
    assert house.finisher.finish([job]) == [COMMITTED]
    assert house.stored("t1") == "first"
    assert len(house.queue("next")) == 1


def unreadable(house: House) -> None:
    house.bare.set("celery-task-meta-t1", b"\x80pickle")


def begun(house: House) -> None:
    house.broker.sadd(house.keys.dedupe_keys("tag-1"), "a dedupe key")


def wrong_type(house: House) -> None:
    house.broker.set("next", "no list")


@pytest.mark.parametrize("prepare", [unreadable, begun, wrong_type])
def test_result_that_the_script_cannot_read_is_left_as_it_is(
    house: House, prepare: Callable[[House], None]
) -> None:
    prepare(house)
    before = house.bare.get("celery-task-meta-t1")
    jobs = [house.job("1", "A", ("next",)), house.job("2", "B")]
    assert house.finisher.finish(jobs) == [NEEDS_TRACER, COMMITTED]
    if house.has_two_servers and prepare is not unreadable:
        # Results come first. What follows is the tracer's, which does not overwrite this one.
        assert house.stored("t1") == "A"
    else:
        assert house.bare.get("celery-task-meta-t1") == before
    assert house.broker.type("next") in ("none", "string")
    assert house.leased() == {"1"}


def test_message_is_not_published_beside_one_that_cannot_be(house: House) -> None:
    wrong_type(house)
    assert house.finisher.finish([house.job("1", "A", ("first", "next"))]) == [NEEDS_TRACER]
    assert house.queue("first") == []
    assert house.leased() == {"1"}


def test_a_redis_that_has_forgotten_the_script_or_is_full_finishes_jobs(house: House) -> None:
    assert house.finisher.finish([house.job("1", "A", ("next",))]) == [COMMITTED]
    house.bare.script_flush()
    jobs = [house.job("2", "B", ("next",)), house.job("3", "C", ("next",))]
    house.broker.script_flush()
    house.broker.config_set("maxmemory", 1)
    try:
        assert house.finisher.finish(jobs) == [COMMITTED, COMMITTED]
    finally:
        house.broker.config_set("maxmemory", 0)
    assert len(house.queue("next")) == 3


@pytest.mark.parametrize("conf", [{}, {"result_failure_expires": 50}], ids=str)
def test_failures_expire_when_the_app_says(url: str, bare: Any, conf: dict[str, Any]) -> None:
    app = install(Celery("expire", broker=url, backend=url, set_as_current=False))
    app.conf.update({"result_expires": 100, **conf})
    backend: Any = for_completion(app.backend)
    backend.mark_as_failure("failed", ValueError("bad"))
    backend.mark_as_done("done", 1)
    longest_s = conf.get("result_failure_expires", 100)
    assert longest_s - 10 < bare.ttl("celery-task-meta-failed") <= longest_s
    assert 90 < bare.ttl("celery-task-meta-done") <= 100
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
    assert app.AsyncResult("full-1").get(timeout=patient(10)) == "a result"
