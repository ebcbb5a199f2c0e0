"""`batchery up`: Redis, a worker, Flower and the gateway start together, and leave nothing."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery

from batchery_worker.devstack.stack import Stack
from support.harness import ask, open_redis, wait_ended, wait_for
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


#: A line of what `up` says when all are ready: what it is, and its URL.
FACT = re.compile(r"^(Redis|Flower|Gateway) +(\S+://\S+)$", re.MULTILINE)


class Up:
    """A running `batchery up`."""

    def __init__(self, directory: Path, *arguments: str, **environment: str) -> None:
        self._log = directory / "up.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                # As the command itself, which has its own folder on the path.
                [sys.executable, "-P", "-m", "batchery", "up", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=os.environ
                | {"PYTHONWARNINGS": "ignore", "BATCHERY_GATEWAY__PORT": "0"}
                | environment,
            )
        self.family: list[psutil.Process] = []

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def urls(self) -> dict[str, str]:
        return dict(FACT.findall(self.log))

    def ready(self) -> "Up":
        wait_for(
            lambda: "Ctrl-C here" in self.log or self.process.poll() is not None, "ready", START_S
        )
        assert self.process.poll() is None, self.log
        self.family = self.children()
        return self

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def pid(self, name: str) -> int:
        """Process id of what has a word in its command line."""
        return next(
            each.pid for each in self.family if any(name in word for word in each.cmdline())
        )

    @contextlib.contextmanager
    def client(self) -> Iterator[Celery]:
        url = self.urls["Redis"]
        app = Celery(broker=url, backend=url, set_as_current=False)
        yield app
        backend: Any = app.backend
        backend.result_consumer.stop()
        app.close()

    def ask(
        self,
        path: str,
        body: bytes | None = None,
        kind: str = "application/json",
        name: str = "Gateway",
    ) -> Any:
        """What the gateway answers, or Flower."""
        url = f"{self.urls[name]}{path}"
        request = urllib.request.Request(url, body, {"Content-Type": kind})
        try:
            with urllib.request.urlopen(request, timeout=patient(60)) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error}: {error.read().decode()}\n{self.log}") from None

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


def run_beside(up: Up, folder: Path, *arguments: str) -> tuple[int, str]:
    """Runs a command with what `up` says to export; returns its exit code and stdout."""
    exported = dict(re.findall(r"^  export (\w+)=(\S+)$", up.log, re.MULTILINE))
    assert exported
    done = subprocess.run(
        [sys.executable, "-m", "batchery", *arguments],
        cwd=folder,
        env={**os.environ, **exported},
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
    with up.client() as client:
        job_id = client.send_task("shout", ["hello"]).id
        assert client.AsyncResult(job_id).get(timeout=patient(30)) == "HELLO"

    def listed() -> Any:
        tasks = up.ask("/api/tasks", name="Flower")
        return job_id in tasks and tasks[job_id]["state"] == "SUCCESS" and tasks[job_id]

    wait_for(listed, "Flower lists the job as done")
    code, out = run_beside(up, tmp_path, "stats", "-A", "shop", "--json")
    assert (code, len(json.loads(out)["workers"])) == (0, 1)
    up.process.send_signal(signal.SIGINT)
    assert up.ended() == 0
    for name in ("redis", "worker", "flower", "gateway"):
        assert f"{name:<7} | " in up.log
    # A line for the batch, and none for the job and its result.
    assert "1 item, waited" in up.log
    assert job_id not in up.log
    assert "HELLO" not in up.log
    words = ("Application shutdown complete", "Warm shutdown", "shutting down", "ready to exit")
    ends = [up.log.index(word) for word in words]
    assert ends == sorted(ends)


def test_sigterm_lets_the_running_job_finish(
    start_up: StartUp, tmp_path: Path, redis_url: str
) -> None:
    napping = tmp_path / "napping"
    up = start_up("-A", "shop", "--redis", redis_url, "--no-flower", "--no-gateway").ready()
    with open_redis(redis_url) as client:
        app = Celery(broker=redis_url, set_as_current=False)
        job_id = app.send_task("nap", [str(napping)]).id
        app.close()
        wait_for(napping.exists, "the job runs")
        up.process.terminate()
        assert up.ended() == 0
        stored = client.get(f"celery-task-meta-{job_id}")
    assert isinstance(stored, bytes)
    assert json.loads(stored)["result"] == "rested"


def test_a_second_ctrl_c_does_not_wait_for_the_job(start_up: StartUp, tmp_path: Path) -> None:
    napping = tmp_path / "napping"
    up = start_up("-A", "shop", "--no-flower", "--no-gateway").ready()
    with up.client() as client:
        client.send_task("nap", [str(napping), 100])
        wait_for(napping.exists, "the job runs")
        up.process.send_signal(signal.SIGINT)
        wait_for(lambda: "Warm shutdown" in up.log, "the worker is asked to stop")
        up.process.send_signal(signal.SIGINT)
        assert up.ended() == 130


@pytest.mark.parametrize(
    ("victim", "word"), [("redis", "-server"), ("worker", "worker"), ("gateway", "--host=")]
)
def test_a_child_that_dies_is_named_and_takes_the_rest_along(
    start_up: StartUp, victim: str, word: str
) -> None:
    up = start_up("-A", "shop").ready()
    os.kill(up.pid(word), signal.SIGKILL)
    assert up.ended() == 1
    assert f"batchery: error: {victim} ended with signal 9 (SIGKILL): " in up.log
    assert "Traceback" not in up.log.split("batchery: error:")[1]


def test_kill_9_leaves_nothing_behind(start_up: StartUp) -> None:
    up = start_up("-A", "shop").ready()
    wait_for(lambda: len(up.children()) >= 8, "all of it runs")
    up.family = up.children()
    up.process.kill()
    assert up.ended() == -signal.SIGKILL


def test_a_model_of_the_settings_alone_is_served(
    start_up: StartUp, tmp_path: Path, model_toml: str
) -> None:
    (tmp_path / "batchery.toml").write_text(model_toml)
    up = start_up().ready()
    with up.client() as client:
        result = client.send_task("embed", ["some text"], queue="embed").get(timeout=patient(60))
    assert len(result["vector"]) == 384
    body = json.dumps({"model": "embed", "input": "some text"}).encode()
    answer = up.ask("/v1/embeddings", body)
    assert answer["data"][0]["embedding"] == pytest.approx(result["vector"], abs=1e-5)
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {}}'
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    kind = "multipart/form-data; boundary=x"
    assert up.ask("/v1/files", form + line + b"\r\n--x--\r\n", kind)["id"]
    (tmp_path / "texts.txt").write_text("one\n")
    command = ["submit", "texts.txt", "--task", "embed", "-o", "out.jsonl"]
    assert f"  batchery {' '.join(command[:4])} -o" in up.log
    assert run_beside(up, tmp_path, *command)[0] == 0
    up.process.send_signal(signal.SIGINT)
    assert up.ended() == 0
    # Nobody would find the file again: what was known of it is gone with the Redis.
    assert not (tmp_path / "batchery-files").exists()


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
        (["-A", "shop", "--redis", "redis://:secret@127.0.0.1:1/0"], {}, "redis://:**@127.0.0.1:1"),
        (["-A", "shop"], {"BATCHERY_REDIS_URL": "redis://127.0.0.1:1/0"}, "no Redis at redis://12"),
        (["-A", "shop"], {"BATCHERY_NO_SUCH": "1"}, "BATCHERY_NO_SUCH: no such setting"),
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
        worker_arguments=["--loglevel=WARNING", "--queues=one,two", "--pool=solo"],
        on_line=lambda name, line: lines.append((name, line)),
    )
    with stack:
        assert stack.redis_url == redis_url
        assert set(stack.processes) == {"worker"}
        assert find_queues(stack) == {"one", "two"}
        worker = psutil.Process(stack.processes["worker"].pid)
    assert not worker.is_running()
    assert {name for name, _ in lines} == {"worker"}


def find_queues(stack: Stack) -> set[str]:
    """Those that its worker consumes."""
    with Celery(set_as_current=False) as app:
        app.conf.update(broker_read_url=stack.redis_url, broker_write_url=stack.redis_url)
        names = [stack.worker_name]
        # It says that it is ready a moment before it hears what is asked.
        answer = wait_for(lambda: ask(app, "active_queues", names), "an answer", START_S)
    return {each["name"] for each in answer[stack.worker_name]}


@pytest.mark.usefixtures("app_path")
def test_without_queues_those_of_all_its_tasks_are_served(redis_url: str) -> None:
    Path("more.py").write_text(ROUTED)
    with Stack("more", redis_url=redis_url) as stack:
        assert find_queues(stack) == {"celery", "fast", "other", "shout"}
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
def test_the_gateway_takes_another_port(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("BATCHERY_GATEWAY__PORT", str(port))
        with Stack("shop", redis_url=redis_url, gateway=True) as stack:
            assert stack.gateway_url is not None
            assert stack.gateway_url.startswith("http://127.0.0.1:")
            assert not stack.gateway_url.endswith(f":{port}")


@pytest.mark.usefixtures("app_path")
def test_where_the_gateway_is_not_installed_the_rest_runs(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    said: list[str] = []
    with Stack(
        "shop",
        redis_url=redis_url,
        gateway=True,
        on_line=lambda name, line: said.append(line) if name == "gateway" else None,
    ) as stack:
        assert stack.gateway_url is None
        assert set(stack.processes) == {"worker"}
    assert said == ['not installed: `pip install "batchery[gateway]"` adds it']


def test_gateway_beyond_loopback_without_keys_is_named(start_up: StartUp) -> None:
    up = start_up("-A", "shop", BATCHERY_GATEWAY='{"host": "0.0.0.0"}')
    assert up.ended() == 1
    assert "batchery: error: gateway ended with exit code 2: " in up.log
    assert "is open to the network, and there are no API keys" in up.log
