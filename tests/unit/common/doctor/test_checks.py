"""Each check of `batchery doctor`: silent where nothing is wrong, and loud where something is."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from batchery.cli.stats import NOT_INSTALLED
from batchery.doctor import thresholds
from batchery.doctor.command import CHECKS
from batchery.doctor.facts import BatchTaskFacts, Facts, FactUnknown, KnownFigures, SlowCommand
from batchery.doctor.findings import Finding, diagnose, read_catalogue
from batchery.metrics_settings import MetricsSettings
from batchery.protocol.figures import MemorySnapshot
from support.healthy_facts import (
    CONF,
    CONFIG,
    INFO,
    WORKER,
    make_facts,
    make_figures,
    make_folder,
    make_model,
    make_registered,
    make_settings,
    make_survey,
)

Case = tuple[str, dict[str, Any], str]


def info(**changes: Any) -> dict[str, Any]:
    return {"info": KnownFigures("INFO", {**INFO, **changes})}


def config(**changes: str) -> KnownFigures:
    renamed = {name.replace("_", "-"): value for name, value in changes.items()}
    return KnownFigures("CONFIG", {**CONFIG, **renamed})


def conf(**changes: Any) -> dict[str, Any]:
    return {"conf": {**CONF, **changes}}


def task(**options: Any) -> dict[str, Any]:
    return {"tasks": [BatchTaskFacts("embed", "embed", **{"serializer": "json", **options})]}


def batches(**sums: Any) -> dict[str, Any]:
    return {"survey": make_survey(make_figures(**sums))}


def device(**changes: Any) -> dict[str, Any]:
    figures = make_figures()
    for name, value in changes.items():
        setattr(figures.devices["cuda:0"], name, value)
    return {"survey": make_survey(figures)}


def metrics(host: str, port: int | None = 9464) -> dict[str, Any]:
    """Settings with a worker's port of metrics."""
    return {"settings": make_settings(metrics=MetricsSettings(host=host, port=port))}


def model(folder: Any = None, **options: Any) -> dict[str, Any]:
    settings = make_settings(models={"embed": make_model(**options)})
    return {"settings": settings, "folders": {"embed": folder}}


def slow(took_ms: float, age_s: float) -> dict[str, Any]:
    return {"slow_commands": [SlowCommand("KEYS", took_ms, age_s)]}


REPLICA = {"ip": "10.0.0.2", "port": 6379, "state": "online", "lag": 1}

#: Content types of the serializers pickle and yaml.
PICKLE, YAML = "application/x-python-serialize", "application/x-yaml"

