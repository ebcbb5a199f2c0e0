"""Figures as metrics: names and values, and figures of other versions."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from batchery.cli.survey import RedisMemory, Survey
from batchery.operations import families
from batchery.protocol.figures import (
    BatchFigures,
    CacheFigures,
    DeviceSnapshot,
    HealthFigures,
    LeaseFigures,
    MemorySnapshot,
    ModelSnapshot,
    TaskFigures,
    TextFigures,
    WaitingJobs,
    WorkerFigures,
    read_figures,
    report,
)
from batchery.redis_scripts import ScriptTime
from support.harness import TESTS

GPU = DeviceSnapshot(
    "ready",
    2,
    oldest_batch_s=12.5,
    resident_kib=1024,
    memory=MemorySnapshot(reserved_bytes=5, total_bytes=9),
    models={
        "embed": ModelSnapshot(16_384, flops=6e12, held_bytes=4, loads=2, load_s=1.5),
        "chat": ModelSnapshot(0, slots=16, slots_taken=3),
    },
)

LOAD_FIGURES = ("loaded", "loads_total", "load_seconds", "memory_bytes")


def make_batches(jobs: int = 10) -> BatchFigures:
    task = TaskFigures(
        batches=2,
        items=jobs,
        tokens=90,
        computed_tokens=100,
        outcomes=Counter(succeeded=jobs, failed=1),
        batch_sizes=Counter({8.0: 1, float("inf"): 1}),
        waits=Counter({0.1: jobs - 1, float("inf"): 1}),
        waited_s=2000.5,
    )
    texts = TextFigures()
    texts.add(0.04, 0.02, 30, 101)
    texts.add(7.0, None, 20, 1)
    return BatchFigures(
        batches=2,
        jobs=jobs,
        failures=Counter(ValueError=1),
        forward_ms=1500.0,
        tracer_jobs=Counter({"a chain": 2}),
        caches={"embed": CacheFigures(items=3, hits=1, deduplicated=1, computed=1)},
        tasks={"embed": task},
        texts={"chat": texts},
    )


def make_worker(jobs: int = 10) -> WorkerFigures:
    return WorkerFigures(
        {"cuda:0": GPU},
        make_batches(jobs),
        clock_s=1.0,
        waiting_by_queue={"embed": WaitingJobs(3, 7.5)},
        leases=LeaseFigures(8, 2, {"fetch": ScriptTime(4, 0.5), "renew": ScriptTime(2, 0.1)}),
        health=HealthFigures(live=True, ready=False, started_at_s=100.5),
    )


MEMORY = RedisMemory(850, 1000, 3)


def make_survey(**workers: WorkerFigures) -> Survey:
    survey = Survey({}, {"embed": 3, "none": 0}, 1, {"embed": 2.5}, {"embed": 8}, 2, MEMORY)
    survey.__dict__["figures"] = workers
    return survey


def read(found: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    """The samples, by name and the values of their labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in found
        for sample in family.samples
    }


def test_times_are_in_seconds_and_histograms_count_all_up_to_each_bound() -> None:
    found = read(families.collect_sums(make_batches()))
    assert found["batchery_stage_seconds_total", "forward"] == 1.5
    assert found["batchery_cache_items_total", "embed", "hit"] == 1
    sizes = {key[-1]: n for key, n in found.items() if key[0] == "batchery_batch_size_bucket"}
    assert (sizes["4.0"], sizes["8.0"], sizes["1024.0"], sizes["+Inf"]) == (0, 1, 1, 2)
    assert found["batchery_batch_size_sum", "embed"] == 10
    waits = {key[-1]: n for key, n in found.items() if "wait_seconds_bucket" in key[0]}
    assert (waits["0.05"], waits["0.1"], waits["1800.0"], waits["+Inf"]) == (0, 9, 9, 10)
    assert found["batchery_queue_wait_seconds_sum", "embed"] == 2000.5


def test_texts_have_tokens_and_times() -> None:
    found = read(families.collect_sums(make_batches()))
    assert found["batchery_text_tokens_total", "chat", "input"] == 50
    assert found["batchery_text_tokens_total", "chat", "output"] == 102
    began = "batchery_first_token_seconds"
    counts = {key[-1]: n for key, n in found.items() if key[0] == f"{began}_bucket"}
    assert (counts["0.025"], counts["0.05"], counts["5.0"], counts["+Inf"]) == (0, 1, 1, 2)
    assert found[f"{began}_sum", "chat"] == 7.04
    # A text of one token has no pause.
    counts = {key[-1]: n for key, n in found.items() if key[0] == "batchery_token_seconds_bucket"}
    assert (counts["0.01"], counts["0.025"], counts["+Inf"]) == (0, 1, 1)
    assert found["batchery_token_seconds_sum", "chat"] == 0.02


