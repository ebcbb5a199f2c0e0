"""Publishers and commands where batch jobs are on a Redis Cluster, beside Celery's broker."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, uuid

from batchery import AsyncClient, BatchTask, Client, NoResult, QueueFull, SettingsError, install
from batchery.cli.app import check_broker, check_redis
from batchery.cli.survey import registered_workers, survey
from batchery.errors import BrokerRefused, RedisUnavailable
from batchery.installation import use_redis
from batchery.shards import shard_of
from batchery_producer import Publisher, submit_file
from conftest import StartWorker
from support.commands import run
from support.harness import Worker, open_redis, queue_length, wait_for
from support.metrics_port import Exporter
from support.own_cluster import OwnCluster
from support.patience import TIMEOUT_S

#: Queues in different shards.
QUEUES = ("apps.shop.shout", "apps.shop.bound")


@pytest.fixture
def on_cluster(cluster: OwnCluster, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The broker; processes that tests start have their batch jobs on the cluster."""
    monkeypatch.setenv("BATCHERY_REDIS_URL", cluster.url)
    return redis_url


def unused(item: Any) -> Any:
    """Stands for a function that workers have."""
    return item


def make_app(broker: str, cluster: OwnCluster, **conf: Any) -> Any:
    """An app whose batch jobs go to the cluster."""
    app = Celery("client", broker=broker, backend=broker, set_as_current=False)
    app.conf.update(conf)
    install(app, redis_url=cluster.url)
    for name in QUEUES:
        app.task(shared=False, base=BatchTask, name=name)(unused)
    return app


@pytest.fixture
def app(cluster: OwnCluster, redis_url: str) -> Iterator[Any]:
    with make_app(redis_url, cluster) as made:
        empty(made)
        yield made
        empty(made)
        backend: Any = made.backend
        backend.result_consumer.stop()


def empty(app: Any) -> None:
    """Removes what waits."""
    for queue in (*QUEUES, "unknown"):
        with shard_of(app, queue).connect(app) as connection:
            channel: Any = connection.default_channel
            channel.queue_purge(queue)


def count(app: Any) -> dict[str, int]:
    """What waits in queues, where any does."""
    queues = survey(app, queues=[*QUEUES, "unknown", "celery"], asks=False).queues
    return {name: jobs for name, jobs in queues.items() if jobs}


def test_each_way_of_sending_goes_to_the_shard_of_the_queue(
    app: Any, redis_url: str, tmp_path: Path
) -> None:
    shout, bound = (app.tasks[name] for name in QUEUES)
    shout.delay("one")
    shout.submit_many(["two", "three"])
    bound.submit_many([str(number) for number in range(2000)])
    assert count(app) == {shout.name: 3, bound.name: 2000}
    empty(app)

    with Client(app) as client:
        client.task(shout.name).delay("known")
        client.task("unknown").delay("by its name")
        with suppress(NoResult):
            list(client.task("unknown").map("abc", timeout_s=0.5))
    with Publisher(app, shout.name) as publisher:
        publisher.send([(uuid(), "more")])
    assert count(app) == {shout.name: 2, "unknown": 4}
    empty(app)

    async def call() -> None:
        async with AsyncClient(app) as client:
            calls = [client.task(name, timeout_s=1)("item") for name in QUEUES]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(answer) for answer in answers] == [NoResult, NoResult]

    asyncio.run(call())
    assert count(app) == dict.fromkeys(QUEUES, 1)

    (tmp_path / "in.txt").write_text("a\nb\n")
    submit_file(tmp_path / "in.txt", shout.name, tmp_path / "out.jsonl", app=app, timeout_s=1)
    assert count(app) == {shout.name: 3, bound.name: 1}
    assert queue_length(redis_url) == 0


def test_ordinary_tasks_go_to_the_broker(app: Any, redis_url: str) -> None:
    ordinary = app.task(shared=False, name="ordinary")(unused)
    ordinary.delay("a")
    with Client(app) as client:
        client.task("ordinary").delay("b")
    with Publisher(app, "ordinary") as publisher:
        publisher.send([(uuid(), "c")])
    assert queue_length(redis_url) == 3
    assert count(app) == {"celery": 3}
    with open_redis(redis_url) as broker:
        broker.delete("celery")


