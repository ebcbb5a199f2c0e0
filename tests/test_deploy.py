"""deploy/ is true as far as it can be without Docker: files, commands, Redis, gateway.

The chart has tests of its own (test_chart.py), as have alerts and dashboard (test_monitoring.py).
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from batchery_producer.gateway.callers import make_key
from batchery_worker.devstack.redis_server import find_redis_server
from conftest import StartWorker
from support.deployed import check_environment
from support.docs_commands import check, check_install, search_path
from support.harness import PYTHONPATH, TESTS, kill_all, wait_for
from support.own_redis import find_lasting_port
from support.patience import patient

ROOT = TESTS.parent
DEPLOY = ROOT / "deploy"

#: Commands that are installed beside this Python.
BIN = Path(sys.executable).parent

#: `${NAME}`, `${NAME:-default}` and `${NAME:?what to do}`, as compose files spell variables.
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<text>[^}]*))?\}")

TEXT = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(
    VARIABLE.sub(lambda found: found["text"] if found["kind"] == "-" else "", TEXT)
)["services"]
OURS = {name: each for name, each in SERVICES.items() if each["image"].startswith("batchery:")}


def instructions(name: str) -> list[str]:
    """The instructions of the Dockerfile of a name, continued lines joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [rest.strip() for each, rest in pairs if each == name]


def test_compose_and_docker_know_all_that_the_files_say() -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    subprocess.run([BIN / "check-jsonschema", *schema, DEPLOY / "compose.yaml"], check=True)
    subprocess.run([BIN / "hadolint", DEPLOY / "Dockerfile"], check=True)
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", {})) <= set(SERVICES), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), volume


def test_no_port_is_published_but_on_this_machine() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert all(each.startswith("127.0.0.1:") for each in published)


@pytest.mark.parametrize("name", OURS)
def test_every_command_and_setting_exists(name: str) -> None:
    service = OURS[name]
    entrypoint = service.get("entrypoint") or json.loads(instructions("ENTRYPOINT")[0])
    check([*entrypoint, *service["command"]])
    check_environment(list(service["environment"]))
    # That of the image asks a worker; others would never be healthy.
    kind, *words = service["healthcheck"]["test"]
    assert kind == "CMD"
    check(words)


def test_the_dockerfile_copies_and_installs_what_exists() -> None:
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    for *sources, _ in map(str.split, instructions("COPY")):
        for source in sources if not sources[0].startswith("--from=") else ():
            assert (ROOT / source).exists(), source
            assert f"!{source}" in allowed, source
    for text in instructions("RUN"):
        if "pip install" in text:
            check_install(shlex.split(text.partition("pip install")[2]))
    entrypoint, command = (json.loads(instructions(name)[0]) for name in ("ENTRYPOINT", "CMD"))
    check([*entrypoint, *command])


def test_systemd_understands_the_unit_and_its_command_exists(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "batchery-worker.service").read_text(encoding="utf-8")
    [command] = re.findall(r"^ExecStart=/opt/batchery/bin/(.*)", text, re.MULTILINE)
    check(shlex.split(command.replace("%%", "%")))
    check_environment(re.findall(r"^Environment=(\w+)", text, re.MULTILINE))
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "batchery-worker.service"
    unit.write_text(text.replace("/opt/batchery/bin", str(BIN)))
    done = subprocess.run(
        ["systemd-analyze", "verify", unit],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        check=False,
    )
    # Of other units of this machine it may say anything.
    assert done.returncode == 0, done.stderr
    assert "batchery" not in done.stderr


def test_the_health_check_tells_a_worker_that_lives_from_one_that_does_not(
    start_worker: StartWorker, redis_url: str
) -> None:
    words = json.loads(instructions("HEALTHCHECK")[0].partition(" CMD ")[2])

    def ask(seconds: int) -> int:
        done = subprocess.run(
            [word.replace("-t 10", f"-t {seconds}") for word in words],
            env={
                **os.environ,
                "PATH": search_path(),
                "PYTHONPATH": PYTHONPATH,
                "PYTHONWARNINGS": "ignore",
                "CELERY_APP": "apps.ordinary",
                "CELERY_BROKER_URL": redis_url,
            },
            capture_output=True,
            check=False,
        )
        return done.returncode

    assert ask(5) != 0
    start_worker("apps.ordinary", "-n", "celery@%h")
    # Ready, it may not listen yet.
    wait_for(lambda: ask(30) == 0, "it answers", patient(90))


