"""`batchery up`: Redis, a worker, Flower and the gateway start together, and leave nothing."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from celery import Celery

from batchery.announcement import FILE, find_announcement
from batchery.errors import RedisUnavailable, StartError
from batchery_worker.devstack.redis_server import EmbeddedRedis, free_port
from batchery_worker.devstack.stack import RemoteWorker, Stack
from support.harness import wait_ended, wait_for
from support.patience import patient

APP = """
import time
from pathlib import Path
from celery import Celery
from batchery import BatchTask, install

app = install(Celery("shop", broker="redis://not.this.one.invalid"))

@app.task(base=BatchTask, name="shout")
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]

@app.task(name="nap")
def nap(file: str, seconds: float = 3) -> str:
    Path(file).touch()
    time.sleep(seconds)
    return "rested"
"""

#: Its tasks go to several queues, one of them where nobody can tell before there is a call.
ROUTED = """
from shop import BatchTask, app

@app.task(base=BatchTask, name="fast", queue="fast")
def fast(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]

@app.task(name="routed")
def routed() -> str:
    return "routed"

@app.task(name="picky")
def picky(number: int) -> str:
    return "picky"

def route(name: str, args: list, kwargs: dict, options: dict, task: object = None) -> object:
    if name == "picky":
        return {"queue": f"picky-{args[0]}"}
    return {"queue": "other"} if name == "routed" else None

app.conf.task_routes = [route]
"""

#: Also on a slow machine that is busy with other tests, in seconds.
START_S = patient(90.0)


class Up:
    """A running `batchery up`."""

    def __init__(self, directory: Path, *arguments: str, **environment: str) -> None:
        self.ready_file = directory / "ready.json"
        self._log = directory / "up.log"
        ports = ["--flower-port=0", "--gateway-port=0"]
        options = [*ports, f"--ready-file={self.ready_file}", *arguments]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                # As the command itself, which has its own folder on the path.
                [sys.executable, "-P", "-m", "batchery", "up", *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env={**os.environ, "PYTHONWARNINGS": "ignore", **environment},
            )
        self.family: list[psutil.Process] = []
        self.info: dict[str, Any] = {}

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ready(self) -> "Up":
        wait_for(
            lambda: self.ready_file.exists() or self.process.poll() is not None, "ready", START_S
        )
        assert self.process.poll() is None, self.log
        self.info = json.loads(self.ready_file.read_text())
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        return self

    @contextlib.contextmanager
    def client(self) -> Iterator[Celery]:
        url = self.info["redis_url"]
        app = Celery(broker=url, backend=url, set_as_current=False)
        yield app
        backend: Any = app.backend
        backend.result_consumer.stop()
        app.close()

    def ask_flower(self, path: str) -> Any:
        with urllib.request.urlopen(
            f"{self.info['flower_url']}{path}", timeout=patient(10)
        ) as answer:
            return json.load(answer)

    def ask_gateway(self, path: str, body: bytes | None = None) -> Any:
        url = f"{self.info['gateway_url']}{path}"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=patient(60)) as answer:
            return json.load(answer)

    def ended(self) -> int:
        """Waits for its end and that of everything it has started; returns its exit code."""
        code = self.process.wait(patient(120))
        wait_ended(self.family)
        return code


@pytest.fixture
def start_up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    (tmp_path / "shop.py").write_text(APP)
    started: list[Up] = []

    def start(*arguments: str, **environment: str) -> Up:
        started.append(Up(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.ended()


StartUp = Callable[..., Up]


def run_beside(folder: Path, *arguments: str) -> tuple[int, str]:
    """Runs a command in the folder of `up`, without any URL; returns its exit code and stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "batchery", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        timeout=patient(60),
        check=False,
    )
    return done.returncode, done.stdout


