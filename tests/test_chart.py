"""The Helm chart gives what Kubernetes takes, refuses what cannot work, and names what exists."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from redis import ConnectionPool

from batchery import Settings
from support.deployed import check_environment
from support.docs_commands import check
from support.helm import CHART, lint, needs_helm, render

pytestmark = needs_helm()

HASH = f"sha256:{'0' * 64}"
SECRETS: dict[str, Any] = {
    "redis": {"existingSecret": "batchery-redis"},
    "gateway": {"existingSecret": "batchery-gateway"},
}
PASSWORDS = {"redis": {"password": "p/w"}, "gateway": {"keys": {"shop": {"hash": HASH}}}}

#: Everything that can be switched on, and workers of two kinds.
FULL: dict[str, Any] = {
    **PASSWORDS,
    "hubTokenSecret": {"name": "hub", "key": "token"},
    "modelCache": {"enabled": True},
    "workers": {
        "default": {"replicas": 2},
        "gpu": {
            "gpus": 8,
            "queues": ["embed", "mood"],
            "image": "batchery:0.1.0-cuda",
            "pod": {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "nvidia.com/gpu"}]},
            "autoscaling": {"enabled": True, "maxReplicas": 8},
        },
    },
    "monitoring": {"prometheusUrl": "http://prometheus:9090"},
}
ELSEWHERE = {
    "redis": {"enabled": False, "url": "rediss://user:secret@redis.example.org:6380/0"},
    "gateway": {"enabled": False},
    "exporter": {"enabled": False},
    "networkPolicy": {"enabled": False},
}
EACH_USE = pytest.mark.parametrize(
    "values", [SECRETS, FULL, ELSEWHERE], ids=["secrets", "full", "elsewhere"]
)

#: The oldest Kubernetes that the chart says it runs on.
OLDEST = re.findall(
    r">=(\d+\.\d+)", yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
)


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    [found] = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each workload's pod by its name."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in objects
        if each["kind"] in ("Deployment", "StatefulSet")
    }


def container(pod: dict[str, Any]) -> dict[str, Any]:
    [only] = pod["spec"]["containers"]
    found: dict[str, Any] = only
    return found


@EACH_USE
@pytest.mark.parametrize("version", [*OLDEST, "1.37"])
def test_every_object_is_what_kubernetes_expects(values: dict[str, Any], version: str) -> None:
    assert [each for each in lint() if each["Severity"] > 1] == []
    for each in render(values):
        if each["kind"] != "ScaledObject":  # KEDA's own.
            kubernetes_validate.validate(each, version, strict=True)


@EACH_USE
def test_every_command_and_setting_exists(values: dict[str, Any]) -> None:
    for pod in pods(render(values)).values():
        only = container(pod)
        words = [*only["command"], *only["args"]]
        check_environment([each["name"] for each in only["env"]])
        if words[0] != "redis-server":
            check(words)


def test_settings_and_keys_arrive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    objects = render({**PASSWORDS, "config": '[models.a]\nkind = "rerank"\nmodel = "m"'})
    written = find(objects, "ConfigMap", "batchery")["data"]["batchery.toml"]
    Path("batchery.toml").write_text(written)
    keys = find(objects, "Secret", "batchery-gateway")["stringData"]["keys"]
    monkeypatch.setenv("BATCHERY_GATEWAY__KEYS", keys)
    settings = Settings.load()
    assert set(settings.models) == {"a"}
    assert {name: key.hash for name, key in settings.gateway.keys.items()} == {"shop": HASH}


def test_any_password_reaches_redis_as_it_is() -> None:
    password = "p w+x/y:z@%25#ü"
    found = find(render({**PASSWORDS, "redis": {"password": password}}), "Secret", "batchery-redis")
    url = found["stringData"]["url"]
    assert ConnectionPool.from_url(url).connection_kwargs["password"] == password


@pytest.mark.parametrize(
    ("answer", "is_live", "is_ready"),
    [
        ("PONG", True, True),
        # A full disk: a restart would read the log for a minute, and find the disk as full.
        ("MISCONF Errors writing to the AOF file: No space left on device", True, False),
        ("BUSY Redis is busy running a script.", False, False),
    ],
    ids=["fine", "full disk", "busy"],
)
def test_redis_is_restarted_only_where_that_helps(
    tmp_path: Path, answer: str, is_live: bool, is_ready: bool
) -> None:
    client = tmp_path / "redis-cli"
    client.write_text(f"#!/bin/sh\necho '{answer}'\n")
    client.chmod(0o755)
    only = container(pods(render(SECRETS))["batchery-redis"])
    for probe, expected in (("livenessProbe", is_live), ("readinessProbe", is_ready)):
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(only[probe]["exec"]["command"], env={"PATH": path}, check=False)
        assert (done.returncode == 0) is expected, probe


def test_each_entry_is_a_deployment_of_its_own_devices_and_queues() -> None:
    found = pods(render(FULL))
    assert "-Q" not in container(found["batchery-worker-default"])["args"]
    only = container(found["batchery-worker-gpu"])
    assert only["args"][-2:] == ["-Q", "embed,mood"]
    assert only["image"] == "batchery:0.1.0-cuda"
    assert only["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 8}
    # Nobody else tells it of a queue that only `-Q` names, once the last worker has gone.
    assert "--queues=embed,mood" in container(found["batchery-exporter"])["args"]
    without = render({**SECRETS, "workers": {"default": None, "gpu": {"gpus": 1}}})
    assert [name for name in pods(without) if "worker" in name] == ["batchery-worker-gpu"]


def test_every_pod_is_behind_a_network_policy() -> None:
    objects = render(FULL)
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    for name, pod in pods(objects).items():
        labels = pod["metadata"]["labels"].items()
        [policy] = [
            each for each in policies if each["podSelector"]["matchLabels"].items() <= labels
        ]
        [ingress] = policy["ingress"]
        # Anybody may call the gateway, which asks for a key; nobody else is so open.
        assert ("from" in ingress) is (not name.endswith("gateway")), name


def test_no_secret_is_in_anything_but_secrets() -> None:
    objects = render({**FULL, "redis": {"password": "s3cr3t-word"}})
    assert {each["kind"] for each in objects if "s3cr3t-word" in json.dumps(each)} == {"Secret"}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({**SECRETS, "worker": {}}, "worker"),
        ({**SECRETS, "workers": {"a": {"gpu": 1}}}, "gpu"),
        ({**SECRETS, "gateway": {"keys": {"shop": {"hash": "plain"}}}}, "hash"),
        ({**SECRETS, "redis": {}}, "set password or existingSecret"),
        ({**SECRETS, "redis": {"enabled": False}}, "set url"),
        ({**SECRETS, "redis": {"password": "p", "url": "redis://a"}}, "leave one out"),
        ({**SECRETS, "gateway": {}}, "set keys or existingSecret"),
        ({**SECRETS, "gateway": {"existingSecret": "a", "replicas": 2}}, "one place of files"),
        (
            {**SECRETS, "workers": {"a": {"autoscaling": {"enabled": True}}}},
            "set monitoring.prometheusUrl",
        ),
        ({**FULL, "exporter": {"enabled": False}}, "needs exporter.enabled"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(Exception, match=text):
        render(values)