@contextlib.contextmanager
def redis_of_the_example(directory: Path) -> Iterator[Any]:
    """A server with deploy/redis.conf, which ends by kill -9."""
    port = find_lasting_port()
    command = [str(find_redis_server()), str(DEPLOY / "redis.conf"), "--port", str(port)]
    with running([*command, "--bind", "127.0.0.1"], directory) as log:
        client = redis.Redis(port=port)

        def answers() -> bool:
            with contextlib.suppress(redis.ConnectionError):
                return bool(client.ping())
            return False

        wait_for(answers, f"Redis answers, see {log}")
        yield client
        client.close()


@contextlib.contextmanager
def running(command: Sequence[str], directory: Path, **environment: str) -> Iterator[Path]:
    """Runs a command in a folder; yields its log, and kills it at the end."""
    log = directory / "log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONWARNINGS": "ignore", "PATH": search_path(), **environment},
        )
    try:
        yield log
    finally:
        kill_all(process)


def test_redis_takes_its_file_keeps_every_write_and_forgets_nothing(tmp_path: Path) -> None:
    with redis_of_the_example(tmp_path) as client:
        said = client.config_get("*")
        assert (said["appendonly"], said["appendfsync"]) == ("yes", "everysec")
        # A backup that fails stops no queue: the log of writes has everything.
        assert said["stop-writes-on-bgsave-error"] == "no"
        client.lpush("celery", "a job")
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.lpush("celery", "too much")
    # Killed, not stopped: the log has it.
    with redis_of_the_example(tmp_path) as client:
        assert client.lrange("celery", 0, -1) == [b"a job"]


def wait_healthy(name: str, port: int) -> None:
    """Waits until the health check of a service of the compose file is content, on another port."""
    words = SERVICES[name]["healthcheck"]["test"][1:]
    words = [re.sub(r"127\.0\.0\.1:\d+/", f"127.0.0.1:{port}/", word) for word in words]
    environment = {**os.environ, "PATH": search_path()}

    def is_healthy() -> bool:
        done = subprocess.run(words, env=environment, capture_output=True, check=False)
        return done.returncode == 0

    wait_for(is_healthy, f"{name} is healthy", patient(60))


def here(name: str, port: int) -> list[str]:
    """The command of a service of the compose file, on another port of this machine."""
    command = list(SERVICES[name]["command"])
    for pattern, text in ((r"(port=)\d+", rf"\g<1>{port}"), (r"0\.0\.0\.0", "127.0.0.1")):
        command = [re.sub(pattern, text, word) for word in command]
    return command


def refuses(url: str) -> bool:
    """Whether a URL asks for a login or a key."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=patient(30))
    refused.value.close()
    return refused.value.code == 401


def test_gateway_asks_for_the_key_and_says_that_it_lives(tmp_path: Path, redis_url: str) -> None:
    port, (key, hashed) = find_lasting_port(), make_key()
    shutil.copy(DEPLOY / "batchery.toml", tmp_path)
    settings = yaml.safe_load(VARIABLE.sub(hashed, TEXT))["services"]["gateway"]["environment"]
    environment = {
        "BATCHERY_GATEWAY": settings["BATCHERY_GATEWAY"].replace("/var/lib", str(tmp_path)),
        "BATCHERY_REDIS_URL": redis_url,
    }
    command = [str(BIN / "batchery"), *here("gateway", port)]
    with running(command, tmp_path, **environment):
        wait_healthy("gateway", port)
        url = f"http://127.0.0.1:{port}/v1/models"
        assert refuses(url)
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(asked, timeout=patient(30)) as answer:
            served = [model["id"] for model in json.load(answer)["data"]]
        assert served == list(tomllib.loads((DEPLOY / "batchery.toml").read_text())["models"])