def test_a_job_runs_through_it_flower_lists_it_and_ctrl_c_ends_all(
    start_up: StartUp, tmp_path: Path
) -> None:
    up = start_up("-A", "shop").ready()
    assert set(up.info["pids"]) == {"redis", "worker", "flower", "gateway"}
    assert stat.S_IMODE(up.ready_file.stat().st_mode) == 0o600
    with up.client() as client:
        job_id = client.send_task("shout", ["hello"]).id
        assert client.AsyncResult(job_id).get(timeout=patient(30)) == "HELLO"

    def listed() -> Any:
        tasks = up.ask_flower("/api/tasks")
        return job_id in tasks and tasks[job_id]["state"] == "SUCCESS" and tasks[job_id]

    wait_for(lambda: find_announcement(tmp_path), "it is announced")
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    (tmp_path / "texts.txt").write_text("one\ntwo\n")
    command = ["submit", "texts.txt", "--task", "shout", "-A", "shop", "-o", "out.jsonl"]
    assert run_beside(tmp_path, *command) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(row["result"] for row in rows) == ["ONE", "TWO"]

    def surveyed() -> bool:
        code, out = run_beside(tmp_path, "stats", "-A", "shop", "--once", "--json")
        assert code == 0
        return len(json.loads(out)["workers"]) == 1

    wait_for(surveyed, "the worker answers in time")

    seen = wait_for(listed, "Flower lists the job as done")
    assert seen["worker"] in up.ask_flower("/api/workers")
    assert seen["runtime"] is not None

    up.process.send_signal(signal.SIGINT)
    assert up.ended() == 0
    assert not up.ready_file.exists()
    assert not (tmp_path / FILE).exists()
    assert "  batchery stats -A shop\n" in up.log
    for line in ("redis   | ", "worker  | ", "flower  | ", f"Redis   {up.info['redis_url']}\n"):
        assert line in up.log
    assert f"Flower  {up.info['flower_url']}\n" in up.log
    assert f"Gateway {up.info['gateway_url']}\n" in up.log
    assert f"In a browser: {up.info['gateway_url']}\n" in up.log
    assert f"export CELERY_BROKER_URL={up.info['redis_url']}\n" in up.log
    assert "shout" in up.log.split("Task    ")[2]
    words = ("Application shutdown complete", "Warm shutdown", "shutting down", "ready to exit")
    ends = [up.log.index(word) for word in words]
    assert ends == sorted(ends)


def test_sigterm_lets_the_running_job_finish_and_data_is_kept(
    start_up: StartUp, tmp_path: Path
) -> None:
    napping = tmp_path / "napping"
    data = str(tmp_path / "data")
    up = start_up("-A", "shop", "--data", data, "--no-flower", "--no-gateway").ready()
    assert up.info["flower_url"] is up.info["gateway_url"] is None
    with up.client() as client:
        job_id = client.send_task("nap", [str(napping)]).id
        wait_for(napping.exists, "the job runs")
    up.process.terminate()
    assert up.ended() == 0

    with EmbeddedRedis(tmp_path / "data") as kept, redis.Redis.from_url(kept.url) as client:
        stored = client.get(f"celery-task-meta-{job_id}")
    assert isinstance(stored, bytes)
    assert json.loads(stored)["result"] == "rested"


def test_a_second_ctrl_c_does_not_wait_for_the_job(start_up: StartUp, tmp_path: Path) -> None:
    napping = tmp_path / "napping"
    up = start_up("-A", "shop", "--no-flower", "--no-gateway").ready()
    with up.client() as client:
        job_id = client.send_task("nap", [str(napping), 100]).id
        wait_for(napping.exists, "the job runs")
        up.process.send_signal(signal.SIGINT)
        wait_for(lambda: "Warm shutdown" in up.log, "the worker is asked to stop")
        up.process.send_signal(signal.SIGINT)
        assert up.ended() == 130
        assert f"Task nap[{job_id}] succeeded" not in up.log


@pytest.mark.parametrize(
    ("victim", "options"),
    [
        ("redis", ["--no-flower", "--no-gateway"]),
        ("worker", ["--no-flower", "--no-gateway"]),
        ("flower", ["--no-gateway"]),
        ("gateway", ["--no-flower"]),
    ],
)
def test_a_child_that_dies_is_named_and_takes_the_rest_along(
    start_up: StartUp, victim: str, options: list[str]
) -> None:
    up = start_up("-A", "shop", *options).ready()
    os.kill(up.info["pids"][victim], signal.SIGKILL)
    assert up.ended() == 1
    assert f"batchery: error: {victim} ended with exit code 137 (SIGKILL): " in up.log
    assert "Traceback" not in up.log.split("batchery: error:")[1]


def test_a_worker_whose_redis_has_died_is_asked_once() -> None:
    worker = RemoteWorker(f"redis://127.0.0.1:{free_port()}/0", "shop")
    assert not worker.answers()
    assert worker.tasks() == {}
    assert worker.queues() == []