def test_a_client_needs_no_broker(cluster: OwnCluster, app: Any) -> None:
    made = Celery("client", broker="memory://", set_as_current=False)
    use_redis(made, cluster.url)
    made.backend_cls = "disabled://"
    with Publisher(made, "unknown") as publisher:
        publisher.send([(uuid(), "item")])
    assert count(app) == {"unknown": 1}


def test_a_class_is_full_by_the_jobs_in_the_shard(cluster: OwnCluster, app: Any) -> None:
    limits = {"high": {"level": 0, "share": 1, "max_waiting": 3}}
    with make_app(app.conf.broker_url, cluster, batchery_classes=limits) as limited:
        shout = limited.tasks[QUEUES[0]]
        shout.delay("one")
        with pytest.raises(QueueFull, match="holds 3 jobs") as caught:
            shout.submit_many(["text"] * 5)
        assert caught.value.sent == 2
        with pytest.raises(QueueFull):
            shout.delay("one too many")
        assert count(app) == {shout.name: 3}


def test_a_run_that_goes_on_sends_no_job_again(app: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("a\nb\nc\n")
    for resume in (False, True):
        submit_file(source, QUEUES[0], target, app=app, timeout_s=1, resume=resume)
        assert count(app) == {QUEUES[0]: 3}


# Commands


def test_purge_deletes_what_waits(app: Any, on_cluster: str) -> None:
    app.tasks[QUEUES[0]].submit_many("abc")
    app.tasks[QUEUES[0]].apply_async(("later",), countdown=1000)
    with open_redis(on_cluster) as broker:
        broker.lpush(QUEUES[0], "sent by a stock client")
    queue, other = QUEUES[0], "unknown"
    code, out, err = run(on_cluster, "batchery", "purge", queue, other, "-A", "apps.shop", "--yes")
    assert (code, out) == (0, f"{queue}: 5\n{other}: 0\n"), err
    assert count(app) == {}


@pytest.fixture
def worker(app: Any, cluster: OwnCluster, start_worker: StartWorker) -> Worker:
    """The only one that lives, which ends with its test: others look at what waits."""
    made = start_worker("apps.shop", env={"BATCHERY_REDIS_URL": cluster.url})

    def is_alone() -> bool:
        known = registered_workers(app).values()
        return {each.name for each in known if not each.is_dead} == {made.name}

    wait_for(is_alone, "workers of tests before count as dead")
    return made


@pytest.mark.usefixtures("worker")
def test_stats_and_the_exporter_see_all_shards(app: Any, on_cluster: str) -> None:
    jobs = [app.tasks[name].delay("text") for name in QUEUES]
    assert [job.get(timeout=TIMEOUT_S) for job in jobs] == ["TEXT", "apps.shop.bound:text"]
    app.tasks[QUEUES[0]].apply_async(("later",), countdown=1000)
    code, out, err = run(on_cluster, "batchery", "stats", "-A", "apps.shop", "--json")
    assert code == 0, err
    (figures,) = json.loads(out)["workers"].values()
    assert {*QUEUES} <= {*figures["queues"]}
    assert figures["batches"]["jobs"] >= 2

    exporter = Exporter(on_cluster)
    try:
        known = wait_for(exporter.known, "figures")
        assert known["batchery_queue_waiting_jobs", QUEUES[1]] == 0
        assert known["batchery_queue_leased_jobs", QUEUES[1]] == 0
        assert known[("batchery_broker_up",)] == 1
    finally:
        exporter.close()


@pytest.mark.usefixtures("worker")
def test_dead_letters_of_all_shards_are_one_list(app: Any, on_cluster: str) -> None:
    def dead(*arguments: str) -> tuple[int, str]:
        code, out, err = run(on_cluster, "batchery", "dead", *arguments, "-A", "apps.shop")
        return code, out + err

    def listed() -> list[Any]:
        code, out = dead("list", "--json")
        assert code == 0, out
        return [json.loads(line) for line in out.splitlines()]

    def has(token: str) -> bool:
        return token in {each["token"] for each in listed()}

    for queue in QUEUES:
        with shard_of(app, queue).connect(app) as connection:
            channel: Any = connection.default_channel
            channel.client.lpush(queue, "no message")
    wait_for(lambda: len(listed()) == 2, "both are there")
    letters = listed()
    assert {each["queue"] for each in letters} == {*QUEUES}
    first, second = (each["token"] for each in letters)
    assert "no message" in dead("show", second)[1]
    assert dead("requeue", first)[0] == 0
    wait_for(lambda: len(listed()) == 2 and not has(first), "it is dead again")
    code, out = dead("purge", "--all", "--yes")
    assert (code, out.strip()) == (0, "deleted: 2")
    assert listed() == []


def test_explain_finds_jobs(app: Any, worker: Worker, on_cluster: str) -> None:
    job = app.tasks[QUEUES[0]].delay("text")
    job.get(timeout=TIMEOUT_S)
    code, out, err = run(on_cluster, "batchery", "explain", job.id, "-A", "apps.shop")
    assert (code, out[:8]) == (0, "SUCCESS:"), err
    later = app.tasks[QUEUES[0]].apply_async(("later",), countdown=1000)
    code, out, err = run(on_cluster, "batchery", "explain", later.id, "-A", "apps.shop")
    assert code in (3, 4), out + err


def diagnose(broker: str, *options: str) -> dict[str, str]:
    """What is found of the cluster and of Redis."""
    _, out, err = run(broker, "batchery", "doctor", "-A", "apps.shop", "--json", *options)
    assert out, err
    found = {each["check"]: each["found"] for each in json.loads(out)["findings"]}
    return {name: text for name, text in found.items() if name.startswith(("cluster", "redis"))}


def test_doctor_names_the_node(
    cluster: OwnCluster, redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = cluster.nodes[0].binary
    options = {"cluster_require_full_coverage": "no", "maxmemory_policy": "allkeys-lru"}
    with OwnCluster(tmp_path / "one", primaries=1, replicas=0, binary=server, **options) as one:
        monkeypatch.setenv("BATCHERY_REDIS_URL", one.url)
        # A node that has met no other one does not know its own address.
        node = f":{one.nodes[0].port}"
        found = diagnose(redis_url, "--timeout", "1")
        assert found["cluster-no-replica"] == f"node {node} has no replica"
        assert f"127.0.0.1{node}: maxmemory-policy is allkeys-lru" in found["redis-eviction"]
        one.nodes[0].kill()
        assert node in diagnose(redis_url, "--timeout", "1")["redis-away"]


def test_rules_are_for_all_shards(on_cluster: str) -> None:
    code, out, err = run(on_cluster, "batchery", "acl", "producer", "-Q", "embed")
    assert (code, "each node of the cluster" in err) == (0, True)
    assert {"(~{b*}batchery:publisher:*", "~{b*}embed", "+cluster|slots"} <= {*out.split()}


# URLs that name something else


def test_a_node_whose_url_is_a_plain_one_is_refused(cluster: OwnCluster) -> None:
    url = cluster.nodes[0].url
    with pytest.raises(RedisUnavailable, match=r"redis\+cluster://"):
        check_redis(url)
    app = Celery("client", broker=url, backend=url, set_as_current=False)
    with Publisher(app, "task") as publisher, pytest.raises(BrokerRefused, match="a cluster"):
        publisher.send([(uuid(), "item")])


def test_a_server_that_is_named_as_a_cluster_is_refused(redis_server: Any) -> None:
    url = redis_server.url.replace("redis:", "redis+cluster:").removesuffix("/0")
    app = Celery("client", broker="memory://", set_as_current=False)
    use_redis(app, url)
    app.backend_cls = "disabled://"
    with pytest.raises(RedisUnavailable, match="is no cluster"):
        check_broker(app)
    with Publisher(app, "task") as publisher, pytest.raises(RedisUnavailable):
        publisher.send([(uuid(), "item")])


def test_a_cluster_as_celerys_broker_is_refused(cluster: OwnCluster) -> None:
    app = install(Celery("client", broker=cluster.url, set_as_current=False))
    with pytest.raises(SettingsError, match="batchery_redis_url"):
        check_broker(app)
    code, _, err = run(cluster.url, "celery", "-A", "apps.shop", "worker")
    assert code == 2
    assert "batchery_redis_url" in err
    assert "Traceback" not in err
