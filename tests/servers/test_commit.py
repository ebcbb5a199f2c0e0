"""The commit against real servers: what is stored, what is refused, and what a lost answer does."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from celery.result import AsyncResult

from batchery.transport.redis_schema import Keys
from batchery_worker.commit import committer
from batchery_worker.commit.committer import CommitStatus, JobResult, RedisCommitter
from batchery_worker.request import LeaseHandle
from batchery_worker.work import CommitContext, JobCommit
from support.own_redis import OwnRedis, redis_servers, server_name
from support.patience import patient

WORKERS, LEASES = "batchery:workers", "batchery:lease:me"
FACTS = {"id": "b1", "size": 2, "padding": 0.0, "forward_ms": 1.0, "device": "cpu"}
COMMITTED, FENCED, NEEDS_TRACER = (
    CommitStatus.COMMITTED,
    CommitStatus.FENCED,
    CommitStatus.NEEDS_TRACER,
)


#: What is no result.
FAILURE = object()


class House:
    """A server, an app whose results are in database 0, and leases wherever they should be."""

    def __init__(
        self, server: OwnRedis, broker_db: int = 0, broker: OwnRedis | None = None, **conf: Any
    ) -> None:
        self.server = server
        self.broker = broker or server
        self.app = Celery("commit", backend=server.url, set_as_current=False)
        self.app.conf.update(conf)
        self.backend: Any = self.app.backend
        self.results: Any = redis.Redis.from_url(server.url)
        self.leases = redis.Redis.from_url(f"{self.broker.url[:-1]}{broker_db}")
        self.store: Any = SimpleNamespace(
            worker="me",
            keys=Keys(),
            lease_key=LEASES,
            db=broker_db,
            client=self.leases,
            shard=0,
        )
        self.pauses: list[float] = []
        self.waits = 0
        self.committer = self.make_committer(self.pauses.append)
        self.results.flushall()
        self.leases.flushall()
        self.leases.zadd(WORKERS, {"me": 1})

    def make_committer(self, sleep: Callable[[float], None]) -> RedisCommitter:
        return RedisCommitter(self.backend, self.wait, sleep)

    @property
    def has_two_servers(self) -> bool:
        return self.broker is not self.server

    def wait(self) -> None:
        self.waits += 1

    def lease(self, *tokens: int) -> None:
        self.leases.hset(LEASES, mapping={str(token): "celery\0message" for token in tokens})

    def leased(self) -> set[str]:
        tokens: Any = self.leases.hkeys(LEASES)
        return {token.decode() for token in tokens}

    def commit(self, *jobs: tuple[str, Any], context: dict[str, JobCommit] | None = None) -> Any:
        """Commits values by task id; the token of the job `t7` is 7."""
        given: dict[str, JobCommit] = {name: (name[1:], 0.5, {}) for name, _ in jobs}
        given |= context or {}
        computed = [
            JobResult(name, None if value is FAILURE else json.dumps(value).encode())
            for name, value in jobs
        ]
        batch = CommitContext(self.store, [given[name] for name, _ in jobs])
        return self.committer.send(computed, batch, FACTS)()

    def stored(self, name: str) -> Any:
        content = self.results.get(self.backend.get_key_for_task(name))
        return content and json.loads(content)

    def put(self, name: str, content: str | bytes) -> None:
        self.results.set(self.backend.get_key_for_task(name), content)

    def close(self) -> None:
        self.results.close()
        self.leases.close()
        self.backend.client.close()


@pytest.fixture(scope="module", params=redis_servers(), ids=server_name)
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    with OwnRedis(tmp_path_factory.mktemp("redis") / "data", request.param) as own:
        yield own


@pytest.fixture(scope="module")
def other_server(server: OwnRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    with OwnRedis(tmp_path_factory.mktemp("redis") / "data", server.binary) as own:
        yield own


@pytest.fixture
def mortal(server: OwnRedis, tmp_path: Path) -> Iterator[OwnRedis]:
    """A server that the test may kill."""
    with OwnRedis(tmp_path / "data", server.binary) as own:
        yield own


@pytest.fixture(params=["one database", "two databases", "two servers"])
def house(request: Any, server: OwnRedis, other_server: OwnRedis) -> Iterator[House]:
    broker = other_server if request.param == "two servers" else None
    database = 3 if request.param == "two databases" else 0
    with contextlib.closing(House(server, database, broker)) as made:
        yield made


@pytest.fixture
def make(server: OwnRedis) -> Iterator[Callable[..., House]]:
    with contextlib.ExitStack() as stack:
        yield lambda **conf: stack.enter_context(contextlib.closing(House(server, **conf)))


def test_batch_is_stored_and_acknowledged_job_by_job(house: House) -> None:
    house.lease(1, 2, 3, 9)
    jobs = [("t1", "A"), ("t2", ["B", None]), ("t3", FAILURE), ("t4", "late")]
    assert house.commit(*jobs) == [COMMITTED, COMMITTED, NEEDS_TRACER, FENCED]
    assert house.leased() == {"3", "9"}
    assert house.stored("t1")["result"] == "A"
    assert house.stored("t2")["result"] == ["B", None]
    assert house.stored("t3") is None
    assert house.stored("t4") is None


def test_a_stock_client_reads_it(house: House) -> None:
    house.lease(1)
    house.commit(("t1", {"label": "x"}))
    result: Any = AsyncResult("t1", app=house.app)
    assert result.get(timeout=patient(30)) == {"label": "x"}
    assert result.successful()
    assert result.children == []
    assert house.stored("t1")["batch"] == {**FACTS, "waited_ms": 0.5}


def test_a_client_that_waits_is_told_what_is_stored(house: House) -> None:
    key = house.backend.get_key_for_task("t1")
    with house.results.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(key)
        channel.get_message(timeout=10)
        house.lease(1)
        house.commit(("t1", 7))
        while (message := channel.get_message(timeout=10)) is None:
            pass
    assert message["data"] == house.results.get(key)


@pytest.mark.parametrize("expires", [None, 0, 3600])
def test_results_expire_as_configured(make: Callable[..., House], expires: int | None) -> None:
    house = make(result_expires=expires)
    house.lease(1)
    house.commit(("t1", 1))
    ttl = house.results.ttl(house.backend.get_key_for_task("t1"))
    assert (ttl == -1) if not expires else (0 < ttl <= expires)


def test_a_key_prefix_is_kept(make: Callable[..., House]) -> None:
    house = make(result_backend_transport_options={"global_keyprefix": "mine_"})
    house.lease(1)
    assert house.commit(("t1", 1)) == [COMMITTED]
    assert house.results.exists("mine_celery-task-meta-t1")


@pytest.mark.parametrize("space", ["", " ", "  "])
def test_success_is_never_overwritten(house: House, space: str) -> None:
    first = f'{{"status":{space}"SUCCESS","result":{space}"first"}}'
    house.put("t1", first)
    house.lease(1)
    assert house.commit(("t1", "second")) == [COMMITTED]
    assert house.stored("t1")["result"] == "first"
    assert house.leased() == set()


@pytest.mark.parametrize("status", ["STARTED", "RETRY", "FAILURE", "50 % done"])
def test_any_status_but_success_is_overwritten(house: House, status: str) -> None:
    house.put("t1", json.dumps({"status": status, "result": None}))
    house.lease(1)
    if house.has_two_servers and status == "FAILURE":
        # Another worker may have stored it after this one was asked for its lease.
        assert house.commit(("t1", "done")) == [NEEDS_TRACER]
        assert house.leased() == {"1"}
    else:
        assert house.commit(("t1", "done")) == [COMMITTED]
        assert house.stored("t1")["result"] == "done"


@pytest.mark.parametrize(
    "content",
    [
        b'{"task_id": "t1", "status": "SUCCESS"}',
        b"\x80\x04\x95",
        b"\x1f\x8bcompressed",
        b"[]",
        "- yaml: SUCCESS",
    ],
)
def test_result_that_the_script_cannot_read_is_left_to_celery(house: House, content: Any) -> None:
    house.put("t1", content)
    house.lease(1, 2)
    assert house.commit(("t1", "mine"), ("t2", "mine")) == [NEEDS_TRACER, COMMITTED]
    assert house.leased() == {"1"}


def test_a_worker_that_lost_its_leases_writes_nothing(house: House) -> None:
    house.lease(1, 2)
    house.leases.delete(LEASES)
    house.put("t2", '{"status": "RETRY", "result": null}')
    assert house.commit(("t1", "zombie"), ("t2", "zombie")) == [FENCED, FENCED]
    assert house.stored("t1") is None
    assert house.stored("t2")["status"] == "RETRY"


def test_a_result_of_the_tracer_needs_the_lease_where_that_is_beside_it(house: House) -> None:
    house.lease(1)
    scripts, key = committer.result_scripts(house.results), house.backend.get_key_for_task("t1")
    for token, result in (("1", "mine"), ("2", "a zombie's")):
        value = json.dumps({"status": "RETRY", "result": result})
        committer.store_states(scripts, {key: value}, 0, LeaseHandle(house.store, token))
    assert house.stored("t1")["result"] == ("a zombie's" if house.has_two_servers else "mine")


def test_commit_of_an_unknown_worker_is_left_to_the_tracer(house: House) -> None:
    house.lease(1)
    house.leases.delete(WORKERS)
    assert house.commit(("t1", 1)) == [NEEDS_TRACER]
    calls = house.leases.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert house.commit(("t1", 1)) == [NEEDS_TRACER]
    assert house.leases.info("commandstats")["cmdstat_evalsha"]["calls"] == calls
    assert house.stored("t1") is None
    assert house.leased() == {"1"}


def test_commit_of_an_ignored_result_only_ends_the_lease(house: House) -> None:
    house.lease(1)
    assert house.commit(("t1", "x"), context={"t1": ("1", 0.0, None)}) == [COMMITTED]
    assert house.leased() == set()
    assert house.stored("t1") is None


def test_large_batches_and_large_results_go_in_parts(house: House) -> None:
    many = range(1, committer.MAX_JOBS_PER_SCRIPT + 100)
    house.lease(*many)
    big = "x" * (committer.MAX_BYTES_PER_SCRIPT // 2)
    jobs = [(f"t{token}", big if token < 6 else token) for token in many]
    assert house.commit(*jobs) == [COMMITTED] * len(many)
    assert house.leased() == set()
    assert house.stored(f"t{many[-1]}")["result"] == many[-1]


def test_commit_succeeds_when_redis_is_full(house: House) -> None:
    house.lease(1, 2)
    servers = (house.results, house.leases)
    for each in servers:
        each.config_set("maxmemory", 1)
    try:
        for each in servers:
            with pytest.raises(redis.ResponseError, match="maxmemory"):
                each.set("more", "x")
        assert house.commit(("t0", "fenced"), ("t1", "x" * 5000)) == [FENCED, COMMITTED]
    finally:
        for each in servers:
            each.config_set("maxmemory", 0)
    assert house.stored("t1")["result"] == "x" * 5000


class LostAnswers:
    """Scripts whose first answers never arrive."""

    def __init__(self, scripts: Any, count: int) -> None:
        self._scripts = scripts
        self._count = count

    def send(self, *words: Any) -> Any:
        read = self._scripts.send(*words)

        def read_or_lose() -> Any:
            answer = read()
            if self._count:
                self._count -= 1
                raise redis.ConnectionError("Connection closed by server.")
            return answer

        return read_or_lose

    def run_once(self, *words: Any) -> Any:
        return self.send(*words)()


def test_scripts_may_be_flushed(house: House) -> None:
    house.lease(1, 2)
    assert house.commit(("t1", "x")) == [COMMITTED]
    house.results.script_flush()
    house.leases.script_flush()
    assert house.commit(("t2", "x")) == [COMMITTED]
    assert house.leased() == set()


def test_lost_answer_is_distinguished_from_a_lost_lease(house: House) -> None:
    house.lease(1, 2, 3)
    house.put("t3", '{"status":"SUCCESS","result":"first"}')
    broker = house.committer._brokers[house.store.shard]
    broker._store = house.store
    for lossy in (house.committer._results, broker):
        assert lossy is not None
        scripts: Any = LostAnswers(lossy.scripts, 2)
        lossy._scripts = scripts
    none: dict[str, JobCommit] = {"t2": ("2", 0.0, None)}
    statuses = house.commit(("t1", "x"), ("t2", "x"), ("t4", "never leased"), context=none)
    assert statuses == [COMMITTED, COMMITTED, FENCED]
    assert house.stored("t1")["result"] == "x"


@pytest.mark.parametrize("away", ["the only server", "results", "broker"])
def test_results_wait_while_redis_is_away(
    server: OwnRedis, other_server: OwnRedis, mortal: OwnRedis, away: str
) -> None:
    gate = threading.Event()

    def pause(seconds: float) -> None:
        gate.set()
        time.sleep(0.01)

    results = server if away == "broker" else mortal
    broker = other_server if away == "results" else mortal
    with contextlib.closing(House(results, 3, broker)) as house:
        house.committer = house.make_committer(pause)
        house.lease(1, 2)
        house.commit(("t2", "warm"))
        mortal.kill()
        statuses: list[Any] = []
        thread = threading.Thread(target=lambda: statuses.append(house.commit(("t1", "kept"))))
        thread.start()
        assert gate.wait(patient(30))
        mortal.start()
        thread.join(patient(30))
        assert statuses == [[COMMITTED]]
        assert house.waits == 1
        assert house.stored("t1")["result"] == "kept"
        assert house.leased() == set()