def test_what_is_of_a_worker_alone_has_its_name() -> None:
    found = read(families.collect_workers({"w": make_worker()}))
    assert (found["batchery_worker_live", "w"], found["batchery_worker_ready", "w"]) == (1, 0)
    assert found["batchery_worker_start_time_seconds", "w"] == 100.5
    assert found["batchery_leases_held", "w"] == 8
    assert found["batchery_leases_recovered_total", "w"] == 2
    assert found["batchery_redis_round_trips_total", "w"] == 6
    assert found["batchery_redis_script_seconds_sum", "w", "fetch"] == 0.5
    assert found["batchery_model_batch_tokens", "w", "cuda:0", "embed"] == 16_384
    assert found["batchery_model_slots_taken", "w", "cuda:0", "chat"] == 3
    assert found["batchery_model_flops_total", "w", "cuda:0", "embed"] == 6e12
    loads = [found[f"batchery_model_{name}", "w", "cuda:0", "embed"] for name in LOAD_FIGURES]
    assert loads == [1, 2, 1.5, 4]
    # One that has no slots has no such figures.
    assert ("batchery_model_slots", "w", "cuda:0", "embed") not in found


def test_devices_have_their_state_and_memory() -> None:
    found = read(families.collect_devices({"w": make_worker()}))
    of_device = {key[0].removeprefix("batchery_device_"): n for key, n in found.items()}
    assert of_device["ready"] == 1
    assert of_device["oldest_batch_seconds"] == 12.5
    assert of_device["resident_memory_bytes"] == 2**20
    assert (of_device["memory_bytes"], of_device["memory_size_bytes"]) == (5, 9)


def test_queues_are_told_from_a_lost_redis() -> None:
    found = read(families.collect_cluster(make_survey(w=make_worker())))
    assert found["batchery_broker_up",] == found["batchery_workers",] == 1
    assert found["batchery_queue_waiting_jobs", "embed"] == 3
    assert found["batchery_queue_leased_jobs", "embed"] == 8
    # One that a worker holds has waited for longer than those in Redis.
    assert found["batchery_queue_oldest_job_seconds", "embed"] == 7.5
    assert found["batchery_queue_oldest_job_seconds", "none"] == 0
    assert (found["batchery_scheduled_jobs",], found["batchery_dead_letters",]) == (2, 1)
    memory = [found[f"batchery_redis_memory_{each}_bytes",] for each in ("used", "max")]
    assert [*memory, found["batchery_redis_evicted_keys_total",]] == [850, 1000, 3]
    unasked = replace(make_survey(), is_asked=False)
    assert ("batchery_workers",) not in read(families.collect_cluster(unasked))
    assert read(families.collect_cluster(None)) == {("batchery_broker_up",): 0}


def test_figures_of_an_older_worker_make_metrics_with_what_they_have() -> None:
    batches = {"jobs": 3, "batches": 1, "failures": {"KeyError": 1}}
    old = read_figures({"devices": {}, "clock_s": 1.0, "batches": batches})
    assert old is not None
    assert read(families.collect_sums(old.batches))["batchery_failures_total", "KeyError"] == 1
    found = read(families.collect_workers({"w": old}))
    assert set(found) == {
        ("batchery_worker_waiting_jobs", "w"),
        ("batchery_device_restarts_total", "w"),
    }


def test_figures_of_a_newer_worker_are_read_without_what_is_new() -> None:
    batches = {**report(make_batches()), "dreams": 3}
    batches["tasks"]["embed"]["dreams"] = {"sheep": 1}
    answer = {"devices": {}, "clock_s": 1.0, "batches": batches, "dreams": None, "leases": None}
    new = read_figures(json.loads(json.dumps(answer)))
    assert new is not None
    assert new.batches.tasks == make_batches().tasks


def collect_all() -> Iterable[Metric]:
    survey = make_survey(w=make_worker())
    yield from families.collect_cluster(survey)
    yield from families.collect_sums(make_batches())
    yield from families.collect_workers(survey.figures)
    yield from families.collect_devices(survey.figures)
    yield from families.collect_failures(survey.figures)


def test_all_of_it_is_what_prometheus_reads() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Made())
    write: Any = generate_latest
    parse: Any = openmetrics.text_string_to_metric_families
    assert {family.name for family in parse(write(registry).decode())} == {
        family.name for family in collect_all()
    }


class Made(Collector):
    def collect(self) -> Iterable[Metric]:
        return collect_all()


def test_page_names_all_metrics_and_no_other() -> None:
    page = (TESTS.parent / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = page.partition("## All metrics")[2].partition("Some are quotients")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    documented = {
        name: (row[1], set(re.findall(r"\w+", row[2])))
        for row in rows
        for name in re.findall(r"`(\w+)`", row[0])
    }
    there = {
        f"{family.name}_total" if family.type == "counter" else family.name: (
            family.type,
            {label for sample in family.samples for label in sample.labels} - {"le"},
        )
        for family in collect_all()
    }
    assert documented == there