#: Check, what is changed in facts of a healthy deployment, and a part of what is found.
WRONG: list[Case] = [
    ("redis-away", {"redis_problem": "no Redis at redis://h"}, "no Redis at"),
    ("redis-version", info(redis_version="6.0.16"), "6.0.16"),
    ("redis-cluster", info(cluster_enabled=1), "Cluster"),
    ("redis-replica", info(role="slave", master_host="10.0.0.1"), "10.0.0.1"),
    ("redis-no-persistence", {**info(aof_enabled=0), "config": config(save="")}, "save is empty"),
    ("redis-snapshots-only", info(aof_enabled=0), "save is 3600 1 300 100"),
    ("redis-eviction", info(maxmemory_policy="allkeys-lru", evicted_keys=7), "7 keys"),
    ("redis-memory", info(used_memory=800 << 20), "78% of maxmemory, which is 1,024 MiB"),
    ("redis-memory", info(maxmemory=0, used_memory=13 << 30), "81% of its machine's memory"),
    (
        "redis-backlog",
        {"survey": make_survey(queues={"embed": 1_500_000}), "job_bytes": 700.0},
        "1,500,000 jobs wait, of 700 bytes each; 1,384,120 more fit",
    ),
    ("redis-latency", {"round_trip_ms": 12.0}, "12.0 ms"),
    ("redis-slow-commands", slow(250.0, 60.0), "KEYS with 250 ms, 60 s ago"),
    (
        "redis-replica-lag",
        {
            **info(connected_slaves=1, slave0={**REPLICA, "lag": 40}),
            "config": config(min_replicas_to_write="1"),
        },
        "lags 40 s",
    ),
    (
        "redis-replica-lag",
        {
            **info(connected_slaves=1, slave0={**REPLICA, "state": "wait_bgsave"}),
            "config": config(min_replicas_to_write="1"),
        },
        "wait_bgsave",
    ),
    ("redis-lost-writes", info(connected_slaves=1, slave0=REPLICA), "min-replicas-to-write is 0"),
    ("redis-connections", info(connected_clients=9000), "9,000 of 10,000"),
    ("redis-connections", info(rejected_connections=3), "3 were refused"),
    ("redis-timeout", {"config": config(timeout="30")}, "30 s"),
    ("redis-clock", {"redis_ahead_s": -3.0}, "-3.0 s"),
    ("settings-invalid", {"settings_problem": "setting x = 1: no"}, "setting x"),
    ("app-not-installed", {"is_installed": False}, "1 batch tasks"),
    (
        "visibility-timeout",
        conf(
            broker_transport_options={"leases": False, "visibility_timeout": 60},
            task_time_limit=600,
        ),
        "60 s, and jobs may run for 600 s",
    ),
    ("acks-early", task(acks_late=False), "embed"),
    ("prefetch-unlimited", conf(worker_prefetch_multiplier=0), "is 0"),
    ("prefetch-unlimited", conf(worker_prefetch_multiplier=1000), "is 1000"),
    ("requeue-forever", conf(task_reject_on_worker_lost=True), "True"),
    ("serializer-refused", conf(task_serializer="yaml"), "yaml"),
    ("serializer-refused", task(serializer="msgpack"), "msgpack"),
    ("pickle-accepted", conf(accept_content=["json", "pickle"]), "pickle"),
    ("pickle-accepted", conf(accept_content=["json", PICKLE]), PICKLE),
    ("result-expires", conf(result_expires=None), "never"),
    ("result-expires", conf(result_expires=5), "5 s"),
    ("result-backend-missing", {"backend": "none"}, "no result backend"),
    ("result-server", {"servers": ("127.0.0.1:6379", "10.0.0.9:6379")}, "10.0.0.9:6379"),
    ("results-ignored", task(ignore_result=True), "embed"),
    ("always-eager", conf(task_always_eager=True), "True"),
    ("connection-retries", conf(broker_connection_max_retries=100), "is 100"),
    (
        "priority-steps",
        {"worker_options": {WORKER: {"priority_steps": [0, 5]}}},
        "[0, 3, 6, 9] here, and [0, 5] in w1@here",
    ),
    ("tracer-wrapped", {"tracer_module": "wrapt.patches"}, "wrapt.patches"),
    ("worker-none", {"registered": [], "consumed": {}}, "no worker answers"),
    (
        "jobs-orphaned",
        {"survey": make_survey(orphaned={"rank": 4, "embed": 1996}), "registered": []},
        "dead workers hold 2,000 jobs of 'embed', 'rank', and no worker lives",
    ),
    (
        "worker-not-installed",
        {"survey": make_survey(workers={"w2@here": {"error": NOT_INSTALLED}})},
        "w2@here has batch tasks",
    ),
    ("worker-stock", {"consumed": {"stock@here": ["embed", "mail"]}}, "stock@here has no leases"),
    ("worker-versions", {"version": "1.1.0"}, "1.1.0 here, and w1@here has 1.0.0"),
    ("worker-versions", {"registered": [make_registered(version=None)]}, "w1@here has unknown"),
    ("worker-clock", {"worker_ahead_s": {WORKER: 30.0}}, "+30.0 s"),
    ("queue-unserved", {"survey": make_survey(queues={"other": 4})}, "4 jobs wait"),
    ("queue-without-worker", {"tasks": [BatchTaskFacts("rank", "rank", "json")]}, "'rank'"),
    ("dead-letters", {"survey": make_survey(dead_letters=1200)}, "1,200"),
    (
        "slow-way",
        batches(tracer_jobs=Counter({"callbacks": 9000, "chain": 100})),
        "9,100 of 50,000 jobs, because of callbacks (9,000), chain (100)",
    ),
    (
        "small-batches",
        {
            "survey": make_survey(
                make_figures(batch_sizes=Counter({"<=1": 900, "<=2": 100})), queues={"embed": 5000}
            )
        },
        "900 of 1,000 batches",
    ),
    ("padding-waste", batches(tokens=500_000), "50%"),
    ("latency-missed", {"settings": make_settings(target_latency_ms=8.0)}, "10 ms on average"),
    ("device-restarts", batches(device_restarts=2), "2 device processes"),
    ("device-given-up", device(state="given up", error="no such card"), "given up: no such card"),
    ("device-on-cpu", batches(device="cpu"), "beside 1 CUDA devices"),
    ("device-out-of-memory", batches(model={"out_of_memory": 9}), "embed ran out of memory 9"),
    ("device-memory", device(memory=MemorySnapshot(reserved_bytes=79, total_bytes=80)), "99%"),
    ("device-fp32", model(dtype="fp32"), "embed runs in fp32 on cuda:0"),
    ("driver-old", {"torch_cuda": 13.0}, "CUDA 12.8, and torch for 13.0"),
    ("main-memory", {"memory_share": 0.99}, "99%"),
    ("open-files", {"open_files": 256}, "256"),
    ("shared-memory", {"shm_bytes": 64 << 20}, "64 MiB"),
    (
        "model-missing",
        {
            **model(model="./nowhere", folder=None),
            "folders": {"embed": type(make_folder())(exists=False, suffixes=())},
        },
        "there is no ./nowhere",
    ),
    ("model-weights", model(folder=make_folder(".bin", ".json"), model="/m"), "/m has .bin, .json"),
    ("model-unpinned", model(revision=None), "org/model has no revision"),
    (
        "model-unpinned",
        model(revision=None, trust_remote_code=True),
        "no revision, and its code is run",
    ),
    ("gateway-keys", {"settings": make_settings(gateway={"host": "0.0.0.0"})}, "0.0.0.0"),
    ("metrics-open", metrics("0.0.0.0"), "metrics.host is 0.0.0.0"),
    ("metrics-open", {**metrics("8.8.8.8"), "in_container": True}, "8.8.8.8"),
    ("metrics-open", metrics("::"), "metrics.host is ::"),
    ("flower-open", {"open_flower": "http://10.0.0.3:5555"}, "http://10.0.0.3:5555"),
]

