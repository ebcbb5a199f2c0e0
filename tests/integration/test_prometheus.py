"""A real Prometheus watches real workers, an exporter and a gateway, as deploy/ sets it up.

First nothing is wrong, and no alert fires. Then what can go wrong does, and each alert that it
provokes fires. Minutes of the rules are seconds here.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from celery import Celery

from apps import shop
from batchery import BatchTask
from batchery_worker.devstack.redis_server import free_port
from support.commands import start
from support.deployed import DEPLOY
from support.gateway import EMBED, GatewayProcess
from support.harness import Worker, kill_all, wait_for
from support.own_redis import OwnRedis
from support.patience import patient

pytestmark = [
    pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus"),
    pytest.mark.timeout(patient(300)),
]

#: A queue that no worker has.
UNSERVED = "unserved"

#: Two models: one that nobody serves.
MODELS = {
    "embed": {**EMBED["embed"], "cache": True},
    "idle": {**EMBED["embed"], "queue": "nobody"},
}

#: Of what only a GPU, or a model with slots, has a figure.
NOT_HERE = (
    *("batchery_device_memory_", "batchery_model_slots"),
    *("batchery_first_token_", "batchery_token_", "batchery_text_tokens_"),
)

#: Alerts that the faults provoke. The others need minutes of a hung device or a GPU that is full;
#: rules_test.yml has those.
PROVOKED = {
    *("BatcheryDeadLetters", "BatcheryDeviceRestarts", "BatcheryExporterLost", "BatcheryFailures"),
    *("BatcheryGatewayErrors", "BatcheryQueueOld", "BatcheryQueueUnserved", "BatcheryRedisDown"),
    *("BatcherySlowWay", "BatcheryWorkerNotReady"),
}


def hurry(rules: str) -> str:
    """The rules with seconds for minutes; a job of ten seconds is an old one."""

    def seconds(least: float) -> str:
        return f"{round(patient(least))}s"

    rules = re.sub(r"for: (\d+)m", lambda found: f"for: {seconds((int(found[1]) + 1) // 2)}", rules)
    rules = re.sub(r"\[(\d+)m\]", lambda found: f"[{seconds(2 * int(found[1]))}]", rules)
    return rules.replace("> 300", f"> {round(patient(10))}")


class Scene:
    """All of it, and what Prometheus has seen."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.redis = stack.enter_context(OwnRedis(folder / "redis"))
        # One for all questions: to make a client takes longer than to ask.
        self._http = stack.enter_context(httpx2.Client())
        ports = {name: free_port() for name in ("shop", "embed", "exporter", "prometheus")}
        self.url = f"http://127.0.0.1:{ports.pop('prometheus')}"
        self.shop = self._start_worker(folder, stack, "apps.shop", ports["shop"], {})
        models = json.dumps(MODELS)
        env = {"BATCHERY_MODELS": models}
        self._start_worker(folder, stack, "batchery.app", ports["embed"], env, "-Q", "embed")
        words = ("--queues", UNSERVED, "--port", str(ports["exporter"]))
        self.exporter: Any = start(
            self.redis.url, "batchery", "exporter", "-A", "apps.shop", *words
        )
        stack.callback(self.exporter.communicate)
        stack.callback(lambda: kill_all(self.exporter))
        self.gateway = GatewayProcess(
            folder, self.redis.url, models=MODELS, gateway={"worker_grace_s": 0.0}
        ).wait_ready()
        stack.callback(self.gateway.kill)
        # Nobody reads a result here.
        self.client = Celery(broker=self.redis.url, set_as_current=False)
        stack.callback(self.client.close)
        copied = self.client.task(name=shop.shout.name, base=BatchTask, shared=False)
        self.shout: BatchTask = copied(shop.shout.run)
        targets = [f"127.0.0.1:{port}" for port in ports.values()]
        self._start_prometheus(folder, stack, [*targets, self.gateway.url.removeprefix("http://")])
        self.fired: set[str] = set()
        self.answered: set[str] = set()

    def _start_worker(
        self,
        folder: Path,
        stack: ExitStack,
        app: str,
        port: int,
        env: dict[str, str],
        *arguments: str,
    ) -> Worker:
        env = {**env, "BATCHERY_METRICS__PORT": str(port)}
        worker = Worker(folder, self.redis.url, app, "-c", "1", *arguments, env=env)
        stack.callback(kill_all, worker.process)
        return worker.wait_ready()

    def _start_prometheus(self, folder: Path, stack: ExitStack, targets: list[str]) -> None:
        (folder / "rules.yml").write_text(hurry((DEPLOY / "monitoring" / "rules.yml").read_text()))
        config = {
            # While Redis hangs, an answer takes a second, and that of the exporter four.
            "global": {"scrape_interval": f"{round(patient(2))}s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [{"job_name": "batchery", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with (folder / "prometheus.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    "prometheus",
                    "--config.file=prometheus.yml",
                    "--storage.tsdb.path=data",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        stack.callback(process.wait)
        stack.callback(process.kill)
        wait_for(lambda: len(self.ask("up == 1")) == len(targets), "all targets are scraped", 60)

    def ask(self, query: str) -> list[Any]:
        """What Prometheus answers."""
        with suppress(httpx2.TransportError):
            answer = self._http.get(f"{self.url}/api/v1/query", params={"query": query})
            if answer.is_success:
                found: list[Any] = answer.json()["data"]["result"]
                return [each for each in found if each["value"][1] != "NaN"]
        return []

    def look(self) -> None:
        """Notes which alerts fire, and which queries of the dashboard have an answer."""
        firing = self.ask('ALERTS{alertstate="firing"}')
        self.fired |= {each["metric"]["alertname"] for each in firing}
        for query in set(dashboard_queries()) - self.answered:
            if self.ask(query):
                self.answered.add(query)

    def work(self, turn: int) -> None:
        """Jobs of each kind, all of which succeed."""
        self.shout.submit_many([f"text {turn} {number}" for number in range(5)])
        # The second text is in the cache from the second turn on.
        for text in (f"text {turn}", "the same text"):
            self.client.send_task("embed", [text], queue="embed")
        self.gateway.post("/v1/embeddings", {"model": "embed", "input": f"call {turn}"})

    def break_things(self, turn: int) -> None:
        """Faults, again and again."""
        for _ in range(5):
            self.client.send_task(shop.nasty.name, ["raise"])
        self.gateway.post("/v1/embeddings", {"model": "idle", "input": "nobody answers"})
        too_long = {"model": "embed", "input": "word " * 1000, "truncate": False}
        assert self.gateway.post("/v1/embeddings", too_long).status_code == 400
        if turn == 0:
            self.client.send_task("nobody.knows.this", queue="celery")
            self.shout.apply_async(("nobody takes me",), queue=UNSERVED)
        for device in self.shop.devices() if turn % 4 == 0 else []:
            device.kill()


def dashboard_queries() -> list[str]:
    board = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text(encoding="utf-8"))
    targets = [each for panel in board["panels"] for each in panel.get("targets", [])]
    values = {"$__rate_interval": f"{round(patient(10))}s", "$namespace": ".*"}
    queries = [each["expr"] for each in targets]
    for name, value in values.items():
        queries = [each.replace(name, value) for each in queries]
    return queries


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, set[str]]]:
    """Has played, and knows which alerts had fired before anything was wrong."""
    with ExitStack() as stack:
        played = Scene(tmp_path_factory.mktemp("scene"), stack)
        for turn in range(15):
            played.work(turn)
            played.look()
            time.sleep(0.5)
        before = set(played.fired)
        deadline_s = time.monotonic() + patient(90)
        wanted = PROVOKED - {"BatcheryRedisDown", "BatcheryExporterLost", "BatcheryWorkerNotReady"}
        turn = 0
        while not wanted <= played.fired and time.monotonic() < deadline_s:
            played.work(turn)
            played.break_things(turn)
            played.look()
            turn += 1
            time.sleep(0.5)

        def has_fired(*names: str) -> bool:
            played.look()
            return set(names) <= played.fired

        with played.redis.hanging(), suppress(AssertionError):
            names = ("BatcheryRedisDown", "BatcheryWorkerNotReady")
            wait_for(lambda: has_fired(*names), "Redis is missed", patient(60))
        kill_all(played.exporter)
        played.gateway.kill()
        with suppress(AssertionError):
            wait_for(
                lambda: has_fired("BatcheryExporterLost"), "the exporter is missed", patient(60)
            )
        yield played, before


def test_no_alert_fires_while_nothing_is_wrong(scene: tuple[Scene, set[str]]) -> None:
    _, before = scene
    assert before == set()


def test_each_fault_fires_its_alert_and_no_other(scene: tuple[Scene, set[str]]) -> None:
    played, _ = scene
    assert played.fired == PROVOKED


def test_every_query_of_the_dashboard_has_an_answer(scene: tuple[Scene, set[str]]) -> None:
    played, _ = scene
    silent = [query for query in dashboard_queries() if query not in played.answered]
    assert [query for query in silent if not any(name in query for name in NOT_HERE)] == []
