"""deploy/ is true as far as it can be without Docker: files, commands, Redis, gateway.

The chart has tests of its own (test_chart.py), as have alerts and dashboard (test_monitoring.py).
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchery.broker_url import read_cluster_url
from benchmarks.redis_cluster import is_new
from support.deployed import check_environment
from support.docs_commands import check, check_install
from support.harness import TESTS
from support.own_cluster import OwnCluster
from support.own_redis import redis_servers

ROOT = TESTS.parent
DEPLOY = ROOT / "deploy"

#: Commands that are installed beside this Python.
BIN = Path(sys.executable).parent

#: `${NAME}`, `${NAME:-default}` and `${NAME:?what to do}`, as compose files spell variables.
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<text>[^}]*))?\}")


def read_services(name: str) -> dict[str, dict[str, Any]]:
    """The services of a compose file, with the defaults of its variables."""
    text = (DEPLOY / name).read_text(encoding="utf-8")
    whole = VARIABLE.sub(lambda found: found["text"] if found["kind"] == "-" else "", text)
    services: dict[str, dict[str, Any]] = yaml.safe_load(whole)["services"]
    return services


SERVICES = read_services("compose.yaml")
#: What a second file adds: it is merged into the first one.
CLUSTERED = read_services("compose.cluster.yaml")
OURS = {name: each for name, each in SERVICES.items() if each["image"].startswith("batchery:")}


def instructions(name: str) -> list[str]:
    """The instructions of the Dockerfile of a name, continued lines joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [rest.strip() for each, rest in pairs if each == name]


def test_compose_and_docker_know_all_that_the_files_say() -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    files = [DEPLOY / "compose.yaml", DEPLOY / "compose.cluster.yaml"]
    subprocess.run([BIN / "check-jsonschema", *schema, *files], check=True)
    subprocess.run([BIN / "hadolint", DEPLOY / "Dockerfile"], check=True)
    for name, service in [*SERVICES.items(), *CLUSTERED.items()]:
        assert set(service.get("depends_on", {})) <= {*SERVICES, *CLUSTERED}, name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), volume


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


def test_all_of_ours_know_the_cluster_whose_nodes_keep_their_addresses() -> None:
    nodes = {
        each["networks"]["default"]["ipv4_address"]: each["volumes"]
        for name, each in CLUSTERED.items()
        if name.startswith("node")
    }
    assert len(nodes) == 6
    assert len({volumes[-1] for volumes in nodes.values()}) == 6
    [joined] = CLUSTERED["cluster"]["command"]
    assert re.findall(r"[\d.]+(?=:6379)", joined) == list(nodes)
    for name in OURS:
        check_environment(list(CLUSTERED[name]["environment"]))
        named, _ = read_cluster_url(CLUSTERED[name]["environment"]["BATCHERY_REDIS_URL"])
        assert {host for host, _ in named} <= set(nodes)


def test_six_nodes_start_with_the_settings_of_a_cluster(tmp_path: Path) -> None:
    server = next(filter(is_new, redis_servers()), None)
    if server is None:
        pytest.skip("no Redis 7 or newer is installed here")
    lines = [
        line.split(maxsplit=1)
        for name in ("redis.conf", "redis-cluster.conf")
        for line in (DEPLOY / name).read_text(encoding="utf-8").splitlines()
        if line and not line.startswith(("#", "bind", "include"))
    ]
    options: dict[str, Any] = {name.replace("-", "_"): value for name, value in lines}
    assert {"cluster_enabled", "appendonly"} <= set(options)
    with OwnCluster(tmp_path / "nodes", binary=server, **options) as cluster:
        assert cluster.is_ready()


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