#: Facts that look like a fault, and are none.
RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("redis-version", info(redis_version="6.2.0")),
    ("redis-memory", info(maxmemory=0)),
    ("redis-memory", info(maxmemory=0, total_system_memory=0)),
    ("redis-backlog", {**info(maxmemory=0), "survey": make_survey(queues={"embed": 10_000_000})}),
    ("redis-slow-commands", slow(250.0, 7200.0)),
    ("redis-slow-commands", slow(20.0, 60.0)),
    ("app-not-installed", {"is_installed": False, "tasks": []}),
    ("visibility-timeout", conf(broker_transport_options={"visibility_timeout": 60})),
    ("visibility-timeout", conf(broker_transport_options={"leases": False})),
    ("serializer-refused", conf(accept_content=["application/json"])),
    ("serializer-refused", {**task(serializer="yaml"), **conf(accept_content=["json", YAML])}),
    ("result-backend-missing", {"backend": "none", "tasks": []}),
    ("priority-steps", {"worker_options": {WORKER: {"fetch_messages": 9}}}),
    ("tracer-wrapped", {"tracer_module": "sentry_sdk.integrations.celery"}),
    ("worker-none", {"consumed": {}}),
    ("jobs-orphaned", {"survey": make_survey(orphaned={"embed": 4})}),
    ("jobs-orphaned", {"registered": []}),
    ("worker-stock", {"consumed": {"stock@here": ["mail"]}}),
    (
        "worker-stock",
        {"consumed": {"stock@here": ["embed"]}, "registered": [make_registered(name=None)]},
    ),
    ("queue-without-worker", {"consumed": {}, "registered": [], "tasks": []}),
    ("slow-way", batches(tracer_jobs=Counter({"callbacks": 100}))),
    ("small-batches", batches(batch_sizes=Counter({"<=1": 1000}))),
    (
        "small-batches",
        {
            "survey": make_survey(
                make_figures(batch_sizes=Counter({"<=1": 1000}), model={"slots": 16}),
                queues={"embed": 5000},
            )
        },
    ),
    ("padding-waste", batches(tokens=50, computed_tokens=100)),
    ("latency-missed", {"settings": make_settings(target_latency_ms=50.0)}),
    ("device-on-cpu", {**batches(device="cpu"), "registered": [make_registered(host="there")]}),
    ("device-on-cpu", {**batches(device="cpu"), "cuda_devices": 0}),
    ("device-out-of-memory", batches(model={"out_of_memory": 1})),
    ("device-fp32", {**model(dtype="fp32"), **batches(device="cpu")}),
    ("driver-old", {"torch_cuda": 12.9}),
    ("shared-memory", {"shm_bytes": 64 << 20, "cuda_devices": 0}),
    ("model-weights", model(folder=make_folder(".safetensors", ".bin"), model="/m")),
    ("metrics-open", metrics("0.0.0.0", port=None)),
    ("metrics-open", {**metrics("0.0.0.0"), "in_container": True}),
    *(("metrics-open", metrics(host)) for host in ("127.0.0.1", "10.0.0.5", "::1", "worker")),
    ("gateway-keys", {"settings": make_settings(gateway={"host": "localhost"})}),
    ("gateway-keys", {"settings": make_settings(gateway={"host": "[::1]"})}),
    (
        "gateway-keys",
        {
            "settings": make_settings(
                gateway={"host": "0.0.0.0", "keys": {"k": {"hash": f"sha256:{'0' * 64}"}}}
            )
        },
    ),
]