def test_kill_9_leaves_nothing_behind(start_up: StartUp, tmp_path: Path) -> None:
    up = start_up("-A", "shop").ready()
    assert len(up.family) >= 8
    wait_for(lambda: find_announcement(tmp_path), "it is announced")
    up.process.kill()
    assert up.ended() == -signal.SIGKILL
    assert (tmp_path / FILE).exists()
    assert find_announcement(tmp_path) is None


def test_a_model_of_the_settings_alone_is_served(
    start_up: StartUp, tmp_path: Path, model_toml: str
) -> None:
    (tmp_path / "batchery.toml").write_text(model_toml)
    up = start_up("--no-flower").ready()
    with up.client() as client:
        result = client.send_task("embed", ["some text"], queue="embed").get(timeout=patient(60))
    assert len(result["vector"]) == 384
    body = json.dumps({"model": "embed", "input": "some text"}).encode()
    answer = up.ask_gateway("/v1/embeddings", body)
    assert answer["data"][0]["embedding"] == pytest.approx(result["vector"], abs=1e-5)
    wait_for(lambda: up.ask_gateway("/status")["workers"] == 1, "the worker answers in time")
    wait_for(lambda: "export BATCHERY_REDIS_URL=" in up.log, "the summary")
    (tmp_path / "texts.txt").write_text("one\n")
    command = ["submit", "texts.txt", "--task", "embed", "-o", "out.jsonl"]
    assert run_beside(tmp_path, *command) == (0, "")
    assert "Task    embed (queue embed)\n" in up.log
    up.process.send_signal(signal.SIGINT)
    assert up.ended() == 0


def test_modules_of_the_folder_do_not_hide_pythons_own(start_up: StartUp, tmp_path: Path) -> None:
    for name in ("queue.py", "select.py", "secrets.py"):
        (tmp_path / name).write_text("raise RuntimeError('this is not the one of Python')")
    with start_up("-A", "shop").ready().client() as client:
        assert client.send_task("shout", ["a"]).get(patient(30)) == "A"


def test_a_worker_that_refuses_to_start_lends_its_exit_code(start_up: StartUp) -> None:
    up = start_up("-A", "no_such_app", "--no-flower")
    assert up.ended() == 2
    reason = "The module no_such_app was not found."
    assert f"worker  | {reason}\n" in up.log
    assert f"batchery: error: worker ended with exit code 2: {reason}\n" in up.log


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ([], {}, "no models configured"),
        ([], {}, '[models.embed]\nkind = "embedding"\nmodel = '),
        (["-A", "shop", "--redis", "redis://:secret@127.0.0.1:1/0"], {}, "redis://:**@127.0.0.1:1"),
        (["-A", "shop"], {"BATCHERY_REDIS_URL": "redis://127.0.0.1:1/0"}, "no Redis at redis://12"),
        (
            [],
            {
                "BATCHERY_MODELS": '{"embed": {"kind": "embedding", "model": "nobody/no-model"}}',
                "HF_ENDPOINT": "http://127.0.0.1:1",
            },
            (
                "'embed': nobody/no-model is not on this machine, and the hub at http://127.0.0.1:1"
                " does not answer"
            ),
        ),
        (
            [],
            {
                "BATCHERY_MODELS": '{"embed": {"kind": "embedding", "model": "nobody/no-model"}}',
                "HF_ENDPOINT": "hub.example",
            },
            "the hub at hub.example does not answer: unknown url type: 'hub.example'",
        ),
        (["-A", "shop"], {"BATCHERY_NO_SUCH": "1"}, "BATCHERY_NO_SUCH: no such setting"),
        (["--redis", "redis://h", "--data", "d"], {}, "give it or --redis, not both"),
    ],
)
def test_stack_that_cannot_start_raises_one_error(
    start_up: StartUp, arguments: list[str], environment: dict[str, str], said: str
) -> None:
    up = start_up(*arguments, **environment)
    assert up.ended() == 2
    assert said in up.log
    assert "secret" not in up.log
    assert "Traceback" not in up.log


