"""The Helm chart gives what a cluster needs, refuses what cannot work, and names what exists."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kombu.utils.url import parse_url
from redis import ConnectionPool

from batchery import Settings
from batchery_producer.gateway.connection import GRACE_S
from support.deployed import DEPLOY, check_environment
from support.docs_commands import check, executable
from support.helm import CHART, MANIFESTS, OPERATORS, lint, needs_helm, render, render_manifests
from support.own_redis import redis_servers

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
    "monitoring": {
        "podMonitor": True,
        "rules": True,
        "dashboard": True,
        "prometheusUrl": "http://prometheus:9090",
    },
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


def test_helm_finds_nothing_wrong() -> None:
    assert [each for each in lint() if each["Severity"] > 1] == []


def test_the_manifests_are_those_of_the_chart() -> None:
    for path, text in render_manifests().items():
        written = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
        assert written == list(yaml.safe_load_all(text)), f"{path.name}: see its first lines"


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl")
@pytest.mark.parametrize("folder", [MANIFESTS, MANIFESTS / "operators"], ids=["all", "operators"])
def test_kustomize_takes_the_manifests(folder: Path) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert {each["metadata"]["namespace"] for each in built} == {"batchery"}


@EACH_USE
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_every_object_is_what_kubernetes_expects(values: dict[str, Any], version: str) -> None:
    for each in render(values):
        if each["apiVersion"] not in OPERATORS:
            kubernetes_validate.validate(each, version, strict=True)


@EACH_USE
def test_no_pod_may_do_more_than_it_must(values: dict[str, Any]) -> None:
    for name, pod in pods(render(values)).items():
        only = container(pod)
        assert pod["spec"]["securityContext"]["runAsNonRoot"], name
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["spec"]["automountServiceAccountToken"] is False, name
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        assert re.search(r":\d", only["image"]), f"{name}: no exact version"
        assert "memory" in only["resources"]["limits"], name
        assert {"livenessProbe", "readinessProbe"} <= set(only), name
        ports = {port["name"] for port in only["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            for how in ("httpGet", "tcpSocket"):
                assert only.get(probe, {}).get(how, {}).get("port", *ports) in ports, name


@EACH_USE
def test_every_mount_has_its_volume_and_every_reference_its_object(values: dict[str, Any]) -> None:
    objects = render(values)
    here = {(each["kind"], each["metadata"]["name"]) for each in objects}
    outside = {"hub", *(values[name].get("existingSecret", "") for name in ("redis", "gateway"))}
    for name, pod in pods(objects).items():
        volumes = {each["name"]: each for each in pod["spec"].get("volumes", [])}
        claims = {"data"} if name.endswith("redis") else set()
        mounted = {each["name"] for each in container(pod)["volumeMounts"]}
        assert mounted == set(volumes) | claims, name
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in here, name
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in here, name
        for variable in container(pod)["env"]:
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference and reference["name"] not in outside:
                secret = find(objects, "Secret", reference["name"])
                assert reference["key"] in secret["stringData"], name


@EACH_USE
def test_every_command_and_setting_exists(values: dict[str, Any]) -> None:
    for pod in pods(render(values)).values():
        only = container(pod)
        words = [*only["command"], *only["args"]]
        check_environment([each["name"] for each in only["env"]])
        if words[0] == "redis-server":
            assert words[1] == "/etc/redis/redis.conf"
            assert redis_servers()
        else:
            check(words)


def test_the_settings_are_those_of_the_example_unless_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DEPLOY / "batchery.toml").read_text(encoding="utf-8")
    for config, models in (
        ("", {"embed", "mood"}),
        ('[models.a]\nkind = "rerank"\nmodel = "m"', {"a"}),
    ):
        settings = find(render({**SECRETS, "config": config}), "ConfigMap", "batchery")
        written = settings["data"]["batchery.toml"]
        assert written.strip() == (config or text).strip()
        (tmp_path / "batchery.toml").write_text(written)
        assert set(Settings.load().models) == models


def test_the_gateway_reads_keys_and_files_from_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    objects = render(PASSWORDS)
    keys = find(objects, "Secret", "batchery-gateway")["stringData"]["keys"]
    monkeypatch.setenv("BATCHERY_GATEWAY__KEYS", keys)
    [files] = [
        each["value"]
        for each in container(pods(objects)["batchery-gateway"])["env"]
        if each["name"] == "BATCHERY_GATEWAY__FILES"
    ]
    monkeypatch.setenv("BATCHERY_GATEWAY__FILES", files)
    gateway = Settings.load().gateway
    assert {name: key.hash for name, key in gateway.keys.items()} == {"shop": HASH}
    assert gateway.files == "/var/lib/batchery-files"
    url = find(objects, "Secret", "batchery-redis")["stringData"]["url"]
    assert url == "redis://:p%2Fw@batchery-redis:6379/0"


def test_any_password_reaches_redis_as_it_is() -> None:
    password = "p w+x/y:z@%25#ü"
    found = find(render({**PASSWORDS, "redis": {"password": password}}), "Secret", "batchery-redis")
    url = found["stringData"]["url"]
    assert parse_url(url)["password"] == password
    assert ConnectionPool.from_url(url).connection_kwargs["password"] == password


@pytest.mark.parametrize(
    ("answer", "is_live", "is_ready"),
    [
        ("PONG", True, True),
        # A full disk: a restart would read the log for a minute, and find the disk as full.
        ("MISCONF Errors writing to the AOF file: No space left on device", True, False),
        ("BUSY Redis is busy running a script.", False, False),
        ("Could not connect to Redis at 127.0.0.1:6379: Connection refused", False, False),
    ],
    ids=["fine", "full disk", "busy", "gone"],
)
def test_redis_is_restarted_only_where_that_helps(
    tmp_path: Path, answer: str, is_live: bool, is_ready: bool
) -> None:
    client = tmp_path / "redis-cli"
    client.write_text(f"#!/bin/sh\necho '{answer}'\n")
    client.chmod(0o755)
    only = container(pods(render(SECRETS))["batchery-redis"])
    for probe, expected in (("livenessProbe", is_live), ("readinessProbe", is_ready)):
        command = only[probe]["exec"]["command"]
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(command, env={"PATH": path}, check=False)
        assert (done.returncode == 0) is expected, probe


def test_each_entry_is_a_deployment_of_its_own_devices_and_queues() -> None:
    objects = render(FULL)
    default = find(objects, "Deployment", "batchery-worker-default")
    gpu = find(objects, "Deployment", "batchery-worker-gpu")
    assert default["spec"]["replicas"] == 2
    assert "replicas" not in gpu["spec"]
    assert "-Q" not in container(default["spec"]["template"])["args"]
    pod = gpu["spec"]["template"]["spec"]
    only = container(gpu["spec"]["template"])
    assert only["args"][-2:] == ["-Q", "embed,mood"]
    assert only["image"] == "batchery:0.1.0-cuda"
    assert only["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 8}
    assert pod["nodeSelector"] == {"gpu": "h100"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]


def test_the_exporter_looks_into_the_queues_of_all_workers() -> None:
    """Nobody else tells it of a queue that only `-Q` names, once the last worker has gone."""
    workers = {"default": {}, "gpu": {"queues": ["embed", "night"]}, "big": {"queues": ["night"]}}
    for values, queues in ((SECRETS, []), ({**SECRETS, "workers": workers}, ["embed,night"])):
        args = container(pods(render(values))["batchery-exporter"])["args"]
        assert [each.partition("=")[2] for each in args if each.startswith("--queues=")] == queues


def test_the_worker_that_is_there_by_default_can_be_taken_away() -> None:
    objects = render({**SECRETS, "workers": {"default": None, "gpu": {"gpus": 1}}})
    assert [name for name in pods(objects) if "worker" in name] == ["batchery-worker-gpu"]


def test_prometheus_gets_a_key_of_the_gateway_if_there_is_one() -> None:
    for secret in ({}, {"name": "scrape", "key": "token"}):
        gateway = {"existingSecret": "a", "scrapeSecret": secret}
        objects = render({**SECRETS, "gateway": gateway, "monitoring": {"podMonitor": True}})
        [endpoint, *more] = find(objects, "PodMonitor", "batchery")["spec"]["podMetricsEndpoints"]
        assert endpoint == {"port": "metrics", "interval": "15s"}
        assert [each["authorization"]["credentials"] for each in more] == (
            [secret] if secret else []
        )


def test_a_worker_has_time_to_load_its_models_and_to_finish_its_batch() -> None:
    pod = pods(render(SECRETS))["batchery-worker-default"]
    only = container(pod)
    start = only["startupProbe"]
    loading_s = start["periodSeconds"] * start["failureThreshold"]
    assert loading_s > Settings.model_fields["device_start_timeout_s"].default
    assert pod["spec"]["terminationGracePeriodSeconds"] == 120
    assert "preStop" not in only.get("lifecycle", {}), "SIGTERM is the warm shutdown"
    # A roll-out is not given up while one worker ends and the next one loads.
    deployment = find(render(SECRETS), "Deployment", "batchery-worker-default")["spec"]
    assert deployment["progressDeadlineSeconds"] > loading_s + 120
    changed = {**SECRETS, "workers": {"default": {"gracePeriodSeconds": 900}}}
    pod = pods(render(changed))["batchery-worker-default"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 900


def test_workers_that_are_not_ready_hold_up_no_drain() -> None:
    budget = find(render(FULL), "PodDisruptionBudget", "batchery-worker-gpu")["spec"]
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_gateway_that_goes_takes_calls_until_the_service_sends_none() -> None:
    pod = pods(render(SECRETS))["batchery-gateway"]
    [sleep, pause_s] = container(pod)["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    needed_s = int(pause_s) + GRACE_S
    assert pod["spec"]["terminationGracePeriodSeconds"] > needed_s
    short = {**SECRETS, "gateway": {**SECRETS["gateway"], "gracePeriodSeconds": needed_s}}
    with pytest.raises(Exception, match="gracePeriodSeconds"):
        render(short)


def test_a_gateway_that_starts_while_redis_is_away_is_not_restarted() -> None:
    only = container(pods(render(SECRETS))["batchery-gateway"])
    assert only["startupProbe"]["tcpSocket"] == only["livenessProbe"]["tcpSocket"]
    assert only["readinessProbe"]["httpGet"]["path"] == "/health"


def test_settings_that_change_replace_the_pods() -> None:
    before, after = (
        pods(render({**SECRETS, "config": config})) for config in ("", "max_batch_size = 8")
    )
    for name in before:
        key = next(iter(before[name]["metadata"]["annotations"]))
        is_same = before[name]["metadata"] == after[name]["metadata"]
        assert is_same is (key == "checksum/redis"), name


def test_every_pod_is_behind_a_network_policy() -> None:
    objects = render(FULL)
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    for name, pod in pods(objects).items():
        labels = pod["metadata"]["labels"].items()
        [policy] = [
            each for each in policies if each["podSelector"]["matchLabels"].items() <= labels
        ]
        [ingress] = policy["ingress"]
        ports = {port["name"] for port in container(pod)["ports"]}
        assert {port["port"] for port in ingress["ports"]} <= ports, name
        # Anybody may call the gateway, which asks for a key; nobody else is so open.
        assert ("from" in ingress) is (not name.endswith("gateway")), name


def test_no_secret_is_in_anything_but_secrets() -> None:
    objects = render({**FULL, "redis": {"password": "s3cr3t-word"}})
    where = {each["kind"] for each in objects if "s3cr3t-word" in json.dumps(each)}
    assert where == {"Secret"}
    for each in (MANIFESTS / "batchery.yaml", MANIFESTS / "operators" / "operators.yaml"):
        assert "kind: Secret\n" not in each.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({**SECRETS, "worker": {}}, "worker"),
        ({**SECRETS, "workers": {"a": {"gpu": 1}}}, "gpu"),
        ({**SECRETS, "workers": {"a": {"gpus": "one"}}}, "gpus"),
        ({**SECRETS, "workers": {"a": {"pod": {"containers": []}}}}, "pod"),
        ({**SECRETS, "gateway": {"keys": {"shop": {"hash": "plain"}}}}, "hash"),
        ({**SECRETS, "redis": {}}, "redis: set password or existingSecret"),
        ({**SECRETS, "redis": {"enabled": False}}, "redis: without enabled, set url"),
        ({**SECRETS, "redis": {"password": "p", "url": "redis://a"}}, "leave one out"),
        ({**SECRETS, "gateway": {}}, "gateway: set keys or existingSecret"),
        (
            {**SECRETS, "gateway": {"existingSecret": "a", "replicas": 2}},
            "several replicas need one place of files",
        ),
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


def test_several_gateways_share_a_store_of_files() -> None:
    gateway = {"existingSecret": "a", "replicas": 3, "filesUrl": "s3://bucket/batches"}
    objects = render({**SECRETS, "gateway": gateway})
    found = find(objects, "Deployment", "batchery-gateway")
    assert found["spec"]["strategy"] == {"type": "RollingUpdate"}
    assert find(objects, "PodDisruptionBudget", "batchery-gateway")
    assert not [each for each in objects if each["kind"] == "PersistentVolumeClaim"]


def test_the_schema_describes_every_value() -> None:
    schema = CHART / "values.schema.json"
    checker = executable("check-jsonschema") or ""
    subprocess.run([checker, "--check-metaschema", schema], check=True)
    known = json.loads(schema.read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert set(known["properties"]) == set(values) | {"global"}
    for name, section in values.items():
        described = known["properties"][name].get("properties")
        if described:
            assert set(described) == set(section), name
    worker = known["$defs"]["worker"]["oneOf"][1]["properties"]
    assert set(worker) == set(values["workerDefaults"])