def find(check: str, facts: Facts) -> list[Finding]:
    return [each for each in diagnose(CHECKS, facts).findings if each.check == check]


def test_nothing_is_found_in_a_healthy_deployment() -> None:
    diagnosis = diagnose(CHECKS, make_facts())
    assert (diagnosis.findings, diagnosis.unchecked) == ([], {})
    assert (diagnosis.exit_code, diagnosis.passed) == (0, len(CHECKS))


@pytest.mark.parametrize(("check", "changes", "part"), WRONG, ids=[each[0] for each in WRONG])
def test_each_fault_is_found_with_its_figure_and_a_fix(
    check: str, changes: dict[str, Any], part: str
) -> None:
    [finding] = find(check, make_facts(**changes))
    assert part in finding.found
    assert finding.fix
    assert finding.why
    assert "{" not in finding.fix.replace('{"', "")
    assert "\n" not in finding.fix


@pytest.mark.parametrize(("check", "changes"), RIGHT, ids=[each[0] for each in RIGHT])
def test_what_only_looks_like_a_fault_is_none(check: str, changes: dict[str, Any]) -> None:
    assert find(check, make_facts(**changes)) == []


def test_every_check_has_texts_and_is_provoked() -> None:
    assert set(CHECKS) == set(read_catalogue()) == {check for check, *_ in WRONG}


def test_every_threshold_is_used_by_a_check() -> None:
    names = {name for name in vars(thresholds) if name.isupper()}
    folder = Path(thresholds.__file__).parent
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("checks_*.py"))
    assert names == set(re.findall(r"limits\.([A-Z_]+)", text))


def test_every_text_is_complete_with_its_thresholds() -> None:
    for texts in read_catalogue().values():
        assert "{" not in texts.describe()


def test_the_fix_names_the_app_and_the_queue() -> None:
    [finding] = find("queue-unserved", make_facts(survey=make_survey(queues={"other": 4})))
    assert finding.fix == "celery -A shop worker -Q other"


def test_a_fact_that_is_unknown_leaves_its_checks_unchecked_and_costs_no_exit_code() -> None:
    unknown = FactUnknown("Redis refuses it: NOPERM")
    diagnosis = diagnose(CHECKS, make_facts(config=unknown, survey=unknown))
    assert diagnosis.exit_code == 0
    assert diagnosis.unchecked["redis-timeout"] == "Redis refuses it: NOPERM"
    # The append-only file is on, so that the setting is not needed.
    assert "redis-no-persistence" not in diagnosis.unchecked
    assert {"queue-unserved", "dead-letters", "padding-waste"} < set(diagnosis.unchecked)


def test_a_figure_that_this_redis_does_not_have_leaves_its_check_unchecked() -> None:
    facts = make_facts(info=KnownFigures("INFO", {"redis_version": "7.0.0"}))
    diagnosis = diagnose(CHECKS, facts)
    assert diagnosis.unchecked["redis-eviction"] == "INFO has no maxmemory_policy"
    assert diagnosis.findings == []


def test_a_fact_of_another_form_costs_only_the_checks_that_need_it() -> None:
    # INFO's figures are numbers where they can be, and settings are whatever an app has set.
    changes = {**info(redis_version=7.2), **conf(accept_content=None)}
    diagnosis = diagnose(CHECKS, make_facts(**changes))
    assert {"serializer-refused", "pickle-accepted"} == set(diagnosis.unchecked)
    assert diagnosis.unchecked["pickle-accepted"].startswith("TypeError: ")
    assert diagnosis.findings == []


def test_nothing_gathered_is_nothing_checked() -> None:
    diagnosis = diagnose(CHECKS, Facts())
    assert set(diagnosis.unchecked) == set(CHECKS)
    assert diagnosis.exit_code == 0


def test_errors_come_first_and_decide_the_exit_code() -> None:
    warning = {"round_trip_ms": 50.0}
    assert diagnose(CHECKS, make_facts(**warning)).exit_code == 1
    diagnosis = diagnose(CHECKS, make_facts(**warning, **conf(task_always_eager=True)))
    assert [each.severity for each in diagnosis.findings] == ["error", "warning"]
    report = diagnosis.report()
    assert report["exit_code"] == 2
    assert report["findings"][1]["check"] == "redis-latency"