@pytest.fixture
def app_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop.py").write_text(APP)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("app_path")
def test_a_stack_runs_inside_a_program_on_a_redis_that_is_there(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://not.this.one.invalid")
    lines: list[tuple[str, str]] = []
    stack = Stack(
        "shop",
        redis_url=redis_url,
        flower=False,
        loglevel="WARNING",
        queues="one,two",
        worker_arguments=["--pool=solo"],
        on_line=lambda name, line: lines.append((name, line)),
    )
    with stack:
        assert stack.redis_url == redis_url
        assert set(stack.pids) == {"worker"}
        assert stack.remote.queues() == ["one", "two"]
        assert set(stack.remote.tasks()) == {"nap", "shout"}
        worker = psutil.Process(stack.pids["worker"])
    assert not worker.is_running()
    assert {name for name, _ in lines} == {"worker"}
    assert any("shop" in line for _, line in lines)


@pytest.mark.usefixtures("app_path")
def test_without_queues_those_of_all_its_tasks_are_served(redis_url: str) -> None:
    Path("more.py").write_text(ROUTED)
    with Stack("more", redis_url=redis_url, flower=False, loglevel="WARNING") as stack:
        assert stack.remote.queues() == ["celery", "fast", "other"]
        app = Celery(broker=redis_url, backend=redis_url, set_as_current=False)
        try:
            jobs = [
                app.send_task("fast", ["a"], queue="fast"),
                app.send_task("shout", ["b"]),
                app.send_task("routed", queue="other"),
            ]
            answers = [job.get(timeout=patient(30)) for job in jobs]
        finally:
            backend: Any = app.backend
            backend.result_consumer.stop()
            app.close()
    assert answers == ["A", "B", "routed"]


@pytest.mark.usefixtures("app_path")
def test_flower_takes_the_next_port_and_may_ask_for_a_password(redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        secret = {"FLOWER_BASIC_AUTH": "user:secret"}
        with Stack("shop", redis_url=redis_url, flower_port=port, environment=secret) as stack:
            assert stack.flower_url is not None
            assert stack.flower_url.startswith("http://127.0.0.1:")
            assert int(stack.flower_url.rpartition(":")[2]) > port


@pytest.mark.usefixtures("app_path")
def test_flower_begins_again_if_its_port_is_taken_meanwhile(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [free_port(), taken.getsockname()[1]]
        monkeypatch.setattr(Stack, "_free_port", lambda *_: ports.pop())
        with Stack("shop", redis_url=redis_url) as stack:
            assert not ports
            assert set(stack.pids) == {"worker", "flower"}


@pytest.mark.usefixtures("app_path")
def test_without_flower_and_gateway_installed_the_rest_runs(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flower", None)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    said: dict[str, list[str]] = {"flower": [], "gateway": []}
    with Stack(
        "shop",
        redis_url=redis_url,
        gateway=True,
        on_line=lambda name, line: said[name].append(line) if name in said else None,
    ) as stack:
        assert stack.flower_url is stack.gateway_url is None
        assert set(stack.pids) == {"worker"}
    assert said == {
        "flower": ['not installed: `pip install "batchery[monitor]"` adds it'],
        "gateway": ['not installed: `pip install "batchery[gateway]"` adds it'],
    }


@pytest.mark.usefixtures("app_path")
def test_gateway_takes_the_next_port_and_begins_again_if_that_is_taken_meanwhile(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found: list[int] = []
        free = Stack._free_port

        def first_taken(stack: Stack, name: str, host: str, wanted: int) -> int:
            found.append(free(stack, name, host, wanted))
            return port if len(found) == 1 else found[-1]

        monkeypatch.setattr(Stack, "_free_port", first_taken)
        with Stack(
            "shop", redis_url=redis_url, flower=False, gateway=True, gateway_port=port
        ) as stack:
            assert set(stack.pids) == {"worker", "gateway"}
            assert len(found) == 2
            assert found[-1] > port
            assert stack.gateway_url == f"http://127.0.0.1:{found[-1]}"


def test_gateway_beyond_loopback_without_keys_is_named(start_up: StartUp) -> None:
    up = start_up("-A", "shop", "--no-flower", BATCHERY_GATEWAY='{"host": "0.0.0.0"}')
    assert up.ended() == 1
    assert "batchery: error: gateway ended with exit code 2: " in up.log
    assert "is open to the network, and there are no API keys" in up.log


def test_a_stack_without_redis_says_so_before_it_starts_anything() -> None:
    stack = Stack(redis_url=f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(RedisUnavailable, match="no Redis at"):
        stack.start()
    assert stack.pids == {}


@pytest.mark.usefixtures("app_path")
def test_a_worker_that_takes_too_long_is_stopped(redis_url: str) -> None:
    stack = Stack("shop", redis_url=redis_url, flower=False, start_timeout_s=0)
    with pytest.raises(StartError, match="worker was not ready after 0 s"):
        stack.start()
    assert not psutil.pid_exists(stack.pids["worker"])
